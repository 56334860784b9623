"""Functions that MindSpore compiles from bytecode compute and break as without the monitor, which says what is missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import pytest
from attaching import Output, attached, warnings_in, with_fixed_weights
from compiled_steps import RECORDED, Deep, Rows, Step, adam, recorded, rows_in, state_of, step_of, train
from evidence import in_turn
from mindspore import Tensor, nn, ops
from training import inputs

from monitor.mindspore.tape import COMPILED_VARIABLE

BYTECODE = 'compiled with capture_mode="bytecode"'
MonitorOf = Callable[[nn.Cell, nn.Cell], Any]


def said_of_bytecode(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [said for said in warnings_in(caplog) if BYTECODE in said]


class Branching(nn.Cell):
    """Its calls break at an ``if``."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Dense(4, 32), nn.Dense(32, 2)
        self.body = nn.SequentialCell(nn.Dense(32, 32), nn.ReLU())

    def construct(self, x: Tensor) -> Tensor:
        hidden = ops.tanh(self.a(x))
        hidden = self.body(hidden) * 1.5 if hidden.sum() > 0 else self.body(hidden) * 0.5
        return ops.tanh(self.b(hidden)).sum()


class Smooth(Branching):
    """The same cells without the ``if``."""

    def construct(self, x: Tensor) -> Tensor:
        return ops.tanh(self.b(self.body(ops.tanh(self.a(x))))).sum()


class Shared(Branching):
    """Calls that share weights."""

    def construct(self, x: Tensor) -> Tensor:
        hidden = ops.tanh(self.a(x))
        for _ in range(3):
            hidden = self.body(hidden) + ops.tanh(self.body[0](hidden))
        return ops.tanh(self.b(hidden)).mean()


GradientsOf = Callable[[Tensor], Any]


def unbroken(gradients_of: GradientsOf, optimizer: nn.Cell) -> Step:
    def step(x: Tensor) -> Tensor:
        loss, gradients = gradients_of(x)
        optimizer(gradients)
        return loss

    return step


