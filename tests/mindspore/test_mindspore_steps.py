"""Training loops that are not a plain one: that fail and go on, skip, accumulate, evaluate, differentiate otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from attaching import EVERYTHING, Output, Row, attached, step_with, warnings_in
from mindspore import Tensor, nn, ops
from training import Net, array, inputs

from monitor.mindspore import modules

KINDS = ("actv", "actv_grad", "grad_unreduced", "grad_reduced", "param_origin", "param_updated")
STEPS = 3
ABOUT = pytest.approx

pytestmark = pytest.mark.usefixtures("recording_ends")


class Failing(Net):
    """Fails once, when it is asked to."""

    fails = False

    def construct(self, x: Tensor) -> Tensor:
        hidden = ops.tanh(self.a(x))
        if self.fails:
            self.fails = False
            raise ValueError("no room")
        return ops.tanh(self.b(hidden)).sum()


Loop = Callable[[Failing, nn.Cell], object]


def recorded(output: Output, loop: Loop, micro_steps: int = 1, **config: Any) -> list[Row]:
    """The rows of a loop, all kinds."""
    others = output.directories()
    net = Failing()
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    with attached(output, net, optimizer, micro_steps, **EVERYTHING | config):
        loop(net, optimizer)
    (directory,) = set(output.directories()) - set(others)
    return [row for kind in KINDS for row in output.rows(kind, directory)]


def plain(net: nn.Cell, optimizer: nn.Cell) -> None:
    for number in range(STEPS):
        step_with(net, optimizer, number)


def fail(net: Failing, *, as_function: bool) -> None:
    """The user catches it."""

    def function(x: Tensor) -> Tensor:
        return net(x)

    net.fails = True
    with pytest.raises(ValueError, match="no room"):
        ms.value_and_grad(function if as_function else net, None, net.trainable_params())(inputs(7))


def places(rows: list[Row], kind: str) -> list[tuple[int, int | None]]:
    """The steps and micro-steps that a kind has rows of."""
    return sorted({(row.step, row.micro_step) for row in rows if row.kind == kind}, key=str)


def norms(rows: list[Row], kind: str, name: str) -> list[float]:
    return [row.values["norm"] for row in rows if (row.kind, row.name) == (kind, name)]


@pytest.mark.parametrize("as_function", [False, True], ids=["a model", "a function"])
def test_a_forward_that_fails_and_is_caught_leaves_its_place_to_the_next(
    output: Output, caplog: pytest.LogCaptureFixture, *, as_function: bool
) -> None:
    def loop(net: Failing, optimizer: nn.Cell) -> None:
        for number in range(STEPS):
            if number == 1:
                fail(net, as_function=as_function)
            step_with(net, optimizer, number)

    assert recorded(output, loop) == recorded(output, plain)
    assert without_moments(warnings_in(caplog)) == []


def without_moments(said: list[str]) -> list[str]:
    """What is said of other things than the moments that plain SGD does not have."""
    return [one for one in said if "mv_distribution is on" not in one]


def in_evaluation(net: nn.Cell) -> None:
    net.set_train(False)
    net(inputs(8))
    net.set_train(True)


def in_training_mode(net: nn.Cell) -> None:
    net(inputs(8))


@pytest.mark.parametrize("call", [in_evaluation, in_training_mode])
@pytest.mark.parametrize("after_a_failure", [False, True])
def test_a_call_that_no_one_differentiates_has_no_rows(
    output: Output, caplog: pytest.LogCaptureFixture, call: Callable[[nn.Cell], None], *, after_a_failure: bool
) -> None:
    """After a failure MindSpore records whatever is called, until the process ends."""

    def loop(net: Failing, optimizer: nn.Cell) -> None:
        if after_a_failure:
            fail(net, as_function=True)
        call(net)
        for number in range(STEPS):
            step_with(net, optimizer, number)
            call(net)

    assert recorded(output, loop) == recorded(output, plain)
    assert without_moments(warnings_in(caplog)) == []


@pytest.mark.parametrize("flag", [True, False], ids=["training", "flag off"])
def test_a_cell_that_trains_is_recorded_and_its_model_s_evaluation_is_not(output: Output, *, flag: bool) -> None:
    """The cell has every call of the model recorded, also those that are not its own."""

    def loop(net: Failing, optimizer: nn.Cell) -> None:
        step = nn.TrainOneStepCell(net, optimizer)
        for number in range(STEPS):
            step.set_train(flag)
            step(inputs(number))
            in_evaluation(net)

    assert recorded(output, loop) == recorded(output, plain)


def test_a_step_that_is_skipped_continues_in_the_next_call_of_the_optimizer(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    def loop(net: Failing, optimizer: nn.Cell) -> None:
        step_with(net, optimizer, 0)
        ms.value_and_grad(net, None, optimizer.parameters)(inputs(7))
        step_with(net, optimizer, 1)
        step_with(net, optimizer, 2)

    found = recorded(output, loop)
    assert places(found, "actv") == places(found, "actv_grad") == [(0, 0), (1, 0), (1, 1), (2, 0)]
    whole_steps = {"grad_unreduced", "grad_reduced", "param_origin", "param_updated"}
    expected = recorded(output, plain)
    assert [row for row in found if row.kind in whole_steps] == [row for row in expected if row.kind in whole_steps]
    (said,) = without_moments(warnings_in(caplog))
    assert said.startswith("[rank 0] grad_acc_steps is 1, but step 1 has more training forwards of the model.")


def test_steps_of_an_optimizer_that_was_made_later_are_in_the_open_step_and_a_warning_says_to_attach_again(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    def loop(net: Failing, optimizer: nn.Cell) -> None:
        step_with(net, optimizer, 0)
        later = nn.SGD(net.trainable_params(), 0.1)
        step_with(net, later, 1)
        step_with(net, later, 2)

    found = recorded(output, loop)
    assert places(found, "actv") == [(0, 0), (1, 0), (1, 1)]
    assert {row.step for row in found if row.kind == "param_updated"} == {0}
    (said,) = [one for one in without_moments(warnings_in(caplog)) if "more training forwards of the model" in one]
    assert "set_monitor again with a new optimizer" in said


def accumulated(net: Failing, optimizer: nn.Cell) -> list[list[np.ndarray]]:
    """Two steps of three micro-batches, of which the user adds up the gradients; those of the first parameter."""
    gradients_of = ms.value_and_grad(net, None, optimizer.parameters)
    found: list[list[np.ndarray]] = []
    for step in range(2):
        each = [gradients_of(inputs(3 * step + number))[1] for number in range(3)]
        total = tuple(sum(parts[1:], start=parts[0]) for parts in zip(*each, strict=True))
        found.append([array(gradients[0]) for gradients in (*each, total)])
        optimizer(total)
    return found


@pytest.mark.parametrize("each", [False, True], ids=["", "monitor_mbs_grad"])
def test_micro_batches_have_activations_of_each_and_gradients_of_each_where_wanted(output: Output, *, each: bool) -> None:
    computed: list[list[np.ndarray]] = []
    found = recorded(output, lambda net, optimizer: computed.extend(accumulated(net, optimizer)), 3, monitor_mbs_grad=each)
    all_places = [(step, number) for step in range(2) for number in range(3)]
    assert places(found, "actv") == places(found, "actv_grad") == all_places
    assert places(found, "grad_unreduced") == (all_places if each else [])
    expected = [np.linalg.norm(one.astype(np.float64)) for parts in computed for one in parts[:3]]
    assert norms(found, "grad_unreduced", "a.weight") == ABOUT(expected if each else [], rel=1e-6)
    totals = [np.linalg.norm(parts[3].astype(np.float64)) for parts in computed]
    assert norms(found, "grad_reduced", "a.weight") == ABOUT(totals, rel=1e-6)
    assert ("grad_unreduced" in output.manifest()["notes"]) is not each


def test_the_warning_of_no_gradients_of_micro_batches_says_why_and_how_to_record_them(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    recorded(output, accumulated, 3)
    (said,) = [one for one in warnings_in(caplog) if "no row of grad_unreduced" in one]
    assert output.manifest()["notes"]["grad_unreduced"] in said
    assert "with monitor_mbs_grad there is a row of each micro-batch" in said


def test_differentiating_something_else_within_a_step_and_between_two_changes_no_row(output: Output) -> None:
    def slope(x: Tensor) -> Tensor:
        return ms.grad(lambda y: ops.sin(y).sum())(x).sum()

    def loop(net: Failing, optimizer: nn.Cell) -> None:
        for number in range(STEPS):
            _, gradients = ms.value_and_grad(lambda x: net(x) + slope(x), None, optimizer.parameters)(inputs(number))
            slope(inputs(9))
            optimizer(gradients)
            slope(inputs(9))

    assert recorded(output, loop) == recorded(output, plain)


def test_the_gradient_of_the_model_itself_within_a_step_is_one_more_micro_step(output: Output) -> None:
    def loop(net: Failing, optimizer: nn.Cell) -> None:
        def penalized(x: Tensor) -> Tensor:
            steep = ms.grad(net)(x)
            return net(x) + (steep * steep).sum()

        _, gradients = ms.value_and_grad(penalized, None, optimizer.parameters)(inputs(0))
        optimizer(gradients)

    found = recorded(output, loop)
    assert places(found, "actv") == [(0, 0), (0, 1)]
    assert places(found, "grad_unreduced") == places(found, "grad_reduced") == [(0, None)]


def test_after_a_forward_that_failed_parts_of_the_model_that_are_only_called_have_no_rows(output: Output) -> None:
    def failing_then_looking(net: Failing, optimizer: nn.Cell) -> None:
        step_with(net, optimizer, 0)
        fail(net, as_function=True)
        net.set_train(False)
        net.a(inputs(8) * 100)
        net.set_train(True)
        for number in range(1, STEPS):
            step_with(net, optimizer, number)

    assert recorded(output, failing_then_looking) == recorded(output, plain)


def test_a_batch_of_several_forwards_is_one_batch(output: Output) -> None:
    net = Net()
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    gradients_of = ms.grad(lambda a, b: ops.square(net(a) - net(b)), None, optimizer.parameters)
    with attached(output, net, optimizer, 2, **EVERYTHING) as monitor:
        for _ in range(2):
            for batch in range(2):
                gradients = gradients_of(inputs(0), inputs(1))
                if batch == 1:
                    optimizer(gradients)
                monitor.batch_ended()
    assert sorted({row.step for row in output.rows("param_updated")}) == [0, 1]
    assert output.manifest()["steps"]["written"]["ranges"] == [[0, 1, 1]]


def test_cells_that_are_recomputed_are_left_out_where_a_repetition_cannot_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules.autograd, "GRAPH_IS_THERE", False)
    net = Net()
    assert [name for name, _ in modules.observable(net).cells] == ["", "a", "b"]
    net.b.recompute()
    assert [name for name, _ in modules.observable(net).cells] == ["", "a"]


def test_a_graph_that_cannot_be_asked_costs_the_gradients_of_activations_and_a_warning(
    output: Output, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules.autograd, "GRAPH_IS_THERE", False)
    net = Net()
    optimizer = nn.Adam(net.trainable_params(), 0.01)
    with attached(output, net, optimizer, **EVERYTHING):
        step_with(net, optimizer)
    assert [said for said in warnings_in(caplog) if "2.9" in said] == [f"[rank 0] {modules.autograd.NO_GRAPH}"]
    assert [kind for kind in KINDS if not output.rows(kind)] == ["actv_grad"]


def test_activations_are_recorded_from_on_to_off(output: Output) -> None:
    net = Net()
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    with attached(output, net, optimizer, wg_distribution=True, all_xy=True, xy_distribution=False) as monitor:
        for step in range(4):
            if step in (1, 3):
                with pytest.warns(DeprecationWarning, match="dynamic start and stop"):
                    monitor.reload_xy(xy_distribution=step == 1)
            step_with(net, optimizer, step)
    for kind in ("actv", "actv_grad"):
        assert {row.step for row in output.rows(kind)} == {1, 2}
    assert {row.step for row in output.rows("grad_reduced")} == {0, 1, 2, 3}
