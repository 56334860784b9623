"""The examples of the reference's two pages on monitoring, run with MindSpore as written but for import paths.

``OBJECTS`` and ``CODE`` name all of them: an example that a page has and its table lacks fails a test. Examples of PyTorch are
run by ``tests/test_reference_documents.py``.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from attaching import with_fixed_weights
from mindspore import Tensor, nn, ops
from reference_examples import MONITOR, WITHOUT, accepts, code_in, fenced, moved, objects_in, prototypes_in, text_of

from monitor.config.jsonc import parse
from monitor.convert import csv2db, csv2tensorboard_by_step
from monitor.mindspore import RunEnded, TrainerMon

ENGLISH, CHINESE = MONITOR
PAGES = {page: text_of(page) for page in MONITOR}

pytestmark = pytest.mark.skipif(not all(PAGES.values()), reason=WITHOUT)

STRUCTURE, ANOMALY = "what the structure looks like", "what an anomaly looks like"
SHOWN = (STRUCTURE, ANOMALY)
"""Objects that are written, and not configurations."""

ALERTS = ["an alert of a deviation", "an alert of NaN", "both alerts"]
BASICS = ["weights", "weight gradients", "activations", "moments", "stacks", "structure", STRUCTURE]
TARGETS = ["a module", "a module and a parameter", "everything", "interpretable features"]
OBJECTS = {
    ENGLISH: ["first use", *BASICS, *TARGETS, "gradients of micro-batches", *ALERTS, ANOMALY, "all fields"],
    CHINESE: [*BASICS, *TARGETS, "statistics", "gradients of micro-batches", *ALERTS, ANOMALY, "all fields"],
}
FOUND = {page: objects_in(text) for page, text in PAGES.items()}
CONFIGURATIONS = [
    pytest.param(config, id=f"{page[-2:]}-{name}")
    for page, names in OBJECTS.items()
    for name, config in zip(names, FOUND[page], strict=False)
    if name not in SHOWN
]

MISPRINTED = "from csv to TensorBoard, misprinted: quotes enclose the commas"
PYTORCH = "PyTorch: "
CODE = {
    ENGLISH: [
        *(f"{PYTORCH}attach", "attach"),
        *(MISPRINTED, "other statistics", "activations from now on", "gradients in the program", "activations in the program"),
    ],
    CHINESE: [
        *(f"{PYTORCH}attach", f"{PYTORCH}DeepSpeed and Accelerate", f"{PYTORCH}DeepSpeed and Transformers", "attach"),
        *(f"{PYTORCH}attach, as before 1.2.2", "the group of a pipeline", "from csv to TensorBoard", "from csv to SQLite"),
        *("other statistics", "activations from now on", "gradients in the program", "activations in the program"),
    ],
}
BEGINS = re.compile(r"^(# Megatron-LM|from msprobe|if \{some|reduced, unreduced =|actv, actv_grad =)")
CONTINUES = re.compile(
    r"^([+# )]|\.\.\.|from |if \{some|csv2|model, optimizer|monitor|time_|process_num|data_type_list|reduced,|actv,)"
)

PROTOTYPES: dict[str, Callable[..., Any]] = {
    "TrainerMon.__init__": TrainerMon.__init__,
    "TrainerMon.set_monitor": TrainerMon.set_monitor,
    "csv2tensorboard_by_step": csv2tensorboard_by_step,
    "csv2db": csv2db,
    "TrainerMon.generate_wgrad_metrics": TrainerMon.generate_wgrad_metrics,
    "TrainerMon.generate_xy_metrics": TrainerMon.generate_xy_metrics,
    "TrainerMon.set_wrapped_optimizer": TrainerMon.set_wrapped_optimizer,
    "TrainerMon.monitor_gnorm_with_ad": TrainerMon.monitor_gnorm_with_ad,
}
ONLY_CHINESE = {"csv2db"}


def code_of(page: str) -> dict[str, str]:
    """The examples by name. Prototypes are no examples."""
    if page == ENGLISH:
        found = [re.sub(r"^\+", "", one, flags=re.MULTILINE) for one in code_in(PAGES[page], BEGINS, CONTINUES)]
    else:
        found = [one for one in fenced(PAGES[page], "python") if " -> " not in one]
    assert len(found) == len(CODE[page])
    return dict(zip(CODE[page], found, strict=True))


class Attention(nn.Cell):
    """As Megatron names its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_qkv = nn.Dense(8, 8)

    def construct(self, x: Tensor) -> Tensor:
        return self.linear_qkv(x)