def broken_before(gradients_of: GradientsOf, optimizer: nn.Cell) -> Step:
    def step(x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = x * 2.0
        loss, gradients = gradients_of(x)
        optimizer(gradients)
        return loss

    return step


def broken_between(gradients_of: GradientsOf, optimizer: nn.Cell) -> Step:
    def step(x: Tensor) -> Tensor:
        loss, gradients = gradients_of(x)
        if loss > 0:
            gradients = tuple([one * 0.3 for one in gradients])
        optimizer(gradients)
        return loss

    return step


def skipping(gradients_of: GradientsOf, optimizer: nn.Cell) -> Step:
    def step(x: Tensor) -> Tensor:
        loss, gradients = gradients_of(x)
        if loss > -100:
            optimizer(gradients)
        return loss

    return step


STEPS = (unbroken, broken_before, broken_between, skipping)
StepOf = Callable[[GradientsOf, nn.Cell], Step]


def trained(make: Callable[[], nn.Cell], step_from: StepOf, monitor_of: MonitorOf | None, before: int = 0) -> list[bytes]:
    """The bits of training: ``before`` steps without a monitor, three steps with it, and two steps after it was closed."""
    net = with_fixed_weights(make())
    optimizer = adam(net.trainable_params())
    step = ms.jit(step_from(ms.value_and_grad(net, None, optimizer.parameters), optimizer), capture_mode="bytecode")
    losses = train(step, before)
    monitor = None if monitor_of is None else monitor_of(net, optimizer)
    losses += train(step, 3)
    if monitor is not None:
        monitor.close()
    return losses + train(step, 2) + state_of(net, optimizer)


@pytest.mark.parametrize(("step_from", "make"), in_turn(STEPS, [Branching, Shared, Smooth]))
def test_a_step_has_the_same_bits_wherever_it_breaks(make: Callable[[], nn.Cell], step_from: StepOf, output: Output) -> None:
    monitored = trained(make, step_from, lambda *trained: attached(output, *trained, **RECORDED))
    assert monitored == trained(make, step_from, None)


@pytest.mark.parametrize(("step_from", "before"), in_turn(STEPS, [0, 2]))
def test_a_step_is_said_once_to_have_no_rows_also_if_it_was_compiled_before_the_monitor(
    step_from: StepOf, before: int, output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    monitored = trained(Smooth, step_from, lambda *trained: attached(output, *trained, **RECORDED), before)
    assert len(said_of_bytecode(caplog)) == 1
    assert monitored == trained(Smooth, step_from, None, before)
    assert len(said_of_bytecode(caplog)) == 1  # nothing is said without a monitor


@pytest.mark.parametrize("step_from", STEPS)
def test_where_nothing_measures_in_compiled_code_the_manifest_says_once_that_a_step_may_have_no_rows(
    step_from: StepOf, output: Output, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(COMPILED_VARIABLE)
    monitored = trained(Smooth, step_from, lambda *trained: attached(output, *trained, **RECORDED))
    (said,) = said_of_bytecode(caplog)
    assert said.endswith(output.manifest()["notes"]["compiled_code: bytecode"])
    assert monitored == trained(Smooth, step_from, None)
    assert len(said_of_bytecode(caplog)) == 1


# --- What Python sees of them.


class Block(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Dense(4, 4)

    def construct(self, x: Tensor) -> Tensor:
        return ops.tanh(self.inner(x))


class CompiledBlock(Block):
    @ms.jit(capture_mode="bytecode")
    def construct(self, x: Tensor) -> Tensor:
        return ops.tanh(self.inner(x))


class Around(nn.Cell):
    """A block that is compiled as a cell, inside a function, or not at all."""

    def __init__(self, how: str) -> None:
        super().__init__()
        block = self.block = CompiledBlock() if how == "cell" else Block()
        self.b = nn.Dense(4, 2)

        def call(x: Tensor) -> Tensor:
            return block(x) * 1.0

        self.call = ms.jit(call, capture_mode="bytecode") if how == "function" else call

    def construct(self, x: Tensor) -> Tensor:
        return self.b(self.call(x)).sum()


@pytest.mark.parametrize("how", ["cell", "function"])
def test_a_compiled_block_has_no_rows_of_its_cells_and_all_other_rows(how: str, output: Output) -> None:
    _, expected = recorded("dynamic", lambda: Around("dynamic"), output)
    _, rows = recorded("dynamic", lambda: Around(how), output)
    assert {key: rows[key] for key in rows if key in expected} == {key: expected[key] for key in expected if key in rows}
    missing = {name for _, name, *_ in set(expected) - set(rows)}
    assert {name.rpartition(".")[0] for name in missing} == ({"block.inner"} if how == "cell" else {"block.inner", "block"})


@pytest.mark.parametrize("how", ["cell", "function"])
def test_rows_are_those_of_a_monitor_that_does_not_record_compiled_code(
    how: str, output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    bits, rows = recorded("dynamic", lambda: Around(how), output)
    monkeypatch.setenv(COMPILED_VARIABLE, "0")
    assert (bits, rows) == recorded("dynamic", lambda: Around(how), output)


# --- What else is compiled.


def test_a_step_that_is_compiled_from_its_source_keeps_its_rows_beside_such_a_function(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    _, expected = recorded("jit", Deep, output)
    before = output.directories()
    net = with_fixed_weights(Deep())
    optimizer = adam(net.trainable_params())

    def forward(x: Tensor) -> Tensor:
        return net(x)

    evaluate = ms.jit(forward, capture_mode="bytecode")
    with attached(output, net, optimizer, **RECORDED):
        step = step_of("jit", net, optimizer)
        for number in range(3):
            net.set_train(False)
            evaluate(inputs(number))
            net.set_train(True)
            step(inputs(number))
    (directory,) = set(output.directories()) - set(before)
    assert rows_in(output, directory) == expected
    assert len(said_of_bytecode(caplog)) == 1


def test_a_function_that_raises_leaves_the_model_as_it_was(output: Output) -> None:
    _, expected = recorded("jit", Deep, output)
    before = output.directories()
    net = with_fixed_weights(Deep())
    optimizer = adam(net.trainable_params())

    def failing(x: Tensor) -> Tensor:
        raise ValueError(f"of the program: {net(x)}")

    def outer(x: Tensor) -> Tensor:
        return compiled(x) * 2.0

    compiled = ms.jit(failing, capture_mode="bytecode")
    with attached(output, net, optimizer, **RECORDED):
        net.set_train(False)
        for call in (compiled, ms.jit(outer, capture_mode="bytecode")):
            with pytest.raises(ValueError, match="of the program"):
                call(inputs(0))
        net.set_train(True)
        train(step_of("jit", net, optimizer))
    (directory,) = set(output.directories()) - set(before)
    assert rows_in(output, directory) == expected


def test_a_monitor_that_is_closed_inside_such_a_function_leaves_cells_as_they_were(output: Output) -> None:
    net = with_fixed_weights(Deep())
    optimizer = adam(net.trainable_params())
    cells = [cell for root in (net, optimizer) for _, cell in root.cells_and_names()]
    attributes = [set(vars(cell)) for cell in cells]
    monitor = attached(output, net, optimizer, **RECORDED)

    def closing(x: Tensor) -> Tensor:
        monitor.close()
        return net(x)

    ms.jit(closing, capture_mode="bytecode")(inputs(0))
    assert set().union(*(set(vars(cell)) - before for cell, before in zip(cells, attributes, strict=True))) <= {
        "_monitored_program"
    }


@pytest.mark.parametrize("how", ["jit", "dynamic"])
def test_later_steps_have_the_rows_of_a_monitor_that_is_attached_after_such_a_function(how: str, output: Output) -> None:
    def rows_of_later_steps(attach_first: bool) -> tuple[Rows, list[bytes]]:
        before = output.directories()
        net = with_fixed_weights(Deep())
        optimizer = adam(net.trainable_params())
        steps = (step_of("bytecode", net, optimizer), step_of(how, net, optimizer))
        monitor = attached(output, net, optimizer, **RECORDED) if attach_first else None
        losses = train(steps[0], 2)
        monitor = monitor or attached(output, net, optimizer, **RECORDED)
        losses += train(steps[1])
        monitor.close()
        (directory,) = set(output.directories()) - set(before)
        rows = rows_in(output, directory)
        first = max(step for _, _, step, _ in rows) - 2  # steps that Python sees a part of are counted
        later = {(*key[:2], key[2] - first, key[3]): values for key, values in rows.items() if key[2] >= first}
        return {key: values for key, values in later.items() if not key[0].startswith("exp_avg")}, losses

    rows, losses = rows_of_later_steps(attach_first=True)
    assert len(rows) > 0
    assert (rows, losses) == rows_of_later_steps(attach_first=False)
