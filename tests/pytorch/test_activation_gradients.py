"""Gradients of activations: those that full module backward hooks give, without touching the graph."""

from __future__ import annotations

import dataclasses
import gc
import math
import weakref
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from observing import (
    ACTIVATIONS,
    BertBlock,
    Numbers,
    Residual,
    SelfAttention,
    Twice,
    Witness,
    backward,
    convolutions,
    observed,
    seeded,
    small_gpt,
    statistics,
    tokens,
)
from torch import Tensor, nn
from watching import Output, attached, warnings_in

from monitor.recording import gradient_edges

WIDE = torch.float64

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")


def values(*shape: int) -> Tensor:
    """Different in every element, and none of them special."""
    return torch.sin(torch.arange(math.prod(shape), dtype=WIDE) * 1.7 + 0.3).view(shape)


def leaf(*shape: int) -> Tensor:
    return values(*shape).requires_grad_()


# Where full module backward hooks work.


def by_full_backward_hooks(model: nn.Module, run: Callable[[], object]) -> Numbers:
    """What ``register_full_backward_hook`` is given, under the names that rows have."""
    seen: defaultdict[str, list[tuple[Any, Any]]] = defaultdict(list)

    def hook(name: str, _module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        seen[name].append((grad_input, grad_output))

    handles = [module.register_full_backward_hook(partial(hook, name)) for name, module in model.named_modules()]
    run()
    for handle in handles:
        handle.remove()
    found: Numbers = {}
    for name, calls in seen.items():
        for call, sides in enumerate(reversed(calls)):
            for side, gradients in zip(("input", "output"), sides, strict=True):
                for place, gradient in enumerate(gradients):
                    slot = f"{name}.{side}" + (f"_{place}" if len(gradients) > 1 else "") + (f"#{call}" if call else "")
                    found |= {} if gradient is None else statistics(slot, gradient)
    return found


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 4)
        self.join = nn.Bilinear(4, 4, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.join(self.left(a), b)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "residual": (lambda: nn.Sequential(Residual(), Residual()), lambda: (values(3, 4),)),
    "bert": (lambda: nn.Sequential(BertBlock(), BertBlock()), lambda: (leaf(3, 4),)),
    "gpt": (small_gpt, lambda: (tokens(),)),
    "convolutions": (convolutions, lambda: (leaf(2, 2, 4, 4),)),
    "called twice": (Twice, lambda: (leaf(3, 4),)),
    "two inputs": (TwoInputs, lambda: (leaf(3, 4), leaf(3, 4))),
    "frozen first layer": (
        lambda: nn.Sequential(nn.Linear(4, 4).requires_grad_(requires_grad=False), nn.ReLU(), nn.Linear(4, 4)),
        lambda: (values(3, 4),),
    ),
}


@pytest.mark.parametrize(("build", "inputs"), MODELS.values(), ids=MODELS)
def test_gradients_are_those_of_full_backward_hooks(build, inputs, output: Output) -> None:
    model, reference = seeded(build), seeded(build)

    expected = by_full_backward_hooks(reference, lambda: backward(reference(*inputs())))
    found = observed(output, model, lambda: backward(model(*inputs())))

    assert found.numbers("actv_grad") == pytest.approx(without_given_back(model, expected), rel=1e-9, abs=1e-14)
    assert len(expected) > 0


def without_given_back(model: nn.Module, expected: Numbers) -> Numbers:
    """A dropout that drops nothing gives its input back: nothing of that input's gradient comes through it."""
    idle = {f"{name}.input" for name, module in model.named_modules() if isinstance(module, nn.Dropout) and module.p == 0}
    return {(name, op): value for (name, op), value in expected.items() if name not in idle}


# What a module hands back to an input is its own part, not the sum over all who use that tensor.


def test_a_residual_is_not_counted_into_the_module_beside_it(output: Output) -> None:
    block = seeded(Residual)
    direct, through_norm = leaf(3, 4), leaf(3, 4)
    backward(direct + block.mlp(block.norm(through_norm)))

    found = observed(output, block, lambda: backward(block(leaf(3, 4)))).numbers("actv_grad")

    expected = statistics("norm.input", through_norm.grad) | statistics(".input", direct.grad + through_norm.grad)
    assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-12)


