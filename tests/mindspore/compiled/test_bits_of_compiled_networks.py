"""Compiled training has the same bits with and without the monitor, also where calls share weights."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
import pytest
from attaching import Output
from compiled_steps import Rows, assert_same, plain, recorded
from evidence import sampled
from mindspore import Tensor, nn, ops
from training import Recurrent

from monitor.mindspore.tape import COMPILED_VARIABLE

SIZE = 8


class Late(nn.Cell):
    """Uses its second argument first."""

    def __init__(self) -> None:
        super().__init__()
        self.of_input, self.of_state = nn.Dense(SIZE, SIZE), nn.Dense(SIZE, SIZE)

    def construct(self, x: Tensor, *, state: Tensor) -> Tensor:
        return ops.tanh(self.of_state(ops.sin(self.of_state(state))) + self.of_input(x))


class Gated(nn.Cell):
    """An LSTM cell, with its state in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Dense(2 * SIZE, 4 * SIZE)

    def construct(self, x: Tensor, state: Any) -> Any:
        hidden, memory = state
        i, f, g, o = self.gates(ops.concat((x, hidden), -1)).split(SIZE, 1)
        memory = ops.sigmoid(f) * memory + ops.sigmoid(i) * ops.tanh(g)
        return ops.sigmoid(o) * ops.tanh(memory), memory


class OfCell(nn.Cell):
    """A network around a cell that it calls several times."""

    def __init__(self, cell: nn.Cell) -> None:
        super().__init__()
        self.cell = cell
        self.head = nn.Dense(SIZE, 1)


class Rnn(OfCell):
    def construct(self, x: Tensor) -> Tensor:
        state = ops.zeros_like(x)
        for i in range(5):
            state = self.cell(x * (i + 1.0), state)
        return self.head(state).mean()


class Lstm(OfCell):
    def construct(self, x: Tensor) -> Tensor:
        hidden, memory = x * 0.0, x * 0.0
        for i in range(4):
            hidden, memory = self.cell(x * (i + 1.0), (hidden, memory))
        return self.head(hidden).square().mean()


class Crossed(OfCell):
    """Each call takes the results of two earlier ones, one of which shows only in its keyword argument."""

    def construct(self, x: Tensor) -> Tensor:
        state = x
        for i in range(3):
            state = self.cell(self.cell(state, state=x * (i + 1.0)), state=ops.cos(state))
        return self.head(state).mean()


