"""Weight gradients: what is read, when, and where there is nothing to read."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from watching import Output, assert_rows, attached

from monitor.pytorch import TrainerMon
from monitor.pytorch.tensor_reader import TorchTensorReader
from monitor.recording.parameters import NOT_ACCUMULATED
from monitor.recording.recorder import RecordedSeries

GRADIENTS = {"wg_distribution": True, "ops": ["min", "max", "mean", "norm", "zeros", "nans", "infs", "std"], "ndigits": 17}
Rows = dict[tuple[str, int, int | None], torch.Tensor]


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def batch(step: int, micro_step: int = 0) -> torch.Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(100 * step + micro_step))


def backward(model: nn.Module, step: int, micro_step: int = 0) -> None:
    model(batch(step, micro_step)).square().mean().backward()


def gradients(model: nn.Module, step: int, micro_step: int | None = None) -> Rows:
    """Copies of the gradients as they are now, under the rows they belong to."""
    named = model.named_parameters()
    return {(name, step, micro_step): p.grad.clone() for name, p in named if p.grad is not None}


def names(output: Output, kind: str) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for row in output.rows(kind):
        found.setdefault(row.step, []).append(row.name)
    return found


def test_one_row_a_step_holds_what_accumulated_over_the_micro_batches(output: Output) -> None:
    model = small_model()
    optimizer = optimizer_of(model)
    expected: Rows = {}
    with attached(output, model, optimizer, grad_acc_steps=3, **GRADIENTS):
        for step in range(2):
            for micro_step in range(3):
                backward(model, step, micro_step)
            expected |= gradients(model, step)
            optimizer.step()
            optimizer.zero_grad()
    assert len(expected) == 8
    assert_rows(output, "grad_unreduced", expected)
    assert_rows(output, "grad_reduced", expected)


def test_a_row_a_micro_batch_holds_what_accumulated_so_far(output: Output) -> None:
    model = small_model()
    optimizer = optimizer_of(model)
    unreduced: Rows = {}
    reduced: Rows = {}
    with attached(output, model, optimizer, grad_acc_steps=2, monitor_mbs_grad=True, **GRADIENTS):
        for step in range(2):
            for micro_step in range(2):
                backward(model, step, micro_step)
                unreduced |= gradients(model, step, micro_step)
            reduced |= gradients(model, step)
            optimizer.step()
            optimizer.zero_grad()
    assert_rows(output, "grad_unreduced", unreduced)
    assert_rows(output, "grad_reduced", reduced)


def test_a_row_a_micro_batch_represents_every_micro_batch_there_was(output: Output) -> None:
    """Fewer than grad_acc_steps in step 0, more in step 1."""
    model = small_model()
    optimizer = optimizer_of(model)
    unreduced: Rows = {}
    with attached(output, model, optimizer, grad_acc_steps=2, monitor_mbs_grad=True, **GRADIENTS):
        for step, micro_batches in enumerate((1, 3)):
            for micro_step in range(micro_batches):
                backward(model, step, micro_step)
                unreduced |= gradients(model, step, micro_step)
            optimizer.step()
            optimizer.zero_grad()
    assert_rows(output, "grad_unreduced", unreduced)


def test_clipping_before_the_step_is_seen_in_the_reduced_gradient_alone(output: Output) -> None:
    model = small_model()
    optimizer = optimizer_of(model)
    with attached(output, model, optimizer, **GRADIENTS):
        backward(model, 0)
        unreduced = gradients(model, 0)
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        reduced = gradients(model, 0)
        optimizer.step()
    assert_rows(output, "grad_unreduced", unreduced)
    assert_rows(output, "grad_reduced", reduced)


def test_edits_of_data_between_backward_and_step_are_seen(output: Output) -> None:
    """They do not count up the tensor's version."""
    model = small_model()
    optimizer = optimizer_of(model)
    with attached(output, model, optimizer, **GRADIENTS):
        backward(model, 0)
        unreduced = gradients(model, 0)
        for p in model.parameters():
            p.grad.data.clamp_(-1e-3, 1e-3)
        reduced = gradients(model, 0)
        optimizer.step()
    assert_rows(output, "grad_unreduced", unreduced)
    assert_rows(output, "grad_reduced", reduced)


