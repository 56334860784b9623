"""What is compiled beside, around and instead of a model that is recorded, also where operators cannot measure it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mindspore as ms
import pytest
from attaching import EVERYTHING, Output, attached, footprint, step_with, steps_of, warnings_in, with_fixed_weights
from mindspore import Tensor, nn, ops
from training import Net, Recurrent, array, inputs

from monitor.mindspore import hooks
from monitor.mindspore.tape import COMPILED_VARIABLE

CELLS = "Code that calls a monitored cell is compiled (@jit or GRAPH_MODE), and MindSpore calls no hooks there"


class Compiled(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Dense(5, 5)

    @ms.jit
    def construct(self, x: Tensor) -> Tensor:
        return ops.tanh(self.inner(x))


class PartlyCompiled(Net):
    """A cell of it is compiled, which is given what another has made, and gives to another."""

    def __init__(self) -> None:
        super().__init__()
        self.jitted = Compiled()

    def construct(self, x: Tensor) -> Tensor:
        return ops.tanh(self.b(self.jitted(self.a(x)))).sum()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators measure in compiled code."""
    monkeypatch.setenv(COMPILED_VARIABLE, "1")


def weights_after(net: nn.Cell, optimizer: nn.Cell, steps: int = 3) -> list[bytes]:
    for number in range(steps):
        step_with(net, optimizer, number)
    return [array(parameter).tobytes() for parameter in net.get_parameters()]


