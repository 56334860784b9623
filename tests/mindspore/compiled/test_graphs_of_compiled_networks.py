"""Whole graphs are recorded without being asked if MindSpore compiles the same computations with measurements as without."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from attaching import Output, attached, warnings_in, with_fixed_weights
from compiled_steps import RECORDED, Rows, Whole, mode_of, of_state, plain, recorded, train
from evidence import sampled
from mindspore import Tensor, nn, ops
from mindspore.nn.cell import _cell_graph_executor
from mindspore.ops import constexpr
from mindspore.train import anf_ir_pb2 as ir
from test_bits_of_compiled_networks import LOOP, NETWORKS, SIZE, batches

from monitor.mindspore.compiled import fallback
from monitor.mindspore.compiled.computations import WRITES, Computations, _Graph, computations
from monitor.mindspore.compiled.fallback import CHANGED
from monitor.mindspore.tape import COMPILED_VARIABLE

WHOLE = [name for name in NETWORKS if name != "loop"]
"""Networks that are one graph."""
SAMPLE = [WHOLE.index(name) for name in ("lstm", "GRU cell", "names", "residual", "projected", "mixed precision")]


class Gate(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.value, self.gate = nn.Dense(SIZE, SIZE), nn.Dense(SIZE, SIZE)

    def construct(self, x: Tensor) -> Tensor:
        return self.value(x) * ops.sigmoid(self.gate(x)) + x


class Supervised(nn.Cell):
    """One head after each block: the result of the first one is used three times in the second one, and outside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.head = Gate(), Gate(), Gate(), nn.Dense(SIZE, 1)

    def construct(self, x: Tensor) -> Tensor:
        one = self.first(x)
        two = self.second(one)
        return self.head(one).mean() + self.head(two).square().mean() + self.head(self.third(two)).mean()


class OfGru(nn.Cell):
    """Its cells return tuples. A hook that the compiler sees after the forward of one shows in the bits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.GRU(SIZE, SIZE, batch_first=True), nn.Dense(SIZE, 1)

    def construct(self, x: Tensor) -> Tensor:
        states, _ = self.layers(ops.stack((x, ops.cos(x), ops.sin(x)), 1))
        return self.head(states).square().mean()


class Evaluated(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Dense(SIZE, SIZE), nn.Dense(SIZE, 1)

    def construct(self, x: Tensor, scale: Tensor) -> Tensor:
        return (self.head(ops.tanh(self.body(x))) * scale - x).square().mean()


class Random(nn.Cell):
    """Operators whose seeds MindSpore counts while it compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Dense(SIZE, SIZE), nn.Dense(SIZE, 1)

    def construct(self, x: Tensor) -> Tensor:
        noise = ops.standard_normal((6, SIZE)) + ops.rand_like(x)
        return self.head(ops.dropout(ops.tanh(self.body(x)), 0.3) + noise).square().mean()


class Dropped(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.dropout, self.head = nn.Dense(SIZE, SIZE), nn.Dropout(p=0.3), nn.Dense(SIZE, 1)

    def construct(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.body(x))).square().mean()


class DrawnByNumPy(nn.Cell):
    """A constant that differs in each compilation."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Dense(SIZE, SIZE)

    def construct(self, x: Tensor) -> Tensor:
        return (self.body(x) + Tensor(np.random.rand(6, SIZE).astype(np.float32))).square().mean()


@constexpr
def drawn() -> float:
    return float(np.random.rand())


class DrawnNumber(DrawnByNumPy):
    def construct(self, x: Tensor) -> Tensor:
        return (self.body(x) * drawn()).square().mean()


class Drawn(nn.Cell):
    """Random numbers of a constant shape."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def construct(self, x: Tensor) -> Tensor:
        return x + ops.standard_normal((6, SIZE), seed=self.seed)


class Function(nn.Cell):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def construct(self, x: Tensor) -> Tensor:
        return self.function(x)


