"""Training loops of MindSpore's dynamic graph as descriptions, and the cells and loops that they represent.

A smaller version of ``tests/generated_loops``: networks are a row of calls, each of any values before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mindspore as ms
import numpy as np
from hypothesis import strategies as st
from mindspore import Parameter, Tensor, nn, ops

ROWS, WIDTH = 3, 4
INPUTS = {"dense": 1, "scale": 1, "tanh": 1, "pair": 2, "gives back": 2, "gives own": 1}
"""Kinds of cells, and how many tensors each takes. The last two return, beside what they make, the first of these or their own
parameter.
"""
TWO_RESULTS = ("gives back", "gives own")


@dataclass(frozen=True)
class Call:
    """A call of a cell with values: 0 is the network's input, the results of calls follow."""

    cell: int
    values: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """A turn of the loop, and the optimizers that an ``if`` leaves out."""

    left_out: tuple[int, ...] = ()


@dataclass(frozen=True)
class Loop:
    """A training loop.

    Attributes:
        cells: Their kinds.
        returned: Values that the network returns.
        optimizers: Their kinds, ``"momentum"`` or ``"adam"``; parameters belong to each in turn.
        each_micro_batch: ``monitor_mbs_grad``.
    """

    cells: tuple[str, ...]
    calls: tuple[Call, ...]
    returned: tuple[int, ...]
    optimizers: tuple[str, ...] = ("momentum",)
    micro_batches: int = 1
    each_micro_batch: bool = False
    steps: tuple[Step, ...] = (Step(), Step())

    @property
    def several_micro_steps(self) -> bool:
        """Whether a step may have several forwards."""
        return self.micro_batches > 1 or any(step.left_out for step in self.steps)


@st.composite
def loops(draw: st.DrawFn) -> Loop:
    cells = ("dense", *draw(st.lists(st.sampled_from([*INPUTS]), max_size=3)))
    calls: list[Call] = [Call(0, (0,))]
    known = 2
    for _ in range(draw(st.integers(0, 4))):
        cell = draw(st.integers(0, len(cells) - 1))
        calls.append(Call(cell, tuple(draw(st.integers(0, known - 1)) for _ in range(INPUTS[cells[cell]]))))
        known += 2 if cells[cell] in TWO_RESULTS else 1
    count = draw(st.sampled_from([1, 2]))
    left_out = st.sampled_from([(), (), (0,), (1,)] if count == 2 else [()])
    return Loop(
        cells,
        tuple(calls),
        tuple(draw(st.lists(st.integers(1, known - 1), min_size=1, max_size=2))),
        tuple(draw(st.sampled_from(["momentum", "adam"])) for _ in range(count)),
        draw(st.sampled_from([1, 2])),
        draw(st.booleans()),
        tuple(Step(draw(left_out)) for _ in range(draw(st.integers(1, 3)))),
    )


