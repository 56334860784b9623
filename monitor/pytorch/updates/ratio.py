"""``update_ratio`` of weights of torch."""

from __future__ import annotations

import torch
from torch import Tensor

from monitor.recording import updates
from monitor.stats.torch.tensors import local_shard
from monitor.stats.torch.updates import squares_of_update


class RatioCollector(updates.RatioCollector):
    """Of what this rank holds."""

    def _usable(self, weight: Tensor) -> Tensor | None:
        held = local_shard(weight)
        usable = held is not None and held.layout is torch.strided and held.is_floating_point() and held.numel()
        return held.detach() if usable and held is not None else None

    def _copy(self, usable: Tensor) -> Tensor:
        return torch.clone(usable)

    def _squares(self, after: Tensor, before: Tensor) -> tuple[Tensor, Tensor] | None:
        same = after.shape == before.shape and after.device == before.device
        return squares_of_update(after, before) if same else None
