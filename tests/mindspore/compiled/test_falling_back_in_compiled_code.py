"""A network that MindSpore compiles without a monitor trains with one, to the same bits. What has no rows then is said once."""

from __future__ import annotations

import functools
from typing import Any

import mindspore as ms
import pytest
from attaching import Output, attached, footprint, warnings_in, with_fixed_weights
from compiled_steps import (
    OUTSIDE,
    RECORDED,
    WHOLE,
    Deep,
    adam,
    assert_same,
    by_model,
    mode_of,
    of_state,
    plain,
    recorded,
    rows_in,
    state_of,
    step_of,
    train,
)
from mindspore import Tensor, nn, ops
from mindspore.graph import api
from training import inputs
from watching_cells import written

from monitor.mindspore import TrainerMon

WITHOUT_HOOKS = "with hooks of its parameters"
WITHOUT_TAPS = "with the monitor's operators"


class Stopped(nn.Cell):
    """MindSpore does not compile hooks of parameters below ``stop_gradient``."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Dense(4, 5), nn.Dense(5, 2)

    def construct(self, x: Tensor) -> Tensor:
        return ops.tanh(self.b(ops.stop_gradient(self.a(x)))).sum()


class First(nn.Cell):
    """Takes a tuple of dynamic length."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Dense(4, 4)

    def construct(self, pair: Any) -> Tensor:
        return self.w(pair[0])


class OfDynamicLength(nn.Cell):
    """MindSpore does not compile the taps of such a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.b = First(), nn.Dense(4, 2)

    def construct(self, x: Tensor) -> Tensor:
        return ops.tanh(self.b(self.first(ms.mutable((x, x), True)))).sum()


def said_of(what: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    return [said for said in warnings_in(caplog) if what in said]


@pytest.mark.parametrize("how", WHOLE)
def test_hooks_that_do_not_compile_are_left_out_and_all_other_rows_are_there(
    how: str, output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    _, expected = recorded("dynamic", Stopped, output)
    caplog.clear()
    bits, rows = recorded(how, Stopped, output)
    assert bits == plain(how, Stopped)
    assert {key for key in rows if key[0] == "grad_unreduced"} == set()
    below = {key for key in rows if key[0] == "actv_grad" and key[1].startswith("a.")}
    assert below == {key for key in expected if key[0] == "actv_grad" and key[1].startswith("a.")}
    assert_same(rows, {key: values for key, values in expected.items() if key[0] != "grad_unreduced"})
    (said,) = said_of(WITHOUT_HOOKS, caplog)
    assert "The input is null" in said
    assert said_of(WITHOUT_TAPS, caplog) == []


@pytest.mark.parametrize("how", WHOLE)
def test_taps_that_do_not_compile_are_left_out_and_that_is_said_once(
    how: str, output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    _, expected = recorded("dynamic", OfDynamicLength, output, loop={"given": growing})
    caplog.clear()
    bits, rows = recorded(how, OfDynamicLength, output, loop={"given": growing})
    assert bits == plain(how, OfDynamicLength, given=growing)
    assert_same(rows, of_state(expected))
    assert len(said_of(WITHOUT_TAPS, caplog)) == 1
    assert said_of(WITHOUT_HOOKS, caplog) == []


class Turning(Deep):
    """MindSpore does not compile its taps for five rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = First()

    def construct(self, x: Tensor) -> Tensor:
        return super().construct(self.first(ms.mutable((x, x), True)) if x.shape[0] == 5 else self.first((x, x)))


@pytest.mark.parametrize("how", WHOLE)
def test_steps_keep_their_numbers_where_taps_are_left_out_later(how: str, output: Output) -> None:
    loop = {"steps": 5, "given": lambda step: ops.ones((5 if step > 1 else 3, 4), ms.float32) * (step + 1)}
    _, expected = recorded("dynamic", Turning, output, loop=loop)
    bits, rows = recorded(how, Turning, output, loop=loop)
    assert bits == plain(how, Turning, **loop)
    assert {step for kind, _, step, _ in rows if kind == "actv"} == {0, 1}
    assert_same(of_state(rows), of_state(expected))


def growing(step: int) -> Tensor:
    """Every step is compiled anew."""
    return ops.tile(inputs(step), (step + 1, 1))


@pytest.mark.parametrize("sink", [False, True])
def test_model_train_goes_on_where_hooks_or_taps_do_not_compile(sink: bool, output: Output) -> None:
    for model, kinds in ((Stopped, {"actv", "actv_grad", "grad_reduced", *OUTSIDE}), (OfDynamicLength, set(OUTSIDE))):
        bits, rows = by_model("graph", output, model, sink=sink)
        assert bits == by_model("graph", output, model, sink=sink, monitored=False)[0]
        assert kinds == {kind for kind, *_ in rows}


