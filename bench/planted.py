"""Changes planted in a training, and the places where a comparison should find them first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from layouts import LAYOUTS
from torch import Tensor, nn
from torch.distributed.tensor import Partial
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from trained import Plant, Training, local

UP, DOWN, NORM = "layers.1.mlp.up.weight", "layers.2.mlp.down.weight", "layers.1.mlp_norm.weight"


@dataclass(frozen=True, slots=True)
class Change:
    """A change in one layout, and where it is expected.

    Attributes:
        expected: Steps, kinds and names, such as ``3 grad_reduced/embed.weight``, of which one is found first.
        variant: The training that is changed: a key of ``VARIANTS``, or empty.
        source: The address of the public thread in which the change was a fault.
        near: Other places that are found first, for a reason that the catalogue gives.
    """

    name: str
    layout: str
    plant: Plant
    expected: tuple[str, ...]
    tied: bool = False
    variant: str = ""
    source: str = ""
    near: tuple[str, ...] = ()


# --- Changes of modules.


def epsilon(layer: int, t: Training) -> None:
    t.modules[f"layers.{layer}.mlp_norm"].eps = 1e-3


def activation(made: Callable[[], nn.Module], t: Training) -> None:
    t.modules["layers.1.mlp"].act = made()


def unmasked(t: Training) -> None:
    t.modules["layers.1.attention"].causal = False


def scaled_attention(t: Training) -> None:
    t.modules["layers.1.attention"].scale *= 1.01


def rounded(name: str, t: Training) -> None:
    t.modules[name].register_forward_hook(lambda _module, _args, result: result.bfloat16().to(result.dtype))


def dropped_out(name: str, t: Training) -> None:
    t.modules[name].register_forward_hook(lambda _module, _args, result: F.dropout(result, 0.01))


def seeded_dropout(name: str, t: Training) -> None:
    torch.manual_seed(t.rank + 1)
    dropped_out(name, t)


def rotary(name: str, value: Any, t: Training) -> None:
    for module in (module for each, module in t.modules.items() if each.endswith("rotary")):
        setattr(module, name, value)


def rotary_of_one(name: str, value: Any, t: Training) -> None:
    setattr(t.modules["layers.1.attention.rotary"], name, value)


def skipped(layer: int, t: Training) -> None:
    t.modules[f"layers.{layer}"].skipped = True


def no_residual(t: Training) -> None:
    t.modules["layers.1"].kept = 0.0


def scaled_residual(t: Training) -> None:
    t.modules["layers.2"].kept = 0.99


def swapped(t: Training) -> None:
    weights = [t.parameter(f"layers.{layer}.mlp.up.weight").data for layer in (1, 2)]
    weights[0][:], weights[1][:] = weights[1].clone(), weights[0].clone()


def scaled_row(t: Training) -> None:
    t.parameter("layers.1.attention.o.weight").data[0] *= 1.5


def untied(t: Training) -> None:
    t.modules["head"].weight = nn.Parameter(t.modules["head"].weight.detach().clone())


# --- Changes of the optimizer.


def rates(t: Training, **changed: Any) -> None:
    t.rates |= changed


def rate_of_one(t: Training) -> None:
    t.groups["head.weight"] = {"lr": 1.01e-3}


# --- Changes of data and loss.


def repeated(t: Training) -> None:
    tokens = t.tokens
    t.tokens = lambda step, part: tokens(step, 0 if step == 3 else part)


def other_tokens(t: Training) -> None:
    tokens = t.tokens
    t.tokens = lambda step, part: (tokens(step, part) + (step == 3)) % 64


def of_rank_0(t: Training) -> None:
    t.place = 0


def weighed(factor: float, t: Training, step: int | None = None, part: int | None = None) -> None:
    """Multiply the loss, in all steps and micro-batches or in one."""
    t.weigh = lambda loss, at, each: loss * (factor if step in (None, at) and part in (None, each) else 1)


def shifted(t: Training) -> None:
    t.shift = 0


# --- Changes in the middle of the run.


def reset(state: str, names: Sequence[str], step: int, t: Training) -> None:
    """Set moments to 0, of the given parameters or of all."""

    def event() -> None:
        for name, one in t.parameters().items():
            if not names or name in names:
                local(t.optimizer.state[one][state]).zero_()

    t.at["begins", step].append(event)


def scaled(name: str, factor: float, step: int, t: Training, grad: bool = False) -> None:
    """Multiply a weight as a step begins, or a gradient before the optimizer steps."""

    def event() -> None:
        if name in t.parameters():
            one = t.parameter(name)
            local(one.grad if grad else one.detach()).mul_(factor)

    t.at["reduced" if grad else "begins", step].append(event)


def flipped(name: str, t: Training, grad: bool = False) -> None:
    """Flip a bit of an element's exponent, in step 2."""

    def event() -> None:
        one = t.parameter(name)
        first = local(one.grad if grad else one.detach()).view(-1)[:1]
        whole, bit = (torch.int64, 54) if one.dtype == torch.float64 else (torch.int32, 25)
        first.view(whole).bitwise_xor_(1 << bit)

    t.at["reduced" if grad else "begins", 2].append(event)


