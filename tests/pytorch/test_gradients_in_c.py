"""After the first gradient of an ordinary backward the code in C reads the others. Rows, notes and bits are those of Python."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from watching import Output, attached
from ways import IN_PYTHON, WAYS, use

from monitor.pytorch.fast_path import IN_C
from monitor.pytorch.gradients import TorchGradients

pytestmark = pytest.mark.skipif(not IN_C, reason="the code in C was not built, or this torch has no exchange of tensors")

LAYERS = 4
STEPS = 4
X = torch.linspace(-1, 1, 12).view(3, 4)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(LAYERS)))


def plain(model: nn.Sequential, optimizers: list[Any]) -> None:
    model(X).square().sum().backward()
    optimizers[0].step()
    optimizers[0].zero_grad()


def twice(model: nn.Sequential, optimizers: list[Any]) -> None:
    """Two losses, each with a backward of its own."""
    y = model(X)
    y.square().sum().backward(retain_graph=True)
    y.abs().sum().backward()
    optimizers[0].step()
    optimizers[0].zero_grad()


def repeated(model: nn.Sequential, optimizers: list[Any]) -> None:
    """Backwards within a backward."""
    x = X.clone().requires_grad_()
    y = checkpoint(model[:2], x, use_reentrant=True)
    checkpoint(model[2:], y, use_reentrant=True).square().sum().backward()
    optimizers[0].step()
    optimizers[0].zero_grad()


def raising(model: nn.Sequential, optimizers: list[Any]) -> None:
    """The loop goes on after a backward that raised half way."""

    def refuse(_: Any) -> None:
        raise ZeroDivisionError

    handle = model[1].weight.register_hook(refuse)
    with pytest.raises(ZeroDivisionError):
        model(X).sum().backward()
    handle.remove()
    optimizers[0].zero_grad()
    plain(model, optimizers)


def thawing(model: nn.Sequential, optimizers: list[Any]) -> None:
    """A layer is frozen in every second step."""
    model[2].requires_grad_(not model[2].weight.requires_grad)
    plain(model, optimizers)


def alternating(model: nn.Sequential, optimizers: list[Any]) -> None:
    """The second optimizer steps between two backwards of one step."""
    model(X).square().sum().backward()
    optimizers[1].step()
    model(X).sum().backward()
    optimizers[0].step()
    model.zero_grad()


def within(model: nn.Sequential, optimizers: list[Any]) -> None:
    """The optimizer of each parameter steps within the backward, which goes on and reaches shared ones again."""
    handles = []
    for p, optimizer in zip(reversed([*model.parameters()]), optimizers, strict=True):

        def step(_: Tensor, optimizer: Any = optimizer) -> None:
            optimizer.step()

        handles.append(p.register_post_accumulate_grad_hook(step))
    model(X).square().sum().backward()
    model.zero_grad()
    for handle in handles:
        handle.remove()


def clearing(model: nn.Sequential, optimizers: list[Any]) -> None:
    """A hook of the loop takes gradients away, and changes others in place."""

    def take_away(p: Tensor) -> None:
        p.grad = None

    def change(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(2)

    handles = [model[0].weight.register_post_accumulate_grad_hook(take_away)]
    handles.append(model[3].weight.register_post_accumulate_grad_hook(change))
    plain(model, optimizers)
    for handle in handles:
        handle.remove()


def accumulating(model: nn.Sequential, optimizers: list[Any]) -> None:
    for part in X.split(1):
        model(part).square().sum().backward()
    optimizers[0].step()
    optimizers[0].zero_grad()


def one(model: nn.Sequential) -> list[Any]:
    return [torch.optim.SGD(model.parameters(), 0.01)]


def two(model: nn.Sequential) -> list[Any]:
    return [torch.optim.SGD(model[:2].parameters(), 0.01), torch.optim.SGD(model[2:].parameters(), 0.01)]


def of_each(model: nn.Sequential) -> list[Any]:
    return [torch.optim.SGD([p], 0.01) for p in reversed([*model.parameters()])]


LOOPS: dict[str, tuple[Callable[..., None], Callable[..., list[Any]], dict[str, Any]]] = {
    "plain": (plain, one, {}),
    "two backwards": (twice, one, {}),
    "backwards within a backward": (repeated, one, {}),
    "a backward that raises": (raising, one, {}),
    "frozen in every second step": (thawing, one, {}),
    "two optimizers": (alternating, two, {}),
    "steps within the backward": (within, of_each, {}),
    "hooks of the loop": (clearing, one, {}),
    "three micro-steps": (accumulating, one, {"grad_acc_steps": 3}),
    "each micro-step": (accumulating, one, {"grad_acc_steps": 3, "monitor_mbs_grad": True}),
    "few steps": (plain, one, {"step_interval": 2}),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_every_loop_has_the_same_rows_and_bits_in_both_ways(loop: str, output: Output) -> None:
    step, optimizers_of, config = LOOPS[loop]
    found = {}
    for way in WAYS:
        with pytest.MonkeyPatch.context() as patch:
            use(way, patch)
            model = layers()
            optimizers = optimizers_of(model)
            with attached(output, model, optimizers, wg_distribution=True, ops=["norm", "mean"], ndigits=17, **config):
                for _ in range(STEPS):
                    step(model, optimizers)
            directory = output.directories()[-1]
            rows = [output.rows(kind, directory) for kind in ("grad_unreduced", "grad_reduced")]
            found[way] = repr(rows), [p.tolist() for p in model.parameters()]
        assert all(rows)
    assert found["in C"] == found[IN_PYTHON]
    model = layers()
    optimizers = optimizers_of(model)
    for _ in range(STEPS):
        step(model, optimizers)
    assert found["in C"][1] == [p.tolist() for p in model.parameters()]


@pytest.mark.parametrize(("way", "of_each_step"), [(WAYS[0], 1), (IN_PYTHON, 2 * LAYERS)])
def test_python_sees_the_first_gradient_of_a_backward_or_all_without_c(
    output: Output, monkeypatch: pytest.MonkeyPatch, way: str, of_each_step: int
) -> None:
    use(way, monkeypatch)
    seen: list[int] = []
    found = TorchGradients.found

    def counted(gradients: TorchGradients, *given: Any) -> None:
        seen[-1] += 1
        found(gradients, *given)

    monkeypatch.setattr(TorchGradients, "found", counted)
    model = layers()
    optimizers = one(model)
    with attached(output, model, optimizers, wg_distribution=True, ops=["norm"]):
        for _ in range(STEPS):
            seen.append(0)
            plain(model, optimizers)
    assert seen == [2 * LAYERS] + [of_each_step] * (STEPS - 1)  # the first step makes the rows
    rows = output.rows("grad_unreduced")
    assert [row.step for row in rows] == sorted([*range(STEPS)] * 2 * LAYERS)
    assert all(before.values["norm"] != after.values["norm"] for before, after in pairwise(rows) if before.name == after.name)


@pytest.mark.parametrize("closed", [True, False])
def test_hooks_keep_neither_the_model_nor_the_monitor(output: Output, closed: bool) -> None:
    model = layers()
    optimizers = one(model)
    monitor = attached(output, model, optimizers, wg_distribution=True, ops=["norm"])
    for _ in range(STEPS):
        plain(model, optimizers)
    known = [weakref.ref(one) for one in (model, model[0].weight, optimizers[0], monitor)]
    if closed:
        monitor.close()
    del model, optimizers, monitor
    gc.collect()
    assert [ref() for ref in known] == [None] * 4
