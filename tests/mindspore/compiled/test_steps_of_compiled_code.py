"""Compiled steps with several optimizers, auxiliary results and loss scaling have the rows of the dynamic graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import pytest
from attaching import Output, attached, warnings_in, with_fixed_weights
from compiled_steps import RECORDED, WHOLE, Deep, Rows, adam, assert_same, mode_of, rows_in, state_of, train
from evidence import in_turn
from mindspore import Tensor, amp, nn, ops


class TwoOptimizers(nn.Cell):
    def __init__(self, net: nn.Cell) -> None:
        super().__init__()
        self.net = net
        first, rest = net.trainable_params()[:2], net.trainable_params()[2:]
        self.first, self.rest = adam(first), nn.Momentum(rest, 0.1, 0.9)
        self.gradients_of = ms.value_and_grad(net, None, (*first, *rest))

    def construct(self, x: Tensor) -> Tensor:
        loss, gradients = self.gradients_of(x)
        self.first(gradients[:2])
        self.rest(gradients[2:])
        return loss


class OneOptimizer(nn.Cell):
    def __init__(self, net: nn.Cell) -> None:
        super().__init__()
        self.net, self.optimizer = net, adam(net.trainable_params())


class Auxiliary(OneOptimizer):
    def __init__(self, net: nn.Cell) -> None:
        super().__init__(net)

        def both(x: Tensor) -> tuple[Tensor, Tensor]:
            loss = net(x)
            return loss, loss * 2.0

        self.gradients_of = ms.value_and_grad(both, None, self.optimizer.parameters, has_aux=True)

    def construct(self, x: Tensor) -> Tensor:
        (loss, other), gradients = self.gradients_of(x)
        self.optimizer(gradients)
        return loss + other


class Scaled(OneOptimizer):
    def __init__(self, net: nn.Cell) -> None:
        super().__init__(net)
        self.scaler = scaler = amp.DynamicLossScaler(1024.0, 2, 2)

        def scaled(x: Tensor) -> Tensor:
            return scaler.scale(net(x))

        self.gradients_of = ms.value_and_grad(scaled, None, self.optimizer.parameters)

    def construct(self, x: Tensor) -> Tensor:
        loss, gradients = self.gradients_of(x)
        finite = amp.all_finite(gradients)
        if finite:
            loss = ops.depend(loss, self.optimizer(self.scaler.unscale(gradients)))
        self.scaler.adjust(finite)
        return loss


STEPS_OF: dict[str, Callable[[nn.Cell], nn.Cell]] = {
    "two optimizers": TwoOptimizers,
    "auxiliary results": Auxiliary,
    "loss scaling": Scaled,
}


def trained(name: str, how: str, output: Output | None) -> tuple[list[bytes], Rows]:
    """The bits of losses, weights and moments, and the rows if there is an output."""
    before = [] if output is None else output.directories()
    with mode_of(how):
        net = with_fixed_weights(Deep())
        cell = STEPS_OF[name](net)
        optimizers = [one for one in cell.cells() if isinstance(one, nn.Optimizer)]
        monitor = None if output is None else attached(output, net, optimizers, **RECORDED)
        losses = train(ms.jit(called(cell)) if how == "jit" else cell)
        if monitor is not None:
            monitor.close()
    bits = losses + state_of(net, *optimizers)
    if output is None:
        return bits, {}
    (directory,) = set(output.directories()) - set(before)
    return bits, rows_in(output, directory)


def called(cell: Any) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        loss: Tensor = cell.construct(x)
        return loss

    return step


@pytest.mark.parametrize(("name", "how"), in_turn(STEPS_OF, WHOLE))
def test_steps_have_the_rows_of_the_dynamic_graph(
    name: str, how: str, output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    _, expected = trained(name, "dynamic", output)
    bits, rows = trained(name, how, output)
    assert bits == trained(name, how, None)[0]
    assert_same(rows, expected)
    assert warnings_in(caplog) == []