def test_each_consumer_of_a_tensor_hands_back_its_own_part(output: Output) -> None:
    attention = seeded(SelfAttention)
    q, kv, gate = leaf(3, 4), leaf(3, 4), leaf(3, 4)
    k, v = attention.kv(kv).chunk(2, dim=-1)
    scores = torch.softmax(attention.q(q) @ k.transpose(-1, -2), dim=-1)
    backward(scores @ v * torch.sigmoid(attention.gate(gate)))

    found = observed(output, attention, lambda: backward(attention(leaf(3, 4)))).numbers("actv_grad")

    expected = statistics("q.input", q.grad) | statistics("kv.input", kv.grad) | statistics("gate.input", gate.grad)
    expected |= statistics(".input", q.grad + kv.grad + gate.grad)
    assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-12)


class AddsStored(nn.Module):
    """x plus what somebody else made of x."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.stored


def test_what_was_computed_before_the_call_is_not_counted_into_it(output: Output) -> None:
    module, direct, elsewhere = AddsStored(), leaf(3, 4), leaf(3, 4)
    backward(direct + torch.tanh(elsewhere))

    def run() -> None:
        x = leaf(3, 4)
        module.stored = torch.tanh(x)
        backward(module(x))

    found = observed(output, module, run).numbers("actv_grad")

    expected = statistics(".input", direct.grad)
    assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-12)


class PoisonedLeft(torch.autograd.Function):
    """a + b, whose backward hands NaN to ``a`` and what it should to ``b``."""

    @staticmethod
    def forward(_ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient * math.nan, gradient


class PoisonedResidual(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return PoisonedLeft.apply(x, self.mlp(self.norm(x)))


def test_a_nan_on_the_residual_alone_marks_no_module_that_did_not_produce_it(output: Output) -> None:
    model = seeded(lambda: nn.Sequential(Residual(), PoisonedResidual(), Residual()))

    found = observed(output, model, lambda: backward(model(leaf(3, 4))))

    marked = {row.name for row in found.rows("actv_grad") if row.values["nans"]}
    produced_it, got_it = {"1.input"}, {name for name in found.names("actv_grad") if name.startswith("0.")}
    assert marked == produced_it | got_it | {".input"}


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


class Fourfold(nn.Module):
    """Four edges into one input, two of them from one node."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + x) * torch.sin(x) + x


@pytest.mark.parametrize("module", [Square(), Fourfold()], ids=["twice", "four times"])
def test_an_input_used_several_times_within_a_module_gets_the_sum(module: nn.Module, output: Output) -> None:
    x = leaf(3, 4)
    backward(module(x))

    found = observed(output, module, lambda: backward(module(leaf(3, 4))))

    assert found.numbers("actv_grad") == pytest.approx(
        statistics(".input", x.grad) | statistics(".output", gradient_of_result(module, leaf(3, 4))), rel=1e-12
    )


def gradient_of_result(module: nn.Module, *inputs: Tensor) -> Tensor:
    result = module(*inputs)
    result.retain_grad()
    backward(result)
    return result.grad


class Outer(nn.Module):
    """``inner`` between two linear layers."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.inner = inner
        self.after = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.inner(self.before(x)))


def test_modules_that_work_in_place_are_observed(output: Output) -> None:
    """Full module backward hooks refuse these."""
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Hardtanh(inplace=True)))
    twin = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Hardtanh()))
    expected = by_full_backward_hooks(twin, lambda: backward(twin(values(3, 4))))

    found = observed(output, model, lambda: backward(model(values(3, 4))))

    assert found.numbers("actv_grad") == pytest.approx(expected, rel=1e-12)


class ChangesItsInput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x[:, :2].mul_(3)
        x.add_(1)
        return torch.tanh(x)


def test_an_input_that_the_module_changes_has_the_gradient_of_what_came_in(output: Output) -> None:
    model = seeded(lambda: Outer(ChangesItsInput()))
    scale = torch.tensor([3.0, 3.0, 1.0, 1.0], dtype=WIDE)
    x = model.before(values(3, 4)).detach().requires_grad_()
    backward(model.after(torch.tanh(x * scale + 1)))

    found = observed(output, model, lambda: backward(model(values(3, 4)))).numbers("actv_grad")

    expected = statistics("inner.input", x.grad) | statistics("before.output", x.grad)
    assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-12)


class Halves(nn.Module):
    """Views in, views out: chunks of a tensor go to two modules, and back in place."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ReLU(inplace=True)
        self.right = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        left, right = x[:, :2], x[:, 2:]
        return self.left(left), self.right(right)


