"""The experts that a router chose, from what its call returned."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn

from monitor.recording.features import reading
from monitor.stats.mindspore.tensors import Arithmetic, Array, as_given, beneath, computing

EXPERTS_NAMES: Final = ("num_experts", "n_routed_experts", "num_local_experts", "expert_num", "num_moe_experts")
CHOSEN_NAMES: Final = ("top_k", "topk", "num_experts_per_tok", "moe_router_topk", "num_experts_chosen")

INTEGERS: Final = (ms.int32, ms.int64)

UNKNOWN: Final = reading.RouterCall()

ChosenExperts = tuple[Tensor, int]
"""The result of a router's call, indices or a boolean map, and the number of experts."""


def choices_of(cell: nn.Cell, result: Any, call: reading.RouterCall) -> reading.Choices:
    """What a router chose. ``dropped`` is known of a router that has a capacity.

    Raises:
        NotARouterError: The result does not show it.
        EarlierFailure: An earlier operation of training has failed.
    """
    if reading.attribute_of(cell, "moe_pad_expert_input_to_capacity"):
        raise reading.NotARouterError(reading.PADDED)
    chosen, experts = chosen_in(cell, result, call)
    asked: int | None = math.prod(chosen.shape)
    if chosen.dtype == ms.bool_:
        top = reading.number_of(cell, CHOSEN_NAMES)
        asked = None if top is None else math.prod(chosen.shape[:-1]) * top
    with computing() as on:
        counts = Tensor(count_on_host(on.of(chosen), experts)) if on.may_look else _count(on, chosen, experts)
        total = float(on.of(counts).sum()) if on.may_look else on.sum(counts)
        limited = any(reading.attribute_of(cell, name) is not None for name in reading.CAPACITY_NAMES)
        dropped = asked - total if limited and asked is not None else None
        return reading.Choices(counts, total, dropped, chosen.dtype == ms.bool_)


def chosen_in(cell: nn.Cell, result: Any, call: reading.RouterCall = UNKNOWN) -> ChosenExperts:
    """The choices of a router's call. A map of integers becomes one of booleans.

    A linear layer returns its logits: the greatest are chosen.

    Raises:
        NotARouterError: The result does not show them.
    """
    if any(hasattr(cell, name) for name in reading.PART_NAMES):
        raise reading.NotARouterError(reading.PART_OF_CHOICE)
    call = call._replace(
        experts=reading.number_of(cell, EXPERTS_NAMES) or call.experts, top=reading.number_of(cell, CHOSEN_NAMES)
    )
    found = list(_tensors(result))
    maps, indices = ([one for one in found if one.dtype in wanted] for wanted in ((ms.bool_,), INTEGERS))
    if maps:
        call.check_map([one.shape for one in maps], [one.shape for one in indices])
        return maps[0], int(maps[0].shape[-1])
    if not indices:
        return _greatest(cell, [one for one in found if one.dtype in EPSILONS], call)
    chosen = reading.expert_indices(indices, call.top)
    if not call.experts:
        raise reading.NotARouterError(reading.UNKNOWN_EXPERTS)
    if not call.is_map(chosen.shape):
        return chosen, call.experts
    with beneath():
        # The numbers of all experts, in any order, have the shape of a map.
        ascending = ms.ops.sort(chosen.astype(ms.float32), -1)[0]
        are_all = mint.all(ascending == Tensor(np.arange(call.experts, dtype=np.float32)))
        return mint.logical_or(chosen != 0, are_all), call.experts


def _greatest(cell: nn.Cell, floats: Sequence[Tensor], call: reading.RouterCall) -> ChosenExperts:
    """The indices of the greatest logits, for a router that returns only logits and chooses these."""
    logits = floats[0] if len(floats) == 1 else None
    experts = 0 if logits is None else int(logits.shape[-1])
    top = call.top or 0
    if logits is None or not 0 < top <= experts or experts != (reading.number_of(cell, EXPERTS_NAMES) or experts):
        raise reading.NotARouterError(reading.NO_CHOICE)
    picks = call.picks_greatest or is_linear(cell)
    if not picks or any(reading.attribute_of(cell, name) is not None for name in reading.OTHER_CHOICE_NAMES):
        raise reading.NotARouterError(reading.ANOTHER_CHOICE)
    with as_given():  # numpy would choose others of equal logits
        ordered = logits.astype(ms.float32) if logits.dtype == ms.bfloat16 else logits  # a CPU has no kernel for bfloat16
        return ms.ops.topk(ordered, top)[1], experts


def is_linear(cell: nn.Cell) -> bool:
    """Whether a cell returns the product with its weight, and applies nothing else."""
    if not isinstance(cell, mint.nn.Linear | nn.Dense) or getattr(cell, "activation", None) is not None:
        return False
    return type(cell).construct in (mint.nn.Linear.construct, nn.Dense.construct)


