"""A training of the small Llama as one rank sees it, and the places where a change can be planted.

All layouts see the same samples, begin with the same weights, and step with the same gradients but for rounding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from llama import LAYERS, WORDS, Llama
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional as F

STEPS, SAMPLES, LENGTH, RANKS = 6, 8, 12, 2

Plant = Callable[["Training"], object]
Event = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Setting:
    """How a run trains.

    Attributes:
        dtype: ``float32``, ``float64``, or ``mixed`` for autocast to bfloat16.
        permuted: Whether the samples of a micro-batch come in another order, so that sums round in another way.
        parts: Micro-batches of a step.
        variant: Another training: a key of ``VARIANTS``, or empty.
    """

    layout: str = "single"
    dtype: str = "float32"
    seed: int = 0
    permuted: bool = False
    parts: int = 2
    tied: bool = False
    variant: str = ""

    @property
    def name(self) -> str:
        marks = [self.layout, self.dtype, f"seed{self.seed}", f"parts{self.parts}"]
        return "-".join([*marks, *["permuted"] * self.permuted, *["tied"] * self.tied, *filter(None, [self.variant])])

    @property
    def ranks(self) -> int:
        return 1 if self.layout in ("single", "compiled") else RANKS

    @property
    def data_ranks(self) -> int:
        """Ranks that share the samples of a micro-batch."""
        return RANKS if self.layout in ("ddp", "fsdp2") else 1


class Training:
    """One rank of a run, and the places where a change can be planted before the model is laid out.

    Attributes:
        model: The whole model, and later what the layout makes of it.
        modules: The modules of the whole model, by name. A layout keeps these objects.
        rates: Arguments of AdamW.
        groups: Parameters with arguments of their own, by name.
        batches: The samples of all steps: ``[STEPS, SAMPLES, LENGTH]``.
        shift: How many positions ahead the targets are.
        targets: The words that samples should predict, -100 where there is none.
        mean: The loss of a micro-batch, from logits and targets.
        plan: How tensor parallelism splits modules.
        layers_of: The numbers of a stage's layers.
        built: Called with the model when it is laid out.
        tokens: The samples of this rank, from a step and a micro-batch.
        place: Which part of a micro-batch this rank has.
        order: The order of the samples of each step.
        reduces: Whether a micro-batch of a step reduces gradients.
        weigh: The loss that is differentiated, from a loss, a step and a micro-batch.
        at: What happens in a step: when it ``begins``, when gradients are ``reduced``, when weights are ``updated``.
    """

    def __init__(self, setting: Setting, rank: int) -> None:
        self.setting, self.rank = setting, rank
        torch.manual_seed(setting.seed)
        self.model: Any = Llama(setting.tied)
        if setting.dtype == "float64":
            self.model.double()
        self.modules: dict[str, Any] = dict(self.model.named_modules())
        self.rates: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01}
        self.groups: dict[str, dict[str, float]] = {}
        self.plan: dict[str, Any] = _plan()
        self.layers_of: Callable[[int], Iterable[int]] = lambda stage: range(
            stage * LAYERS // RANKS, (stage + 1) * LAYERS // RANKS
        )
        self.built: list[Callable[[Any], object]] = []
        self.tokens: Callable[[int, int], Tensor] = lambda step, part: self.share(self.batches[step], part)
        self.targets: Callable[[Tensor], Tensor] = lambda tokens: tokens.roll(-self.shift, 1)
        self.mean: Callable[[Tensor, Tensor], Tensor] = lambda logits, targets: F.cross_entropy(logits, targets) / setting.parts
        self.weigh: Callable[[Tensor, int, int], Tensor] = lambda loss, _step, _part: loss
        self.shift, self.place = 1, rank if setting.data_ranks > 1 else 0
        self.reduces: Callable[[int, int], bool] = lambda _step, part: part == setting.parts - 1
        self.at: dict[tuple[str, int], list[Event]] = defaultdict(list)
        self.optimizer: Any = None
        self._whole = [name for name, _ in self.model.named_parameters()]
        self.order = _order(setting)
        self.batches = _batches(setting)[:, self.order]

    def install(self, name: str, module: Any) -> None:
        """Put another module into the place of one."""
        parent, _, own = name.rpartition(".")
        setattr(self.modules[parent], own, module)
        self.modules = dict(self.model.named_modules())
        self._whole = [name for name, _ in self.model.named_parameters()]

    def parameter(self, name: str) -> Any:
        """The parameter of a name, as the layout has made it."""
        module, _, own = name.rpartition(".")
        return getattr(self.modules[module], own)

    def parameters(self) -> dict[str, Any]:
        """All of this rank, by their names in the whole model."""
        own = {id(one) for one in self.model.parameters()}
        return {name: self.parameter(name) for name in self._whole if id(self.parameter(name)) in own}

    def happen(self, when: str, step: int) -> None:
        for event in self.at.get((when, step), []):
            event()

    def loss(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """The mean over tokens, divided by the number of micro-batches, unless ``mean`` is another."""
        return self.mean(logits.flatten(0, 1), self.targets(tokens).flatten())

    def optimize(self) -> None:
        """Make the optimizer."""
        named = self.parameters()
        groups: list[dict[str, Any]] = [{"params": [one for name, one in named.items() if name not in self.groups]}]
        groups += [{"params": [named[name]], **own} for name, own in self.groups.items() if name in named]
        self.optimizer = torch.optim.AdamW(groups, **self.rates)

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.setting.dtype == "mixed")

    def gathered(self) -> dict[str, Tensor]:
        """Final weights of this rank; every rank calls it, as DTensors are gathered."""
        return {name: whole(one.detach()).double() for name, one in self.parameters().items()}

    def share(self, batch: Tensor, part: int) -> Tensor:
        """The samples of a batch that this rank has in a micro-batch."""
        return batch.chunk(self.setting.parts)[part].chunk(self.setting.data_ranks)[self.place]


def whole(one: Tensor) -> Tensor:
    return one.full_tensor() if isinstance(one, DTensor) else one


def local(one: Tensor) -> Tensor:
    return one.to_local() if isinstance(one, DTensor) else one


def _batches(setting: Setting) -> Tensor:
    """The samples of all steps."""
    return torch.randint(WORDS, (STEPS, SAMPLES, LENGTH), generator=torch.Generator().manual_seed(100 + setting.seed))


def _order(setting: Setting) -> Tensor:
    """The order of the samples of a step. Another one moves samples within their micro-batch alone."""
    if not setting.permuted:
        return torch.arange(SAMPLES)
    order, size = torch.Generator().manual_seed(1), SAMPLES // setting.parts
    return torch.cat([part * size + torch.randperm(size, generator=order) for part in range(setting.parts)])


def _plan() -> dict[str, Any]:
    """Heads and hidden columns over ranks; embedding, norms and head stay plain on every rank."""
    columns = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
    plan: dict[str, Any] = {}
    for layer in range(LAYERS):
        plan |= {f"layers.{layer}.{name}": ColwiseParallel() for name in columns}
        plan |= {f"layers.{layer}.{name}": RowwiseParallel() for name in ("attention.o", "mlp.down")}
    return plan
