"""Training steps of a model, compiled in different ways, and what a monitor records of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from attaching import EVERYTHING, Output, with_fixed_weights
from mindspore import Tensor, nn, ops
from training import array, inputs
from watching_cells import written

from monitor.mindspore import MonitorCallback, TrainerMon

STEPS = 3
KINDS = (
    "actv",
    "actv_grad",
    "grad_unreduced",
    "grad_reduced",
    "param_origin",
    "param_updated",
    "exp_avg",
    "exp_avg_sq",
)
RECORDED = {**EVERYTHING, "ops": [*EVERYTHING["ops"], "shape", "dtype"]}
WHOLE = ("graph", "jit")
"""The ways in which a whole step is compiled."""

Rows = dict[tuple[Any, ...], dict[str, Any]]
Step = Callable[[Tensor], Tensor]
OptimizerOf = Callable[[list[Any]], nn.Cell]


class Deep(nn.Cell):
    """Cells inside a ``SequentialCell``, and outside."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Dense(4, 5)
        self.body = nn.SequentialCell(nn.Dense(5, 5), nn.ReLU())
        self.b = nn.Dense(5, 2)

    def construct(self, x: Tensor) -> Tensor:
        return ops.tanh(self.b(self.body(ops.tanh(self.a(x))))).sum()


class Whole(nn.Cell):
    """A training step as a cell, for GRAPH_MODE."""

    def __init__(self, net: nn.Cell, optimizer: nn.Cell) -> None:
        super().__init__()
        self.net = net
        self.optimizer = optimizer
        self.gradients_of = ms.value_and_grad(net, None, optimizer.parameters)

    def construct(self, x: Tensor) -> Tensor:
        loss, gradients = self.gradients_of(x)
        self.optimizer(gradients)
        return loss


class Skipping(nn.Cell):
    """A training step as a cell. Its second argument decides whether the optimizer is called, as loss scaling does."""

    def __init__(self, net: nn.Cell, optimizer: nn.Cell) -> None:
        super().__init__()
        self.net, self.optimizer = net, optimizer
        self.gradients_of = ms.value_and_grad(net, None, optimizer.parameters)

    def construct(self, x: Tensor, apply: Tensor) -> Tensor:
        loss, gradients = self.gradients_of(x)
        if apply > 0:
            loss = ops.depend(loss, self.optimizer(gradients))
        return loss


class Sinking(nn.Cell):
    """Makes three steps in a call, as a device does with data sinking."""

    def __init__(self, net: nn.Cell, optimizer: nn.Cell) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.gradients_of = ms.value_and_grad(net, None, optimizer.parameters)

    def construct(self, x: Tensor) -> Tensor:
        loss, gradients = self.gradients_of(x)
        for _ in range(3):
            loss = ops.depend(loss, self.optimizer(gradients))
            loss, gradients = self.gradients_of(x + loss * 0.0)
        return loss


def step_of(how: str, net: nn.Cell, optimizer: nn.Cell) -> Step:
    """A training step: ``dynamic``, ``graph`` (GRAPH_MODE), ``jit``, or ``bytecode``."""
    if how == "graph":
        return Whole(net, optimizer)
    gradients_of = ms.value_and_grad(net, None, optimizer.parameters)

    def step(x: Tensor) -> Tensor:
        loss, gradients = gradients_of(x)
        optimizer(gradients)
        return loss

    return {
        "dynamic": lambda: step,
        "jit": lambda: ms.jit(step),
        "bytecode": lambda: ms.jit(step, capture_mode="bytecode"),
    }[how]()


@contextmanager
def mode_of(how: str) -> Iterator[None]:
    if how != "graph":
        yield
        return
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        yield
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)


def adam(parameters: list[Any]) -> nn.Cell:
    return nn.Adam(parameters, 0.01, eps=1e-3)


def state_of(*cells: nn.Cell) -> list[bytes]:
    """The bits of all weights and moments."""
    return [array(parameter).tobytes() for cell in cells for parameter in cell.get_parameters()]