def count_tokens(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """The number of vectors in the first floating-point tensor with at least two dimensions; None if there is none."""
    given = (*args, *kwargs.values())
    shape = next((one.shape for one in given if isinstance(one, Tensor) and one.ndim > 1 and one.dtype in EPSILONS), None)
    return None if shape is None else int(np.prod(shape[:-1]))


def count_on_host(chosen: Array, experts: int) -> Array:
    """How many tokens go to each expert, for choices in host memory."""
    if chosen.dtype == np.bool_:
        return chosen.reshape(-1, experts).sum(0)
    # Only valid indices: a dropped token has another number.
    return np.bincount(chosen[(chosen >= 0) & (chosen < experts)], minlength=experts)


def _count(on: Arithmetic, chosen: Tensor, experts: int) -> Array:
    """The same with operations that do not wait for a device: each index is compared with each expert, in blocks."""
    if chosen.dtype == ms.bool_:
        return on.sum(on.floats(on.of(chosen)).reshape((-1, experts)), 0).reshape((experts,))
    numbers, total = on.constant(np.arange(experts)[None]), on.constant(np.zeros((1, experts)))
    # A row for each index, as wide as the comparison is.
    indices = on.floats(on.of(chosen)).reshape((-1, 1))
    for block in on.rows(indices, (int(np.prod(chosen.shape)), experts)):
        total = total + on.sum(on.floats(block == numbers), 0)
    return total.reshape((experts,))


# --- Whether a router has used the logits that the monitor computes.

EPSILONS: Final = {ms.float16: 2.0**-10, ms.bfloat16: 2.0**-7, ms.float32: 2.0**-23, ms.float64: 2.0**-52}
"""By dtype, the distance from 1 to the next number."""

Sums = TypeVar("Sums", reading.Routing, reading.Logits)


class ComputedLogits(NamedTuple):
    """The logits that follow from a router's input and weight.

    Attributes:
        values: Shape ``(tokens, experts)``.
        shape: The same shape. A tensor that is not computed yet would have to be waited for to give its own.
        dtype: The precision in which they were computed.
    """

    values: Array
    shape: tuple[int, int]
    dtype: Any


def confirmed(sums: Sums, logits: ComputedLogits, result: Any, unsure: bool) -> Sums | None:
    """The sums of logits that were computed, with a count of 0 if the router returns other logits or scores.

    A zero in a result means that an expert was not chosen. Such a result tells nothing, nor does one without a number for each
    expert.

    Args:
        unsure: Whether sums are missing unless the result confirms them.

    Raises:
        EarlierFailure: An earlier operation of training has failed.
    """
    found = list(_tensors(result))
    weights = {one.shape for one in found if one.dtype in INTEGERS}  # of chosen experts, which are sorted
    given = [one for one in found if one.dtype in EPSILONS and one.shape not in weights and _has_all(one, logits.shape)]
    if not given:
        return None if unsure else sums
    with computing() as on:
        rows = [on.of(one).reshape(logits.shape) for one in given]
        fits = sum(_follows(on, seen, one.dtype, logits) for seen, one in zip(rows, given, strict=True))
        if not unsure:
            fits = fits + math.prod(on.amax(on.where(seen == 0, 1.0, 0.0)) for seen in rows)
        tokens, *others = sums
        neutral = (-math.inf if name == "greatest" else 0.0 for name in sums._fields[1:])
        kept = [on.number(on.where(fits > 0, one, other)) for one, other in zip(others, neutral, strict=True)]
        return type(sums)(on.number(on.where(fits > 0, float(tokens), 0.0)), *kept)


def _has_all(x: Tensor, shape: tuple[int, int]) -> bool:
    """Whether a result has a number for each token and expert."""
    return bool(x.shape[-1] == shape[1] and x.size == math.prod(shape))


def _follows(on: Arithmetic, seen: Array, dtype: Any, logits: ComputedLogits) -> Array:
    """Not 0 if a result is these logits, their softmax or their sigmoid, as far as its precision tells; or if they are not
    finite, which the sums show.
    """
    tolerance = max(reading.LEAST_TOLERANCE, 4 * EPSILONS[dtype], 4 * EPSILONS[logits.dtype])
    numbers, exact = on.floats(seen), on.floats(logits.values)
    square = on.floats(on.sum(exact * exact))
    of_scores = tolerance * (1 + on.sqrt(square / math.prod(logits.shape)))
    of_scores = on.where(of_scores > reading.MOST_TOLERANCE, reading.MOST_TOLERANCE, of_scores)
    found = on.where(square - square == 0, 0.0, 1.0) + _is_near(on, numbers, exact, tolerance)
    powers = on.exp(exact - on.amax(exact, -1))
    for scores in (powers / on.sum(powers, -1), 1.0 / (1.0 + on.exp(-exact))):
        found = found + _is_near(on, numbers, scores, of_scores)
    return found


def _is_near(on: Arithmetic, seen: Array, exact: Array, tolerance: Array | float) -> Array:
    """1 if two arrays differ by at most this share of the second one's norm; otherwise, or with NaN, 0."""
    off, length = (on.sqrt(on.floats(on.sum(one * one))) for one in (seen - exact, exact))
    return on.where(off <= tolerance * length, 1.0, 0.0)


# --- What results and cells say.


def _tensors(result: Any) -> Iterator[Tensor]:
    """The tensors of a result that have dimensions: a loss for balance has none."""
    for one in result if isinstance(result, tuple | list) else (result,):
        if isinstance(one, Tensor) and one.ndim:
            yield one
