"""Compiled loops of other shapes: micro-batches, several optimizers, a compiled function around the model."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
import pytest
from attaching import Output, warnings_in, with_fixed_weights
from compiled_steps import RECORDED, STEPS, WHOLE, Deep, Rows, adam, assert_same, mode_of, rows_in, state_of
from mindspore import Tensor, nn
from training import inputs
from watching_cells import written

from monitor.mindspore import TrainerMon
from monitor.mindspore.compiled import roles
from monitor.mindspore.compiled.order import Entry, in_order
from monitor.mindspore.compiled.program import Tap
from monitor.mindspore.tape import TapedTensor
from monitor.stats.partials import COLUMNS


def run(
    output: Output, how: str, step_of: Any, optimizers_of: Any, *, micro_steps: int = 1, monitored: bool = True, **config: Any
) -> tuple[list[bytes], Rows]:
    """The bits of a loop, and its rows."""
    others = output.directories()
    with mode_of(how):
        net = with_fixed_weights(Deep())
        optimizers = optimizers_of(net)
        monitor = TrainerMon(written(output, **{**RECORDED, **config})) if monitored else None
        if monitor is not None:
            monitor.set_monitor(net, micro_steps, optimizers)
        step: Any = step_of(net, *optimizers)
        if how == "jit":
            step = ms.jit(called(step))
        losses = [step(inputs(number), inputs(number + 10)).asnumpy().tobytes() for number in range(STEPS)]
        bits = losses + state_of(net, *optimizers)
        if monitor is None:
            return bits, {}
        monitor.close()
    (directory,) = set(output.directories()) - set(others)
    return bits, rows_in(output, directory)


def called(step: Any) -> Any:
    def one(x: Tensor, y: Tensor) -> Tensor:
        return step(x, y)

    return one


class Accumulating(nn.Cell):
    """Adds the gradients of two micro-batches."""

    def __init__(self, net: nn.Cell, optimizer: nn.Cell) -> None:
        super().__init__()
        self.net, self.optimizer = net, optimizer
        self.gradients_of = ms.value_and_grad(net, None, optimizer.parameters)

    def construct(self, x: Tensor, y: Tensor) -> Tensor:
        loss, first = self.gradients_of(x)
        other, second = self.gradients_of(y)
        together = ()
        for i in range(len(first)):
            together = together + (first[i] + second[i],)  # noqa: RUF005 (the compiler does not know starred items)
        self.optimizer(together)
        return loss + other


@pytest.mark.parametrize("how", WHOLE)
def test_micro_batches_of_one_compiled_step_have_all_rows_but_unreduced_gradients(
    how: str, output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    loop: dict[str, Any] = {"micro_steps": 2, "monitor_mbs_grad": True}

    def one(net: nn.Cell) -> list[nn.Cell]:
        return [adam(net.trainable_params())]

    _, expected = run(output, "dynamic", Accumulating, one, **loop)
    bits, rows = run(output, how, Accumulating, one, **loop)
    assert bits == run(output, how, Accumulating, one, monitored=False)[0]
    assert_same(rows, {key: values for key, values in expected.items() if key[0] != "grad_unreduced"})
    assert any("several gradients of one parameter" in said for said in warnings_in(caplog))


class Alternating(nn.Cell):
    """Two optimizers, each of which steps a part of the model."""

    def __init__(self, net: nn.Cell, one: nn.Cell, other: nn.Cell) -> None:
        super().__init__()
        self.net, self.one, self.other = net, one, other
        self.count = len(one.parameters)
        self.gradients_of = ms.value_and_grad(net, None, ms.ParameterTuple([*one.parameters, *other.parameters]))

    def construct(self, x: Tensor, y: Tensor) -> Tensor:
        loss, gradients = self.gradients_of(x)
        self.one(gradients[: self.count])
        self.other(gradients[self.count :])
        return loss + y.sum() * 0.0


@pytest.mark.parametrize("how", WHOLE)
def test_each_of_two_optimizers_has_its_turn_in_a_compiled_step(how: str, output: Output) -> None:
    def two(net: nn.Cell) -> list[nn.Cell]:
        return [adam(net.a.trainable_params()), nn.SGD([*net.body.trainable_params(), *net.b.trainable_params()], 0.1)]

    _, expected = run(output, "dynamic", Alternating, two)
    bits, rows = run(output, how, Alternating, two)
    assert bits == run(output, how, Alternating, two, monitored=False)[0]
    assert_same(rows, expected)


class AroundForward(nn.Cell):
    """A step of the dynamic graph that differentiates a compiled function, which calls the model."""

    def __init__(self, net: nn.Cell, optimizer: nn.Cell) -> None:
        super().__init__()

        def forward(x: Tensor) -> Tensor:
            return net(x)

        self.optimizer = optimizer
        self.gradients_of = ms.value_and_grad(ms.jit(forward), None, optimizer.parameters)

    def construct(self, x: Tensor, y: Tensor) -> Tensor:
        loss, gradients = self.gradients_of(x)
        self.optimizer(gradients)
        return loss + y.sum() * 0.0


class Plain(nn.Cell):
    def __init__(self, net: nn.Cell, optimizer: nn.Cell) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.gradients_of = ms.value_and_grad(net, None, optimizer.parameters)

    def construct(self, x: Tensor, y: Tensor) -> Tensor:
        loss, gradients = self.gradients_of(x)
        self.optimizer(gradients)
        return loss + y.sum() * 0.0


def test_a_compiled_function_around_the_model_has_the_rows_of_the_dynamic_graph(output: Output) -> None:
    def one(net: nn.Cell) -> list[nn.Cell]:
        return [adam(net.trainable_params())]

    _, expected = run(output, "dynamic", Plain, one)
    bits, rows = run(output, "dynamic", AroundForward, one)
    assert bits == run(output, "dynamic", AroundForward, one, monitored=False)[0]
    of_input = {key for key in rows if key[0] == "actv_grad" and key[1] in (".input", "a.input")}
    assert_same({key: values for key, values in rows.items() if key not in of_input}, expected)


def test_a_forward_stays_after_the_step_of_an_optimizer_that_is_replayed_with_it() -> None:
    """The thread that replays may come late: to the end of one step and the whole of the next."""
    x = TapedTensor(np.zeros(len(COLUMNS)), None, (), "")
    made = [roles.AFTER, roles.TURN_ENDS, roles.OUTPUT, roles.BEGIN, roles.OUTPUT_GRAD, roles.TURN_ENDS]
    entries = [Entry(Tap(None, role), 0, number, x, 0) for number, role in enumerate(made)]
    assert [entry.number for entry in in_order(entries)] == [0, 1, 3, 2, 4, 5]