def test_a_gradient_put_in_place_of_another_is_seen(output: Output) -> None:
    model = small_model()
    optimizer = optimizer_of(model)
    with attached(output, model, optimizer, **GRADIENTS):
        backward(model, 0)
        model[0].bias.grad = torch.full((4,), 7.0)
        model[2].bias.grad = None
        reduced = gradients(model, 0)
        optimizer.step()
    assert_rows(output, "grad_reduced", reduced)


def test_what_a_hook_of_the_optimizer_changes_before_ours_is_seen(output: Output) -> None:
    model = small_model()
    optimizer = optimizer_of(model)
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_value_(model.parameters(), 1e-3))
    with attached(output, model, optimizer, **GRADIENTS):
        backward(model, 0)
        optimizer.step()
        reduced = gradients(model, 0)
    assert_rows(output, "grad_reduced", reduced)


def test_a_step_of_fewer_micro_batches_has_the_sum_of_those_there_were(output: Output) -> None:
    model = small_model()
    optimizer = optimizer_of(model)
    with attached(output, model, optimizer, grad_acc_steps=4, **GRADIENTS):
        for micro_step in range(3):
            backward(model, 0, micro_step)
        expected = gradients(model, 0)
        optimizer.step()
    assert_rows(output, "grad_unreduced", expected)
    assert_rows(output, "grad_reduced", expected)


