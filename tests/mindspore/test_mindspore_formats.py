"""One training of MindSpore's, written in every format at once, and the alerts that it sets off."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from attaching import EVERYTHING, Output, attached, step_with, steps_of
from mindspore import Tensor, nn
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training import Net, inputs
from typer.testing import CliRunner

from monitor.anomalies.ranking.cli import app
from monitor.coordinator.manifest_format import read_manifest
from monitor.series import NO_MICRO_STEP, Series
from monitor.sinks.csv import read_csv
from monitor.sinks.hdf5 import read_hdf5

OPS = [*EVERYTHING["ops"], "shape", "dtype"]
Values = dict[tuple[str, int, str], Any]
FAULT = 3


def train(net: Net, optimizer: nn.Cell, steps: int = 5) -> None:
    """One step hands the optimizer a NaN in the gradient of one weight, and continues as before."""
    gradients_of = ms.value_and_grad(net, None, optimizer.parameters)
    for number in range(steps):
        _, gradients = gradients_of(inputs(number))
        if number == FAULT:
            broken = gradients[0].asnumpy().copy()
            broken[0, 0] = math.nan
            gradients = (Tensor(broken), *gradients[1:])
        optimizer(gradients)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Output:
    base = tmp_path_factory.mktemp("formats") / "out"
    output, net = Output(base), Net()
    optimizer = nn.SGD(net.trainable_params(), 0.01)
    config = EVERYTHING | {"format": ["csv", "hdf5", "tensorboard", "api"], "step_count_per_record": 2, "ops": OPS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MONITOR_OUTPUT_DIR", str(base))
        with attached(output, net, optimizer, **config):
            train(net, optimizer)
    return output


def by_tag(rows: list[dict[str, Any]]) -> Values:
    found: Values = {}
    for row in rows:
        micro_step = NO_MICRO_STEP if row.get("micro_step") is None else row["micro_step"]
        tag = Series(row["kind"], row["vpp_stage"], row["name"]).tag(0, micro_step)
        found |= {(tag, row["step"], op): row[op] for op in OPS}
    return found


def of_csv(output: Output) -> Values:
    tables = {path: read_csv(path) for path in output.directory().glob("*_*-*.csv")}
    return by_tag(
        [{"kind": path.name.rpartition("_")[0], **row} for path, table in tables.items() for row in table.to_pylist()]
    )


def of_tensorboard(output: Output) -> Values:
    run = EventAccumulator(str(output.directory()), size_guidance={"scalars": 0})
    run.Reload()
    scalars = {tuple(tag.rsplit("_", 1)): run.Scalars(tag) for tag in run.Tags()["scalars"]}
    return {(tag, one.step, op): one.value for (tag, op), found in scalars.items() for one in found}


def test_hdf5_and_csv_have_the_same_rows_with_the_same_values(trained: Output) -> None:
    csv = of_csv(trained)
    hdf5 = by_tag([row for path in trained.directory().glob("*.h5") for row in read_hdf5(path, ops=OPS).to_pylist()])
    assert csv.keys() == hdf5.keys()
    assert len(csv) > 5 * len(OPS) * 20
    for (tag, step, op), value in csv.items():
        expected = hdf5[tag, step, op]
        same = value == (json.dumps(expected) if op == "shape" and not isinstance(expected, str) else expected)
        assert same or value == pytest.approx(expected, rel=1e-15, abs=1e-16, nan_ok=True), (tag, step, op)


def test_tensorboard_has_them_in_single_precision(trained: Output) -> None:
    numbers = {place: value for place, value in of_csv(trained).items() if isinstance(value, (int, float))}
    found = of_tensorboard(trained)
    assert numbers.keys() == found.keys()
    for place, value in numbers.items():
        assert float(np.float32(value)) == pytest.approx(found[place], rel=1e-6, nan_ok=True), place


def test_records_hold_as_many_steps_as_wanted_and_dtypes_are_mindspore_s(trained: Output) -> None:
    names = sorted(path.name for path in trained.directory().glob("actv_grad_*.csv"))
    assert names == ["actv_grad_0-1.csv", "actv_grad_2-3.csv", "actv_grad_4-5.csv"]
    assert {row.values["dtype"] for row in trained.rows("actv")} == {"mindspore.float32"}
    assert {row.name: row.values["shape"] for row in trained.rows("param_origin")}["a.weight"] == "[5, 4]"


def test_the_numbers_of_the_step_in_progress_are_there_to_ask_for(output: Output) -> None:
    net = Net()
    optimizer = nn.SGD(net.trainable_params(), 0.01)
    with attached(output, net, optimizer, **EVERYTHING | {"format": "api", "ops": ["norm"]}) as monitor:
        _, gradients = ms.value_and_grad(net, None, optimizer.parameters)(inputs(0))
        expected = {p.name: np.linalg.norm(g.asnumpy()) for p, g in zip(optimizer.parameters, gradients, strict=True)}
        before, _ = monitor.generate_wgrad_metrics()  # one process has nothing to reduce
        optimizer(gradients)
        reduced, unreduced = monitor.generate_wgrad_metrics()
        activations, their_gradients = monitor.generate_xy_metrics()
    for found in (before, reduced, unreduced):
        assert sorted(one["norm"] for one in found.values()) == pytest.approx(sorted(expected.values()), rel=1e-6)
    assert (len(activations), len(their_gradients)) == (6, 4)
    assert not list(output.directory().glob("*.csv"))


def test_numbers_have_as_many_digits_as_wanted(output: Output) -> None:
    net = Net()
    optimizer = nn.SGD(net.trainable_params(), 0.01)
    with attached(output, net, optimizer, wg_distribution=True, ops=["norm"], ndigits=2):
        step_with(net, optimizer)
    (path,) = output.directory().glob("grad_reduced_*.csv")
    cells = [line.split(",")[-1] for line in path.read_text().splitlines()[1:]]
    assert all(len(cell.partition(".")[2]) <= 2 for cell in cells)


def test_ops_of_magnitudes_are_shares_of_the_elements(output: Output) -> None:
    net = Net()
    weight = np.full(net.a.weight.shape, 1.0, np.float32)
    weight[0], weight[1] = 1e-9, 1e6  # below the least, and above the greatest, that float16 has
    net.a.weight.set_data(Tensor(weight))
    optimizer = nn.SGD(net.trainable_params(), 0.0)
    ops = ["magnitude_histogram", "underflow_fp16", "overflow_fp16"]
    with attached(output, net, optimizer, param_distribution=True, ops=ops, format=["csv", "hdf5"]):
        step_with(net, optimizer)
    (row,) = [row for row in output.rows("param_origin") if row.name == "a.weight"]
    assert (row.values["underflow_fp16"], row.values["overflow_fp16"]) == (pytest.approx(0.2), pytest.approx(0.2))


def test_a_nan_in_a_gradient_sets_off_an_alert_and_is_named_as_the_first(output: Output) -> None:
    net = Net()
    optimizer = nn.SGD(net.trainable_params(), 0.01)
    alert = {"rules": [{"rule_name": "AnomalyNan"}], "dump": True}
    with attached(output, net, optimizer, **EVERYTHING | {"alert": alert}):
        train(net, optimizer)
    (events,) = output.base.glob("anomaly_detected/rank0/anomaly*.json")
    found = list(json.loads(events.read_text()).values())
    assert min(event["step"] for event in found) == FAULT
    result = CliRunner().invoke(app, ["-d", str(output.base / "anomaly_detected"), "-k", "1"], env={"COLUMNS": "400"})
    assert result.exit_code == 1, result.output
    assert "a.weight" in result.output
    assert "grad_reduced" in result.output


def test_an_alert_brings_a_closer_look_for_some_steps(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAMIC_MONITOR", "True")
    net = Net()
    optimizer = nn.SGD(net.trainable_params(), 0.01)
    closer = {"set": {"xy_distribution": True, "all_xy": True}, "steps": 2}
    config = {"dynamic_on": True, "wg_distribution": True, "ops": ["nans"]}
    alert = {"rules": [{"rule_name": "AnomalyNan"}], "dump": True}
    with attached(output, net, optimizer, **config, alert=alert, on_alert=closer) as monitor:
        train(net, optimizer, FAULT + 1)
        for parameter, sound in zip(net.get_parameters(), Net().get_parameters(), strict=True):
            parameter.set_data(sound)
        control = monitor._recordings[0].switching._control
        deadline = time.monotonic() + 20  # the writer finds the NaN in its own time
        while not steps_of(output, "actv") and time.monotonic() < deadline:
            control._watching.turn()
            step_with(net, optimizer)
        for number in range(4):
            control._watching.turn()
            step_with(net, optimizer, number)
    first, second = steps_of(output, "actv")
    assert FAULT < first == second - 1


def test_a_bound_on_disk_thins_the_oldest_steps_of_mindspore_too(output: Output) -> None:
    net = Net()
    optimizer = nn.SGD(net.trainable_params(), 0.01)
    config = {"wg_distribution": True, "format": "csv", "ops": EVERYTHING["ops"], "max_output_bytes": 30_000}
    with attached(output, net, optimizer, **config):
        for number in range(60):
            step_with(net, optimizer, number)
    manifest = read_manifest(output.directory() / "manifest.json")
    written = set(manifest.steps.written.steps())
    thinned = {step for steps in manifest.thinned.steps.values() for step in steps.steps()}
    assert written | thinned == set(range(60))
    assert thinned
    assert not written & thinned
    assert set(range(52, 60)) <= written
    assert set(steps_of(output, "grad_reduced")) == written
    assert sum(path.stat().st_size for path in output.directory().iterdir()) <= 30_000
