"""MindSpore: functions and cells that are compiled (``@jit``), as calls at L1 and mix, and as cells at L0 and mix."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from cells_to_dump import Dump, described, dumping, same
from mindspore import Tensor, nn, ops
from typer.testing import CliRunner

from monitor.compare.cli import app
from monitor.mindspore import PrecisionDebugger
from monitor.mindspore.dump.jit import BytecodeContext, Executor
from monitor.mindspore.hooks import _warn_once
from monitor.mindspore.tape import COMPILED_VARIABLE

MODES = ("ast", "bytecode")
X = Tensor(np.array([[-1.0, 2.0, 3.0]], np.float32))


def squares(x: Tensor, y: Tensor) -> Tensor:
    return (ops.relu(x) * x * y).sum()


def raises(x: Tensor) -> Tensor:
    if x.shape[0] == 1:
        raise ValueError("no room")
    return ops.relu(x)


class Methods:
    def twice(self, x: Tensor) -> Tensor:
        return x * 2


class Inner(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Dense(3, 3, weight_init="ones", bias_init="zeros")

    def construct(self, x: Tensor) -> Tensor:
        return self.dense(x) * x


def compiled(function: Callable[..., Any], mode: str) -> Callable[..., Any]:
    return ms.jit(function, capture_mode=mode)


def compiled_cell(mode: str) -> nn.Cell:
    """Of a class of its own, whose ``construct`` is compiled."""
    kind = type("AlexNet", (Inner,), {})
    kind.construct = compiled(Inner.construct, mode)
    return kind().set_train()


def entries(base: Path) -> list[str]:
    return list(Dump(base).data)


@pytest.mark.parametrize("mode", MODES)
def test_a_compiled_function_is_one_call_with_its_inputs_and_outputs(mode: str, tmp_path: Path) -> None:
    function = compiled(squares, mode)
    with dumping(tmp_path):
        result = function(X, X + 1)
    data = Dump(tmp_path).data
    assert list(data) == ["Tensor.__add__.0.forward", "Jit.squares.0.forward"]
    expected = {"input_args": [described(X), described(X + 1)], "input_kwargs": {}, "output": [described(result)]}
    assert same(data["Jit.squares.0.forward"], expected)


@pytest.mark.parametrize("mode", MODES)
def test_its_backward_has_the_gradients_of_both_sides(mode: str, tmp_path: Path) -> None:
    function, y = compiled(squares, mode), Tensor(np.array([[0.5, 1.0, -2.0]], np.float32))
    with dumping(tmp_path):
        ms.grad(lambda x, y: function(x, y) * 3, (0, 1))(X, y)
    entry = Dump(tmp_path).data["Jit.squares.0.backward"]
    x = X.asnumpy()
    by_x, by_y = 3 * 2 * np.maximum(x, 0) * y.asnumpy(), 3 * np.maximum(x, 0) * x
    assert same(entry["input"], [described(Tensor(3.0, ms.float32))])
    assert same(entry["output"], [described(Tensor(by_x)), described(Tensor(by_y))])


@pytest.mark.parametrize("mode", MODES)
def test_a_compiled_cell_has_the_name_of_its_class(mode: str, tmp_path: Path) -> None:
    cell = compiled_cell(mode)
    with dumping(tmp_path):
        for _ in range(2):
            ms.grad(lambda x: cell(x).sum())(X)
    names = [name for name in entries(tmp_path) if name.startswith("Jit")]
    assert names == [f"Jit.AlexNet.{call}.{direction}" for call in range(2) for direction in ("forward", "backward")]
    assert same(Dump(tmp_path).data["Jit.AlexNet.1.forward"]["input_args"], [described(X)])


@pytest.mark.parametrize("mode", MODES)
def test_the_object_of_a_compiled_method_is_no_argument(mode: str, tmp_path: Path) -> None:
    kind = type("Compiled", (), {"twice": compiled(Methods.twice, mode)})
    with dumping(tmp_path):
        kind().twice(X)
    assert same(Dump(tmp_path).data["Jit.twice.0.forward"]["input_args"], [described(X)])


@pytest.mark.parametrize("mode", MODES)
def test_mix_has_the_call_below_its_cell_and_the_functions_around_it(mode: str, tmp_path: Path) -> None:
    network = nn.SequentialCell(compiled_cell(mode), nn.ReLU())
    with dumping(tmp_path, network, level="mix"):
        network(ops.sin(X))
    construct = Dump(tmp_path / "pynative").read("construct.json")
    assert construct["Jit.AlexNet.0.forward"] == "Cell.0.AlexNet.forward.0"
    assert construct["Functional.sin.0.forward"] is None
    assert construct["Primitive.relu.ReLU.0.forward"] == "Cell.1.ReLU.forward.0"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", ["L1", "mix"])
def test_compiled_code_computes_the_same_bits_as_without_a_dump(mode: str, level: str, tmp_path: Path) -> None:
    """It is compiled within the dump, and called after it."""

    def bits(function: Callable[..., Any]) -> list[bytes]:
        return [one.asnumpy().tobytes() for one in ms.value_and_grad(function)(X, X)]

    def fresh() -> Callable[..., Any]:
        def long(x: Tensor, y: Tensor) -> Tensor:
            z = ops.gelu(ops.softmax(x) * 2 + 1) * ops.tanh(y)
            return (z * z).sum() + ops.silu(x).sum()

        return compiled(long, mode)

    expected, function = bits(fresh()), fresh()
    with dumping(tmp_path, nn.SequentialCell(nn.ReLU()), level=level):
        assert bits(function) == expected
    assert bits(function) == expected


@pytest.mark.parametrize("mode", MODES)
def test_a_compiled_function_that_raises_has_no_entry_and_later_calls_have(mode: str, tmp_path: Path) -> None:
    function = compiled(raises, mode)
    with dumping(tmp_path):
        with suppress(Exception):
            function(X)
        ops.relu(X)
    assert entries(tmp_path) == ["Functional.relu.0.forward"]


def test_a_compiled_function_within_another_one_is_a_part_of_it(tmp_path: Path) -> None:
    inner = ms.jit(squares)

    @ms.jit
    def outer(x: Tensor) -> Tensor:
        return inner(x, x) + 1

    with dumping(tmp_path):
        outer(X)
    assert entries(tmp_path) == ["Jit.outer.0.forward"]


@pytest.mark.parametrize("mode", MODES)
def test_the_list_in_the_configuration_selects_them(mode: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"statistics": {"list": ["Jit.squares"]}}')
    function = compiled(squares, mode)
    with dumping(tmp_path / "out", config_path=tmp_path / "config.json"):
        function(ops.sin(X), X)
    assert entries(tmp_path / "out") == ["Jit.squares.0.forward"]


def test_what_runs_compiled_code_is_the_same_after_a_dump(tmp_path: Path) -> None:
    before = [dict(vars(owner)) for owner in (Executor, BytecodeContext)]
    with dumping(tmp_path):
        assert [dict(vars(owner)) for owner in (Executor, BytecodeContext)] != before
    assert [dict(vars(owner)) for owner in (Executor, BytecodeContext)] == before


# --- Compiled cells have a part of their own, beside everything that Python calls.


class Network(nn.Cell):
    """Two compiled cells between cells that are not."""

    def __init__(self, mode: str = "ast") -> None:
        super().__init__()
        self.first = nn.Dense(3, 3, weight_init="ones", bias_init="zeros")
        self.middle = compiled_cell(mode)
        self.second = compiled_cell(mode)
        self.last = nn.ReLU()

    def construct(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.middle(self.first(x))))


def trained(network: nn.Cell) -> None:
    ms.value_and_grad(lambda x: network(x).sum(), None, network.trainable_params())(X)


COMPILED = {f"Cell.{name}.AlexNet.{direction}.0" for name in ("middle", "second") for direction in ("forward", "backward")}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", ["L0", "mix"])
def test_compiled_cells_are_in_both_parts_and_all_else_is_in_one(mode: str, level: str, tmp_path: Path) -> None:
    network = Network(mode)
    with dumping(tmp_path, network, level=level):
        trained(network)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["graph", "pynative"]
    graph, pynative = (Dump(tmp_path / part).data for part in ("graph", "pynative"))
    assert set(graph) == COMPILED
    assert {name: pynative[name] for name in graph} == graph
    others = {"Cell.first.Dense.forward.0", "Cell.first.Dense.parameters_grad.0", "Cell.last.ReLU.backward.0"}
    assert others <= set(pynative) - COMPILED
    assert ("Jit.AlexNet.1.backward" in pynative) is (level == "mix")


def test_each_part_has_its_own_files(tmp_path: Path) -> None:
    network = Network()
    with dumping(tmp_path, network, level="L0", task="tensor"):
        trained(network)
    for part in ("graph", "pynative"):
        dump = Dump(tmp_path / part)
        leaf = dump.data["Cell.middle.AlexNet.forward.0"]["output"][0]
        assert same(leaf, {**described(Tensor(dump.tensor(leaf))), "data_name": leaf["data_name"]})
        assert dump.read("construct.json")["Cell.middle.AlexNet.forward.0"] is None
        assert dump.read("stack.json")


def test_every_step_and_segment_has_both_parts(tmp_path: Path) -> None:
    network = Network()
    debugger = PrecisionDebugger(dump_path=tmp_path, level="L0")
    for _ in range(2):
        for _ in range(2):
            debugger.start(network)
            network(X)
            debugger.stop()
        debugger.step()
    debugger.close()
    for step in range(2):
        for part in ("graph", "pynative"):
            assert {f"Cell.second.AlexNet.forward.{call}" for call in range(2)} <= set(Dump(tmp_path / part, step).data)


@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
def test_without_compiled_cells_and_at_l1_there_are_no_parts(level: str, tmp_path: Path) -> None:
    network = Network() if level == "L1" else nn.SequentialCell(nn.ReLU())
    with dumping(tmp_path, network, level=level):
        network(ops.sin(X))
    assert [path.name for path in tmp_path.iterdir()] == ["step0"]


def test_two_dumps_with_parts_are_compared_part_by_part(tmp_path: Path) -> None:
    for name, factor in (("left", 1), ("same", 1), ("right", 2)):
        network = Network()
        network.second.dense.weight.set_data(network.second.dense.weight * factor)
        with dumping(tmp_path / name, network, level="L0", task="tensor"):
            network(X)
    same_run, other = (CliRunner().invoke(app, [str(tmp_path / "left"), str(tmp_path / name)]) for name in ("same", "right"))
    assert (same_run.exit_code, other.exit_code) == (0, 1)
    assert "Cell.second.AlexNet.forward.0.output.0" in other.output


class OfItsOwn(nn.Cell):
    """A compiled cell with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = ms.Parameter(Tensor([2.0, -1.0, 0.5], ms.float32))

    @ms.jit
    def construct(self, x: Tensor) -> Tensor:
        return x * self.factor


