"""The experts that a router chose, from what its forward returned.

Counts stay on the device of the result, and nothing waits for it. ``torch.bincount`` would: on an accelerator, the length of
its result depends on the largest element.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from monitor.pytorch.frameworks.dtensor import layout_of
from monitor.recording.features import reading
from monitor.stats.torch.tensors import local_shard

EXPERTS_NAMES: Final = ("num_experts", "n_routed_experts", "num_local_experts", "num_moe_experts")
TOP_K_NAMES: Final = ("top_k", "topk", "num_experts_per_tok", "moe_router_topk")
CAPACITY_NAMES: Final = ("capacity", "capacity_factor", "expert_capacity", "moe_expert_capacity_factor")
"""A router with one of these, not None, refuses assignments beyond the capacity of an expert."""

PADDING_NAMES: Final = ("moe_pad_expert_input_to_capacity",)
OTHER_CHOICE_NAMES: Final = ("e_score_correction_bias", "expert_bias", "correction_bias", "num_group", "n_group", "topk_group")
"""A router with one of these does not choose the greatest logits."""

NO_CHOICE: Final = "it returns neither the indices of the chosen experts nor logits with a top_k"
SEVERAL: Final = "it returns several integer tensors, and it is unknown which one holds the chosen experts"


def choices_of(module: nn.Module, result: Any) -> reading.Choices:
    """What a router chose. ``dropped`` is known of a router that has a capacity.

    Raises:
        NotARouterError: The result does not show it.
    """
    if any(_attribute(module, name) for name in PADDING_NAMES):
        raise reading.NotARouterError(reading.PADDED)
    counts = counts_of(module, result)
    total = counts.sum()
    asked = _asked(module, result) if any(_attribute(module, name) is not None for name in CAPACITY_NAMES) else None
    return reading.Choices(counts, total, None if asked is None else asked - total)


def counts_of(module: nn.Module, result: Any) -> Tensor:
    """How many tokens go to each expert, int64, shape ``(experts,)``, on the device of a router's result.

    Raises:
        NotARouterError: The result does not show it.
    """
    found = list(_result_tensors(result))
    maps = [one for one in found if one.dtype == torch.bool]
    if maps:
        return maps[-1].flatten(0, -2).sum(0)
    floats = [one for one in found if one.is_floating_point()]
    indices = _integers(found)
    experts = _number(module, EXPERTS_NAMES) or (floats[0].shape[-1] if floats else None)
    if indices and experts:
        return count_indices(_expert_indices(indices, _number(module, TOP_K_NAMES)), experts)
    return count_indices(_greatest(module, floats), floats[0].shape[-1])


def _greatest(module: nn.Module, floats: Sequence[Tensor]) -> Tensor:
    """The indices of the greatest logits, for a router that returns only logits and chooses these."""
    top, experts = _number(module, TOP_K_NAMES), _number(module, EXPERTS_NAMES)
    if len(floats) != 1 or not top or floats[0].shape[-1] < top or floats[0].shape[-1] != (experts or floats[0].shape[-1]):
        raise reading.NotARouterError(NO_CHOICE)
    if any(_attribute(module, name) is not None for name in OTHER_CHOICE_NAMES):
        raise reading.NotARouterError(reading.ANOTHER_CHOICE)
    return floats[0].topk(top, -1).indices


def _asked(module: nn.Module, result: Any) -> int | None:
    """The number of assignments before a capacity refused any; None if that is not known."""
    found, top = list(_result_tensors(result)), _number(module, TOP_K_NAMES)
    maps = [one for one in found if one.dtype == torch.bool]
    if maps:
        return maps[-1][..., 0].numel() * top if top else None
    indices = _integers(found)
    return _expert_indices(indices, top).numel() if indices else None


def _integers(found: Sequence[Tensor]) -> list[Tensor]:
    return [one for one in found if not one.is_floating_point() and not one.is_complex() and one.dtype != torch.bool]


def _expert_indices(indices: Sequence[Tensor], top: int | None) -> Tensor:
    """The index tensor: of several, the one whose last dimension is ``top``."""
    fitting = [one for one in indices if top is not None and one.shape[-1] == top] if len(indices) > 1 else indices
    if len(fitting) != 1:
        raise reading.NotARouterError(SEVERAL)
    return fitting[0]


def count_indices(indices: Tensor, experts: int) -> Tensor:
    """Count valid indices only: a dropped token has an index out of range, at which a device kernel would fail fatally."""
    flat = indices.flatten().to(torch.int64)
    there = ((flat >= 0) & (flat < experts)).to(torch.int64)
    zeros = torch.zeros(experts, dtype=torch.int64, device=flat.device)
    return zeros.scatter_add_(0, flat.clamp(0, experts - 1), there)


def _result_tensors(result: Any) -> Iterator[Tensor]:
    """The local tensors of a result that have dimensions.

    Raises:
        NotARouterError: A tensor is split over ranks in its last dimension, or holds terms of a sum.
    """
    for one in result if isinstance(result, tuple | list) else (result,):
        if isinstance(one, Tensor) and one.dim() > 0 and (local := local_shard(one)) is not None:
            layout = layout_of(one)
            if layout is not None and any(each.is_partial() or each.is_shard(one.dim() - 1) for each in layout[1]):
                raise reading.NotARouterError(reading.NOT_WHOLE_CHOICE)
            yield local


def _number(module: nn.Module, names: tuple[str, ...]) -> int | None:
    found = (_attribute(module, name) for name in names)
    return next((value for value in found if isinstance(value, int) and not isinstance(value, bool)), None)


def _attribute(module: nn.Module, name: str) -> Any:
    """An attribute of a module, or of its configuration; None without it."""
    value = getattr(module, name, None)
    return getattr(getattr(module, "config", None), name, None) if value is None else value