class Block(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.first = First()

    def construct(self, x: Tensor) -> Tensor:
        return self.first(ms.mutable((x, x), True))


class CompiledBlock(Block):
    @ms.jit
    def construct(self, x: Tensor) -> Tensor:
        return self.first(ms.mutable((x, x), True))


class Around(nn.Cell):
    """A cell in the dynamic graph."""

    def __init__(self, block: nn.Cell) -> None:
        super().__init__()
        self.a, self.block, self.b = nn.Dense(4, 4), block, nn.Dense(4, 2)

    def construct(self, x: Tensor) -> Tensor:
        return ops.tanh(self.b(self.block(self.a(x)))).sum()


def test_rows_of_the_dynamic_graph_go_on_around_what_is_compiled_without_taps(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    _, expected = recorded("dynamic", lambda: Around(Block()), output)
    caplog.clear()
    bits, rows = recorded("dynamic", lambda: Around(CompiledBlock()), output)
    assert bits == plain("dynamic", lambda: Around(CompiledBlock()))
    inside = {key for key in expected if key[0].startswith("actv") and key[1].startswith("block.first")}
    assert inside
    assert_same(rows, {key: values for key, values in expected.items() if key not in inside})
    assert len(said_of(WITHOUT_TAPS, caplog)) == 1


class Raising(Deep):
    """Does not compile for four rows, with or without a monitor."""

    def construct(self, x: Tensor) -> Tensor:
        if x.shape[0] == 4:
            raise ValueError("four rows")
        return super().construct(x)


@pytest.mark.parametrize("how", WHOLE)
def test_an_error_of_the_program_is_raised_as_without_a_monitor_and_rows_go_on(
    how: str, output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    def run(net: nn.Cell, optimizer: nn.Cell) -> tuple[str, list[bytes]]:
        step = step_of(how, net, optimizer)
        train(step, 1)
        with pytest.raises(ValueError, match="four rows") as raised:
            step(ops.ones((4, 4), ms.float32))
        assert raised.value.__context__ is None
        train(step, 2, five_rows)
        return str(raised.value), state_of(net, optimizer)

    def made() -> tuple[nn.Cell, nn.Cell]:
        net = with_fixed_weights(Raising())
        return net, adam(net.trainable_params())

    with mode_of(how):
        expected = run(*made())
        net, optimizer = made()
        with attached(output, net, optimizer, **RECORDED):
            assert run(net, optimizer) == expected
    rows = rows_in(output, output.directory())
    steps = {kind: {step for of, _, step, _ in rows if of == kind} for kind in ("actv", "grad_unreduced", "param_updated")}
    assert steps == {kind: {0, 1, 2} for kind in steps}
    assert said_of("MindSpore cannot compile", caplog) == []


def five_rows(step: int) -> Tensor:
    return ops.ones((5, 4), ms.float32) * step


def test_a_model_that_falls_back_leaves_the_rows_of_another_one(output: Output) -> None:
    _, expected = recorded("jit", Deep, output)
    others = output.directories()
    falling, whole = with_fixed_weights(OfDynamicLength()), with_fixed_weights(Deep())
    optimizers = adam(falling.trainable_params()), adam(whole.trainable_params())
    with TrainerMon(written(output, **RECORDED)) as first:
        first.set_monitor(falling, 1, optimizers[0])
        known = set(output.directories())
        with TrainerMon(written(output, **RECORDED)) as second:
            second.set_monitor(whole, 1, optimizers[1])
            (directory,) = set(output.directories()) - known
            train(step_of("jit", falling, optimizers[0]))
            train(step_of("jit", whole, optimizers[1]))
    assert known - set(others)
    assert_same(rows_in(output, directory), expected)


def test_a_patch_of_the_program_on_the_compiler_stays_and_the_monitors_goes(output: Output) -> None:
    calls = []
    before = vars(api._JitExecutor)["compile"]
    net = with_fixed_weights(OfDynamicLength())
    optimizer = adam(net.trainable_params())
    monitor = attached(output, net, optimizer, **RECORDED)
    below = vars(api._JitExecutor)["compile"]
    assert below is not before

    @functools.wraps(below)
    def compile_(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return below(*args, **kwargs)

    api._JitExecutor.compile = compile_
    try:
        train(step_of("jit", net, optimizer), 2)
        monitor.close()
        assert vars(api._JitExecutor)["compile"] is compile_
        assert len(calls) >= 2
    finally:
        api._JitExecutor.compile = before
    with attached(output, net, optimizer, **RECORDED):
        pass
    assert vars(api._JitExecutor)["compile"] is before


def test_hooks_of_the_program_that_follow_the_monitors_keep_their_order(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    """The monitor's hook would read what the later hook returns, so it is not put back."""
    net = with_fixed_weights(Stopped())
    optimizer = adam(net.trainable_params())
    with attached(output, net, optimizer, **RECORDED):
        handle = net.b.weight.register_hook(called_for_gradients)
        train(step_of("jit", net, optimizer), 1)
        handle.remove()
        assert len(net.b.weight.hooks()) == 0
        assert len(net.a.weight.hooks()) == 1
    assert len(said_of("A hook was registered after the monitor's", caplog)) == 1


def called_for_gradients(gradient: Any) -> Any:
    return gradient


@pytest.mark.parametrize("model", [Stopped, OfDynamicLength])
def test_a_closed_monitor_leaves_nothing_behind_and_another_one_tries_again(
    model: type[nn.Cell], output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    net = with_fixed_weights(model())
    optimizer = adam(net.trainable_params())
    before = footprint(net, optimizer)
    for _ in range(2):
        with attached(output, net, optimizer, **RECORDED):
            train(step_of("jit", net, optimizer), 1)
        assert footprint(net, optimizer) == before
        assert not any("_monitored_as" in vars(cell) for _, cell in net.cells_and_names())
    assert len(said_of("MindSpore cannot compile", caplog)) == 2
