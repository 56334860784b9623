"""Activation checkpointing, both kinds: a recomputed forward is not a second one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from observing import Observed, Residual, backward, observed, seeded
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from watching import Output

Run = Callable[..., Tensor]

KINDS: dict[str, Run] = {
    "reentrant": partial(checkpoint, use_reentrant=True),
    "non-reentrant": partial(checkpoint, use_reentrant=False),
}
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
both_kinds = pytest.mark.parametrize("segment", KINDS.values(), ids=KINDS)


def plainly(call: Callable[..., Tensor], *args: Any) -> Tensor:
    return call(*args)


def leaf(scale: float = 1.0) -> Tensor:
    x = scale * torch.sin(torch.arange(12, dtype=torch.float64) * 1.7 + 0.3).view(3, 4)
    return x.requires_grad_()


class Stack(nn.Module):
    """Blocks, each of them one segment."""

    def __init__(self, segment: Run, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(blocks))
        self.segment = segment

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.segment(block, x)
        return x


class Shared(nn.Module):
    """Segments that call one module again and again, also outside of any segment."""

    def __init__(self, segment: Run) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.segment = segment

    def twice(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.segment(self.twice, x)
        x = torch.sin(self.layer(x))
        return self.segment(self.twice, self.segment(self.twice, x))


class Nested(nn.Module):
    """Segments within a segment, and calls before, between and after them."""

    def __init__(self, segment: Run, segment_within: Run | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.segment = segment
        self.segment_within = segment_within or segment

    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))

    def outer(self, x: Tensor) -> Tensor:
        x = self.segment_within(self.inner, self.layer(x))
        x = self.layer(x) + self.segment_within(self.inner, x)
        return self.layer(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.segment(self.outer, self.segment(self.outer, x))


class EndsInSegment(Nested):
    """What the outer segment saved is asked for by the inner one first."""

    def outer(self, x: Tensor) -> Tensor:
        return self.segment_within(self.inner, torch.sin(self.layer(x)))


class WithoutGradientsBetween(nn.Module):
    """The module of a segment is also called where nothing will be recomputed, before and after."""

    def __init__(self, segment: Run) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.segment = segment

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            before = self.layer(x)
        x = self.segment(self.layer, x + before)
        with torch.no_grad():
            after = self.layer(x)
        return self.segment(self.layer, x * after)


class OneOfTwo(nn.Module):
    """A segment returns two tensors, of which one has no gradient."""

    def __init__(self, segment: Run) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.segment = segment

    def pair(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), self.layer(x.detach()).detach()

    def forward(self, x: Tensor) -> Tensor:
        first, constant = self.segment(self.pair, x)
        return first * constant


MODELS = {one.__name__: one for one in (Stack, Shared, Nested, EndsInSegment, WithoutGradientsBetween, OneOfTwo)}


def rows(found: Observed, kind: str) -> dict[tuple[str, int | None], Any]:
    """Every row, which fails if one stands twice."""
    by_place = {(row.name, row.micro_step): row.values for row in found.rows(kind)}
    assert len(by_place) == len(found.rows(kind))
    return by_place


def assert_same_rows(found: Observed, expected: Observed) -> None:
    for kind in ("actv", "actv_grad"):
        assert rows(found, kind).keys() == rows(expected, kind).keys()
        for place, values in rows(expected, kind).items():
            assert rows(found, kind)[place] == pytest.approx(values, rel=1e-12, abs=1e-15)


@both_kinds
@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_rows_are_those_of_the_model_without_checkpointing(
    build: Callable[[Run], nn.Module], segment: Run, output: Output
) -> None:
    model, twin = seeded(lambda: build(segment)), seeded(lambda: build(plainly))

    def accumulate(model: nn.Module) -> None:
        backward(model(leaf()))
        backward(model(leaf(2.0)))

    found = observed(output, model, lambda: accumulate(model), grad_acc_steps=2)

    assert_same_rows(found, observed(output, twin, lambda: accumulate(twin), grad_acc_steps=2))


@both_kinds
@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_recomputation_has_the_micro_step_of_its_forward(
    build: Callable[[Run], nn.Module], segment: Run, output: Output
) -> None:
    """Forwards of two micro-batches before the first backward, and the later one's backward first."""
    model, twin = seeded(lambda: build(segment)), seeded(lambda: build(plainly))

    def interleave(model: nn.Module) -> None:
        first, second = model(leaf()), model(leaf(2.0))
        backward(second)
        third = model(leaf(3.0))
        backward(first)
        backward(third)

    found = observed(output, model, lambda: interleave(model), grad_acc_steps=3)

    assert_same_rows(found, observed(output, twin, lambda: interleave(twin), grad_acc_steps=3))


