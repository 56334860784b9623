"""Each cell of the two tables on compiled code in ``docs/mindspore.md`` is what recordings have."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
import pytest
from attaching import EVERYTHING, Output, with_fixed_weights
from compiled_steps import OUTSIDE, Deep, adam, mode_of, plain, recorded as recorded_in_csv
from mindspore import Tensor, nn, ops
from pyarrow import parquet
from training import inputs
from watching_cells import written

from monitor.mindspore import MonitorCallback, TrainerMon
from monitor.mindspore.tape import COMPILED_VARIABLE

PAGE = (Path(__file__).parents[3] / "docs" / "mindspore.md").read_text(encoding="utf-8")
STEPS = 2
WAYS = {
    "`GRAPH_MODE`": ("graph",),
    "`Model.train` in `GRAPH_MODE`, data sunk or not": ("Model", "Model, sunk"),
    "whole step in `@jit`": ("jit",),
    "forward and backward, or the optimizer, in `@jit`": ("backward", "optimizer"),
    "`@jit` cell or function in the dynamic graph": ("cell", "function"),
}
"""The columns of the table, and the ways of training that each is about."""

CELLS = ("actv", "actv_grad", "activation_hook", "linear_hook", "stack_info")
STEPPED = ("grad_reduced", "param_origin", "param_updated", "exp_avg", "exp_avg_sq")
"""Kinds that are read when the optimizer is called."""

UPDATES = ("update_ratio", "optimizer_health", "adam_update", "adam_ratio", "mg_direction")
RECORDED: dict[str, Any] = {
    **EVERYTHING,
    **dict.fromkeys(("update_ratio", "optimizer_health", "ur_distribution", "mg_direction", "run_numbers", "stack_info"), True),
    "recording_l2_features": True,
    "l2_targets": {"linear_hook": [], "activation_hook": ["a", "b", "block.again"]},
    "ops": ["norm", "abs_p50", "magnitude_histogram"],
    "format": "parquet",
}

Place = tuple[str, str, int, int | None]
"""Kind, name, step and micro-step of a row. The rows of ``stack_info.csv`` have a kind of their own."""

Rows = dict[Place, dict[str, Any]]


class Block(nn.Cell):
    """Calls one cell twice, and one that is computed again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.repeated = nn.SequentialCell(nn.Dense(5, 5), nn.Tanh())
        self.repeated.recompute()
        self.again = nn.Dense(5, 5)

    def construct(self, x: Tensor) -> Tensor:
        return self.again(self.again(self.repeated(x)))


class CompiledBlock(Block):
    @ms.jit
    def construct(self, x: Tensor) -> Tensor:
        return self.again(self.again(self.repeated(x)))


class Network(nn.Cell):
    def __init__(self, block: nn.Cell) -> None:
        super().__init__()
        self.a, self.block, self.b = nn.Dense(4, 5), block, nn.Dense(5, 2)

    def construct(self, x: Tensor) -> Tensor:
        return ops.tanh(self.b(self.block(ops.tanh(self.a(x))))).sum()


class Step(nn.Cell):
    """A training step of one or two micro-batches, of which a part may be compiled."""

    def __init__(self, network: nn.Cell, optimizer: nn.Cell, way: str, micro_batches: int) -> None:
        super().__init__()
        self.network, self.optimizer, self.micro_batches = network, optimizer, micro_batches
        self.gradients_of: Any = ms.value_and_grad(network, None, optimizer.parameters)
        self.apply_to: Any = ms.jit(calling(optimizer)) if way == "optimizer" else optimizer
        if way == "function":
            self.gradients_of = ms.value_and_grad(ms.jit(calling(network)), None, optimizer.parameters)
        if way == "backward":
            self.gradients_of = ms.jit(calling(self.gradients_of))

    def construct(self, x: Tensor) -> Tensor:
        loss, gradients = self.gradients_of(x)
        if self.micro_batches == 2:
            other, more = self.gradients_of(x * 0.5)
            loss, gradients = loss + other, added(gradients, more)
        self.apply_to(gradients)
        return loss


def added(first: Any, second: Any) -> Any:
    together = ()
    for i in range(len(first)):
        together = together + (first[i] + second[i],)  # noqa: RUF005 (the compiler does not know starred items)
    return together


def calling(called: Any) -> Callable[[Any], Any]:
    """A function, as ``ms.jit`` wants it."""

    def one(x: Any) -> Any:
        return called(x)

    return one


