"""Numeric faults of public training frameworks, rebuilt in the layout in which they happened.

What is rebuilt is the effect on the numbers, not the code of the framework. Each has the address of a thread that describes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from llama import LAYERS
from planted import LOGITS, RATE, UP, Change, at, ignored, own_half, rotary, rotary_at, untied, weighed
from torch import Tensor
from torch.nn import functional as F
from trained import STEPS, Plant, Training, local
from variants import DROPOUT, MOE, answers, auxiliary, average, clip_to, masked, norms_decay, schedule, window

GITHUB = "https://github.com/"

# --- Loss.


def mean_of_means(t: Training) -> None:
    """Each micro-batch is divided by its own number of targets."""
    t.mean = lambda logits, targets: F.cross_entropy(logits, targets) / t.setting.parts


def mean_of_ranks(t: Training) -> None:
    """Each rank divides by its own number of targets, and the ranks are averaged."""
    average(t, lambda step: torch.cat([answers(t.tokens(step, part)) for part in range(t.setting.parts)]), 1)


# --- Gradients.


def scaled_gradients(part_of_name: str, factor: float, t: Training) -> None:
    """Multiply gradients after they are reduced, in all steps."""

    def event() -> None:
        for name, one in t.parameters().items():
            if part_of_name in name:
                local(one.grad).mul_(factor)

    for step in range(STEPS):
        t.at["reduced", step].append(event)


def not_zeroed(t: Training) -> None:
    t.at["begins", 0].append(lambda: setattr(t.optimizer, "zero_grad", lambda: None))


def accumulated_in_bfloat16(t: Training) -> None:
    def rounded(one: Any) -> None:
        one.grad.copy_(one.grad.bfloat16())

    t.built.append(lambda model: [one.register_post_accumulate_grad_hook(rounded) for one in model.parameters()])


def frozen_norms(t: Training) -> None:
    """The backward pass of norms has no gradient of their weights."""
    for name, module in t.modules.items():
        if name.endswith("norm"):
            module.forward = partial(_normalized, module)


def _normalized(norm: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, norm.normalized_shape, norm.weight.detach(), norm.eps)


def clipped_by_stage(t: Training) -> None:
    """Each stage clips by the norm of its own gradients."""

    def clip() -> None:
        own = [one.grad for one in t.parameters().values()]
        clip_to(own, torch.stack([one.square().sum() for one in own]).sum().sqrt())

    for step in range(STEPS):
        t.at["reduced", step] = [clip]


# --- Modules.


def epsilons(value: float, t: Training) -> None:
    for name, module in t.modules.items():
        if name.endswith("norm"):
            module.eps = value


def rates_in_bfloat16(t: Training) -> None:
    for name, module in t.modules.items():
        if name.endswith("rotary"):
            module.rates = partial(_coarse_rates, module.rates)


def _coarse_rates(rates: Callable[[Tensor], Tensor], q: Tensor) -> Tensor:
    return rates(q).bfloat16().double()


def arranged_in_halves(t: Training) -> None:
    for name, module in t.modules.items():
        if name.endswith("rotary"):
            module.arranged = lambda angles: torch.cat((angles, angles), -1)


def initialized_by_depth(t: Training) -> None:
    """The scale of weights that write to the residual is given to the gates."""
    with torch.no_grad():
        for layer in range(LAYERS):
            t.parameter(f"layers.{layer}.mlp.gate.weight").mul_(1 / math.sqrt(2 * LAYERS))


def dropout_lost(t: Training) -> None:
    """An evaluation sets the probability to 0."""

    def lose(module: Any, _args: object) -> None:
        module.p = module.p if module.training else 0.0

    t.modules[DROPOUT].register_forward_pre_hook(lose)


def dropout_of_rank_0(t: Training) -> None:
    t.modules[DROPOUT].rank = 0


# --- The optimizer.


def resumed_without(states: tuple[str, ...], t: Training) -> None:
    """Step 4 begins with these states of AdamW as they are in a new optimizer."""

    def event() -> None:
        for state in t.optimizer.state.values():
            for name in states:
                local(state[name]).zero_()

    t.at["begins", 4].append(event)


def decayed_at(step: int, decay: float, t: Training) -> None:
    """One step alone has another weight decay."""
    usual = t.rates["weight_decay"]

    def event(value: float) -> None:
        for group in t.optimizer.param_groups:
            group["weight_decay"] = value

    t.at["begins", step].append(lambda: event(decay))
    t.at["updated", step].append(lambda: event(usual))


# --- The catalogue.


def fault(
    name: str, thread: str, layout: str, plant: Plant, expected: tuple[str, ...], variant: str = "", **more: Any
) -> Change:
    return Change(name, layout, plant, expected, variant=variant, source=GITHUB + thread, **more)


FIRST_NORM = "layers.0.attention_norm"
ROUTER = at(0, f"actv_grad/{MOE}.router.output")
ATTENTION_0 = at(0, "actv/layers.0.attention.o.input")

FAULTS = [
    fault(
        "mean of micro-batches, not of tokens",
        "huggingface/transformers/pull/34191",
        "single",
        mean_of_means,
        at(0, *LOGITS),
        "prompts",
    ),
    fault(
        "not divided by micro-batches", "huggingface/transformers/pull/35207", "single", partial(weighed, 2.0), at(0, *LOGITS)
    ),
    fault("mean of ranks, not of tokens", "pytorch/torchtitan/pull/2206", "fsdp2", mean_of_ranks, at(0, *LOGITS), "prompts"),
    fault(
        "divided by ranks twice",
        "meta-pytorch/torchtune/pull/2172",
        "fsdp2",
        partial(weighed, 0.5),
        at(0, "grad_reduced/embed.weight"),
        "prompts",
    ),
    fault("one gradient not reduced", "pytorch/pytorch/pull/124193", "ddp", ignored, at(0, f"grad_reduced/{UP}")),
    # The thread shows ranks that disagree, but no cause. The cause is that of similar faults, such as the next one.
    fault(
        "gradient of the final norm not reduced",
        "NVIDIA/Megatron-LM/issues/1446",
        "tp",
        partial(own_half, "norm"),
        at(0, "grad_reduced/norm.weight"),
    ),
    fault(
        "gradients of norms averaged, not summed",
        "EleutherAI/gpt-neox/pull/1259",
        "tp",
        partial(scaled_gradients, "norm", 0.5),
        at(0, f"grad_reduced/{FIRST_NORM}.weight"),
    ),
    fault(
        "gradients of experts divided by another group",
        "deepspeedai/DeepSpeed/pull/6546",
        "ddp",
        partial(scaled_gradients, "experts", 2.0),
        at(0, f"grad_reduced/{MOE}.experts.0.gate.weight"),
        "mixture",
    ),
    fault(
        "auxiliary loss of a router halved", "NVIDIA/Megatron-LM/pull/5047", "tp", partial(auxiliary, 0.005), ROUTER, "mixture"
    ),
    fault(
        "auxiliary loss times the number of ranks",
        "huggingface/transformers/pull/48706",
        "ddp",
        partial(auxiliary, 0.02),
        ROUTER,
        "mixture",
    ),
    fault(
        "gradients not set to zero",
        "deepspeedai/DeepSpeed/pull/7839",
        "single",
        not_zeroed,
        at(1, "grad_unreduced/head.weight"),
    ),
    fault(
        "gradients accumulated in bfloat16",
        "deepspeedai/DeepSpeed/issues/1800",
        "single",
        accumulated_in_bfloat16,
        at(0, "grad_unreduced/head.weight"),
    ),
    fault(
        "no gradient of norms",
        "unslothai/unsloth/issues/4533",
        "single",
        frozen_norms,
        at(0, "grad_unreduced/norm.weight"),
    ),
    fault(
        "clipped by the norm of a stage",
        "pytorch/torchtitan/pull/649",
        "pp",
        clipped_by_stage,
        at(0, "grad_reduced/embed.weight"),
        "clipped",
    ),
    fault(
        "rotary frequencies in bfloat16",
        "huggingface/transformers/pull/29285",
        "ddp",
        rates_in_bfloat16,
        rotary_at(0),
    ),
    fault(
        "rotary frequencies of zeros", "pytorch/torchtitan/issues/4783", "fsdp2", partial(rotary, "stretch", 0.0), rotary_at(0)
    ),
    fault("base of the rotary", "pytorch/torchtitan/pull/3772", "fsdp2", partial(rotary, "base", 1e6), rotary_at(0)),
    fault(
        "rotary halves and neighbours mixed",
        "NVIDIA/Megatron-LM/issues/3900",
        "tp",
        arranged_in_halves,
        rotary_at(0),
        "interleaved",
    ),
    fault(
        "epsilon of all norms",
        "pytorch/torchtitan/pull/4395",
        "fsdp2",
        partial(epsilons, 1e-6),
        at(0, f"actv/{FIRST_NORM}.output"),
    ),
    fault(
        "documents see each other", "axolotl-ai-cloud/axolotl/issues/1375", "ddp", partial(masked, None), ATTENTION_0, "packed"
    ),
    fault(
        "window one key too wide",
        "huggingface/transformers/pull/26792",
        "single",
        partial(masked, window(5)),
        ATTENTION_0,
        "window",
    ),
    fault(
        "scale of initial weights",
        "pytorch/torchtitan/issues/3334",
        "fsdp2",
        initialized_by_depth,
        at(0, "param_origin/layers.0.mlp.gate.weight"),
    ),
    fault(
        "no dropout after an evaluation",
        "NVIDIA/Megatron-LM/pull/411",
        "single",
        dropout_lost,
        at(3, f"actv/{DROPOUT}.output"),
        "dropout",
    ),
    fault(
        "dropout of all ranks alike",
        "huggingface/transformers/issues/31412",
        "ddp",
        dropout_of_rank_0,
        at(0, f"actv/{DROPOUT}.output"),
        "dropout",
    ),
    fault(
        "schedule twice as fast",
        "huggingface/transformers/pull/24088",
        "ddp",
        partial(schedule, lambda step: max(0.0, 1 - 2 * step / STEPS)),
        at(1, "run/learning_rate.0"),
        "schedule",
    ),
    fault(
        "schedule backwards",
        "karpathy/nanochat/issues/68",
        "single",
        partial(schedule, lambda step: step / STEPS),
        RATE,
        "schedule",
    ),
    fault(
        "weight decay of norms",
        "huggingface/transformers/pull/35927",
        "single",
        partial(norms_decay, 0.1),
        at(0, f"param_updated/{FIRST_NORM}.weight"),
        "norms-not-decayed",
        # A weight of one dimension may differ by two updates of Adam, 2e-3 here. The decay changes it by 1e-4.
        near=at(1, f"actv/{FIRST_NORM}.output"),
    ),
    fault(
        "stale weight decay after a resume",
        "NVIDIA/Megatron-LM/pull/7468",
        "tp",
        partial(decayed_at, 4, 0.1),
        at(4, "param_updated/embed.weight"),
    ),
    fault(
        "moments lost in a resume",
        "deepspeedai/DeepSpeed/pull/7786",
        "ddp",
        partial(resumed_without, ("exp_avg", "exp_avg_sq", "step")),
        at(4, "exp_avg/*"),
    ),
    fault(
        "steps of Adam lost in a resume",
        "deepspeedai/DeepSpeed/pull/4396",
        "ddp",
        partial(resumed_without, ("step",)),
        at(4, "param_updated/embed.weight"),
        # The moments of an optimizer that replaces another are not recorded in its first step.
        near=at(4, "exp_avg/*"),
    ),
    Change(
        "head not tied",
        "single",
        untied,
        at(0, "grad_unreduced/embed.weight", "grad_reduced/embed.weight"),
        tied=True,
        source=f"{GITHUB}unslothai/unsloth/pull/3711",
    ),
]