def clipped(t: Training) -> None:
    """Clip by the norm of what this rank has."""

    def event() -> None:
        own = [local(one.grad) for one in t.parameters().values()]
        norm = torch.stack([one.square().sum() for one in own]).sum().sqrt()
        for one in own:
            one.mul_(0.1 / norm)

    t.at["reduced", 2].append(event)


def stale(t: Training) -> None:
    """Step 3 uses the weights that step 2 used."""
    kept: dict[str, Tensor] = {}

    def keep() -> None:
        kept.update({name: local(one.detach()).clone() for name, one in t.parameters().items()})

    def restore() -> None:
        for name, one in t.parameters().items():
            local(one.detach()).copy_(kept[name])

    t.at["begins", 2].append(keep)
    t.at["begins", 3].append(restore)


def own_half(name: str, t: Training) -> None:
    """Each rank's gradient of a norm is that of half of the positions, as under sequence parallelism without a reduction."""
    norm, place = t.modules[name], t.rank

    def forward(x: Tensor) -> Tensor:
        weights = [norm.weight if half == place else norm.weight.detach() for half in range(2)]
        halves = zip(x.chunk(2, 1), weights, strict=True)
        return torch.cat([F.rms_norm(half, (x.shape[-1],), weight, norm.eps) for half, weight in halves], 1)

    norm.forward = forward


# --- Changes of what a layout does.


def ignored(t: Training) -> None:
    ignore: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model  # torch has no public way
    ignore(t.model, [UP])


def averaged(t: Training, divided_by: float = 2, dtype: torch.dtype | None = None) -> None:
    """Another way to average gradients under DistributedDataParallel."""

    def reduced(bucket: Any) -> Any:
        sent = bucket.buffer() if dtype is None else bucket.buffer().to(dtype)
        future = dist.all_reduce(sent, async_op=True).get_future()
        return future.then(lambda done: done.value()[0].to(bucket.buffer().dtype) / divided_by)

    t.built.append(lambda model: model.register_comm_hook(None, lambda _state, bucket: reduced(bucket)))


def not_reduced(t: Training) -> None:
    """Step 2 ends without a reduction."""
    usual = t.reduces
    t.reduces = lambda step, part: step != 2 and usual(step, part)


def divided(name: str, factor: float, t: Training) -> None:
    """A wrong divisor of the reduce-scatter of a module."""

    def change(_model: object) -> None:
        t.modules[name].set_force_sum_reduction_for_comms(True)  # gloo has no other sum with a factor
        t.modules[name].set_gradient_divide_factor(factor)

    t.built.append(change)


def partial_output(name: str, t: Training) -> None:
    t.plan = {**t.plan, name: RowwiseParallel(output_layouts=Partial())}