def recorded(way: str, micro_batches: int, base: Path) -> Rows:
    """All rows of a training."""
    network = with_fixed_weights(Network(CompiledBlock() if way == "cell" else Block()))
    optimizer = adam(network.trainable_params())
    step = Step(network, optimizer, way, micro_batches).set_train(True)
    path = written(Output(base), **RECORDED, monitor_mbs_grad=micro_batches == 2)
    with mode_of("graph" if way in ("graph", "Model", "Model, sunk") else "dynamic"):
        if "Model" in way:
            model = ms.train.Model(step) if micro_batches == 2 else ms.train.Model(network, optimizer=optimizer)
            data = ds.GeneratorDataset([(inputs(one).asnumpy(),) for one in range(STEPS)], ["x"], shuffle=False)
            model.train(1, data, callbacks=[MonitorCallback(path, micro_batches)], dataset_sink_mode="sunk" in way)
        else:
            with TrainerMon(path) as monitor:
                monitor.set_monitor(network, micro_batches, optimizer)
                compiled = ms.jit(calling(step.construct)) if way == "jit" else step
                for one in range(STEPS):
                    monitor.log(loss=compiled(inputs(one)))
    return dict(rows_in(Output(base).directory()))


def rows_in(directory: Path) -> Iterator[tuple[Place, dict[str, Any]]]:
    for path in directory.glob("metrics_*.parquet"):
        for row in parquet.read_table(path).to_pylist():
            yield (row["kind"], row["name"], row["step"], row["micro_step"]), row
    with (directory / "stack_info.csv").open() as file:
        for row in csv.DictReader(file):
            yield ("stack_info", row["module_name"].partition(":")[2], 0, None), row


@pytest.fixture(scope="module")
def rows_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, int], Rows]]:
    """Trains in a way, once."""
    done: dict[tuple[str, int], Rows] = {}
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(COMPILED_VARIABLE, "1")

        def rows(way: str, micro_batches: int) -> Rows:
            if (way, micro_batches) not in done:
                base = tmp_path_factory.mktemp("job") / "out"
                base.mkdir()
                patched.setenv("MONITOR_OUTPUT_DIR", str(base))
                done[way, micro_batches] = recorded(way, micro_batches, base)
            return done[way, micro_batches]

        yield rows


# --- The rows of the table: the places that each is about.


def is_repeated(place: Place) -> bool:
    return place[0] in CELLS and place[1].startswith("block.repeated")


def of_kinds(*kinds: str) -> Callable[[Place, dict[str, Any]], bool]:
    return lambda place, _: place[0] in kinds and not is_repeated(place)


def of_run(*names: str) -> Callable[[Place, dict[str, Any]], bool]:
    return lambda place, _: place[0] == "run" and place[1].startswith(names)


def is_of_another_micro_batch(place: Place, _: dict[str, Any]) -> bool:
    return place[0] in ("actv", "actv_grad", "grad_unreduced") and place[3] == 1 and not is_repeated(place)


ABOUT: dict[str, Callable[[Place, dict[str, Any]], bool]] = {
    "inputs and outputs of cells": of_kinds("actv"),
    "their gradients": of_kinds("actv_grad"),
    "a row for each call of a cell": lambda place, _: place[0] in ("actv", "actv_grad") and "#1" in place[1],
    "`grad_unreduced`": of_kinds("grad_unreduced"),
    "`grad_reduced`, `param_origin`, `param_updated`, moments": of_kinds(*STEPPED),
    "`run`: norm of all gradients": of_run("grad_norm"),
    "`run`: learning rates": of_run("learning_rate"),
    "`run`: the loss that `MonitorCallback` or `log` records": of_run("loss"),
    "`update_ratio`, `optimizer_health`, `ur_distribution`, `mg_direction`": of_kinds(*UPDATES),
    "features of cells (`recording_l2_features`), `stack_info`": of_kinds("activation_hook", "linear_hook", "stack_info"),
    "magnitude histograms and percentiles (`abs_p50` …)": lambda place, row: (
        place[0] in ("actv", "actv_grad", "grad_unreduced", *STEPPED)
        and not is_repeated(place)
        and (row.get("abs_p50"), row.get("histogram")) != (None, None)
    ),
    "micro-batches": is_of_another_micro_batch,
    "recomputed cells": lambda place, _: is_repeated(place),
}