class OfHalves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.halves = Halves()

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(self.halves(self.before(x)), dim=1)


def test_views_have_gradients_of_their_own(output: Output) -> None:
    model = seeded(OfHalves)
    whole = model.before(values(3, 4)).detach().requires_grad_()
    left, right = whole[:, :2].detach().requires_grad_(), whole[:, 2:].detach().requires_grad_()
    backward(torch.cat([torch.relu(left), model.halves.right(right)], dim=1))

    found = observed(output, model, lambda: backward(model(values(3, 4)))).numbers("actv_grad")

    both = torch.cat([left.grad, right.grad], dim=1)
    expected = statistics("halves.right.input", right.grad) | statistics("halves.input", both)
    expected |= statistics("before.output", both)
    assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-12)
    # What is changed in place is the whole tensor, of which the graph then knows no separate left half.
    assert ("halves.left.input", "norm") not in found


class Codebook(nn.Module):
    """Passes a view of its weight on that was made without a graph. It says that it requires a gradient, and gets none."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Linear(4, 4)
        self.distance = nn.Bilinear(4, 4, 4)
        self.same = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            codes = self.codes.weight[:3]
        return self.same(codes).sum() * self.distance(self.codes(x), codes)


def test_a_view_that_was_made_without_a_graph_leaves_other_inputs_their_rows(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    model = seeded(Codebook)
    first = model.codes(values(3, 4)).detach().requires_grad_()
    codes = model.codes.weight[:3].detach()
    backward(codes.sum() * model.distance(first, codes))

    found = observed(output, model, lambda: backward(model(values(3, 4)))).numbers("actv_grad")

    expected = statistics("distance.input_0", first.grad)
    assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-12)
    assert {name for name, _ in found if name.startswith(("distance.input", "same"))} == {"distance.input_0"}
    assert warnings_in(caplog) == []


# Inputs and outputs of every structure.


@dataclasses.dataclass
class Result:
    main: Tensor
    extras: dict[str, Any]


class Structured(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor], *, scale: Tensor, flag: bool = True) -> Result:
        del flag
        return Result(pair[0] * scale, {"sum": pair[0] + pair[1], "deep": [pair[1] * 2]})


def test_gradients_of_nested_and_keyword_tensors_are_recorded_under_their_names(output: Output) -> None:
    module = Structured()

    def run() -> tuple[Tensor, Tensor, Tensor]:
        a, b, scale = leaf(2), leaf(2), torch.full((2,), 3.0, dtype=WIDE, requires_grad=True)
        result = module((a, b), scale=scale)
        (result.main.sum() + 10 * result.extras["sum"].sum() + 100 * result.extras["deep"][0].sum()).backward()
        return a, b, scale

    a, b, scale = run()
    expected = statistics(".input_0_0", a.grad) | statistics(".input_0_1", b.grad) | statistics(".input_scale", scale.grad)
    for name, gradient in (("main", 1.0), ("extras_sum", 10.0), ("extras_deep_0", 100.0)):
        expected |= statistics(f".output_{name}", torch.full((2,), gradient))
    assert observed(output, module, run).numbers("actv_grad") == pytest.approx(expected)


class PartlyUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, unused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.layer(x), torch.sin(x), unused.detach()


def test_what_no_gradient_reaches_has_no_row(output: Output) -> None:
    model = seeded(PartlyUsed)

    found = observed(output, model, lambda: backward(model(leaf(3, 4), leaf(3, 4))[0]))

    assert sorted(found.names("actv_grad")) == [".input_0", ".output_0", "layer.input", "layer.output"]


class PassesNone(torch.autograd.Function):
    """Hands its backward None for a result that nothing uses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(_ctx: Any, first: Tensor | None, second: Tensor | None) -> Any:
        parts = [gradient * n for gradient, n in ((first, 2), (second, 3)) if gradient is not None]
        return sum(parts[1:], parts[0])