def layers(own: Sequence[int], t: Training) -> None:
    """The last stage has these layers."""
    usual = t.layers_of
    t.layers_of = lambda stage: own if stage == 1 else usual(stage)


def on_rank(rank: int, plant: Plant) -> Plant:
    return lambda t: plant(t) if t.rank == rank else None


# --- The catalogue.

ATTENTION = ("0 actv/layers.1.attention.o.input",)
EMBED = ("actv/.input", "actv/embed.input", "actv/embed.output")
ROTARY = ("actv/layers.{}.attention.rotary.output_0", "actv/layers.{}.attention.rotary.output_1")


def at(step: int, *names: str) -> tuple[str, ...]:
    return tuple(f"{step} {name}" for name in names)


def rotary_at(layer: int) -> tuple[str, ...]:
    return at(0, *(name.format(layer) for name in ROTARY))


RATE = at(0, "run/learning_rate.0")
NORM_1 = at(0, "actv/layers.1.mlp_norm.output")
ACT = at(0, "actv/layers.1.mlp.act.output")
LOGITS = ("actv_grad/head.output", "actv_grad/.output")

SINGLE: dict[str, tuple[Plant, tuple[str, ...]]] = {
    "epsilon of a norm": (partial(epsilon, 1), NORM_1),
    "GELU for SiLU": (partial(activation, nn.GELU), ACT),
    "hard swish for SiLU": (partial(activation, nn.Hardswish), ACT),
    "no mask": (unmasked, ATTENTION),
    "scale of attention": (scaled_attention, ATTENTION),
    "two swapped weights": (swapped, at(0, f"param_origin/{UP}")),
    "scaled row of a weight": (scaled_row, at(0, "param_origin/layers.1.attention.o.weight")),
    "rate off by 1 %": (partial(rates, lr=1.01e-3), RATE),
    "rate of one weight": (rate_of_one, at(0, "param_updated/head.weight", "run/learning_rate.1")),
    "first beta": (partial(rates, betas=(0.8, 0.999)), at(1, "exp_avg/embed.weight")),
    "second beta": (partial(rates, betas=(0.9, 0.99)), at(1, "exp_avg_sq/embed.weight")),
    "epsilon of Adam": (partial(rates, eps=1e-4), at(0, "param_updated/embed.weight")),
    "weight decay": (partial(rates, weight_decay=0.1), at(0, "param_updated/embed.weight")),
    "dropped micro-batch": (partial(weighed, 0.0, step=3, part=1), at(3, *LOGITS)),
    "repeated micro-batch": (repeated, at(3, *EMBED)),
    "lost loss scale": (partial(weighed, 2.0, step=3), at(3, *LOGITS)),
    "sum for mean": (partial(weighed, 96.0), at(0, *LOGITS)),
    "targets not shifted": (shifted, at(0, *LOGITS)),
    "all moments reset": (partial(reset, "exp_avg_sq", (), 4), at(4, "exp_avg_sq/embed.weight")),
    "one moment reset": (partial(reset, "exp_avg", (DOWN,), 3), at(3, f"exp_avg/{DOWN}")),
    "cast in a layer": (partial(rounded, "layers.1.mlp.down"), at(0, "actv/layers.1.mlp.down.output")),
    "rotary in bfloat16": (partial(rotary, "dtype", torch.bfloat16), rotary_at(0)),
    "base of the rotary": (partial(rotary, "base", 500.0), rotary_at(0)),
    "skipped layer": (partial(skipped, 2), at(0, "actv/layers.2.attention_norm.input")),
    "dropped residual": (no_residual, at(0, "actv/layers.1.mlp_norm.input")),
    "scaled residual": (scaled_residual, at(0, "actv/layers.2.mlp_norm.input")),
    "dropout left on": (partial(dropped_out, "layers.1.mlp.down"), at(0, "actv/layers.1.mlp.down.output")),
    "flipped bit of a weight": (partial(flipped, UP), at(2, f"param_origin/{UP}")),
    "flipped bit of a gradient": (partial(flipped, UP, grad=True), at(2, f"grad_reduced/{UP}")),
    "halved gradient": (partial(scaled, UP, 0.5, 3, grad=True), at(3, f"grad_reduced/{UP}")),
    "clipped": (clipped, at(2, "grad_reduced/embed.weight")),
    "stale weights": (stale, at(3, "param_origin/embed.weight")),
}

