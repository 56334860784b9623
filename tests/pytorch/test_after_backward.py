"""Gradients that were written to between the end of backward and the step are marked, and no others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint
from watching import Output, attached, warnings_in

from monitor.pytorch.gradients import CHANGED
from monitor.recording.phases import UNSCALED

GRADIENTS = {"wg_distribution": True, "ops": ["norm"]}
Edit = Callable[[nn.Module], object]


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.ones(6, 5)).square().mean()


def noted(output: Output) -> object:
    return output.manifest()["notes"].get("grad_reduced")


def clip(model: nn.Module) -> object:
    return nn.utils.clip_grad_norm_(model.parameters(), 1e9)


def clip_values(model: nn.Module) -> object:
    return nn.utils.clip_grad_value_(model.parameters(), 1e-3)


def scale(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad /= 2


def read(model: nn.Module) -> object:
    return nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize(("edit", "expected"), [(read, None), (clip, CHANGED), (clip_values, CHANGED), (scale, CHANGED)])
@pytest.mark.parametrize("micro_steps", [1, 3])
def test_who_writes_to_gradients_after_backward_is_noticed(
    output: Output, edit: Edit, expected: str | None, micro_steps: int
) -> None:
    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.05)
    with attached(output, model, optimizer, grad_acc_steps=micro_steps, **GRADIENTS):
        for _ in range(2):
            for _ in range(micro_steps):
                loss_of(model).backward()
            edit(model)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    assert expected == noted(output)


def test_one_clipped_step_of_many_is_noticed(output: Output) -> None:
    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.05)
    with attached(output, model, optimizer, **GRADIENTS):
        for step in range(5):
            loss_of(model).backward()
            if step == 3:
                clip(model)
            optimizer.step()
            optimizer.zero_grad()
    assert noted(output) == CHANGED


@pytest.mark.parametrize(("edit", "expected"), [(read, None), (clip, CHANGED)])
def test_a_closure_may_clip_and_may_be_called_again(output: Output, edit: Edit, expected: str | None) -> None:
    model = small_model()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        edit(model)
        return loss

    with attached(output, model, optimizer, **GRADIENTS):
        optimizer.step(closure)
    assert noted(output) == expected


def test_what_a_later_backward_adds_is_no_change(output: Output) -> None:
    """Each reaches other parameters, and the last only those in the middle."""
    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.05)
    with attached(output, model, optimizer, grad_acc_steps=3, **GRADIENTS):
        loss_of(model).backward()
        loss_of(model).backward(inputs=list(model[4].parameters()))
        loss_of(model).backward(inputs=list(model[2].parameters()))
        optimizer.step()
    assert noted(output) is None


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(("edit", "expected"), [(read, None), (clip, CHANGED)])
def test_checkpointed_segments_are_backwards_within_a_backward(
    output: Output, edit: Edit, expected: str | None, reentrant: bool
) -> None:
    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.05)
    with attached(output, model, optimizer, **GRADIENTS):
        x = torch.ones(6, 5, requires_grad=True)
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=reentrant)
        x.square().mean().backward()
        edit(model)
        optimizer.step()
    assert noted(output) == expected


@pytest.mark.parametrize(("edit", "expected"), [(read, None), (clip, f"{UNSCALED}; {CHANGED}")])
def test_a_scaler_that_unscales_has_not_clipped(output: Output, edit: Edit, expected: str | None) -> None:
    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.05)
    scaler = GradScaler("cpu", init_scale=256.0)
    with attached(output, model, optimizer, **GRADIENTS):
        for _ in range(2):
            scaler.scale(loss_of(model)).backward()
            scaler.unscale_(optimizer)
            edit(model)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert noted(output) == expected


def test_a_gradient_put_in_place_of_another_is_not_one_that_was_changed(output: Output) -> None:
    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.05)
    with attached(output, model, optimizer, **GRADIENTS):
        loss_of(model).backward()
        for p in model.parameters():
            p.grad = torch.zeros_like(p).add_(1)
        optimizer.step()
    assert noted(output) is None


def test_a_backward_that_fails_leaves_nothing_to_compare_with(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    """The gradients of the head are there by then, and the next backward adds to them."""
    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.05)

    def fail(_: Tensor) -> None:
        raise ValueError("in the midst of it")

    with attached(output, model, optimizer, **GRADIENTS):
        hidden = model[:3](torch.ones(6, 5))
        handle = hidden.register_hook(fail)
        with pytest.raises(ValueError, match="in the midst of it"):
            model[3:](hidden).square().mean().backward()
        handle.remove()
        loss_of(model).backward()
        optimizer.step()
    assert noted(output) is None
    assert warnings_in(caplog) == []


def test_compiled_backwards_are_followed_as_far_as_an_engine_runs_them(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.05)
    compiled = torch.compile(model, backend="eager")
    with attached(output, model, optimizer, 2, **GRADIENTS):
        loss_of(compiled).backward()
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            loss_of(compiled).backward()
        optimizer.step()
    assert noted(output) is None
    assert warnings_in(caplog) == []


def test_a_model_may_be_converted_between_backward_and_the_step_where_torch_swaps_tensors(output: Output) -> None:
    """Torch refuses to swap a tensor that has a weak reference; it swaps gradients, too."""
    model = nn.Linear(4, 3)
    optimizer = SGD(model.parameters(), lr=0.1)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with attached(output, model, optimizer, 2, wg_distribution=True, run_numbers=True, ops=["norm"], ndigits=17):
            for dtype in (torch.float32, torch.float64):
                model.to(dtype)(torch.ones(2, 4, dtype=dtype)).square().sum().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            model.float()
            norm = model.weight.grad.norm().item()
            optimizer.step()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert {row.name: row.values["norm"] for row in output.rows("grad_reduced")}["weight"] == pytest.approx(norm, rel=1e-6)
