"""Other trainings of the small Llama, for faults that need one: each layout trains them alike, but for rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist
from llama import LAYERS, WIDTH, Gated, Rotary
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional as F
from trained import LENGTH, RANKS, SAMPLES, STEPS, Plant, Training

NO_TARGET = -100
"""The target of tokens that ``cross_entropy`` leaves out."""
EXPERTS = 4
MOE, DROPOUT = "layers.1.mlp", "layers.1.attention.o.1"


# --- Data and loss.


def prompts(t: Training) -> None:
    """Tokens of prompts are no targets, so their numbers differ by rank and micro-batch. The loss is the mean over all."""
    t.targets = answers
    average(t, lambda step: answers(t.batches[step]), t.setting.data_ranks)


def answers(tokens: Tensor) -> Tensor:
    """The targets of samples, of which each begins with a prompt of 0 to 9 tokens."""
    prompt = torch.arange(LENGTH) < tokens[:, :1] % 10
    return tokens.roll(-1, 1).masked_fill(prompt, NO_TARGET)


def average(t: Training, counted: Callable[[int], Tensor], factor: int) -> None:
    """Have the loss be the sum over tokens, divided by the number of targets that a step counts, times a factor."""
    divisor = {"targets": 1}

    def count(step: int) -> None:
        divisor["targets"] = int((counted(step) != NO_TARGET).sum())

    for step in range(STEPS):
        t.at["begins", step].append(partial(count, step))
    t.mean = lambda logits, targets: F.cross_entropy(logits, targets, reduction="sum") * factor / divisor["targets"]


# --- Modules.


class Mixture(nn.Module):
    """Each token goes to the expert that its router prefers.

    Attributes:
        imbalance: 1 if all experts are used equally by each sample, else more: a mean over samples, the same however a batch
            is cut.
    """

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), nn.ModuleList(Gated() for _ in range(EXPERTS))
        self.imbalance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        chosen = F.one_hot(shares.argmax(-1), EXPERTS).to(x.dtype)
        self.imbalance = EXPERTS * (chosen.mean(1) * shares.mean(1)).sum(-1).mean()
        found = torch.stack([expert(x) for expert in self.experts], -1)
        mixed: Tensor = (found * (chosen * shares).unsqueeze(-2)).sum(-1)
        return mixed


def mixture(t: Training) -> None:
    """Four experts in layer 1, whose router has an auxiliary loss."""
    t.install(MOE, Mixture())
    names = [f"{MOE}.experts.{expert}" for expert in range(EXPERTS)]
    t.plan = {name: how for name, how in t.plan.items() if not name.startswith(MOE)}
    t.plan |= {f"{name}.{own}": ColwiseParallel() for name in names for own in ("gate", "up")}
    t.plan |= {f"{name}.down": RowwiseParallel() for name in names}
    auxiliary(0.01, t)


def auxiliary(weight: float, t: Training) -> None:
    t.weigh = lambda loss, _step, _part: loss + weight * t.modules[MOE].imbalance / t.setting.parts


class Interleaved(Rotary):
    """Rotates pairs of neighbours. ``arranged`` gives both columns of a pair their angle."""

    def __init__(self) -> None:
        super().__init__()
        self.arranged: Callable[[Tensor], Tensor] = lambda angles: angles.repeat_interleave(2, -1)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        angles = self.arranged(self.angles(q))
        cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
        return q * cos + _turned(q) * sin, k * cos + _turned(k) * sin


def _turned(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def interleaved(t: Training) -> None:
    for layer in range(LAYERS):
        t.install(f"layers.{layer}.attention.rotary", Interleaved())


def masked(mask: Tensor | None, t: Training) -> None:
    for layer in range(LAYERS):
        t.modules[f"layers.{layer}.attention"].mask = mask


def packed() -> Tensor:
    """Samples hold two documents, which do not see each other."""
    document = torch.arange(LENGTH) >= LENGTH // 2 - 1
    return (document[:, None] == document[None]).tril()


def window(size: int) -> Tensor:
    """Each query sees that many keys: its own and those before it."""
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().triu(1 - size)


class Dropout(nn.Module):
    """Its masks are those of a step, a micro-batch and a sample, and the same in all layouts.

    Attributes:
        place: The step and the micro-batch.
        rank: The rank whose samples' masks are used.
    """

    def __init__(self, t: Training) -> None:
        super().__init__()
        self.p, self.rank, self.place = 0.2, t.place, (0, 0)
        self._order, self._cut = t.order, (t.setting.parts, t.setting.data_ranks)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x * 1.0
        step, part = self.place
        drawn = torch.rand(SAMPLES, *x.shape[1:], generator=torch.Generator().manual_seed(step))[self._order]
        own = drawn.chunk(self._cut[0])[part].chunk(self._cut[1])[self.rank]
        return x * (own >= self.p) / (1 - self.p)


def dropout(t: Training) -> None:
    """Dropout after the attention of layer 1, and an evaluation before step 3."""
    name, _, _ = DROPOUT.rpartition(".")
    t.install(name, nn.Sequential(t.modules[name], Dropout(t)))
    tokens = t.tokens

    def noted(step: int, part: int) -> Tensor:
        t.modules[DROPOUT].place = (step, part)
        return tokens(step, part)

    t.tokens = noted
    t.at["begins", 3].append(lambda: evaluate(t))


def evaluate(t: Training) -> None:
    t.model.eval()
    with torch.no_grad():
        t.model(t.batches[0])
    t.model.train()


# --- The optimizer.


def schedule(rate: Callable[[int], float], t: Training) -> None:
    """Set the learning rate of each step, as a multiple of 1e-3."""

    def change(step: int) -> None:
        for group in t.optimizer.param_groups:
            group["lr"] = 1e-3 * rate(step)

    for step in range(STEPS):
        t.at["begins", step].append(partial(change, step))


def norms_decay(decay: float, t: Training) -> None:
    """Another weight decay of norms."""
    t.groups |= {name: {"weight_decay": decay} for name, one in t.model.named_parameters() if one.dim() == 1}


def clipped(t: Training) -> None:
    """Clip by the norm of all gradients, of which the stages of a pipeline have one part each."""

    def clip() -> None:
        own = [one.grad for one in t.parameters().values()]
        total = torch.stack([one.square().sum() for one in own]).sum()
        if t.setting.ranks == RANKS:
            dist.all_reduce(total)
        clip_to(own, total.sqrt())

    for step in range(STEPS):
        t.at["reduced", step].append(clip)


def clip_to(gradients: list[Tensor], norm: Tensor) -> None:
    for one in gradients:
        one.mul_(0.1 / norm)


VARIANTS: Mapping[str, Plant] = {
    "prompts": prompts,
    "mixture": mixture,
    "interleaved": interleaved,
    "packed": partial(masked, packed()),
    "window": partial(masked, window(4)),
    "dropout": dropout,
    "schedule": partial(schedule, lambda step: 1 - step / STEPS),
    "norms-not-decayed": partial(norms_decay, 0.0),
    "clipped": clipped,
}