DDP: dict[str, tuple[Plant, tuple[str, ...]]] = {
    "epsilon of a norm": (partial(epsilon, 1), NORM_1),
    "one gradient not reduced": (ignored, at(0, f"grad_reduced/{UP}", f"param_updated/{UP}")),
    "divided twice": (partial(averaged, divided_by=4), at(0, "grad_reduced/embed.weight")),
    "sum for mean": (partial(averaged, divided_by=1), at(0, "grad_reduced/embed.weight")),
    "reduced in bfloat16": (partial(averaged, dtype=torch.bfloat16), at(0, "grad_reduced/embed.weight")),
    "step without reduction": (not_reduced, at(2, "grad_reduced/*")),
    "no mask on a rank": (on_rank(1, unmasked), ATTENTION),
    "dropped micro-batch on a rank": (on_rank(1, partial(weighed, 0.0, step=3, part=1)), at(3, *LOGITS)),
    "repeated micro-batch on a rank": (on_rank(1, repeated), at(3, *EMBED)),
    "data of rank 0": (of_rank_0, at(0, *EMBED)),
    "weight of a rank": (on_rank(1, partial(scaled, UP, 1.01, 2)), at(2, f"param_origin/{UP}", "actv/layers.1.mlp.up.output")),
    "moments of a rank reset": (
        on_rank(1, partial(reset, "exp_avg", (), 3)),
        (
            *at(3, "exp_avg/embed.weight", "param_updated/embed.weight"),
            *at(4, "param_origin/embed.weight", "actv/embed.output"),
        ),
    ),
    "rate of a rank": (
        on_rank(1, partial(rates, lr=1.1e-3)),
        (*RATE, *at(0, "param_updated/embed.weight"), *at(1, "param_origin/embed.weight", "actv/embed.output")),
    ),
    "gradient of a rank": (
        on_rank(1, partial(scaled, UP, -1.0, 3, grad=True)),
        (*at(3, f"grad_reduced/{UP}", f"param_updated/{UP}"), *at(4, f"param_origin/{UP}", "actv/layers.1.mlp.up.output")),
    ),
}

FSDP2: dict[str, tuple[Plant, tuple[str, ...]]] = {
    "divided twice in a layer": (partial(divided, "layers.1", 4.0), at(0, "grad_reduced/layers.1.attention_norm.weight")),
    "sum for mean at the root": (partial(divided, "", 1.0), at(0, "grad_reduced/embed.weight")),
    "clipped by the local norm": (clipped, at(2, "grad_reduced/embed.weight")),
    "data of rank 0": (of_rank_0, at(0, *EMBED)),
    "no mask on a rank": (on_rank(1, unmasked), ATTENTION),
    "dropped micro-batch on a rank": (on_rank(1, partial(weighed, 0.0, step=3, part=1)), at(3, *LOGITS)),
    "repeated micro-batch on a rank": (on_rank(1, repeated), at(3, *EMBED)),
    "shard of a weight": (on_rank(1, partial(scaled, UP, 1.1, 2)), at(2, f"param_origin/{UP}")),
    "moment of a shard reset": (on_rank(1, partial(reset, "exp_avg", (DOWN,), 3)), at(3, f"exp_avg/{DOWN}")),
    "rate of a rank": (on_rank(1, partial(rates, lr=1.1e-3)), (*RATE, *at(0, "param_updated/embed.weight"))),
    "weight decay": (partial(rates, weight_decay=0.2), at(0, "param_updated/embed.weight")),
    "stale shards on a rank": (on_rank(1, stale), at(3, "param_origin/embed.weight")),
    "rotary in bfloat16": (partial(rotary, "dtype", torch.bfloat16), rotary_at(0)),
}