class HalfUsed(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return PassesNone.apply(x)


def test_a_gradient_of_none_has_no_row_and_is_no_failure(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(4, 4, dtype=WIDE), HalfUsed())

    found = observed(output, model, lambda: model(values(3, 4))[0].sum().backward())

    assert {name for name in found.names("actv_grad") if name.startswith("1.")} == {"1.input", "1.output_0"}
    assert "failed" not in caplog.text


# Every way of running a backward.


def test_a_second_backward_over_the_same_graph_leaves_its_own_gradients(output: Output) -> None:
    model = seeded(lambda: nn.Sequential(Fourfold(), nn.Linear(4, 4)))

    def run(last: float) -> None:
        result = model(leaf(3, 4)).sum()
        result.backward(torch.tensor(1.0, dtype=WIDE), retain_graph=True)
        result.backward(torch.tensor(last, dtype=WIDE))

    once = observed(output, model, lambda: run(1.0)).norms("actv_grad")
    twice = observed(output, model, lambda: run(3.0)).norms("actv_grad")

    assert twice == pytest.approx({name: 3 * norm for name, norm in once.items()}, rel=1e-12)


def test_autograd_grad_is_observed_like_backward(output: Output) -> None:
    model = seeded(lambda: nn.Sequential(Fourfold(), nn.Linear(4, 4)))
    expected = observed(output, model, lambda: model(leaf(3, 4)).sum().backward()).numbers("actv_grad")

    found = observed(output, model, lambda: torch.autograd.grad(model(x := leaf(3, 4)).sum(), x)).numbers("actv_grad")

    assert found == expected


class TwoPaths(nn.Module):
    """One of the edges into the input lies before the weight, the other one behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=WIDE))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x) * self.weight + x


def test_a_backward_that_ends_halfway_leaves_nothing_to_the_next(output: Output) -> None:
    """Of the edges into an input only some ran in the first pass; their part is not of the second."""
    model = TwoPaths()

    def run(*, halfway: bool) -> None:
        result = model(leaf(3, 4)).sum()
        if halfway:
            torch.autograd.grad(result, model.weight, retain_graph=True)
        result.backward()

    expected = observed(output, model, lambda: run(halfway=False)).numbers("actv_grad")
    assert observed(output, model, lambda: run(halfway=True)).numbers("actv_grad") == expected


def test_a_gradient_of_a_gradient_is_undisturbed(output: Output) -> None:
    """The penalty of a gradient's norm: its graph is built by a backward, which is observed."""

    def penalty(model: nn.Module) -> Tensor:
        x = leaf(3, 4)
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        gradient.square().sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), Fourfold(), nn.Tanh(), nn.Linear(4, 1))

    expected = penalty(seeded(build))
    found: list[Tensor] = []
    model = seeded(build)
    rows = observed(output, model, lambda: found.append(penalty(model)))

    assert torch.equal(found[0], expected)
    assert {".input", "1.input", "1.output", "3.output"} <= set(rows.names("actv_grad"))


def test_a_backward_that_is_never_run_has_no_rows(output: Output) -> None:
    model = seeded(Residual)

    found = observed(output, model, lambda: model(leaf(3, 4)))

    assert found.rows("actv_grad") == []
    assert found.names("actv")[-1] == ".output"


