"""The experts that a router chose, from what its call returned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from monitor.recording.features import reading
from monitor.stats.mindspore.tensors import Arithmetic, Array, beneath, computing

EXPERTS_NAMES: Final = ("num_experts", "n_routed_experts", "expert_num", "num_moe_experts")
CHOSEN_NAMES: Final = ("top_k", "topk", "num_experts_per_tok", "moe_router_topk", "num_experts_chosen")
CAPACITY_NAMES: Final = ("capacity", "capacity_factor", "expert_capacity", "moe_expert_capacity_factor")
"""A router with one of these, not None, refuses assignments beyond the capacity of an expert."""

INTEGERS: Final = (ms.int32, ms.int64)

UNKNOWN: Final = reading.RouterCall()

SEVERAL: Final = "it returns several tensors of integers, and it is unclear which of them holds the chosen experts"

ChosenExperts = tuple[Tensor, int]
"""The result of a router's call, indices or a boolean map, and the number of experts."""


def choices_of(cell: nn.Cell, result: Any, call: reading.RouterCall) -> reading.Choices:
    """What a router chose. ``dropped`` is known of a router that has a capacity.

    Raises:
        NotARouterError: The result does not show it.
        EarlierFailure: An earlier operation of training has failed.
    """
    if _attribute(cell, "moe_pad_expert_input_to_capacity"):
        raise reading.NotARouterError(reading.PADDED)
    chosen, experts = chosen_in(cell, result, call)
    asked = int(np.prod(chosen.shape))
    if chosen.dtype == ms.bool_:
        asked = asked // experts * (_number(cell, CHOSEN_NAMES) or 0)
    with computing() as on:
        counts = Tensor(count_on_host(on.of(chosen), experts)) if on.may_look else _count(on, chosen, experts)
        total = float(on.of(counts).sum()) if on.may_look else on.sum(counts)
        limited = any(_attribute(cell, name) is not None for name in CAPACITY_NAMES)
        return reading.Choices(counts, total, asked - total if limited and asked else None, chosen.dtype == ms.bool_)


def chosen_in(cell: nn.Cell, result: Any, call: reading.RouterCall = UNKNOWN) -> ChosenExperts:
    """The choices of a router's call. A map of integers becomes one of booleans.

    Raises:
        NotARouterError: The result does not show them.
    """
    if any(hasattr(cell, name) for name in reading.PART_NAMES):
        raise reading.NotARouterError(reading.PART_OF_CHOICE)
    call = call._replace(experts=_number(cell, EXPERTS_NAMES) or call.experts, top=_number(cell, CHOSEN_NAMES))
    found = [one for one in _tensors(result) if one.ndim > 0]
    maps, indices = ([one for one in found if one.dtype in wanted] for wanted in ((ms.bool_,), INTEGERS))
    if maps:
        call.check_map([one.shape for one in maps], [one.shape for one in indices])
        return maps[0], int(maps[0].shape[-1])
    if not indices:
        raise reading.NotARouterError("it does not return the numbers of the chosen experts")
    chosen = _fitting_indices(indices, call.top)
    if not call.experts:
        raise reading.NotARouterError(reading.UNKNOWN_EXPERTS)
    if not call.is_map(chosen.shape):
        return chosen, call.experts
    with beneath():
        return chosen != 0, call.experts


def count_tokens(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """The number of vectors in the first tensor of numbers with at least two dimensions; None if there is none."""
    given = (*args, *kwargs.values())
    shape = next((one.shape for one in given if isinstance(one, Tensor) and one.ndim > 1 and one.dtype not in INTEGERS), None)
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


def _fitting_indices(indices: Sequence[Tensor], top: int | None) -> Tensor:
    """The tensor with as many indices for each token as the router chooses, if there are several."""
    fitting = [one for one in indices if top is not None and one.shape[-1] == top] if len(indices) > 1 else indices
    if len(fitting) != 1:
        raise reading.NotARouterError(SEVERAL)
    return fitting[0]


def _tensors(result: Any) -> Iterator[Tensor]:
    for one in result if isinstance(result, tuple | list) else (result,):
        if isinstance(one, Tensor):
            yield one


def _number(cell: nn.Cell, names: tuple[str, ...]) -> int | None:
    found = (_attribute(cell, name) for name in names)
    return next((value for value in found if isinstance(value, int) and not isinstance(value, bool)), None)


def _attribute(cell: nn.Cell, name: str) -> Any:
    """An attribute of a cell, or of its configuration; None without it."""
    value = getattr(cell, name, None)
    return getattr(getattr(cell, "config", None), name, None) if value is None else value