TP: dict[str, tuple[Plant, tuple[str, ...]]] = {
    "output of an MLP not reduced": (partial(partial_output, "layers.1.mlp.down"), at(0, "actv/layers.1.mlp.down.output")),
    "attention not reduced": (partial(partial_output, "layers.2.attention.o"), at(0, "actv/layers.2.attention.o.output")),
    "gradient of a norm not reduced": (
        partial(own_half, "layers.2.mlp_norm"),
        at(0, "grad_unreduced/layers.2.mlp_norm.weight", "grad_reduced/layers.2.mlp_norm.weight"),
    ),
    "clipped by the local norm": (clipped, at(2, "grad_reduced/embed.weight", "grad_reduced/layers.0.attention.q.weight")),
    "replica of a norm": (
        on_rank(1, partial(scaled, NORM, 1.01, 2)),
        at(2, f"param_origin/{NORM}", "actv/layers.1.mlp_norm.output"),
    ),
    "shard of a weight": (on_rank(1, partial(scaled, UP, 1.1, 2)), at(2, f"param_origin/{UP}")),
    "no mask on a rank": (on_rank(1, unmasked), ATTENTION),
    "positions on a rank": (on_rank(1, partial(rotary, "stretch", 2.0)), rotary_at(0)),
    "positions in a layer of a rank": (on_rank(1, partial(rotary_of_one, "stretch", 2.0)), rotary_at(1)),
    "other data on a rank": (on_rank(1, other_tokens), at(3, *EMBED)),
    "moment of a shard reset": (on_rank(1, partial(reset, "exp_avg_sq", (DOWN,), 3)), at(3, f"exp_avg_sq/{DOWN}")),
    "dropout of each rank": (partial(seeded_dropout, "layers.1.mlp_norm"), NORM_1),
    "scale of attention": (scaled_attention, ATTENTION),
}

PP: dict[str, tuple[Plant, tuple[str, ...]]] = {
    "number of layers off by one": (partial(layers, (1, 2)), at(0, "param_origin/layers.2.attention.q.weight")),
    "order of layers": (partial(layers, (3, 2)), at(0, "param_origin/layers.2.attention.q.weight")),
    "not divided by micro-batches": (partial(weighed, 2.0), at(0, *LOGITS)),
    "dropped micro-batch": (partial(weighed, 0.0, step=3, part=1), at(3, *LOGITS)),
    "epsilon of a norm": (partial(epsilon, 3), at(0, "actv/layers.3.mlp_norm.output")),
    "rate of a stage": (
        on_rank(1, partial(rates, lr=1.1e-3)),
        (*RATE, *at(0, "param_updated/layers.2.attention_norm.weight", "param_updated/layers.2.attention.q.weight")),
    ),
    "clipped by the norm of a stage": (clipped, at(2, "grad_reduced/embed.weight")),
    "cast between stages": (partial(rounded, "layers.1"), at(0, "actv/layers.1.output", "actv/layers.2.input")),
    "stale weights of a stage": (
        on_rank(1, stale),
        at(3, "param_origin/layers.2.attention_norm.weight", "param_origin/layers.2.attention.q.weight"),
    ),
    "skipped layer": (partial(skipped, 3), at(0, "actv/layers.3.output")),
    "moment of a stage reset": (on_rank(1, partial(reset, "exp_avg", (DOWN,), 3)), at(3, f"exp_avg/{DOWN}")),
}

BY_LAYOUT = {"single": SINGLE, "ddp": DDP, "fsdp2": FSDP2, "tp": TP, "pp": PP}
assert BY_LAYOUT.keys() <= LAYOUTS.keys()

CHANGES = [Change(name, layout, plant, where) for layout, each in BY_LAYOUT.items() for name, (plant, where) in each.items()]