@both_kinds
def test_activations_are_recorded_in_forward_and_not_again_in_recomputation(segment: Run, output: Output) -> None:
    model = seeded(lambda: Stack(segment))
    calls: list[None] = []
    model.blocks[0].register_forward_pre_hook(lambda *_: calls.append(None))

    found = observed(output, model, lambda: backward(model(leaf())))

    assert len(calls) == 2
    assert found.names("actv").count("blocks.0.input") == 1
    assert found.names("actv_grad").count("blocks.0.input") == 1


@both_kinds
def test_a_module_in_segments_of_both_kinds_is_distinguished(segment: Run, output: Output) -> None:
    other = next(kind for kind in KINDS.values() if kind is not segment)

    class Mixed(nn.Module):
        def __init__(self, first: Run, second: Run) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.first, self.second = first, second

        def forward(self, x: Tensor) -> Tensor:
            for kind in (self.first, self.second, self.first):
                x = kind(lambda x: torch.tanh(self.layer(x)), x)
            return x

    model, twin = seeded(lambda: Mixed(segment, other)), seeded(lambda: Mixed(plainly, plainly))

    found = observed(output, model, lambda: backward(model(leaf())))

    assert_same_rows(found, observed(output, twin, lambda: backward(twin(leaf()))))


@both_kinds
@pytest.mark.parametrize("build", [Nested, EndsInSegment])
def test_one_kind_of_segment_within_the_other_is_distinguished(build: type[Nested], segment: Run, output: Output) -> None:
    other = next(kind for kind in KINDS.values() if kind is not segment)
    model, twin = seeded(lambda: build(segment, other)), seeded(lambda: build(plainly))

    found = observed(output, model, lambda: backward(model(leaf())))

    assert_same_rows(found, observed(output, twin, lambda: backward(twin(leaf()))))


def test_a_second_backward_through_a_segment_repeats_the_same_calls(output: Output) -> None:
    model = seeded(lambda: Shared(KINDS["reentrant"]))

    def run(*, twice: bool) -> None:
        result = model(leaf()).sum()
        result.backward(retain_graph=True)
        if twice:
            result.backward()

    expected = observed(output, model, lambda: run(twice=False))

    assert_same_rows(observed(output, model, lambda: run(twice=True)), expected)


class Reversible(torch.autograd.Function):
    """Runs a module without a graph and again in backward, as reversible networks do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            result = ctx.module(x)
        result.backward(gradient)
        return x.grad, None


def test_a_network_that_recomputes_by_itself_is_recorded_once(output: Output) -> None:
    model, twin = (seeded(lambda: Stack(plainly)) for _ in range(2))
    model.segment = lambda block, x: Reversible.apply(x, block)

    found = observed(output, model, lambda: backward(model(leaf())))

    assert_same_rows(found, observed(output, twin, lambda: backward(twin(leaf()))))


class CallsInBackward(torch.autograd.Function):
    """Uses a module in its backward, which is no repetition: its forward did not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        train_in_backward(ctx.module, gradient)
        return 2 * gradient, None


def train_in_backward(module: nn.Module, gradient: Tensor) -> None:
    with torch.enable_grad():
        for _ in range(2):
            module(gradient.detach().requires_grad_()).sum().backward()


class CallsInForward(torch.autograd.Function):
    """Uses a module in its forward, without gradients, as the first forward of a checkpoint does."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        result: Tensor = module(x)
        return result


def test_a_call_in_backward_that_repeats_none_is_not_recorded(output: Output) -> None:
    model = seeded(lambda: nn.ModuleList([nn.Linear(4, 4)]))

    def run() -> None:
        x = model[0](CallsInBackward.apply(leaf(), model[0]))
        CallsInForward.apply(x, model[0])
        backward(x)

    found = observed(output, model, run)

    assert found.names("actv") == ["0.input", "0.output", "0.input#1", "0.output#1"]
    assert found.names("actv_grad") == ["0.output", "0.input"]


def test_a_call_from_a_gradient_hook_repeats_none(output: Output) -> None:
    model = seeded(lambda: nn.ModuleList([nn.Linear(4, 4)]))

    def run() -> None:
        x = torch.sin(leaf())
        x.register_hook(partial(train_in_backward, model[0]))
        CallsInForward.apply(x, model[0])
        backward(x)

    found = observed(output, model, run)

    assert found.names("actv") == ["0.input", "0.output"]
    assert found.names("actv_grad") == []