def test_a_short_step_whose_gradients_were_clipped_by_value_has_no_unreduced_rows_and_says_so(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the step itself tells that the accumulation was over, and by then its sum is gone."""
    model = small_model()
    optimizer = optimizer_of(model)
    with attached(output, model, optimizer, grad_acc_steps=2, **GRADIENTS):
        for step in range(2):
            backward(model, step)
            nn.utils.clip_grad_value_(model.parameters(), 1e-3)
            reduced = gradients(model, step)
            optimizer.step()
            optimizer.zero_grad()
    assert output.rows("grad_unreduced") == []
    assert names(output, "grad_reduced") == {step: [name for name, _, _ in reduced] for step in range(2)}
    (said,) = [message for message in caplog.messages if "grad_unreduced is missing" in message]
    assert "step 0" in said


@pytest.mark.parametrize("clipped", [(1,), (0, 1)])
def test_a_short_step_whose_gradients_were_clipped_by_their_norm_has_what_backward_left(
    output: Output, caplog: pytest.LogCaptureFixture, clipped: tuple[int, ...]
) -> None:
    """They are read right before. A loop may clip after each micro-batch: then the last backward has left the row."""
    model = small_model()
    optimizer = optimizer_of(model)
    expected: Rows = {}
    with attached(output, model, optimizer, grad_acc_steps=3, **GRADIENTS):
        for step, micro_batches in enumerate((2, 3, 2)):
            for micro_step in range(micro_batches):
                backward(model, step, micro_step)
                expected |= gradients(model, step)
                if micro_step in clipped or micro_step == 2:
                    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
    assert_rows(output, "grad_unreduced", expected)
    assert [message for message in caplog.messages if "grad_unreduced is missing" in message] == []


def test_a_step_of_more_micro_batches_has_the_sum_of_all_and_one_warning(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    model = small_model()
    optimizer = optimizer_of(model)
    expected: Rows = {}
    with attached(output, model, optimizer, grad_acc_steps=2, **GRADIENTS):
        for step in range(2):
            for micro_step in range(4):
                backward(model, step, micro_step)
            expected |= gradients(model, step)
            optimizer.step()
            optimizer.zero_grad()
    assert_rows(output, "grad_unreduced", expected)
    assert len([message for message in caplog.messages if "more training forwards of the model" in message]) == 1
    assert output.manifest()["failures"] == {}  # nothing is lost: trainermon report calls such a run healthy


@pytest.mark.parametrize("told", [False, True])
def test_a_batch_that_the_loop_does_not_step_is_named_or_is_a_skipped_step(
    output: Output, caplog: pytest.LogCaptureFixture, told: bool
) -> None:
    """As a loop does that looks for NaN itself. Nothing but the call tells it from a loop that needs two forwards there."""
    model = small_model()
    optimizer = optimizer_of(model)
    with attached(output, model, optimizer, **GRADIENTS) as monitor:
        for batch in range(5):
            optimizer.zero_grad()
            backward(model, batch, 0)
            if batch not in (2, 3):
                optimizer.step()
            if told:
                monitor.batch_ended()
    said = [one for one in caplog.messages if "The step before had exactly grad_acc_steps. If a batch failed" in one]
    assert output.manifest()["steps"]["skipped"]["ranges"] == ([[2, 3, 1]] if told else [])
    assert ("step 2 has more training forwards of the model" in output.manifest()["notes"].get("more_forwards", "")) == (
        not told
    )
    assert len(said) == (not told)


@pytest.mark.parametrize("clips", [False, True])
def test_a_step_whose_backwards_run_in_reverse_has_the_sum_of_all(output: Output, clips: bool) -> None:
    model = small_model()
    optimizer = optimizer_of(model)
    with attached(output, model, optimizer, grad_acc_steps=3, **GRADIENTS):
        losses = [model(batch(0, micro_step)).square().mean() for micro_step in range(3)]
        for loss in reversed(losses):
            loss.backward()
        expected = gradients(model, 0)
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
    assert_rows(output, "grad_unreduced", expected)


def test_one_backward_of_a_sum_of_losses_has_its_row_in_the_last_micro_step(output: Output) -> None:
    model = small_model()
    with attached(output, model, optimizer_of(model), grad_acc_steps=2, monitor_mbs_grad=True, **GRADIENTS):
        sum(model(batch(0, micro_step)).square().mean() for micro_step in range(2)).backward()
    assert {row.micro_step for row in output.rows("grad_unreduced")} == {1}


class Scaled(nn.Module):
    """Has a parameter that its loss uses, and its forward does not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = small_model()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@pytest.mark.parametrize("each", [False, True])
def test_a_parameter_that_the_loss_alone_uses_has_its_gradient_in_the_micro_step_of_it(output: Output, each: bool) -> None:
    model = Scaled()
    optimizer = optimizer_of(model)
    expected: Rows = {}
    with attached(output, model, optimizer, grad_acc_steps=3, monitor_mbs_grad=each, **GRADIENTS):
        for micro_step in range(3):
            (model(batch(0, micro_step)) * model.scale).square().mean().backward()
            if each or micro_step == 2:
                expected |= gradients(model, 0, micro_step if each else None)
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
    assert_rows(output, "grad_unreduced", expected)


class Experts(nn.Module):
    """Each micro-batch goes to one of two experts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList([nn.Linear(5, 2), nn.Linear(5, 2)])

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return self.experts[expert](x)


def test_an_expert_that_the_last_micro_batch_did_not_reach_has_its_sum(output: Output) -> None:
    model = Experts()
    optimizer = optimizer_of(model)
    with attached(output, model, optimizer, grad_acc_steps=2, **GRADIENTS):
        for expert in (1, 0):
            model(batch(0), expert).square().mean().backward()
        expected = gradients(model, 0)
        optimizer.step()
    assert len(expected) == 4
    assert_rows(output, "grad_unreduced", expected)


def test_a_parameter_without_a_gradient_has_no_row_also_after_a_step_in_which_it_had_one(output: Output) -> None:
    """Peers, fault 1: a branch that did not run was written again with the values of an earlier step."""
    model = Experts()
    optimizer = optimizer_of(model)
    expected: Rows = {}
    with attached(output, model, optimizer, **GRADIENTS):
        for step, expert in enumerate((0, 1)):
            model(batch(step), expert).square().mean().backward()
            expected |= gradients(model, step)
            optimizer.step()
            optimizer.zero_grad()
    assert_rows(output, "grad_unreduced", expected)
    assert_rows(output, "grad_reduced", expected)
    assert names(output, "grad_reduced")[1] == ["experts.1.weight", "experts.1.bias"]


def test_a_gradient_that_was_zeroed_and_not_taken_away_is_a_row_of_zeros(output: Output) -> None:
    model = small_model()
    optimizer = optimizer_of(model)
    with attached(output, model, optimizer, **GRADIENTS):
        backward(model, 0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
    assert names(output, "grad_unreduced").keys() == {0}
    assert [row.values["zeros"] for row in output.rows("grad_reduced") if row.step == 1] == [1.0] * 4


def test_frozen_weights_have_rows_from_the_step_in_which_they_are_thawed(output: Output) -> None:
    model = small_model()
    optimizer = optimizer_of(model)
    model[0].requires_grad_(False)
    expected: Rows = {}
    with attached(output, model, optimizer, **GRADIENTS):
        for step in range(4):
            model[0].requires_grad_(step in (1, 2))
            backward(model, step)
            expected |= gradients(model, step)
            optimizer.step()
            optimizer.zero_grad()
    assert_rows(output, "grad_unreduced", expected)
    assert [len(rows) for rows in names(output, "grad_reduced").values()] == [2, 4, 4, 2]


def test_lazy_parameters_have_rows_from_the_step_in_which_they_get_their_shape(output: Output) -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 3))
    optimizer = optimizer_of(model)
    expected: Rows = {}
    with attached(output, model, optimizer, **GRADIENTS):
        for step in range(2):
            backward(model, step)
            expected |= gradients(model, step)
            optimizer.step()
            optimizer.zero_grad()
    assert_rows(output, "grad_unreduced", expected)
    assert_rows(output, "grad_reduced", expected)


def test_a_weight_that_two_modules_share_has_one_row_with_the_gradient_of_both(output: Output) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False))
    model[1].weight = model[0].weight
    optimizer = optimizer_of(model)
    with attached(output, model, optimizer, **GRADIENTS):
        backward(model, 0)
        expected = {("0.weight", 0, None): model[0].weight.grad.clone()}
        optimizer.step()
    assert_rows(output, "grad_unreduced", expected)
    assert_rows(output, "grad_reduced", expected)


@pytest.mark.parametrize("grad_acc_steps", [1, 2])
def test_a_sparse_gradient_counts_its_implicit_zeros_and_adds_up_what_stands_twice(output: Output, grad_acc_steps: int) -> None:
    """Peers, fault 16: sparse tensors gave nan."""
    torch.manual_seed(0)
    model = nn.Embedding(10, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    with attached(output, model, optimizer, grad_acc_steps=grad_acc_steps, **GRADIENTS):
        for micro_step in range(grad_acc_steps):
            model(torch.tensor([1, 4, 4, 7 + micro_step])).square().sum().backward()
        assert model.weight.grad.is_sparse
        expected = {("weight", 0, None): model.weight.grad.to_dense()}
        optimizer.step()
    assert_rows(output, "grad_unreduced", expected)
    assert_rows(output, "grad_reduced", expected)


def test_a_complex_gradient_is_read_by_magnitude(output: Output) -> None:
    """Peers, fault 16: complex tensors gave nan."""
    model = nn.Linear(3, 2, dtype=torch.complex64)
    optimizer = optimizer_of(model)
    with attached(output, model, optimizer, **GRADIENTS):
        model(torch.randn(4, 3, dtype=torch.complex64)).abs().square().sum().backward()
        expected = {(name, 0, None): p.grad.abs() for name, p in model.named_parameters()}
        optimizer.step()
    assert_rows(output, "grad_unreduced", expected)
    assert_rows(output, "grad_reduced", expected)


def test_two_backwards_through_one_forward_leave_one_row_with_their_sum(output: Output) -> None:
    model = small_model()
    optimizer = optimizer_of(model)
    with attached(output, model, optimizer, **GRADIENTS):
        result = model(batch(0))
        result.square().mean().backward(retain_graph=True)
        result.abs().sum().backward()
        expected = gradients(model, 0)
        optimizer.step()
    assert_rows(output, "grad_unreduced", expected)


def test_a_nan_and_an_inf_are_in_the_row_of_their_parameter_and_in_no_other(output: Output) -> None:
    model = small_model()
    optimizer = optimizer_of(model)
    model[0].weight.register_hook(lambda g: torch.full_like(g, float("nan")))
    model[2].bias.register_hook(lambda g: g / 0)
    with attached(output, model, optimizer, **GRADIENTS):
        backward(model, 0)
        expected = gradients(model, 0)
        optimizer.step()
    assert_rows(output, "grad_unreduced", expected)
    assert {row.name: (row.values["nans"], row.values["infs"]) for row in output.rows("grad_reduced")} == {
        "0.weight": (20, 0),
        "0.bias": (0, 0),
        "2.weight": (0, 0),
        "2.bias": (0, 3),
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_of_other_precisions_are_read_as_they_are(output: Output, dtype: torch.dtype) -> None:
    model = small_model().to(dtype)
    optimizer = optimizer_of(model)
    with attached(output, model, optimizer, **GRADIENTS):
        model(batch(0).to(dtype)).square().mean().backward()
        expected = gradients(model, 0)
        optimizer.step()
    assert_rows(output, "grad_unreduced", expected)
    assert_rows(output, "grad_reduced", expected)


def test_a_model_whose_parts_are_called_without_its_root_has_its_gradients(output: Output) -> None:
    model = small_model()
    optimizer = optimizer_of(model)
    with attached(output, model, optimizer, grad_acc_steps=2, **GRADIENTS):
        for micro_step in range(2):
            model[2](model[0](batch(0, micro_step))).square().mean().backward()
        expected = gradients(model, 0)
        optimizer.step()
    assert_rows(output, "grad_unreduced", expected)


def test_gradients_that_the_loop_assigns_are_the_reduced_ones_and_a_warning_says_that_they_are_all(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    model = small_model()
    optimizer = optimizer_of(model)
    expected: Rows = {}
    with attached(output, model, optimizer, **GRADIENTS):
        for step in range(2):
            parameters = list(model.parameters())
            found = torch.autograd.grad(model(batch(step)).square().mean(), parameters)
            for parameter, gradient in zip(parameters, found, strict=True):
                parameter.grad = gradient
            expected |= gradients(model, step)
            optimizer.step()
    assert_rows(output, "grad_reduced", expected)
    assert output.rows("grad_unreduced") == []
    (said,) = [message for message in caplog.messages if "no row of grad_unreduced" in message]
    assert "torch.autograd.grad" in said


def test_gradients_that_are_taken_away_after_each_micro_batch_are_the_last_ones_and_the_manifest_says_so(
    output: Output,
) -> None:
    model = small_model()
    optimizer = optimizer_of(model)
    with attached(output, model, optimizer, grad_acc_steps=2, **GRADIENTS):
        for micro_step in range(2):
            model.zero_grad()
            backward(model, 0, micro_step)
        expected = gradients(model, 0)
        optimizer.step()
    assert_rows(output, "grad_unreduced", expected)
    assert output.manifest()["notes"]["grad_unreduced"] == NOT_ACCUMULATED


def test_gradients_that_are_taken_away_between_two_losses_of_one_forward_are_noted(output: Output) -> None:
    """As gradient surgery does."""
    model = small_model()
    optimizer = optimizer_of(model)
    with attached(output, model, optimizer, **GRADIENTS):
        predicted = model(batch(0))
        predicted.square().mean().backward(retain_graph=True)
        model.zero_grad()
        predicted.abs().mean().backward()
        expected = gradients(model, 0)
        optimizer.step()
    assert_rows(output, "grad_unreduced", expected)
    assert output.manifest()["notes"] == {"grad_unreduced": NOT_ACCUMULATED}


@pytest.mark.parametrize("create_graph", [False, True])
def test_two_losses_of_one_forward_whose_gradients_accumulate_need_no_note(output: Output, create_graph: bool) -> None:
    model = small_model()
    optimizer = optimizer_of(model)
    with attached(output, model, optimizer, **GRADIENTS):
        predicted = model(batch(0))
        for loss in (predicted.square().mean(), predicted.abs().mean()):
            loss.backward(retain_graph=True, create_graph=create_graph)
        expected = gradients(model, 0)
        optimizer.step()
        optimizer.zero_grad()
    assert_rows(output, "grad_unreduced", expected)
    assert output.manifest()["notes"] == {}


def test_gradients_that_accumulate_need_no_note(output: Output) -> None:
    model = small_model()
    optimizer = optimizer_of(model)
    with attached(output, model, optimizer, grad_acc_steps=2, **GRADIENTS):
        for step in range(2):
            for micro_step in range(2):
                backward(model, step, micro_step)
            optimizer.step()
            optimizer.zero_grad()
    assert output.manifest()["notes"] == {}


def test_main_grad_is_read_where_there_is_one(output: Output) -> None:
    model = small_model()
    optimizer = optimizer_of(model)
    model[0].weight.main_grad = torch.zeros(4, 5, dtype=torch.float64)
    with attached(output, model, optimizer, params_have_main_grad=True, **GRADIENTS):
        backward(model, 0)
        model[0].weight.main_grad += model[0].weight.grad / 3
        expected = gradients(model, 0) | {("0.weight", 0, None): model[0].weight.main_grad.clone()}
        optimizer.step()
    assert_rows(output, "grad_reduced", expected)


def test_main_grad_is_not_read_when_parameters_are_said_to_have_none(output: Output) -> None:
    model = small_model()
    optimizer = optimizer_of(model)
    model[0].weight.main_grad = torch.full((4, 5), 9.0)
    with attached(output, model, optimizer, **GRADIENTS):
        backward(model, 0)
        expected = gradients(model, 0)
        optimizer.step()
    assert_rows(output, "grad_reduced", expected)


def move_to_main_grad(p: torch.Tensor) -> None:
    p.main_grad = p.grad.double() if p.main_grad is None else p.main_grad + p.grad
    p.grad = None


def test_a_main_grad_that_took_the_gradient_over_in_backward_is_the_unreduced_one(output: Output) -> None:
    model = small_model()
    optimizer = optimizer_of(model)
    for p in model.parameters():
        p.main_grad = None
        p.register_post_accumulate_grad_hook(move_to_main_grad)
    with attached(output, model, optimizer, grad_acc_steps=2, params_have_main_grad=True, **GRADIENTS):
        for micro_step in range(2):
            backward(model, 0, micro_step)
        expected = {(name, 0, None): p.main_grad for name, p in model.named_parameters()}
        optimizer.step()
    assert_rows(output, "grad_unreduced", expected)
    assert_rows(output, "grad_reduced", expected)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_scripted_part_which_takes_no_hooks_has_its_gradients(output: Output) -> None:
    model = small_model()
    model[0] = torch.jit.script(model[0])
    optimizer = optimizer_of(model)
    with attached(output, model, optimizer, **GRADIENTS):
        backward(model, 0)
        expected = gradients(model, 0)
        optimizer.step()
    assert_rows(output, "grad_unreduced", expected)
    assert_rows(output, "grad_reduced", expected)


def test_targets_select_the_parameters_below_them(output: Output) -> None:
    model = small_model()
    optimizer = optimizer_of(model)
    with attached(output, model, optimizer, targets={"2": {}, "0.bias": {}}, **GRADIENTS):
        backward(model, 0)
        optimizer.step()
    assert names(output, "grad_reduced") == {0: ["0.bias", "2.weight", "2.bias"]}


def failing_for(monkeypatch: pytest.MonkeyPatch, unreadable: Iterable[str]) -> None:
    """Make the recorder raise for these parameters."""
    find_row, refused = TorchTensorReader._slot, set(unreadable)

    def slot(reader: TorchTensorReader, watched: RecordedSeries, *where: Any) -> Any:
        if watched.series.name in refused:
            raise MemoryError("no room for it")
        return find_row(reader, watched, *where)

    monkeypatch.setattr(TorchTensorReader, "_slot", slot)


def test_a_parameter_that_cannot_be_read_hides_no_other(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_for(monkeypatch, ["0.weight"])
    model = small_model()
    optimizer = optimizer_of(model)
    with attached(output, model, optimizer, **GRADIENTS):
        backward(model, 0)
        optimizer.step()
    assert {kind: sorted(names(output, kind)[0]) for kind in ("grad_unreduced", "grad_reduced")} == {
        "grad_unreduced": ["0.bias", "2.bias", "2.weight"],
        "grad_reduced": ["0.bias", "2.bias", "2.weight"],
    }


def test_a_reading_that_fails_for_every_parameter_is_said_once_a_kind(
    output: Output, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And counted: how often stands in the manifest."""
    model = small_model()
    failing_for(monkeypatch, [name for name, _ in model.named_parameters()])
    optimizer = optimizer_of(model)
    with attached(output, model, optimizer, **GRADIENTS), caplog.at_level(logging.WARNING, "monitor"):
        for step in range(3):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
    assert len([message for message in caplog.messages if "MemoryError" in message]) == 2
    assert sorted(output.manifest()["failures"].values()) == [12, 12]


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """A process group whose other rank does nothing."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("two_ranks")
def test_a_short_step_among_several_ranks_has_no_unreduced_rows(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    """By the time the step tells that it was short, a reducer has added the other ranks' gradients."""
    model = small_model()
    optimizer = optimizer_of(model)
    with attached(output, model, optimizer, grad_acc_steps=2, **GRADIENTS):
        for micro_batches in (2, 1):
            for micro_step in range(micro_batches):
                backward(model, 0, micro_step)
            for p in model.parameters():
                dist.all_reduce(p.grad)
            optimizer.step()
            optimizer.zero_grad()
    assert names(output, "grad_unreduced").keys() == {0}
    assert names(output, "grad_reduced").keys() == {0, 1}
    assert len([message for message in caplog.messages if "grad_unreduced is missing" in message]) == 1


@pytest.mark.parametrize(
    ("passed", "said"),
    [
        ({"dp_group": [0, 1]}, "summed over ranks 2, 3 as well"),
        ({"dp_group": [0, 1], "tp_group": [0, 2]}, ""),
        ({"dp_group": [0, 1, 2, 3]}, ""),
        ({}, ""),
    ],
)
def test_ranks_that_share_gradients_and_are_in_no_group_are_named(
    output: Output, passed: dict[str, list[int]], said: str
) -> None:
    """As those of context parallelism, if ``dp_group`` is the data-parallel dimension alone."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        model = small_model()
        optimizer = optimizer_of(model)
        with TrainerMon(GRADIENTS, params_have_main_grad=False) as monitor:
            groups = {name: dist.new_group(ranks) for name, ranks in passed.items()}
            monitor.set_monitor(model, 1, optimizer, **groups)
            backward(model, 0)
            for p in model.parameters():
                dist.all_reduce(p.grad)
            optimizer.step()
    finally:
        dist.destroy_process_group()
    note = output.manifest()["notes"].get("ranks in no group", "")
    assert said in note
    assert bool(note) == bool(said)
    assert names(output, "grad_reduced").keys() == {0}


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("passed", [True, False])
def test_weights_that_one_rank_writes_are_named_if_their_gradients_are_local_as_those_of_experts(
    output: Output, caplog: pytest.LogCaptureFixture, passed: bool
) -> None:
    """The other rank may hold another expert, of which dp_group says that this rank writes it."""
    model = small_model()
    optimizer = optimizer_of(model)
    with TrainerMon({"param_distribution": True, **GRADIENTS}, params_have_main_grad=False) as monitor:
        monitor.set_monitor(model, 1, optimizer, dp_group=dist.group.WORLD if passed else None)
        for step in range(2):
            backward(model, step)
            for p in [*model.parameters()][2:]:
                dist.all_reduce(p.grad)
            optimizer.step()
            optimizer.zero_grad()
    first, second = [name for name, _ in model.named_parameters()][:2]
    told = [message for message in caplog.messages if "so rank 0 alone writes them" in message]
    assert [f"moments of 2 parameters ({first}, {second}), so" in message for message in told] == [True] * passed
    assert ("weights" in output.manifest()["notes"]) is passed
