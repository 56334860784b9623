"""``forward``: numbers of each step go where people look, and they are those of the files."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from prometheus_client.parser import text_string_to_metric_families
from torch import nn

import monitor
from monitor import ConfigError
from monitor.forwarding.forwarding import Number, exposition

DOCUMENT = (Path(__file__).parents[2] / "docs" / "forwarding.md").read_text(encoding="utf-8")
STEPS = 3
FIELDS: dict[str, Any] = {
    "wg_distribution": True,
    "xy_distribution": True,
    "all_xy": True,
    "ops": ["norm", "min"],
    "ndigits": 17,
    "run_numbers": True,
}


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(tmp_path / "out"))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return tmp_path / "out"


def trained(prepare: Callable[[Any], object] = lambda _: None, micro_batches: int = 1, **fields: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    with monitor.watch(model, optimizer, None, micro_batches=micro_batches, **{**FIELDS, **fields}) as watching:
        prepare(watching)
        for _ in range(STEPS):
            for _ in range(micro_batches):
                model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def in_files(base: Path, kind: str, op: str) -> dict[tuple[int, str], float]:
    found: dict[tuple[int, str], float] = {}
    for path in base.glob(f"*-rank0-*/{kind}_[0-9]*.csv"):
        with path.open() as lines:
            found |= {(int(row["step"]), row["name"]): float(row[op]) for row in csv.DictReader(lines)}
    return found


def test_a_function_gets_the_numbers_of_the_files(base: Path) -> None:
    seen: dict[int, dict[str, float]] = {}
    trained(lambda one: one.forward_to(lambda numbers, step: seen.update({step: numbers}), kinds=["grad_reduced", "run"]))
    assert list(seen) == list(range(STEPS))
    for kind, op in (("grad_reduced", "norm"), ("run", "value")):
        expected = in_files(base, kind, op)
        found = {
            (step, name.split("/")[2]): value
            for step, numbers in seen.items()
            for name, value in numbers.items()
            if name.startswith(f"monitor/{kind}/")
        }
        assert found == pytest.approx(expected, rel=1e-12)
    assert all({name.split("/")[1] for name in numbers} == {"grad_reduced", "run"} for numbers in seen.values())


def test_micro_steps_are_one_number(base: Path) -> None:
    seen: list[dict[str, float]] = []
    trained(lambda one: one.forward_to(lambda numbers, _: seen.append(numbers), kinds=["actv"], names=["0.output"]), 2)
    rows: dict[int, list[float]] = {}
    for path in base.glob("*-rank0-*/actv_[0-9]*.csv"):
        with path.open() as lines:
            for row in csv.DictReader(lines):
                if row["name"] == "0.output":
                    rows.setdefault(int(row["step"]), []).append(float(row["norm"]))
    assert [one["monitor/actv/0.output/norm"] for one in seen] == pytest.approx(
        [math.hypot(*rows[step]) for step in sorted(rows)]
    )


def test_the_choice_is_by_kind_name_op_and_number_and_stays_the_same(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[set[str]] = []

    def prepare(one: Any) -> None:
        one.forward_to(lambda numbers, _: seen.append(set(numbers)), names=["#.*", "**.weight"], ops=["norm", "max"], most=3)

    trained(prepare)
    assert seen == [seen[0]] * STEPS
    assert len(seen[0]) == 3
    warned = [record.getMessage() for record in caplog.records if "not passed on" in record.getMessage()]
    assert len(warned) == 1
    assert "because `most` is 3" in warned[0]
    assert base.exists()


def test_two_functions_of_one_name_are_both_called_and_what_fits_nothing_is_told(
    base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[list[int]] = [[], [], []]

    def prepare(one: Any) -> None:
        for steps, kinds in zip(seen, (["run"], ["grad_reduced"], ["grad"]), strict=True):
            one.forward_to(lambda _, step, steps=steps: steps.append(step), kinds=kinds)

    trained(prepare)
    assert seen == [list(range(STEPS))] * 3
    said = [record.getMessage() for record in caplog.records if "forward" in record.getMessage()]
    assert len([one for one in said if "forward.kinds: there is no grad to pass on" in one]) == 1
    assert len([one for one in said if "no number of the kinds and names to pass on. Its kinds are" in one]) == 1
    assert base.exists()


def test_a_target_that_fails_is_told_of_once_and_stops_nothing(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fails(_numbers: dict[str, float], _step: int) -> None:
        raise RuntimeError("no network")

    assert all(map(torch.equal, trained(lambda one: one.forward_to(fails)), trained()))
    assert len([record for record in caplog.records if "no network" in record.getMessage()]) == 1
    assert in_files(base, "grad_reduced", "norm")


label = st.text(st.characters(codec="utf-8", exclude_characters="\r"), min_size=1, max_size=8)


@given(label, label, st.floats(allow_nan=False), st.integers(0, 2**40))
def test_prometheus_reads_every_name_and_number(kind: str, name: str, value: float, step: int) -> None:
    text = exposition(3, step, {Number(kind, name, "norm"): value, Number("other", name, "norm"): math.nan})
    families = {family.name: family.samples for family in text_string_to_metric_families(text)}
    assert [(one.labels, one.value) for one in families["trainermon_step"]] == [({"rank": "3"}, step)]
    first, second = families["trainermon_value"]
    assert (first.labels, first.value) == ({"rank": "3", "kind": kind, "name": name, "op": "norm"}, value)
    assert math.isnan(second.value)


def test_prometheus_gets_a_file_of_each_rank(base: Path, tmp_path: Path) -> None:
    trained(forward={"to": "prometheus", "file": str(tmp_path / "rank{rank}.prom"), "kinds": ["grad_reduced"]})
    (family, values) = text_string_to_metric_families((tmp_path / "rank0.prom").read_text())
    assert family.samples[0].value == STEPS - 1
    expected = {name: value for (step, name), value in in_files(base, "grad_reduced", "norm").items() if step == STEPS - 1}
    assert {one.labels["name"]: one.value for one in values.samples} == pytest.approx(expected, rel=1e-12)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.usefixtures("base")
def test_prometheus_is_served_on_the_loopback_until_the_monitor_is_closed() -> None:
    port, told = free_port(), []

    def look(one: Any) -> None:
        address = f"http://127.0.0.1:{port}/metrics"
        one.forward_to(lambda *_: told.append(urllib.request.urlopen(address).read().decode()), most=1)

    trained(look, forward={"to": "prometheus", "port": port})
    assert "trainermon_value{" in told[-1]
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics")


@pytest.mark.usefixtures("base")
def test_a_port_in_use_is_refused_before_training() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match=r"forward: prometheus cannot be used: .*in use"):
            trained(forward={"to": "prometheus", "port": taken.getsockname()[1]})


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        ({"to": "grafana"}, "forward.to: 'grafana' is not allowed"),
        ({"to": "prometheus"}, '"prometheus" needs either "file" or "port"'),
        ({"to": "prometheus", "file": "x", "port": 1}, '"prometheus" needs either "file" or "port"'),
        ({"to": "wandb", "port": 9}, 'port goes with "to": "prometheus"'),
        ({"most": 0}, "forward.most: 0 is not allowed"),
        ({"kind": ["run"]}, "did you mean `kinds`"),
    ],
)
def test_what_cannot_be_used_is_refused(forward: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        trained(forward=forward)
    assert said.replace("'", '"') in str(refused.value)


def run(script: str, tmp_path: Path, **variables: str) -> str:
    environment = {
        **os.environ,
        "MONITOR_OUTPUT_DIR": str(tmp_path / "out"),
        "PYTHONPATH": os.pathsep.join(sys.path),
        **variables,
    }
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n{script}"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


OPENTELEMETRY = """
import json
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

