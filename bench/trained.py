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
    """

    layout: str = "single"
    dtype: str = "float32"
    seed: int = 0
    permuted: bool = False
    parts: int = 2
    tied: bool = False

    @property
    def name(self) -> str:
        marks = [self.layout, self.dtype, f"seed{self.seed}", f"parts{self.parts}"]
        return "-".join([*marks, *["permuted"] * self.permuted, *["tied"] * self.tied])

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
        shift: How many positions ahead the targets are.
        plan: How tensor parallelism splits modules.
        layers_of: The numbers of a stage's layers.
        built: Called with the model when it is laid out.
        tokens: The samples of this rank, from a step and a micro-batch.
        place: Which part of a micro-batch this rank has.
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
        self.tokens: Callable[[int, int], Tensor] = self._tokens
        self.weigh: Callable[[Tensor, int, int], Tensor] = lambda loss, _step, _part: loss
        self.shift, self.place = 1, rank if setting.data_ranks > 1 else 0
        self.reduces: Callable[[int, int], bool] = lambda _step, part: part == setting.parts - 1
        self.at: dict[tuple[str, int], list[Event]] = defaultdict(list)
        self.optimizer: Any = None
        self._whole = [name for name, _ in self.model.named_parameters()]
        self._batches = _batches(setting)

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
        """The mean over tokens, divided by the number of micro-batches."""
        return F.cross_entropy(logits.flatten(0, 1), tokens.roll(-self.shift, 1).flatten()) / self.setting.parts

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

    def _tokens(self, step: int, part: int) -> Tensor:
        return self._batches[step].chunk(self.setting.parts)[part].chunk(self.setting.data_ranks)[self.place]


def whole(one: Tensor) -> Tensor:
    return one.full_tensor() if isinstance(one, DTensor) else one


def local(one: Tensor) -> Tensor:
    return one.to_local() if isinstance(one, DTensor) else one


def _batches(setting: Setting) -> Tensor:
    """The samples of all steps. Another order moves samples within their micro-batch alone."""
    tokens = torch.randint(WORDS, (STEPS, SAMPLES, LENGTH), generator=torch.Generator().manual_seed(100 + setting.seed))
    if not setting.permuted:
        return tokens
    order, size = torch.Generator().manual_seed(1), SAMPLES // setting.parts
    moved = [part * size + torch.randperm(size, generator=order) for part in range(setting.parts)]
    return tokens[:, torch.cat(moved)]


def _plan() -> dict[str, Any]:
    """Heads and hidden columns over ranks; embedding, norms and head stay plain on every rank."""
    columns = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
    plan: dict[str, Any] = {}
    for layer in range(LAYERS):
        plan |= {f"layers.{layer}.{name}": ColwiseParallel() for name in columns}
        plan |= {f"layers.{layer}.{name}": RowwiseParallel() for name in ("attention.o", "mlp.down")}
    return plan