def test_parameters_of_a_compiled_cell_are_in_both_parts_with_their_gradients(tmp_path: Path) -> None:
    network = nn.SequentialCell(OfItsOwn(), nn.ReLU())
    with dumping(tmp_path, network, level="L0"):
        trained(network)
    gradient = X.asnumpy()[0] * (X.asnumpy()[0] * network[0].factor.asnumpy() > 0)
    for part in ("graph", "pynative"):
        data = Dump(tmp_path / part).data
        assert same(data["Cell.0.OfItsOwn.forward.0"]["parameters"], {"factor": described(network[0].factor)})
        assert same(data["Cell.0.OfItsOwn.parameters_grad.0"], {"factor": [described(Tensor(gradient))]})


# --- A step that is compiled as a whole.


def compiled_step(network: nn.Cell) -> Callable[[Tensor], Tensor]:
    gradients_of = ms.value_and_grad(network, None, network.trainable_params())

    @ms.jit
    def step(x: Tensor) -> Tensor:
        loss, _ = gradients_of(x)
        return loss

    return step


@pytest.mark.parametrize("asked", [None, "1"])
@pytest.mark.parametrize("before", [0, 1], ids=["compiled within the dump", "compiled before"])
@pytest.mark.parametrize("level", ["L0", "mix"])
def test_a_compiled_step_without_a_cell_is_said_once(
    level: str,
    before: int,
    asked: str | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _warn_once.cache_clear()
    monkeypatch.delenv(COMPILED_VARIABLE, raising=False)
    if asked is not None:
        monkeypatch.setenv(COMPILED_VARIABLE, asked)  # it has the monitor record compiled code, and no dump
    network = Inner().set_train()
    step = compiled_step(network)
    for _ in range(before):
        step(X)
    debugger = PrecisionDebugger(dump_path=tmp_path, level=level)
    for _ in range(2):
        debugger.start(network)
        step(X)
        debugger.stop()
        debugger.step()
    debugger.close()
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len([one for one in said if "no module of the model was called in step 0, so none is dumped" in one]) == 1
    assert len([one for one in said if "such cells are not dumped" in one]) == 1 - before
    assert [one for one in said if COMPILED_VARIABLE in one or "rows" in one] == []
