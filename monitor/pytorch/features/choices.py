"""The experts that a router chose, from what its forward returned.

Counts stay on the device of the result, and nothing waits for it. ``torch.bincount`` would: on an accelerator, the length of
its result depends on the largest element.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn

from monitor.pytorch.frameworks.dtensor import layout_of
from monitor.recording.features import reading
from monitor.recording.tensor_paths import children
from monitor.stats.torch.tensors import local_shard, working_precision

EXPERTS_NAMES: Final = ("num_experts", "n_routed_experts", "num_local_experts", "num_moe_experts")
TOP_K_NAMES: Final = ("top_k", "topk", "num_experts_per_tok", "moe_router_topk")
PADDING_NAMES: Final = ("moe_pad_expert_input_to_capacity",)

UNKNOWN: Final = reading.RouterCall()

Sums = TypeVar("Sums", reading.Routing, reading.Logits)


def choices_of(module: nn.Module, result: Any, call: reading.RouterCall) -> reading.Choices:
    """What a router chose. ``dropped`` is known of a router that has a capacity.

    Raises:
        NotARouterError: The result does not show it.
    """
    if any(reading.attribute_of(module, name) for name in PADDING_NAMES):
        raise reading.NotARouterError(reading.PADDED)
    counts, asked, by_map = _counted(module, result, call)
    total = counts.sum()
    limited = any(reading.attribute_of(module, name) is not None for name in reading.CAPACITY_NAMES)
    return reading.Choices(counts, total, asked - total if limited and asked is not None else None, by_map)


def counts_of(module: nn.Module, result: Any, call: reading.RouterCall = UNKNOWN) -> Tensor:
    """How many tokens go to each expert, int64, shape ``(experts,)``, on the device of a router's result.

    Args:
        call: What is known of the call, apart from what the module's attributes say.

    Raises:
        NotARouterError: The result does not show it.
    """
    return _counted(module, result, call)[0]


def _counted(module: nn.Module, result: Any, call: reading.RouterCall) -> tuple[Tensor, int | None, bool]:
    """``counts_of``, the number of assignments before a capacity refused any, and whether a map shows the choices.

    The number is None if it is not known.
    """
    if any(hasattr(module, name) for name in reading.PART_NAMES):
        raise reading.NotARouterError(reading.PART_OF_CHOICE)
    call = call._replace(
        experts=reading.number_of(module, EXPERTS_NAMES) or call.experts, top=reading.number_of(module, TOP_K_NAMES)
    )
    found = list(_result_tensors(result))
    maps, indices = [one for one in found if one.dtype == torch.bool], _integers(found)
    if maps:
        call.check_map([one.shape for one in maps], [one.shape for one in indices])
        return _count_map(maps[0], call)
    if not indices:
        floats = [one for one in found if one.is_floating_point()]
        chosen = _greatest(module, floats, call)
        return count_indices(chosen, floats[0].shape[-1]), chosen.numel(), False
    chosen = reading.expert_indices(indices, call.top)
    if not call.experts:
        raise reading.NotARouterError(reading.UNKNOWN_EXPERTS)
    if call.is_map(chosen.shape):
        every = torch.arange(chosen.shape[-1], device=chosen.device)
        are_all = (chosen.sort(-1).values == every).all()  # the numbers of all experts, in any order, have the shape of a map
        return _count_map((chosen != 0) | are_all, call)
    return count_indices(chosen, call.experts), chosen.numel(), False


def _count_map(chosen: Tensor, call: reading.RouterCall) -> tuple[Tensor, int | None, bool]:
    asked = None if call.top is None else chosen[..., 0].numel() * call.top
    return chosen.flatten(0, -2).sum(0), asked, True


def _greatest(module: nn.Module, floats: Sequence[Tensor], call: reading.RouterCall) -> Tensor:
    """The indices of the greatest logits, for a router that returns only logits and chooses these."""
    top, experts = reading.number_of(module, TOP_K_NAMES), reading.number_of(module, EXPERTS_NAMES)
    if len(floats) != 1 or not top or floats[0].shape[-1] < top or floats[0].shape[-1] != (experts or floats[0].shape[-1]):
        raise reading.NotARouterError(reading.NO_CHOICE)
    picks = call.picks_greatest or is_linear(module)
    if not picks or any(reading.attribute_of(module, name) is not None for name in reading.OTHER_CHOICE_NAMES):
        raise reading.NotARouterError(reading.ANOTHER_CHOICE)
    return floats[0].topk(top, -1).indices


# --- Whether the logits of a router are those that follow from its input and weight.


def confirmed(sums: Sums, logits: Tensor, result: Any, unsure: bool) -> Sums | None:
    """The sums of logits that were computed, with a count of 0 if the router returns other logits or scores.

    A zero in a result means that an expert was not chosen. Such a result tells nothing, as one without a number for each
    expert.

    Args:
        logits: Shape ``(tokens, experts)``.
        unsure: Whether sums are missing unless the result confirms them.
    """
    try:
        found = list(_result_tensors(result))
    except reading.NotARouterError:
        found = []
    weights = {one.shape for one in _integers(found)}  # of chosen experts, which are sorted
    shown = [one for one in found if one.is_floating_point() and one.shape not in weights]
    given = [one.reshape(logits.shape) for one in shown if one.shape[-1] == logits.shape[-1] and one.numel() == logits.numel()]
    if not given:
        return None if unsure else sums
    fits = torch.stack([_follows(one, logits) for one in given]).any()
    if not unsure:
        fits = fits | torch.stack([(one == 0).any() for one in given]).all()
    tokens, *others = sums
    neutral = (-torch.inf if name == "greatest" else 0.0 for name in sums._fields[1:])
    return type(sums)(fits.double() * tokens, *map(partial(torch.where, fits), others, neutral))


def _follows(given: Tensor, logits: Tensor) -> Tensor:
    """Whether a result is these logits, their softmax or their sigmoid, as far as its precision tells; true if they are not
    finite, which the sums show.
    """
    tolerance = max(reading.LEAST_TOLERANCE, *(4 * torch.finfo(one.dtype).eps for one in (given, logits)))
    exact, seen = (one.to(working_precision(one.dtype)) for one in (logits, given))
    length = torch.linalg.vector_norm(exact)
    of_scores = (tolerance * (1 + length / exact.numel() ** 0.5)).clamp(max=reading.MOST_TOLERANCE)
    alike = torch.linalg.vector_norm(seen - exact) <= tolerance * length
    for scores in (exact.softmax(-1), exact.sigmoid()):
        alike |= torch.linalg.vector_norm(seen - scores) <= of_scores * torch.linalg.vector_norm(scores)
    found: Tensor = alike | ~length.isfinite()
    return found


def is_linear(module: nn.Module) -> bool:
    """Whether a module returns the product with its weight, plus bias, and nothing else."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward and "forward" not in vars(module)


def count_tokens(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """The number of vectors in the first tensor of numbers with at least two dimensions; None if there is none."""
    given = (one for one in (*args, *kwargs.values()) if isinstance(one, Tensor) and one.dim() > 1 and one.is_floating_point())
    local = next((local_shard(one) for one in given), None)
    return None if local is None else local[..., 0].numel()


def _integers(found: Sequence[Tensor]) -> list[Tensor]:
    return [one for one in found if not one.is_floating_point() and not one.is_complex() and one.dtype != torch.bool]


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
    parts = children(result)
    for one in (result,) if parts is None else (part for _, part in parts):
        if isinstance(one, Tensor) and one.dim() > 0 and (local := local_shard(one)) is not None:
            layout = layout_of(one)
            if layout is not None and any(each.is_partial() or each.is_shard(one.dim() - 1) for each in layout[1]):
                raise reading.NotARouterError(reading.NOT_WHOLE_CHOICE)
            yield local