class Layer(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.self_attention = Attention()
        self.mlp = nn.Dense(8, 8)

    def construct(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.mlp(self.self_attention(x))
        return x, ops.stop_gradient(x)


class Encoder(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.CellList([Layer(), Layer()])

    def construct(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        return x


class LanguageModel(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()

    def construct(self, x: Tensor) -> Tensor:
        return self.encoder(x)


class Network(nn.Cell):
    """With the layer that the pages name, ``language_model.encoder.layers.0``."""

    def __init__(self) -> None:
        super().__init__()
        self.language_model = LanguageModel()

    def construct(self, x: Tensor) -> Tensor:
        return self.language_model(x).sum()


class Run:
    """A network, its optimizer, and steps that train it."""

    def __init__(self) -> None:
        self.model = with_fixed_weights(Network())
        self.optimizer = nn.Adam(self.model.trainable_params(), 1e-6)  # no deviation of its own
        self._gradients_of = ms.value_and_grad(self.model, None, self.optimizer.parameters)

    def step(self, value: float = 1.0) -> None:
        _, gradients = self._gradients_of(Tensor(np.full((2, 8), value, np.float32)))
        self.optimizer(gradients)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home, where a program runs that writes to ``monitor_output``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(tmp_path / "monitor_output"))
    monkeypatch.delenv("DYNAMIC_MONITOR", raising=False)
    return tmp_path


def attached(config: str, run: Run) -> TrainerMon:
    Path("monitor_config.json").write_text(config)
    monitor = TrainerMon("./monitor_config.json")
    monitor.set_monitor(run.model, grad_acc_steps=1, optimizer=run.optimizer)
    return monitor


def trained(config: str, steps: int = 2) -> None:
    run = Run()
    with attached(config, run):
        for _ in range(steps):
            run.step()


def recorded(base: Path) -> set[str]:
    """The kinds that have a file."""
    (rank,) = base.glob("monitor_output/*-rank0-*")
    return {re.sub(r"_\d+-\d+$", "", path.stem) for path in rank.glob("*.csv")}


def wanted(config: dict[str, Any]) -> Iterator[str]:
    """The kinds that the switches of a configuration ask for."""
    for switch, kinds in {
        "param_distribution": ("param_origin", "param_updated"),
        "wg_distribution": ("grad_unreduced", "grad_reduced"),
        "mv_distribution": ("exp_avg", "exp_avg_sq"),
        "xy_distribution": ("actv", "actv_grad"),
        "stack_info": ("stack_info",),
        "recording_l2_features": ("linear_hook",),
        "cc_distribution": ("communication_log",),
    }.items():
        yield from kinds if config.get(switch) else ()


@pytest.mark.parametrize("page", PAGES)
def test_the_table_has_every_object_of_a_page(page: str) -> None:
    assert len(FOUND[page]) == len(OBJECTS[page])
    for name, text in zip(OBJECTS[page], FOUND[page], strict=True):
        config = parse(text).value
        assert ("print_struct" in config and len(config) == 1) is (name == "structure")
        assert ("alert" in config) is (name in (*ALERTS, "all fields"))


@pytest.mark.parametrize("page", PAGES)
def test_the_table_has_every_piece_of_code_of_a_page(page: str) -> None:
    for name, code in code_of(page).items():
        assert ("msprobe.pytorch import" in code or "....optimizer" in code) is name.startswith(PYTORCH)
    imports = [line for line in PAGES[page].splitlines() if re.match(r"^\+?from msprobe", line)]
    assert len(imports) == sum(one.count("from msprobe") for one in code_of(page).values())


@pytest.mark.parametrize("config", CONFIGURATIONS)
def test_every_configuration_records_what_it_asks_for(config: str, here: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    asked = parse(config).value
    if asked.get("print_struct"):
        with pytest.raises(RunEnded):
            trained(config)
        return
    trained(config)
    assert recorded(here) - {"run"} == set(wanted(asked))
    assert not [one for one in caplog.messages if "failed" in one]


def test_the_structure_has_the_keys_of_the_example(here: Path) -> None:
    with pytest.raises(RunEnded):
        trained('{"print_struct": true}')
    (path,) = here.glob("monitor_output/module_struct/rank0/module_struct.json")
    ours = json.loads(path.read_text())["0:language_model.encoder.layers.0"]
    (shown,) = parse(FOUND[CHINESE][OBJECTS[CHINESE].index(STRUCTURE)]).value.values()
    assert ours.keys() == shown.keys()
    assert ours["output"] == {
        "config": "tuple[2]",
        "0": "size=(2, 8), dtype=Float32",
        "1": "size=(2, 8), dtype=Float32",
    }


@pytest.mark.parametrize("name", ALERTS)
@pytest.mark.parametrize("page", PAGES)
def test_an_alert_writes_the_fields_of_the_example_and_the_command_ranks_it(name: str, page: str, here: Path) -> None:
    alert = parse(FOUND[page][OBJECTS[page].index(name)]).value
    run = Run()
    with attached(json.dumps({**alert, "wg_distribution": True, "ops": ["norm"]}), run):
        for value in (1.0, 1.0, 1.0, float("nan") if "NaN" in name else 1e6):
            run.step(value)
    (path,) = here.glob("monitor_output/anomaly_detected/rank0/anomaly*.json")
    events = json.loads(path.read_text())
    (shown,) = parse(FOUND[page][OBJECTS[page].index(ANOMALY)]).value.values()
    assert all(event.keys() == shown.keys() for event in events.values())
    assert {event["step"] for event in events.values()} == {3}
    (command,) = {line.strip() for line in PAGES[page].splitlines() if line.startswith("python3 -m ")}
    arguments = shlex.split(os.path.expandvars(command.replace("msprobe.core.monitor.anomaly_processor", "monitor.anomalies")))
    ran = subprocess.run([sys.executable, *arguments[1:]], check=False, capture_output=True, env=environment())
    assert ran.returncode == 1  # a rule fired
    assert (here / "monitor_output/anomaly_detected/anomaly_analyse.json").exists()


@pytest.mark.parametrize("page", PAGES)
def test_the_monitor_is_attached_as_the_page_does_it(page: str, here: Path) -> None:
    run = Run()
    (here / "monitor_config.json").write_text('{"wg_distribution": true}')
    names: dict[str, Any] = {
        "setup_model_and_optimizer": lambda *_: (run.model, run.optimizer, None),
        "model_provider": None,
        "model_type": None,
        "model": run.model,
        "optimizer": run.optimizer,
        "args": SimpleNamespace(global_batch_size=4, data_parallel_size=2, micro_batch_size=2),
    }
    exec(compile(moved(code_of(page)["attach"]), page, "exec"), names)
    run.step()
    names["monitor"].close()
    assert recorded(here) - {"run"} == {"grad_unreduced", "grad_reduced"}


def test_the_group_of_a_pipeline_is_passed(here: Path) -> None:
    (here / "monitor_config.json").write_text("{}")
    stage = SimpleNamespace(get_pipeline_model_parallel_group=lambda: None)
    names: dict[str, Any] = {"TrainerMon": TrainerMon, "mpu": stage}
    exec(compile(code_of(CHINESE)["the group of a pipeline"], CHINESE, "exec"), names)
    names["monitor"].close()


@pytest.mark.parametrize("name", ["from csv to TensorBoard", "from csv to SQLite"])
def test_a_recording_is_converted(name: str, here: Path) -> None:
    trained(json.dumps({"param_distribution": True, "wg_distribution": True}))
    (rank,) = here.glob("monitor_output/*-rank0-*")
    rank.rename(rank.with_name("Dec03_21-34-41" + rank.name[14:]))
    (here / "convert.py").write_text(moved(code_of(CHINESE)[name]))
    subprocess.run([sys.executable, "convert.py"], check=True, capture_output=True, env=environment())
    made = "*_csv2tensorboard_by_step" if "TensorBoard" in name else "monitor_metrics.db"
    assert len(list(here.glob(f"**/{made}"))) == 1


def test_the_misprint_is_still_one() -> None:
    with pytest.raises(SyntaxError):
        compile(code_of(ENGLISH)[MISPRINTED], ENGLISH, "exec")


@pytest.mark.filterwarnings("ignore:reload_xy:DeprecationWarning")
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize(
    ("name", "first", "then"),
    [("other statistics", "norm", {"min", "max"}), ("activations from now on", "actv", {"actv", "actv_grad"})],
)
def test_what_is_recorded_changes_while_training(page: str, name: str, first: str, then: set[str], here: Path) -> None:
    run = Run()
    with attached(json.dumps({"wg_distribution": True, "all_xy": True, "ops": ["norm"]}), run) as monitor:
        run.step()
        code = re.sub(r"\n\s*", "\n    ", code_of(page)[name].replace("{some condition}", "True").strip())
        exec(compile(code, page, "exec"), {"monitor": monitor})
        run.step()
        run.step()
    (rank,) = here.glob("monitor_output/*-rank0-*")
    if name == "other statistics":
        headers = {path.read_text().splitlines()[0] for path in rank.glob("grad_reduced_*.csv")}
        assert {tuple(header.split(",")[3:]) for header in headers} == {(first,), ("min", "max")}
    else:
        assert then <= recorded(here)


@pytest.mark.parametrize("page", PAGES)
def test_numbers_are_given_to_the_program(page: str, here: Path) -> None:
    run = Run()
    config = {"wg_distribution": True, "xy_distribution": True, "all_xy": True, "format": "api", "ops": ["norm"]}
    with attached(json.dumps(config), run) as monitor:
        run.step()
        names: dict[str, Any] = {"monitor": monitor}
        for name in ("gradients in the program", "activations in the program"):
            exec(compile(code_of(page)[name], page, "exec"), names)
    for which in ("reduced", "unreduced", "actv", "actv_grad"):
        assert names[which], which
        assert all(np.isfinite(value) for values in names[which].values() for value in values.values()), which
    assert list(here.glob("monitor_output/*/*.csv")) == []


@pytest.mark.parametrize("page", PAGES)
def test_every_prototype_is_ours(page: str) -> None:
    found = list(prototypes_in(PAGES[page]))
    missing = ONLY_CHINESE if page == ENGLISH else set()
    assert [one.partition("(")[0] for one in found] == [name for name in PROTOTYPES if name not in missing]
    assert [one for one in found if not accepts(PROTOTYPES[one.partition("(")[0]], one)] == []


def environment() -> dict[str, str]:
    """With this package in the path, for a program in another directory."""
    return {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