class Named(nn.Cell):
    """Its arguments have names that a function around it may have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Dense(SIZE, SIZE)

    def construct(self, _1: Tensor, _0: Any = None, rest: float = 1.0, args: float = 1.0, kwargs: float = 1.0) -> Tensor:
        return self.layer(_1) * (rest * args * kwargs) - (_1 if _0 is None else _0)


class Naming(OfCell):
    def construct(self, x: Tensor) -> Tensor:
        state = self.cell(_0=x * 2.0, _1=x)
        return self.head(self.cell(self.cell(state, _0=x), rest=0.5, args=0.5, kwargs=3.0)).square().mean()


class Whole(OfCell):
    """A loop that the compiler keeps."""

    def construct(self, x: Tensor) -> Tensor:
        state, i = ops.zeros_like(x), Tensor(0, ms.int32)
        while i < 3:
            state, i = self.cell(x, state), i + 1
        return self.head(state).mean()


class Tree(OfCell):
    """Calls that do not depend on each other, in another order than their results are used."""

    def construct(self, x: Tensor) -> Tensor:
        first, second = self.cell(x * 2.0, x), self.cell(x, ops.sin(x))
        both = self.cell(second, first)
        return self.head(self.cell(both, second) * second + self.cell(first, both)).mean()


class Residual(nn.Cell):
    """A block with normalization and dropout, three times; tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(SIZE), nn.Dropout(p=0.2)
        self.up, self.down = nn.Dense(SIZE, SIZE, has_bias=False), nn.Dense(SIZE, SIZE, has_bias=False)
        self.down.weight = self.up.weight

    def construct(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + self.dropout(self.down(ops.relu(self.up(self.norm(x)))))
        return x.square().mean()


class Projected(nn.Cell):
    """Attention whose Q, K and V have one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.norm = nn.Dense(SIZE, SIZE), nn.LayerNorm((SIZE,))

    def construct(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x), self.project(x * 2.0), self.project(x + 1.0)
        return (self.norm(x) + ops.matmul(ops.softmax(ops.matmul(q, k.T), -1), self.norm(v))).square().mean()


class Siamese(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.SequentialCell(nn.Dense(SIZE, SIZE), nn.ReLU(), nn.Dense(SIZE, SIZE))

    def construct(self, x: Tensor) -> Tensor:
        one, other = self.encode(x), self.encode(ops.cos(x))
        return (one - other).square().mean() + ops.tanh(one * other).mean()


NETWORKS = {
    "rnn": lambda: Rnn(Recurrent(SIZE)),
    "lstm": lambda: Lstm(Gated()),
    "crossed": lambda: Crossed(Late()),
    "GRU cell": lambda: Rnn(nn.GRUCell(SIZE, SIZE)),
    "LSTM cell": lambda: Lstm(nn.LSTMCell(SIZE, SIZE)),
    "names": lambda: Naming(Named()),
    "loop": lambda: Whole(Recurrent(SIZE)),
    "tree": lambda: Tree(Recurrent(SIZE)),
    "residual": Residual,
    "projected": Projected,
    "siamese": Siamese,
    "mixed precision": lambda: ms.amp.auto_mixed_precision(Rnn(Recurrent(SIZE)), "O2"),
}
SHARING = ("rnn", "lstm", "crossed", "GRU cell", "LSTM cell")
"""Networks in which the order of adding gradients up shows in the bits."""


def batches(step: int) -> Tensor:
    return Tensor(np.random.default_rng(step).normal(size=(6, SIZE)).astype(np.float32))


LOOP: dict[str, Any] = {"given": batches}


def train(how: str, name: str, output: Output, **config: Any) -> tuple[list[bytes], list[bytes], Rows]:
    """The bits without and with a monitor, and its rows."""
    ms.set_seed(1)
    bits = plain(how, NETWORKS[name], **LOOP)
    ms.set_seed(1)
    return bits, *recorded(how, NETWORKS[name], output, loop=LOOP, **config)


@pytest.mark.parametrize(
    ("how", "name"),
    [*(("jit", name) for name in NETWORKS), *(("graph", name) for name in sampled(SHARING, 2, 4))],
)
def test_training_has_the_same_bits(how: str, name: str, output: Output) -> None:
    bits, found, rows = train(how, name, output)
    assert found == bits
    assert {kind for kind, *_ in rows} >= {"actv", "actv_grad", "grad_reduced"}


@pytest.mark.parametrize("name", sampled(SHARING, 1, 3))
def test_training_has_the_same_bits_if_compiled_code_is_not_recorded(
    name: str, output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(COMPILED_VARIABLE, "0")
    bits, found, _ = train("jit", name, output)
    assert found == bits


def test_calls_that_depend_on_each_other_have_the_numbers_of_the_dynamic_graph(output: Output) -> None:
    _, expected = recorded("dynamic", NETWORKS["rnn"], output, loop=LOOP)
    _, rows = recorded("jit", NETWORKS["rnn"], output, loop=LOOP)
    assert rows.keys() == expected.keys()
    assert_same(*(dependent(some) for some in (rows, expected)), 1e-4)


def dependent(rows: Rows) -> Rows:
    """Without those of a layer whose calls depend on the network's input alone."""
    return {key: values for key, values in rows.items() if "of_input" not in key[1] or not key[0].startswith("actv")}


def test_calls_with_tuples_of_tensors_have_the_numbers_of_the_dynamic_graph(output: Output) -> None:
    _, expected = recorded("dynamic", NETWORKS["lstm"], output, loop=LOOP)
    _, rows = recorded("jit", NETWORKS["lstm"], output, loop=LOOP)
    unused = "cell.output_1#3"
    assert_same(activations(rows), {key: values for key, values in activations(expected).items() if key[1] != unused}, 1e-4)


def activations(rows: Rows) -> Rows:
    return {key: values for key, values in rows.items() if key[0] == "actv"}