reader = InMemoryMetricReader()
metrics.set_meter_provider(MeterProvider(metric_readers=[reader]))
from test_what_is_passed_on import trained

trained(forward={"to": "opentelemetry", "kinds": ["grad_reduced"]})
found = {}
for resource in reader.get_metrics_data().resource_metrics:
    for scope in resource.scope_metrics:
        for metric in scope.metrics:
            found[metric.name] = [[dict(point.attributes), point.value] for point in metric.data.data_points]
print(json.dumps(found))
"""


def test_opentelemetry_has_gauges_of_the_last_step(tmp_path: Path) -> None:
    found = json.loads(run(OPENTELEMETRY, tmp_path).splitlines()[-1])
    assert found["trainermon.step"] == [[{"rank": 0}, STEPS - 1]]
    expected = {name: value for (step, name), value in in_files(tmp_path / "out", "grad_reduced", "norm").items() if step == 2}
    assert {attributes["name"]: value for attributes, value in found["trainermon.value"]} == pytest.approx(expected)
    assert {attributes["kind"] for attributes, _ in found["trainermon.value"]} == {"grad_reduced"}


WANDB = """
import wandb

run = wandb.init(project="p", settings=wandb.Settings(x_disable_stats=True, console="off"))
from test_what_is_passed_on import trained

def prepare(one):
    one.forward_to(lambda numbers, step: run.log({"mine": step}), most=1)

trained(prepare, forward={"to": "wandb", "kinds": ["grad_reduced"]})
run.finish()
"""


def history_in(content: bytes) -> Iterator[dict[str, Any]]:
    """What a run logged, from its offline file: blocks of 32 KiB of records, each after its checksum, length and type."""
    from wandb.proto import wandb_internal_pb2

    at, whole = 7, b""
    while at + 7 <= len(content):
        if 2**15 - at % 2**15 < 7:  # no record begins so late in a block
            at += 2**15 - at % 2**15
            continue
        length, of = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if of in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            if record.HasField("history"):
                yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}


def test_wandb_gets_them_with_what_the_program_logs(tmp_path: Path) -> None:
    run(WANDB, tmp_path, WANDB_MODE="offline", WANDB_SILENT="true", WANDB_DIR=str(tmp_path))
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    logged = list(history_in(path.read_bytes()))
    found = {(row["monitor/step"], key): value for row in logged for key, value in row.items() if "grad_reduced" in key}
    expected = in_files(tmp_path / "out", "grad_reduced", "norm")
    assert found == pytest.approx(
        {(step, f"monitor/grad_reduced/{name}/norm"): value for (step, name), value in expected.items()}
    )


def test_the_example_of_the_document_runs(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```python\n(.*?)```", DOCUMENT, flags=re.DOTALL)
    exec(compile(example, "forwarding.md", "exec"), {})
    assert "learning_rate" in (tmp_path / "metrics-0.prom").read_text()
    assert base.exists()
