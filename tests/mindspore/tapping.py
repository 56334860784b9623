"""Jobs that train beside the monitor, and the rows that they must have.

The expected rows come from a twin of the model. Each floating-point input and output ``x`` of its cells becomes ``x + zero``,
with a zero of its own. MindSpore returns the gradient of that zero. It is the gradient of ``x`` that flows through this cell
alone. So no hook takes part in the expectation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mindspore as ms
import numpy as np
from attaching import EVERYTHING, Output, attached
from mindspore import Parameter, Tensor, mint, nn
from numpy.typing import NDArray

Array = NDArray[np.float64]
Step = Callable[[int], Tensor]
"""One step of training, by its number. Returns a tensor that depends on the forward."""
Place = tuple[str, str, int]
"""Kind, name and step of a row."""

STEPS = 2
KINDS = ("actv", "actv_grad", "grad_unreduced", "grad_reduced", "param_origin", "param_updated", "exp_avg", "exp_avg_sq")
BACKWARD = ("actv_grad", "grad_unreduced")
FLOATS = (ms.float32, ms.float16, ms.bfloat16, ms.float64)
MOMENTS = {"exp_avg": ("exp_avg", "moment1", "moments", "momentum_buf"), "exp_avg_sq": ("exp_avg_sq", "moment2")}
OPS = {"min": np.min, "max": np.max, "mean": np.mean, "norm": np.linalg.norm}


def drawn(seed: int, *shape: int) -> Tensor:
    return Tensor(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def array(x: Tensor) -> Array:
    """The numbers of a tensor in float64, as a copy."""
    on_host: NDArray[Any] = (x.astype(ms.float32) if x.dtype == ms.bfloat16 else x).asnumpy()
    return on_host.astype(np.float64)


def mean_of_squares(net: nn.Cell, step: int) -> Tensor:
    return (net(drawn(1000 + step, 6, 8)).astype(ms.float32) ** 2).mean()


def value_and_grad(job: Job, net: nn.Cell, optimizer: nn.Cell) -> Step:
    """The usual loop."""

    def step(number: int) -> Tensor:
        loss, gradients = ms.value_and_grad(lambda: job.loss(net, number), None, optimizer.parameters)()
        optimizer(gradients)
        return loss

    return step


@dataclass
class Job:
    """A training.

    Attributes:
        model: Makes the model.
        loss: The loss of a model in a step.
        loop: Makes the function that trains.
        optimizer: Makes the optimizer from ``parameters(model)``.
        data: The inputs of cells that depend on no weight. They have no gradient.
        twin: Makes a model with the same numbers, if not ``model``.
        scale: The loss scale of ``loop``.
        rel: The tolerance, relative to the largest element.
    """

    model: Callable[[], nn.Cell]
    loss: Callable[[nn.Cell, int], Tensor] = mean_of_squares
    loop: Callable[[Job, nn.Cell, nn.Cell], Step] = value_and_grad
    optimizer: Callable[[Any], nn.Cell] = lambda parameters: nn.Momentum(parameters, 0.01, momentum=0.9)
    parameters: Callable[[nn.Cell], Any] = lambda net: net.trainable_params()
    data: Sequence[str] = (".input", "first.input")
    twin: Callable[[], nn.Cell] | None = None
    scale: float = 1.0
    rel: float = 2e-6

    def train(self, output: Output | None, **config: Any) -> list[bytes]:
        """The bits of every loss, weight and moment, with a monitor if there is an output."""
        net = with_drawn_weights(self.model())
        optimizer = self.optimizer(self.parameters(net))
        monitor = None if output is None else attached(output, net, optimizer, **EVERYTHING | {"update_ratio": True} | config)
        try:
            step = self.loop(self, net, optimizer)
            losses = [array(step(number)) for number in range(STEPS)]
        finally:
            if monitor is not None:
                monitor.close()
        return [x.tobytes() for x in (*losses, *map(array, net.get_parameters()), *map(array, optimizer.get_parameters()))]

    def expected(self) -> dict[Place, Array]:
        """The rows of every kind in ``KINDS``."""
        nets = [with_drawn_weights((self.twin or self.model)()) for _ in range(2)]
        rows = Twin(*nets, self.optimizer(self.parameters(nets[0])), self.loss).rows()
        rows = {(kind, name, step): x for (kind, name, step), x in rows.items() if kind != "actv_grad" or name not in self.data}
        return {place: x * (self.scale if place[0] in BACKWARD else 1.0) for place, x in rows.items()}


def with_drawn_weights(net: nn.Cell) -> nn.Cell:
    """The same in every run, and in training mode."""
    for seed, parameter in enumerate(net.get_parameters()):
        parameter.set_data(drawn(seed, *parameter.shape).astype(parameter.dtype))
    return net.set_train(True)


def assert_rows(output: Output, job: Job) -> None:
    """The rows are exactly those that are expected."""
    rows = [row for kind in KINDS for row in output.rows(kind)]
    found = {(row.kind, row.name, row.step): row.values for row in rows}
    expected = job.expected()
    assert len(found) == len(rows)
    assert sorted(found) == sorted(expected)
    for place, x in expected.items():
        scale = np.abs(x).max(initial=1e-30) * max(1.0, x.size**0.5)
        for op, of in OPS.items():
            assert abs(found[place][op] - of(x)) <= job.rel * scale, (place, op)
    assert_updates(output, expected)


def assert_updates(output: Output, expected: Mapping[Place, Array]) -> None:
    found = {(row.name, row.step): row.values["update_norm"] for row in output.rows("update_ratio")}
    for (name, step), norm in found.items():
        change = expected["param_updated", name, step] - expected["param_origin", name, step]
        assert abs(norm - np.linalg.norm(change)) <= 1e-5 * np.linalg.norm(expected["param_origin", name, step])
    assert {("param_updated", *place) for place in found} == {place for place in expected if place[0] == "param_updated"}


@dataclass
class Taps:
    """The tensors of one forward, by name, and the zeros that are added to them once ``adds`` is set."""

    values: dict[str, Array] = field(default_factory=dict)
    zeros: dict[str, Parameter] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    adds: bool = False

    def begin(self, *, adds: bool) -> None:
        """A forward begins."""
        self.calls.clear()
        self.adds = adds
        if not adds:
            self.values.clear()
            self.zeros.clear()

    def call(self, name: str) -> str:
        """The suffix of the next call of a cell."""
        number = self.calls[name] = self.calls.get(name, -1) + 1
        return f"#{number}" if number else ""

    def tapped(self, value: Any, name: str, call: str) -> Any:
        """``value`` with a zero added to each floating-point tensor in it."""
        if isinstance(value, Tensor):
            return self._tensor(value, name + call)
        if isinstance(value, tuple | list):
            alone = len(value) == 1
            return type(value)(self.tapped(one, name if alone else f"{name}_{i}", call) for i, one in enumerate(value))
        if isinstance(value, dict):
            return {key: self.tapped(one, f"{name}_{key}", call) for key, one in value.items()}
        return value

    def _tensor(self, x: Tensor, name: str) -> Tensor:
        if not self.adds:
            self.values[name] = array(x)
            if x.dtype in FLOATS:
                self.zeros[name] = Parameter(Tensor(np.zeros(x.shape), x.dtype), name=f"zero {name}")
        return mint.add(x, self.zeros[name]) if self.adds and name in self.zeros else x


def tap(model: nn.Cell, taps: Taps) -> None:
    """Tap every call of every cell of a model, around its hooks and casts."""
    for name, cell in list(model.cells_and_names()):
        cls: Any = type(cell)
        cell.__class__ = type(cls.__name__, (cls,), {"__call__": _tapped_call(cls, name, taps)})


def _tapped_call(cls: Any, name: str, taps: Taps) -> Callable[..., Any]:
    def call(self: nn.Cell, *args: Any, **kwargs: Any) -> Any:
        number = taps.call(name)
        if kwargs:
            args = tuple(taps.tapped(one, f"{name}.input_{place}", number) for place, one in enumerate(args))
            kwargs = taps.tapped(kwargs, f"{name}.input", number)
        else:
            args = taps.tapped(args, f"{name}.input", number)
        return taps.tapped(cls.__call__(self, *args, **kwargs), f"{name}.output", number)

    return call


@dataclass
class Twin:
    """A model that trains unmonitored, and one that is tapped with its weights before each step."""

    model: nn.Cell
    tapped: nn.Cell
    optimizer: nn.Cell
    loss: Callable[[nn.Cell, int], Tensor]

    def rows(self) -> dict[Place, Array]:
        found: dict[Place, Array] = {}
        taps = Taps()
        tap(self.tapped, taps)
        for step in range(STEPS):
            for ours, theirs in zip(self.tapped.get_parameters(), self.model.get_parameters(), strict=True):
                ours.set_data(Tensor(array(theirs).astype(np.float32)).astype(theirs.dtype))
            found |= {(kind, name, step): x for kind, name, x in self._activations(taps, step)}
            found |= {(kind, name, step): x for kind, name, x in self._step(step)}
        return found

    def _activations(self, taps: Taps, step: int) -> Iterator[tuple[str, str, Array]]:
        taps.begin(adds=False)
        self.loss(self.tapped, step)
        taps.begin(adds=True)
        _, gradients = ms.value_and_grad(lambda: self.loss(self.tapped, step), None, list(taps.zeros.values()))()
        yield from (("actv", name, x) for name, x in taps.values.items())
        yield from (("actv_grad", name, array(x)) for name, x in zip(taps.zeros, gradients, strict=True))

    def _step(self, step: int) -> Iterator[tuple[str, str, Array]]:
        known = {id(parameter): name for name, parameter in self.model.parameters_and_names()}
        stepped = {known[id(one)]: one for one in self.optimizer.parameters}
        _, gradients = ms.value_and_grad(lambda: self.loss(self.model, step), None, self.optimizer.parameters)()
        for name, gradient in zip(stepped, gradients, strict=True):
            yield from ((kind, name, array(gradient)) for kind in ("grad_unreduced", "grad_reduced"))
        for kind, names in MOMENTS.items() if step else ():
            kept = next((found for one in names if (found := getattr(self.optimizer, one, None)) is not None), ())
            yield from ((kind, name, array(one)) for name, one in zip(stepped, kept, strict=False))
        yield from (("param_origin", name, array(one)) for name, one in self.model.parameters_and_names())
        self.optimizer(gradients)
        yield from (("param_updated", name, array(one)) for name, one in self.model.parameters_and_names())