def table() -> Iterator[tuple[str, str, str, str]]:
    """Row, column, text without its note, and note."""
    lines = PAGE.partition("| | `GRAPH_MODE` |")[1:]
    header, _, *rows = "".join(lines).partition("\n\n")[0].splitlines()
    columns = cells_of(header)[1:]
    for row in rows:
        name, *texts = cells_of(row)
        for column, text in zip(columns, texts, strict=True):
            note = re.search("[¹²³⁴]", text)
            yield name, column, re.sub("[¹²³⁴]", "", text), note.group() if note else ""


def cells_of(line: str) -> list[str]:
    return [one.strip() for one in line.strip().strip("|").split("|")]


CASES = [
    pytest.param(name, way, text, note, id=f"{name}-{way}")
    for name, column, text, note in table()
    for way in WAYS.get(column, ())
]


def python_sees(way: str, place: Place) -> bool:
    """Whether a row is read in a part of the step that is not compiled."""
    kind, name, *_ = place
    return {
        "backward": kind in STEPPED,
        "optimizer": kind not in STEPPED,
        "cell": kind not in CELLS or not name.startswith(("block.repeated", "block.again")),
        "function": kind not in CELLS,
    }[way]


def as_written(text: str, note: str, way: str, places: set[Place]) -> set[Place]:
    """Of the places in the dynamic graph those that a cell of the table says are recorded."""
    if text == "yes" and note == "²" and way in ("graph", "jit", "Model", "Model, sunk"):
        return {place for place in places if place[0] != "grad_unreduced" or place[3] is None}
    if text == "of what Python sees":
        return {place for place in places if python_sees(way, place)}
    if text == "yes, if Python calls the optimizer":
        return set() if way == "optimizer" else places
    return {"yes": places, "no": set()}[text]


def elements_elsewhere(one: dict[str, Any], other: dict[str, Any]) -> int:
    """How many elements are in another bin."""
    of_one, of_other = (
        Counter({filled["bin"]: filled["elements"] for filled in row.get("histogram") or ()}) for row in (one, other)
    )
    assert of_one.total() == of_other.total()
    return (of_one - of_other).total()


def test_the_table_has_these_rows_and_columns() -> None:
    assert {name for name, *_ in table()} == set(ABOUT)
    assert {column for _, column, *_ in table()} == set(WAYS)


@pytest.mark.parametrize(("name", "way", "text", "note"), CASES)
def test_a_cell_of_the_table_is_what_is_recorded(
    rows_of: Callable[[str, int], Rows], name: str, way: str, text: str, note: str
) -> None:
    micro_batches = 2 if name == "micro-batches" else 1
    expected = rows_of("Model, dynamic" if "Model" in way else "dynamic", micro_batches)
    found = rows_of(way, micro_batches)
    is_about = ABOUT[name]
    places = {place for place, row in expected.items() if is_about(place, row)}
    assert places != set()
    there = {place for place in places if place in found and is_about(place, found[place])}
    assert there == as_written(text, note, way, places)
    for place in there:
        one, other = expected[place].get("norm"), found[place].get("norm")
        assert (one is None) == (other is None)
        assert one is None or np.isclose(one, other, 1e-5, 1e-6), place
        assert elements_elsewhere(expected[place], found[place]) <= 1, place  # last bits decide at the edge of a bin


# --- The table of the environment variable.

INSIDE = {"actv", "actv_grad", "grad_unreduced", "grad_reduced"}
SETTINGS = [
    (None, "graph", {*INSIDE, *OUTSIDE}),
    (None, "jit", set(OUTSIDE)),
    ("1", "graph", {*INSIDE, *OUTSIDE}),
    ("1", "jit", {*INSIDE, *OUTSIDE}),
    ("0", "jit", set()),
]


@pytest.mark.parametrize(("value", "how", "kinds"), SETTINGS)
def test_the_variable_decides_what_has_rows_in_compiled_code(
    value: str | None, how: str, kinds: set[str], output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is None:
        monkeypatch.delenv(COMPILED_VARIABLE)
    else:
        monkeypatch.setenv(COMPILED_VARIABLE, value)
    bits, rows = recorded_in_csv(how, Deep, output)
    assert bits == plain(how, Deep)
    assert {kind for kind, *_ in rows} == kinds


def test_the_value_0_has_graph_mode_refused(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMPILED_VARIABLE, "0")
    with pytest.raises(ValueError, match=f"{COMPILED_VARIABLE} is 0"):
        recorded_in_csv("graph", Deep, output)
