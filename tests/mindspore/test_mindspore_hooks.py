"""Hooks of cells, where cells are called from Python and where a compiler comes by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from training import Net, array, inputs

from monitor.failures import Failures
from monitor.mindspore.hooks import after_forward, before_forward, takes_hooks


def hooked(cells: list[nn.Cell]) -> list[str]:
    called: list[str] = []
    guarded = Failures().guarded
    for cell in cells:
        before_forward(cell, guarded("calling", lambda *_: called.append("call") or "replaced"))
        after_forward(cell, guarded("returning", lambda *_: called.append("return") or "replaced"))
    return called


def outcome(compile_step: Callable[[Any], Any], hooks: bool) -> tuple[list[bytes], list[str]]:
    net = Net()
    optimizer = nn.Adam(net.trainable_params(), 0.01)
    called = hooked([net, net.a, net.b, optimizer] if hooks else [])
    gradients_of = ms.value_and_grad(net, None, optimizer.parameters)

    def step(x: Tensor) -> Tensor:
        loss, gradients = gradients_of(x)
        optimizer(gradients)
        return loss

    compiled = compile_step(step)
    losses = [compiled(inputs(number)).asnumpy() for number in range(2)]
    return [x.tobytes() for x in (*losses, *map(array, net.trainable_params()))], called


@pytest.mark.parametrize(
    ("compile_step", "calls"), [(lambda step: step, 8), (ms.jit, 0)], ids=["from Python", "in a compiled step"]
)
def test_hooks_change_no_bit_wherever_cells_are_called(compile_step: Callable[[Any], Any], calls: int) -> None:
    plain, _ = outcome(compile_step, hooks=False)
    observed, called = outcome(compile_step, hooks=True)
    assert observed == plain
    assert (called.count("call"), called.count("return")) == (calls, calls)


def test_a_hook_gets_keyword_arguments_and_results_that_are_none() -> None:
    class Nothing(nn.Cell):
        def construct(self, x: Tensor, *, scale: float = 1.0) -> None:
            del x, scale

    cell, told = Nothing(), []
    before_forward(cell, lambda _cell, args, kwargs: told.append((len(args), kwargs)))
    after_forward(cell, lambda _cell, args, kwargs, result: told.append((len(args), kwargs, result)))
    cell(Tensor(1.0), scale=2.0)
    assert told == [(1, {"scale": 2.0}), (1, {"scale": 2.0}, None)]


def test_a_hook_that_was_taken_away_is_not_called() -> None:
    net, told = Net(), []
    before_forward(net, told.append).remove()
    after_forward(net, told.append).remove()
    net(inputs(0))
    assert told == []


def test_a_cell_with_a_backward_of_its_own_has_no_hook_after_its_call() -> None:
    class Own(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            return ops.sin(x)

        def bprop(self, x: Tensor, _out: Tensor, dout: Tensor) -> tuple[Tensor]:
            return (dout * ops.cos(x),)

    cell, told = Own(), []
    after_forward(cell, lambda *_: told.append("called"))
    cell(Tensor(np.zeros(2, np.float32)))
    assert told == []
    assert not takes_hooks(cell)
    assert takes_hooks(Net())
