"""MindSpore, each level and task on a convolutional network and a transformer: every entry, its structure, every number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tapes
from cells_to_dump import Convolutional, Transformer, gradients_of, input_of, seeded
from dumps_by_hand import ByHand, Spelled, Spelling, assert_tasks_agree, debugger_of, points
from mindspore import nn
from tapes import Tape, Value

from monitor.mindspore import PrecisionDebugger

SPELLING = Spelling("mindspore.Tensor", "Float32", "Int32")
FLOAT = Spelled("mindspore._c_expression.typing.Float")

Parameters = dict[str, Value]
Kind = type[nn.Cell]


def parameters_of(network: nn.Cell) -> Parameters:
    return {one.name: Value(one.asnumpy(), trained=True) for one in network.get_parameters()}


def below(parameters: Parameters, name: str) -> Parameters:
    """Those of one cell, by their names in it."""
    return {key.rpartition(".")[2]: one for key, one in parameters.items() if key.rpartition(".")[0] == name}


def biased(tape: Tape, x: Value, own: Parameters) -> Value:
    return tape.call("Primitive.bias_add.BiasAdd", tapes.biased, x, own["bias"]) if "bias" in own else x


def convolved(tape: Tape, x: Value, name: str, p: Parameters) -> Value:
    own = below(p, name)
    with tape.module(f"Cell.{name}.Conv2d", x, parameters=own) as cell:
        y = tape.call("Primitive.conv2d.Conv2D", tapes.convolution, x, own["weight"])
        y = biased(tape, y, own)
        cell.results = (y,)
    return y


def in_shape(tape: Tape, x: Value, shape: tuple[int, ...], attribute: str = "reshape") -> Value:
    return tape.call(f"Primitive.{attribute}.Reshape", lambda x, shape: tapes.reshaped(shape)(x), x, shape)


def projected(tape: Tape, x: Value, name: str, p: Parameters) -> Value:
    own, shape = below(p, name), x.array.shape
    with tape.module(f"Cell.{name}.Dense", x, parameters=own) as cell:
        tape.call("Primitive.shape_op.Shape", tapes.shape_of, x)
        y = in_shape(tape, x, (-1, shape[-1])) if len(shape) > 2 else x
        y = tape.call("Primitive.matmul.MatMul", tapes.linear, y, own["weight"])
        y = biased(tape, y, own)
        y = in_shape(tape, y, (*shape[:-1], y.array.shape[-1])) if len(shape) > 2 else y
        cell.results = (y,)
    return y


def convolutional(tape: Tape, x: Value, p: Parameters) -> Value:
    x = convolved(tape, x, "conv1", p)
    with tape.module("Cell.relu.ReLU", x) as cell:
        x = tape.call("Primitive.relu.ReLU", tapes.relu, x)
        cell.results = (x,)
    x = convolved(tape, x, "conv2", p)
    x = tape.call("Tensor.reshape", tapes.reshaped((2, 32)), x, 2, -1)
    return projected(tape, x, "fc", p)


def normalized(tape: Tape, x: Value, name: str, p: Parameters) -> Value:
    own = below(p, name)
    with tape.module(f"Cell.{name}.LayerNorm", x, parameters=own) as cell:
        gamma, beta = (tape.call("Tensor.astype", tapes.unchanged, one, FLOAT) for one in own.values())
        y, *_ = tape.call("Primitive.layer_norm.LayerNorm", lambda *args: tapes.normalized(*args, 1e-7), x, gamma, beta)
        cell.results = (y,)
    return y


def block(tape: Tape, x: Value, name: str, p: Parameters) -> Value:
    with tape.module(f"Cell.{name}.Block", x) as cell:
        y = projected(tape, normalized(tape, x, f"{name}.norm", p), f"{name}.qkv", p)
        q, k, v = tape.call("Functional.chunk", tapes.in_thirds, y, 3, axis=-1)
        k = tape.call("Functional.transpose", tapes.last_two_swapped, k, (0, 2, 1))
        scores = tape.call("Functional.matmul", tapes.matmul, q, k)
        weights = tape.call("Functional.softmax", tapes.softmax, scores)
        y = tape.call("Tensor.__matmul__", tapes.matmul, weights, v)
        y = tape.call("Tensor.__add__", tapes.added, x, projected(tape, y, f"{name}.out", p))
        cell.results = (y,)
    return y


def embedded(tape: Tape, text: Value, p: Parameters) -> Value:
    own = below(p, "embedding")
    with tape.module("Cell.embedding.Embedding", text, parameters=own) as cell:
        tape.call("Primitive.get_shp.Shape", tapes.shape_of, text)
        flat = in_shape(tape, text, (-1,), "reshape_flat")
        rows = tape.call("Primitive.gather.Gather", gathered, own["embedding_table"], flat, 0)
        x = in_shape(tape, rows, (2, 6, 8))
        cell.results = (x,)
    return x


def gathered(table: Any, places: Any, _: int) -> Any:
    rows, back = tapes.looked_up(places, table)
    return rows, lambda g: back(g)[::-1]


def transformer(tape: Tape, text: Value, p: Parameters) -> Value:
    x = embedded(tape, text, p)
    for n in range(2):
        x = block(tape, x, f"blocks.{n}", p)
    return projected(tape, x, "head", p)


BY_HAND: dict[Kind, Callable[[Tape, Value, Parameters], Value]] = {Convolutional: convolutional, Transformer: transformer}
POINTS = {Convolutional: ("conv1", "relu", "fc"), Transformer: ("embedding", "blocks.0", "blocks.1.norm", "head")}


@pytest.fixture(scope="module", params=[Convolutional, Transformer])
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


@pytest.fixture(scope="module")
def tape(kind: Kind) -> Tape:
    """``gradients_of`` by hand."""
    network, tape = seeded(kind), Tape()
    y = BY_HAND[kind](tape, Value(input_of(network).asnumpy()), parameters_of(network))
    y = tape.call("Tensor.__pow__", tapes.squared, y, 2)
    tape.backward(tape.call("Tensor.sum", tapes.summed, y))
    return tape


def dumped(base: Path, kind: Kind, level: str, task: str, *, with_model: bool = True) -> ByHand:
    debugger = debugger_of(PrecisionDebugger, base, level, task)
    network = seeded(kind)
    cells = dict(network.cells_and_names())
    for name in POINTS[kind] if level == "debug" else ():
        cells[name].register_forward_hook(lambda _, __, y, name=name: debugger.save(y, name))
    debugger.start(network if with_model else None)
    gradients_of(network)
    debugger.stop()
    debugger.step()
    debugger.close()
    return ByHand(base, SPELLING, level, task)


@pytest.mark.parametrize("task", ["statistics", "md5", "tensor"])
@pytest.mark.parametrize("level", ["L0", "L1", "mix", "debug"])
def test_every_entry_and_every_number_in_it_is_the_one_computed_by_hand(
    tmp_path: Path, tape: Tape, kind: Kind, level: str, task: str
) -> None:
    expected = points(tape, POINTS[kind]) if level == "debug" else tape.expected(level)
    assert dumped(tmp_path, kind, level, task).differences(expected) == []


def test_apis_without_a_model_are_those_with_one_but_for_primitives(tmp_path: Path, tape: Tape, kind: Kind) -> None:
    expected = {name: one for name, one in tape.expected("L1").items() if not name.startswith("Primitive")}
    assert dumped(tmp_path, kind, "L1", "tensor", with_model=False).differences(expected) == []


@pytest.mark.parametrize("level", ["mix", "debug"])
def test_statistics_and_checksums_are_those_of_the_elements(tmp_path: Path, kind: Kind, level: str) -> None:
    assert_tasks_agree(tmp_path, lambda base, task: dumped(base, kind, level, task))