def test_a_backward_after_its_step_is_not_recorded_in_the_next_one(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    model = seeded(lambda: nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(output, model, optimizer, **ACTIVATIONS):
        late = model(values(3, 4)).sum()
        optimizer.step()
        late.backward()
        model(2 * values(3, 4))
        optimizer.step()

    assert output.rows("actv_grad") == []
    assert "after its optimizer step" in caplog.text


# What is left behind.


class GivesNone(torch.autograd.Function):
    """Uses its first input, and has a gradient for the second alone."""

    @staticmethod
    def forward(_context: Any, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    @staticmethod
    def backward(_context: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient


class TakesNone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return GivesNone.apply(self.left(x), self.right(x))


def test_a_result_that_gets_no_gradient_from_its_only_user_has_no_row(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    model = seeded(TakesNone)

    found = observed(output, model, lambda: backward(model(leaf(3, 4)))).names("actv_grad")

    assert sorted(found) == [".input", ".output", "right.input", "right.output"]
    assert not warnings_in(caplog)


class WithBias(nn.Module):
    """A layer that leaves it to others to add its bias, as those of Megatron do, and who adds it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = ReturnsBias(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y, bias = self.layer(x)
        return y + bias


class ReturnsBias(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ self.weight, self.bias


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)], ids=["in order", "in reverse"])
@pytest.mark.parametrize("together", [True, False], ids=["after all forwards", "each after its forward"])
def test_a_parameter_that_is_a_result_has_the_gradient_of_each_micro_batch_in_its_own_row(
    output: Output, order: tuple[int, ...], together: bool
) -> None:
    model = seeded(WithBias)
    inputs = [(number + 1) * values(3, 4) for number in order]

    def run() -> None:
        results = [model(x) for x in inputs] if together else []
        for place, number in enumerate(order):
            backward(results[number] if together else model(inputs[place]))

    found = observed(output, model, run, grad_acc_steps=3).rows("actv_grad")

    expected = []
    for x in inputs:
        model.zero_grad()
        backward(model(x))
        expected.append(model.layer.bias.grad.norm().item())
    norms = {row.micro_step: row.values["norm"] for row in found if row.name == "layer.output_1"}
    assert norms == pytest.approx(dict(enumerate(expected)))


def hook_count(tensor: Tensor) -> int:
    return len(tensor._backward_hooks or ())


def test_hooks_on_leaves_are_gone_after_the_step(output: Output) -> None:
    class ReturnsItsWeight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, dtype=WIDE))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * self.weight, self.weight

    model, kept = ReturnsItsWeight(), leaf(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(output, model, optimizer, **ACTIVATIONS):
        counts = []
        for _ in range(3):
            result, weight = model(kept)
            (result.sum() + weight.sum()).backward()
            during = hook_count(model.weight)
            optimizer.step()
            counts.append((during, hook_count(model.weight), hook_count(kept)))

    assert counts == [(1, 0, 0)] * 3


def test_a_graph_that_outlives_its_steps_gathers_no_hooks(output: Output) -> None:
    """A precomputed tensor, with a graph of its own, that goes into every step."""
    model = nn.Sequential(nn.Identity(), Fourfold())
    weight = leaf(3, 4)
    kept = weight * 2
    optimizer = torch.optim.SGD([weight], lr=0.0)
    counts: list[tuple[int, int]] = []
    with attached(output, model, optimizer, **ACTIVATIONS) as monitor:
        for _ in range(4):
            model(kept).sum().backward(retain_graph=True)
            optimizer.step()
            run = monitor._recordings[0].run
            assert run is not None
            run.pipeline.flush(30.0)  # a tuple that the writer is making must not be looked at: it could not be finished
            counts.append((hook_count(kept), living(gradient_edges._EdgeSum)))

    assert counts == [(0, 0)] * 4
    assert [row.step for row in output.rows("actv_grad") if row.name == "1.input"] == [0, 1, 2, 3]


def living(wanted: type) -> int:
    return sum(issubclass(type(one), wanted) for one in gc.get_objects())


def tensors_after_each_step(build: Callable[[], nn.Module], output: Output | None) -> list[int]:
    """How many tensors Python holds after each of three steps, without the help of the collector."""
    model = seeded(build)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = None if output is None else attached(output, model, optimizer, **ACTIVATIONS)
    gc.collect()
    gc.freeze()  # what was there before is not looked through
    gc.disable()
    try:
        counts = []
        for _ in range(3):
            backward(model(leaf(3, 4)))
            optimizer.step()
            optimizer.zero_grad()
            counts.append(living(Tensor))
    finally:
        gc.enable()
        gc.unfreeze()
    if monitor is not None:
        monitor.close()
    return counts


@pytest.mark.parametrize("build", [lambda: nn.Sequential(BertBlock(), BertBlock()), lambda: Outer(Fourfold())])
def test_activations_are_freed_as_soon_as_without_a_monitor(build, output: Output) -> None:
    unmonitored = tensors_after_each_step(build, None)
    first, *later = tensors_after_each_step(build, output)

    # The monitor holds a few tensors of its own: they are there after the first step and never grow.
    assert later == [first] * 2
    assert unmonitored[1:] == unmonitored[:1] * 2


@pytest.mark.parametrize("run_backward", [True, False])
def test_graphs_die_with_their_loss(run_backward: bool, output: Output) -> None:
    """Nothing keeps a node alive, and no cycle waits for the collector."""
    model = seeded(lambda: nn.Sequential(Outer(Fourfold()), BertBlock()))
    nodes: list[weakref.ref[Witness]] = []
    for module in model.modules():
        module.register_forward_hook(lambda *call: nodes.append(Witness.of(call[-1])))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(output, model, optimizer, **ACTIVATIONS):
        gc.collect()
        gc.disable()
        try:
            loss = model(leaf(3, 4)).sum()
            assert all(node() is not None for node in nodes)
            if run_backward:
                loss.backward()
            del loss
            assert [node() for node in nodes] == [None] * len(list(model.modules()))
        finally:
            gc.enable()