def plain(how: str, make: Callable[[], nn.Cell], optimizer_of: OptimizerOf = adam, **loop: Any) -> list[bytes]:
    """The bits of losses, weights and moments without a monitor."""
    with mode_of(how):
        net = with_fixed_weights(make())
        optimizer = optimizer_of(net.trainable_params())
        return train(step_of(how, net, optimizer), **loop) + state_of(net, optimizer)


def recorded(
    how: str,
    make: Callable[[], nn.Cell],
    output: Output,
    optimizer_of: OptimizerOf = adam,
    *,
    loop: dict[str, Any] | None = None,
    **config: Any,
) -> tuple[list[bytes], Rows]:
    """These bits, and all rows."""
    others = output.directories()
    with mode_of(how):
        net = with_fixed_weights(make())
        optimizer = optimizer_of(net.trainable_params())
        monitor = TrainerMon(written(output, **{**RECORDED, **config}))
        monitor.set_monitor(net, 1, optimizer)
        losses = train(step_of(how, net, optimizer), **(loop or {}))
        monitor.close()
    (directory,) = set(output.directories()) - set(others)
    return losses + state_of(net, optimizer), rows_in(output, directory)


def train(step: Step, steps: int = STEPS, given: Callable[[int], Tensor] = inputs) -> list[bytes]:
    return [step(given(number)).asnumpy().tobytes() for number in range(steps)]


def rows_in(output: Output, directory: Any) -> Rows:
    """The values of all rows by kind, name, step and micro-step."""
    found: Rows = {}
    for kind in KINDS:
        for row in output.rows(kind, directory):
            key = kind, row.name, row.step, row.micro_step
            assert key not in found
            found[key] = row.values
    return found


def called(net: nn.Cell) -> Any:
    """A function that calls a network, for ``jit``."""

    def evaluate(x: Tensor) -> Tensor:
        return net(x)

    return evaluate


def assert_same(found: Rows, expected: Rows, tolerance: float = 1e-6) -> None:
    """The same rows, with numbers that agree to ``tolerance``."""
    assert sorted(set(expected) - set(found), key=str) == [], "missing"
    assert sorted(set(found) - set(expected), key=str) == [], "more"
    for key, values in expected.items():
        for op, value in values.items():
            if isinstance(value, float):
                assert np.isclose(found[key][op], value, tolerance, tolerance, equal_nan=True), (key, op)
            else:
                assert found[key][op] == value, (key, op)


@contextmanager
def read_from(output: Output) -> Iterator[Rows]:
    """The rows of the run that is made inside, once it has ended."""
    found: Rows = {}
    others = output.directories()
    yield found
    (directory,) = set(output.directories()) - set(others)
    found |= rows_in(output, directory)


OUTSIDE = ("param_origin", "param_updated", "exp_avg", "exp_avg_sq")
"""The kinds of ``RECORDED`` that live between two executions of compiled code."""


def of_state(rows: Rows) -> Rows:
    return {key: values for key, values in rows.items() if key[0] in OUTSIDE}


# --- ``Model.train``


class WithLoss(nn.Cell):
    def __init__(self, net: nn.Cell) -> None:
        super().__init__()
        self.net = net

    def construct(self, x: Tensor, y: Tensor) -> Tensor:
        return self.net(x) * y.mean()


def samples() -> Iterator[tuple[Any, Any]]:
    for number in range(STEPS):
        yield inputs(number).asnumpy(), np.ones(3, np.float32)


def by_model(
    how: str, output: Output, make: Callable[[], nn.Cell] | None = None, *, sink: bool, monitored: bool = True, **config: Any
) -> tuple[list[bytes], Rows]:
    """The bits of weights and moments after ``Model.train``, and all rows."""
    others = output.directories()
    with mode_of(how):
        net = with_fixed_weights((make or Deep)())
        optimizer = adam(net.trainable_params())
        model = ms.train.Model(WithLoss(net).set_train(True), optimizer=optimizer)
        callbacks = [MonitorCallback(written(output, **{**RECORDED, **config}))] if monitored else []
        data = ds.GeneratorDataset(samples, ["x", "y"], shuffle=False)
        model.train(1, data, callbacks=callbacks, dataset_sink_mode=sink)
    if not monitored:
        return state_of(net, optimizer), {}
    (directory,) = set(output.directories()) - set(others)
    return state_of(net, optimizer), rows_in(output, directory)