class OfConstant(nn.Cell):
    """MindSpore computes a function of a constant while it compiles; with taps, a kernel does."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.function = nn.Dense(SIZE, SIZE), Function(function)
        self.numbers = Tensor(np.random.default_rng(0).uniform(0.1, 3, (6, SIZE)).astype(np.float32))

    def construct(self, x: Tensor) -> Tensor:
        return (self.body(x) * self.function(self.numbers)).square().mean()


def scaled(x: Tensor) -> Tensor:
    return x / 3.0 * 7.0


def trained(make: Callable[[], nn.Cell], output: Output) -> tuple[list[bytes], list[bytes], Rows]:
    """The bits without and with a monitor, and its rows."""
    ms.set_seed(1)
    bits = plain("graph", make, **LOOP)
    return bits, *monitored(make, output)


def monitored(make: Callable[[], nn.Cell], output: Output) -> tuple[list[bytes], Rows]:
    ms.set_seed(1)
    return recorded("graph", make, output, loop=LOOP)


@pytest.mark.parametrize("name", sampled(WHOLE, *SAMPLE))
def test_whole_graphs_are_recorded_without_being_asked(name: str, output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(COMPILED_VARIABLE)
    bits, found, rows = trained(NETWORKS[name], output)
    assert found == bits
    assert {kind for kind, *_ in rows} >= {"actv", "actv_grad", "grad_reduced"}


@pytest.mark.parametrize("make", [OfGru, lambda: OfConstant(scaled)], ids=["tuples", "products of a constant"])
def test_networks_with_tuples_and_constants_are_recorded_to_the_same_bits(
    make: Callable[[], nn.Cell], output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(COMPILED_VARIABLE)
    bits, found, rows = trained(make, output)
    assert found == bits
    assert {kind for kind, *_ in rows} >= {"actv", "actv_grad", "grad_reduced"}


def test_they_have_the_rows_that_they_have_on_request(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    _, expected = monitored(NETWORKS["lstm"], output)
    monkeypatch.delenv(COMPILED_VARIABLE)
    _, rows = monitored(NETWORKS["lstm"], output)
    assert rows == expected


@pytest.mark.parametrize(
    "make",
    [Supervised, NETWORKS["loop"], DrawnByNumPy, DrawnNumber, lambda: OfConstant(ops.log)],
    ids=["supervised", "loop", "drawn by NumPy", "drawn number", "logarithm of a constant"],
)
def test_other_computations_and_those_that_cannot_be_compared_are_compiled_without_the_monitor(
    make: Callable[[], nn.Cell], output: Output, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ms.set_seed(1)
    np.random.seed(1)
    _, expected = recorded("dynamic", make, output, loop=LOOP)
    monkeypatch.delenv(COMPILED_VARIABLE)
    bits, found, rows = trained(make, output)
    assert found == bits
    assert {(kind, step) for kind, _, step, _ in rows} == {(kind, step) for kind, _, step, _ in of_state(expected)}
    assert [one for one in warnings_in(caplog) if CHANGED in one] != []


def test_a_model_that_is_called_by_itself_has_the_same_computations(
    output: Output, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(COMPILED_VARIABLE)
    net = Evaluated()
    with mode_of("graph"), attached(output, net, nn.SGD(net.trainable_params()), **RECORDED):
        net.set_train(False)(batches(0), batches(1))
    assert [one for one in warnings_in(caplog) if CHANGED in one] == []


def test_a_long_compilation_says_that_it_is_repeated(
    output: Output, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(COMPILED_VARIABLE)
    monkeypatch.setattr(fallback, "LONG_S", 0.0)
    caplog.set_level(logging.INFO, logger="monitor")
    monitored(NETWORKS["siamese"], output)
    assert "compiles it again" in caplog.text


def test_random_operators_have_the_seeds_that_they_have_without_a_monitor(
    output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(COMPILED_VARIABLE)
    bits, found, rows = trained(Random, output)
    assert found == bits
    assert rows != {}


def test_random_operators_begin_anew_where_mindspore_compiles_again_without_a_monitor(
    output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does so at the second call of a step that was first compiled while an earlier one was garbage."""
    monkeypatch.delenv(COMPILED_VARIABLE)
    with mode_of("graph"):
        losses_of_garbage(Dropped())
        expected = losses_of_garbage(Dropped())
        found = losses_of_garbage(Dropped(), output)
    assert found == expected


def losses_of_garbage(net: nn.Cell, output: Output | None = None) -> list[bytes]:
    """The losses of training. Its step is garbage then, which Python does not collect at once."""
    ms.set_seed(1)
    optimizer = nn.SGD(with_fixed_weights(net).trainable_params())
    step = Whole(net, optimizer)
    vars(step)["itself"] = step
    with ExitStack() as stack:
        if output is not None:
            stack.enter_context(attached(output, net, optimizer, **RECORDED))
        return train(step, **LOOP)


def test_other_networks_draw_the_constants_that_they_draw_without_a_monitor(
    output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(COMPILED_VARIABLE)
    net = Supervised()
    with mode_of("graph"):
        np.random.seed(3)
        expected = with_fixed_weights(DrawnByNumPy())(batches(0)).asnumpy()
        with attached(output, net, nn.SGD(net.trainable_params()), **RECORDED):
            np.random.seed(3)
            found = with_fixed_weights(DrawnByNumPy())(batches(0)).asnumpy()
    assert found == expected


def compiled(cell: nn.Cell) -> Computations | None:
    with mode_of("graph"):
        cell.compile(batches(0))
        (phase,) = cell.compile_cache
        return computations(_cell_graph_executor, phase)


def test_random_numbers_of_other_seeds_are_other_computations() -> None:
    ms.set_seed(1)
    one, other = compiled(Drawn(1)), compiled(Drawn(2))
    assert one is not None
    assert other is not None
    assert one.returned != other.returned


@pytest.mark.parametrize("carriers", [(), ("MakeTuple",), ("Depend", "MakeTuple")])
def test_a_read_after_a_write_is_another_one_than_before(carriers: tuple[str, ...]) -> None:
    """The state of the memory may take a tuple of writes."""
    before, after = (_Graph({}, {}).value(of_write_and_read(carriers, read)) for read in ("U", "state"))
    assert before != after


def of_write_and_read(carriers: tuple[str, ...], state_of_read: str) -> Any:
    """The description of a graph that writes to a parameter, and returns it."""
    graph = ir.GraphProto(parameters=[ir.ParameterProto(name=name) for name in ("p", "x")])
    graph.const_vals.add(key="U", value=ir.ValueProto(dtype=ir.DT_STRING, str_val="U"))
    nodes = [("write", "Assign", ("p", "x", "U"))]
    for place, carrier in enumerate(carriers):
        nodes.append((f"carried {place}", carrier, (nodes[-1][0],)))
    nodes += [("state", "UpdateState", ("U", nodes[-1][0])), ("read", "Load", ("p", state_of_read))]
    for name, kind, inputs in nodes:
        node = graph.node.add(name=name, op_type=kind, input=[ir.InputProto(name=one) for one in inputs])
        if kind == "Assign":
            node.attribute.add(name=WRITES[0], value=ir.ValueProto(dtype=ir.DT_BOOL, bool_val=True))
    graph.outputs.add(name="read")
    return graph


def test_the_same_network_has_other_bits_if_it_is_recorded_on_request(output: Output) -> None:
    bits, found, rows = trained(Supervised, output)
    assert found != bits
    assert rows != {}