def test_a_compiled_cell_has_rows_those_inside_have_not_and_training_has_the_same_bits(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    plain = with_fixed_weights(PartlyCompiled())
    expected = weights_after(plain, nn.Adam(plain.trainable_params(), 0.01))
    net = with_fixed_weights(PartlyCompiled())
    optimizer = nn.Adam(net.trainable_params(), 0.01)
    with attached(output, net, optimizer, **EVERYTHING):
        assert weights_after(net, optimizer) == expected
    for kind in ("actv", "actv_grad"):
        names = {row.name for row in output.rows(kind)}
        assert {"a.output", "jitted.input", "jitted.output", "b.input"} < names
        assert not any("inner" in name for name in names)
    for kind in ("grad_unreduced", "grad_reduced"):
        assert "jitted.inner.weight" in {row.name for row in output.rows(kind)}
    assert steps_of(output, "actv_grad") == steps_of(output, "grad_unreduced") == [0, 1, 2]
    (said,) = warnings_in(caplog)
    assert said == "Cells inside 'jitted' are compiled (@jit) and have no rows: take @jit off to record them."


def compiled_losses(net: nn.Cell, optimizer: nn.Cell) -> list[bytes]:
    gradients_of = ms.value_and_grad(net, None, optimizer.parameters)

    @ms.jit
    def step(x: Tensor) -> Tensor:
        loss, gradients = gradients_of(x)
        optimizer(gradients)
        return loss

    return [step(inputs(number)).asnumpy().tobytes() for number in range(3)]


def test_a_step_that_is_compiled_as_a_whole_trains_to_the_same_bits_and_what_has_no_rows_is_said_once(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    hooks._warn_once.cache_clear()
    plain = Net()
    expected = compiled_losses(plain, nn.Adam(plain.trainable_params(), 0.01))
    net = Net()
    optimizer = nn.Adam(net.trainable_params(), 0.01)
    with attached(output, net, optimizer, **EVERYTHING):
        assert compiled_losses(net, optimizer) == expected
    for kind in ("param_origin", "param_updated"):
        assert steps_of(output, kind) == [0, 1, 2]
    for kind in ("actv", "actv_grad", "grad_unreduced", "grad_reduced"):
        assert steps_of(output, kind) == []
    of_cells, of_steps = warnings_in(caplog)
    assert of_cells.startswith(CELLS)
    assert "last bits of training could change" in of_steps
    assert "have no rows: xy_distribution, wg_distribution" in of_steps
    assert f"set {COMPILED_VARIABLE}=1" in of_steps


def test_the_manifest_says_that_a_compiled_forward_and_backward_has_no_rows_if_python_calls_the_optimizer(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    hooks.warn_of_compiled(hooks._NO_ROWS)  # as for an earlier model of the process
    caplog.clear()
    net = Net()
    optimizer = nn.Adam(net.trainable_params(), 0.01)
    gradients_of = ms.value_and_grad(net, None, optimizer.parameters)

    @ms.jit
    def computed(x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        return gradients_of(x)  # type: ignore[no-any-return]

    with attached(output, net, optimizer, **EVERYTHING):
        for number in range(3):
            optimizer(computed(inputs(number))[1])
    assert steps_of(output, "grad_reduced") == steps_of(output, "param_updated") == [0, 1, 2]
    (said,) = warnings_in(caplog)
    assert said.endswith(output.manifest()["notes"]["compiled_code"])
    assert "have no rows: xy_distribution, grad_unreduced." in said
    assert {kind for kind in ("actv", "actv_grad", "grad_unreduced") if steps_of(output, kind)} == set()


@pytest.mark.parametrize("compiled", [ms.jit, ms.vmap])
def test_the_manifest_says_that_a_compiled_forward_has_no_rows(
    compiled: Callable[..., Any], output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    hooks.warn_of_compiled(hooks._NO_ROWS)
    caplog.clear()
    net = Net()
    optimizer = nn.Adam(net.trainable_params(), 0.01)

    def loss(x: Tensor) -> Tensor:
        return net(x)  # type: ignore[no-any-return]

    forward = compiled(loss)
    gradients_of = ms.value_and_grad(lambda x: forward(x).sum(), None, optimizer.parameters)
    with attached(output, net, optimizer, **EVERYTHING):
        for number in range(3):
            optimizer(gradients_of(inputs(number))[1])
    assert steps_of(output, "grad_unreduced") == steps_of(output, "param_updated") == [0, 1, 2]
    (said,) = warnings_in(caplog)
    assert said.endswith(output.manifest()["notes"]["compiled_code"])
    assert "The forward is compiled" in said
    assert "have no rows: xy_distribution." in said


def test_a_compiled_evaluation_does_not_hide_the_rows_of_the_dynamic_graph(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    hooks.warn_of_compiled(hooks._NO_ROWS)
    caplog.clear()
    net = Net()
    optimizer = nn.Adam(net.trainable_params(), 0.01)

    @ms.jit
    def evaluated(x: Tensor) -> Tensor:
        return net(x)  # type: ignore[no-any-return]

    with attached(output, net, optimizer, **EVERYTHING):
        for number in range(3):
            evaluated(inputs(number))
            step_with(net, optimizer, number)
    assert steps_of(output, "actv") == steps_of(output, "grad_unreduced") == [0, 1, 2]
    assert warnings_in(caplog) == []


class Gated(nn.Cell):
    """MindSpore does not compile it with a hook of a parameter of ``gate``."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.gate = nn.Dense(4, 5), nn.Dense(4, 5)

    def construct(self, x: Tensor) -> Tensor:
        return (self.a(x) * ops.stop_gradient(self.gate(x))).sum()


@pytest.mark.parametrize("accepted", ["", "0"])
def test_code_that_mindspore_does_not_compile_with_hooks_of_parameters_is_compiled_without_them(
    output: Output, monkeypatch: pytest.MonkeyPatch, accepted: str
) -> None:
    if accepted:
        monkeypatch.setenv(COMPILED_VARIABLE, accepted)
    plain = with_fixed_weights(Gated())
    optimizer = nn.Adam(plain.trainable_params(), 0.01)
    expected = [*compiled_losses(plain, optimizer), *weights_after(plain, optimizer, 2)]
    net = with_fixed_weights(Gated())
    optimizer = nn.Adam(net.trainable_params(), 0.01)
    with attached(output, net, optimizer, **EVERYTHING):
        assert [*compiled_losses(net, optimizer), *weights_after(net, optimizer, 2)] == expected
    rows = [row for row in output.rows("grad_unreduced") if row.name == "a.weight"]
    assert [row.step for row in rows] == ([0, 1] if accepted else [3, 4])
    assert footprint(net, optimizer) == {}


class Rnn(nn.Cell):
    """Calls one cell with two arguments in a loop: the order of adding up its gradients shows in the bits."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = Recurrent(4)

    def construct(self, x: Tensor) -> Tensor:
        state = ops.zeros_like(x)
        for i in range(5):
            state = self.cell(x * (i + 1.0), state)
        return state.mean()


class OfGru(nn.Cell):
    """Its cells return tuples. A hook that the compiler sees after the forward of one shows in the bits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.GRU(4, 8, batch_first=True), nn.Dense(8, 1)

    def construct(self, x: Tensor) -> Tensor:
        states, _ = self.layers(ops.stack([ops.sin(x * i) for i in range(1, 7)], 1))
        return self.head(states).square().mean()


@pytest.mark.parametrize("make", [Rnn, OfGru])
def test_a_compiled_loop_over_one_cell_trains_to_the_same_bits(make: type[nn.Cell], output: Output) -> None:
    plain = with_fixed_weights(make())
    expected = compiled_losses(plain, nn.Adam(plain.trainable_params(), 0.01))
    net = with_fixed_weights(make())
    optimizer = nn.Adam(net.trainable_params(), 0.01)
    with attached(output, net, optimizer, **EVERYTHING):
        assert compiled_losses(net, optimizer) == expected
    assert [array(one).tobytes() for one in net.get_parameters()] == [array(one).tobytes() for one in plain.get_parameters()]


def test_hooks_of_the_user_are_called_and_removed_beside_those_of_the_monitor(output: Output) -> None:
    net = Net()
    optimizer = nn.Adam(net.trainable_params(), 0.01)
    called: list[str] = []
    first = net.a.register_forward_pre_hook(lambda _cell, _args: called.append("first"))
    with attached(output, net, optimizer, **EVERYTHING):
        second = net.b.register_forward_pre_hook(lambda _cell, _args: called.append("second"))
        step_with(net, optimizer)
        first.remove()
        step_with(net, optimizer)
        second.remove()
        step_with(net, optimizer)
    assert called == ["first", "second", "second"]
    assert steps_of(output, "actv") == [0, 1, 2]
    assert footprint(net, optimizer) == {}


def test_a_hook_of_the_user_may_replace_the_result_of_a_cell_and_both_are_recorded(output: Output) -> None:
    net = Net()
    optimizer = nn.Adam(net.trainable_params(), 0.01)
    with attached(output, net, optimizer, **EVERYTHING):
        handle = net.a.register_forward_hook(lambda _cell, _args, result: result * 0.0)
        step_with(net, optimizer)
        handle.remove()
        step_with(net, optimizer)
    norms = {(row.name, row.step): row.values["norm"] for row in output.rows("actv")}
    assert norms["b.input", 0] == 0.0
    assert norms["a.output", 0] > 0.0
    assert norms["b.input", 1] > 0.0
    assert footprint(net, optimizer) == {}


def test_after_compiled_steps_one_that_is_not_has_the_next_number(output: Output) -> None:
    net = Net()
    optimizer = nn.Adam(net.trainable_params(), 0.01)
    with attached(output, net, optimizer, **EVERYTHING):
        compiled_losses(net, optimizer)
        step_with(net, optimizer)
    assert steps_of(output, "grad_unreduced") == steps_of(output, "actv") == [3]
    assert steps_of(output, "param_updated") == [0, 1, 2, 3]


@pytest.fixture
def graph_mode() -> Iterator[None]:
    ms.set_context(mode=ms.GRAPH_MODE)
    yield
    ms.set_context(mode=ms.PYNATIVE_MODE)


class Step(nn.Cell):
    def __init__(self, net: nn.Cell, optimizer: nn.Cell) -> None:
        super().__init__()
        self.net, self.optimizer = net, optimizer
        self.gradients_of = ms.value_and_grad(net, None, optimizer.parameters)

    def construct(self, x: Tensor) -> Tensor:
        loss, gradients = self.gradients_of(x)
        self.optimizer(gradients)
        return loss


@pytest.mark.usefixtures("graph_mode", "measured")
def test_graph_mode_is_recorded(output: Output) -> None:
    net = Net()
    optimizer = nn.Adam(net.trainable_params())
    step = Step(net, optimizer)
    with attached(output, net, optimizer, **EVERYTHING):
        for number in range(3):
            step(inputs(number))
    for kind in ("actv", "actv_grad", "grad_unreduced", "grad_reduced", "param_updated"):
        assert steps_of(output, kind) == [0, 1, 2]


def test_a_model_that_is_attached_in_the_dynamic_graph_has_rows_of_weights_in_graph_mode_and_what_it_lacks_is_said_once(
    output: Output, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    hooks._warn_once.cache_clear()
    net = Net()
    optimizer = nn.Adam(net.trainable_params())
    with attached(output, net, optimizer, **EVERYTHING):
        step_with(net, optimizer)
        request.getfixturevalue("graph_mode")
        step = Step(net, optimizer)
        for number in range(3):
            step(inputs(number))
    assert steps_of(output, "actv") == [0]
    assert steps_of(output, "param_updated") == [0, 1, 2, 3]
    of_cells, of_steps = warnings_in(caplog)
    assert of_cells.startswith(CELLS)
    assert "have no rows: xy_distribution, wg_distribution" in of_steps


def test_nothing_is_said_of_a_model_that_is_exported(output: Output, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    hooks._warn_once.cache_clear()
    net = Net()
    with attached(output, net, nn.Adam(net.trainable_params()), **EVERYTHING):
        ms.export(net, inputs(0), file_name=str(tmp_path / "net"), file_format="MINDIR")
    assert warnings_in(caplog) == []


@pytest.mark.parametrize("first", [ms.GRAPH_MODE, ms.PYNATIVE_MODE])
@pytest.mark.usefixtures("graph_mode", "measured")
def test_steps_of_both_modes_are_recorded_in_whichever_the_model_is_attached(
    first: int, output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    ms.set_context(mode=first)
    net = Net()
    optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
    step = Step(net, optimizer)
    with attached(output, net, optimizer, **EVERYTHING):
        for number, mode in enumerate((ms.GRAPH_MODE, ms.PYNATIVE_MODE, ms.GRAPH_MODE)):
            ms.set_context(mode=mode)
            step(inputs(number))
    for kind in ("actv", "actv_grad", "grad_unreduced", "grad_reduced", "param_updated"):
        assert steps_of(output, kind) == [0, 1, 2]
    assert warnings_in(caplog) == []


@pytest.mark.usefixtures("graph_mode")
def test_in_graph_mode_nothing_is_attached_if_compiled_code_is_not_to_be_recorded(
    output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(COMPILED_VARIABLE, "0")
    net = Net()
    optimizer = nn.Adam(net.trainable_params())
    before = footprint(net, optimizer)
    with pytest.raises(ValueError, match="mode is GRAPH_MODE"):
        attached(output, net, optimizer, **EVERYTHING)
    assert footprint(net, optimizer) == before
    assert output.directories() == []


@pytest.mark.usefixtures("graph_mode")
def test_functions_of_mindspore_itself_are_no_parts_of_the_program(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    net = with_fixed_weights(Net())
    optimizer = nn.Adam(net.trainable_params(), 0.01)
    with attached(output, net, optimizer, **EVERYTHING):
        ms.set_context(mode=ms.PYNATIVE_MODE)
        weights_after(net, optimizer)
    assert warnings_in(caplog) == []


def test_a_model_that_trains_with_its_flag_off_is_recorded_and_told_of_once(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    net = Net().set_train(False)
    optimizer = nn.Adam(net.trainable_params(), 0.01)
    with attached(output, net, optimizer, **EVERYTHING):
        weights_after(net, optimizer)
    assert steps_of(output, "actv") == steps_of(output, "actv_grad") == [0, 1, 2]
    (said,) = warnings_in(caplog)
    assert "training flag off" in said
    assert output.manifest()["failures"] == {}  # nothing is lost, and a report may call the run healthy


class Repeating(Net):
    """A part of it is called by whatever ``call`` is."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.SequentialCell(nn.Dense(5, 5), nn.Tanh())
        self.calls = lambda cell, x: cell(x)

    def construct(self, x: Tensor) -> Tensor:
        return self.b(self.calls(self.part, self.a(x))).sum()


def rows_of_repeating(output: Output, how: str) -> list[object]:
    others = output.directories()
    net = with_fixed_weights(Repeating())
    if how == "ms.recompute":
        net.calls = ms.recompute
    if how == "Cell.recompute":
        net.part.recompute()
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    with attached(output, net, optimizer, **EVERYTHING):
        weights_after(net, optimizer)
    (directory,) = set(output.directories()) - set(others)
    kinds = ("actv", "actv_grad", "grad_unreduced", "grad_reduced", "param_updated")
    return [sorted(output.rows(kind, directory), key=lambda row: (row.step, row.name)) for kind in kinds]


@pytest.mark.parametrize("how", ["ms.recompute", "Cell.recompute"])
def test_what_is_computed_again_in_the_backward_has_the_rows_of_what_is_not(
    output: Output, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert rows_of_repeating(output, how) == rows_of_repeating(output, "a call")
    assert [said for said in warnings_in(caplog) if "mv_distribution is on" not in said] == [], "plain SGD keeps no moments"
