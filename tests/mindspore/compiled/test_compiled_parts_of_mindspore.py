"""Compiled cells and functions inside the dynamic graph: the cells inside them have rows, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import pytest
from attaching import Output, warnings_in
from compiled_steps import STEPS, assert_same, plain, recorded
from mindspore import Tensor, nn, ops


class Block(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.SequentialCell(nn.Dense(5, 5), nn.ReLU())
        self.again = nn.Dense(5, 5)

    def construct(self, x: Tensor) -> Tensor:
        return self.again(self.again(self.inner(x)))


class CompiledBlock(Block):
    @ms.jit
    def construct(self, x: Tensor) -> Tensor:
        return self.again(self.again(self.inner(x)))


class Around(nn.Cell):
    """Calls a block between two cells of the dynamic graph."""

    def __init__(self, block: nn.Cell) -> None:
        super().__init__()
        self.a, self.block, self.b = nn.Dense(4, 5), block, nn.Dense(5, 2)

    def construct(self, x: Tensor) -> Tensor:
        return ops.tanh(self.b(self.block(ops.tanh(self.a(x))))).sum()


class CompiledModel(Around):
    """The model itself is compiled, and differentiated by the dynamic graph."""

    @ms.jit
    def construct(self, x: Tensor) -> Tensor:
        return ops.tanh(self.b(self.block(ops.tanh(self.a(x))))).sum()


class TwoBlocks(nn.Cell):
    def __init__(self, one: nn.Cell) -> None:
        super().__init__()
        self.a, self.block, self.b = nn.Dense(4, 5), one, nn.Dense(5, 2)

    def construct(self, x: Tensor) -> Tensor:
        x = ops.tanh(self.a(x))
        return ops.tanh(self.b(self.block(x) * self.block(x * 2.0))).sum()


MODELS: dict[str, tuple[Callable[[], nn.Cell], Callable[[], nn.Cell]]] = {
    "a compiled cell": (lambda: Around(Block()), lambda: Around(CompiledBlock())),
    "the whole model": (lambda: Around(Block()), lambda: CompiledModel(Block())),
    "a compiled cell in a compiled model": (lambda: Around(Block()), lambda: CompiledModel(CompiledBlock())),
    "two calls of a compiled cell": (lambda: TwoBlocks(Block()), lambda: TwoBlocks(CompiledBlock())),
}


@pytest.mark.parametrize("which", MODELS)
def test_cells_inside_compiled_cells_have_the_rows_of_the_dynamic_graph(
    which: str, output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    made, compiled = MODELS[which]
    _, expected = recorded("dynamic", made, output)
    bits, rows = recorded("dynamic", compiled, output)
    assert bits == plain("dynamic", compiled)
    if isinstance(compiled(), CompiledModel):  # its backward computes the gradient of its input, asked for or not
        of_input = {key for key in rows if key[:2] == ("actv_grad", ".input")}
        assert len(of_input) == STEPS
        rows = {key: values for key, values in rows.items() if key not in of_input}
    assert_same(rows, expected)
    assert warnings_in(caplog) == []


@pytest.mark.parametrize("how", ["graph", "jit"])
def test_compiled_cells_inside_a_compiled_step_have_rows(how: str, output: Output) -> None:
    _, expected = recorded("dynamic", lambda: Around(Block()), output)
    bits, rows = recorded(how, lambda: CompiledModel(CompiledBlock()), output)
    assert bits == plain(how, lambda: CompiledModel(CompiledBlock()))
    assert_same(rows, expected)


@pytest.mark.parametrize("part", ["forward and backward", "optimizer"])
def test_a_step_of_which_one_half_is_compiled_has_the_rows_of_the_dynamic_graph(part: str, output: Output) -> None:
    from attaching import with_fixed_weights
    from compiled_steps import RECORDED, adam, rows_in, state_of, train
    from watching_cells import written

    from monitor.mindspore import TrainerMon

    def run(monitored: bool) -> tuple[list[bytes], Any]:
        others = output.directories()
        net = with_fixed_weights(Around(Block()))
        optimizer = adam(net.trainable_params())
        monitor = TrainerMon(written(output, **RECORDED)) if monitored else None
        if monitor is not None:
            monitor.set_monitor(net, 1, optimizer)
        gradients_of: Any = ms.value_and_grad(net, None, optimizer.parameters)
        apply: Any = optimizer
        if part == "optimizer":
            apply = ms.jit(lambda_free(optimizer))
        else:
            gradients_of = ms.jit(called(gradients_of))

        def step(x: Tensor) -> Tensor:
            loss, gradients = gradients_of(x)
            apply(gradients)
            return loss

        losses = train(step)
        if monitor is None:
            return losses + state_of(net, optimizer), None
        monitor.close()
        (directory,) = set(output.directories()) - set(others)
        return losses + state_of(net, optimizer), rows_in(output, directory)

    _, expected = recorded("dynamic", lambda: Around(Block()), output)
    bits, rows = run(True)
    assert bits == run(False)[0]
    assert_same(rows, expected)


def lambda_free(optimizer: nn.Cell) -> Callable[[Any], Any]:
    def apply(gradients: Any) -> Any:
        return optimizer(gradients)

    return apply


def called(gradients_of: Any) -> Callable[[Any], Any]:
    def both(x: Tensor) -> Any:
        return gradients_of(x)

    return both