class Mixed(nn.Cell):
    """Scales what it is given, each with numbers of its own."""

    def __init__(self, kind: str, random: np.random.Generator) -> None:
        super().__init__()
        self.kind = kind
        drawn = random.normal(size=(INPUTS[kind], WIDTH)).astype(np.float32)
        self.factors = Parameter(Tensor(drawn), name="factors")

    def construct(self, *values: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        made = values[0] * self.factors[0]
        if len(values) == 2:
            made = ops.tanh(made + values[1] * self.factors[1])
        return (made, values[0]) if self.kind == "gives back" else made


class GivesOwn(nn.Cell):
    def __init__(self, random: np.random.Generator) -> None:
        super().__init__()
        self.own = Parameter(Tensor(random.normal(size=(ROWS, WIDTH)).astype(np.float32)), name="own")

    def construct(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.own, self.own


class Network(nn.Cell):
    def __init__(self, loop: Loop) -> None:
        super().__init__()
        random = np.random.default_rng(0)
        self.loop = loop
        self.layers = nn.CellList([_cell(kind, random) for kind in loop.cells])

    def construct(self, x: Tensor) -> tuple[Tensor, ...]:
        values = [x]
        for call in self.loop.calls:
            found = self.layers[call.cell](*(values[one] for one in call.values))
            values += found if isinstance(found, tuple) else [found]
        return tuple(values[one] for one in self.loop.returned)


def _cell(kind: str, random: np.random.Generator) -> nn.Cell:
    if kind == "tanh":
        return nn.Tanh()
    if kind == "gives own":
        return GivesOwn(random)
    if kind != "dense":
        return Mixed(kind, random)
    weight, bias = (Tensor(random.normal(size=shape).astype(np.float32)) for shape in ((WIDTH, WIDTH), (WIDTH,)))
    return nn.Dense(WIDTH, WIDTH, weight_init=weight, bias_init=bias)


class Observer:
    """Looks at a loop, and changes nothing of it."""

    def attach(self, training: Training) -> None:
        """Before the first step."""

    def micro_batch_ended(self, x: np.ndarray, gradients: Sequence[np.ndarray]) -> None:
        """Forward and backward of ``x`` have run: the gradients of all parameters."""

    def optimizer_begins(self, index: int, gradients: Sequence[np.ndarray]) -> None:
        """An optimizer is about to be called with these."""

    def optimizer_ended(self, index: int) -> None:
        """It was."""

    def close(self) -> None:
        """After the last step."""


class Training:
    """A loop's objects.

    Attributes:
        parameters: All of the network, by name; ``held``: by optimizer.
        bits: The loss of each micro-batch, and all weights after each step, as bytes.
    """

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.network = Network(loop).set_train(True)
        self.parameters = dict(self.network.parameters_and_names())
        count = len(loop.optimizers)
        self.held = [[*self.parameters.values()][index::count] for index in range(count)]
        made: dict[str, Callable[[list[Parameter]], nn.Cell]] = {
            "momentum": lambda p: nn.Momentum(p, 0.01, 0.9),
            "adam": lambda p: nn.Adam(p, 0.01, eps=1e-3),
        }
        self.optimizers = [made[kind](held) for kind, held in zip(loop.optimizers, self.held, strict=True)]
        self.bits: list[bytes] = []

    def run(self, observer: Observer) -> None:
        observer.attach(self)
        every = [*self.parameters.values()]
        gradients_of = ms.value_and_grad(self._loss, None, ms.ParameterTuple(every))
        random = np.random.default_rng(1)
        for step in self.loop.steps:
            total: list[Tensor] = []
            for _ in range(self.loop.micro_batches):
                x = random.normal(size=(ROWS, WIDTH)).astype(np.float32)
                loss, gradients = gradients_of(Tensor(x))
                self.bits.append(loss.asnumpy().tobytes())
                observer.micro_batch_ended(x, [array(one) for one in gradients])
                total = [one + other for one, other in zip(total, gradients, strict=True)] if total else list(gradients)
            by_name = dict(zip(self.parameters, total, strict=True))
            for index in [one for one in range(len(self.optimizers)) if one not in step.left_out]:
                self._call(index, by_name, observer)
            self.bits += [array(one).tobytes() for one in every]
        observer.close()

    def _loss(self, x: Tensor) -> Tensor:
        found = self.network(x)
        return sum((y * y + place * y).mean() for place, y in enumerate(found))

    def _call(self, index: int, gradients: dict[str, Tensor], observer: Observer) -> None:
        mine = tuple(gradients[name] for name, one in self.parameters.items() if any(one is held for held in self.held[index]))
        observer.optimizer_begins(index, [array(one) for one in mine])
        self.optimizers[index](mine)
        observer.optimizer_ended(index)


def array(x: Tensor) -> np.ndarray:
    """Its numbers now: optimizers write where they stand."""
    found: np.ndarray = x.asnumpy().copy()
    return found
