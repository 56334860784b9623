"""MindSpore's implementation of ``monitor.recording.features.reading``: finds the tensors that features are computed from."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Final

import mindspore as ms
from mindspore import Tensor, mint, nn

from monitor.mindspore.features.activations import activation_of, active_share, last_active
from monitor.mindspore.features.attention import Scores, heads_of, spread, summed
from monitor.mindspore.features.choices import choices_of, confirmed, count_tokens, is_linear
from monitor.mindspore.features.matrices import (
    dtype_of_routing,
    entropy_from,
    entropy_of,
    logit_sums_from,
    logit_sums_of,
    logits_from,
    norms_of,
    similarity_of_rows,
)
from monitor.recording.attached_model import NamedParameter
from monitor.recording.features import reading
from monitor.series import Placement
from monitor.stats.mindspore.tensors import dtype_of, has_data

# --- Find a feature's tensors in a cell's arguments and weights.

FLOATS: Final = frozenset({ms.float64, ms.float32, ms.float16, ms.bfloat16})


def given_scores(args: tuple[Any, ...], kwargs: Mapping[str, Any], order: str) -> Scores | None:
    """Q and K from the arguments of a core attention; None if the arguments have no such tensors.

    Args:
        order: The order of the dimensions batch, heads, sequence and size, such as ``s,b,h,d``.

    Raises:
        MisfitError: The tensors have unusable shapes, types or contents.
    """
    query, key = reading.queries_and_keys(args, kwargs, Tensor)
    if query is None or key is None or len(query.shape) != 4 or len(key.shape) != 4:
        return None
    reading.says_causal(kwargs)
    if not all(has_data(one) and one.size for one in (query, key)):
        raise reading.MisfitError(reading.NOT_WHOLE)
    places = reading.places_of(order)
    of_query, of_key = (tuple(one.shape[place] for place in places) for one in (query, key))
    if of_query[2] != of_key[2]:
        raise reading.MisfitError(reading.OTHER_LENGTHS)
    if not reading.go_together(of_query, of_key) or not (_is_floating_point(query) and _is_floating_point(key)):
        raise reading.MisfitError(reading.NO_SCORES)
    return Scores(query, key, of_query[3] ** -0.5, places)


def matrix_of(cell: nn.Cell) -> Tensor | None:
    """``weight`` or ``wg`` of a cell, or the weight of a layer with one of these names. Runs no code of the cell."""
    for name in reading.MATRIX_NAMES:
        value = _attribute(cell, name)
        if isinstance(value, nn.Cell):
            value = _attribute(value, "weight")
        if isinstance(value, Tensor):
            return value
    return None


def bias_of(cell: nn.Cell, experts: int) -> Tensor | None:
    """The bias that is added to logits; None if there is none."""
    bias = _attribute(cell, "bias")
    fits = isinstance(bias, Tensor) and tuple(bias.shape) == (experts,) and not reading.adds_to_scores(cell)
    return whole_rows(bias) if fits else None


def local_matrix(weight: Tensor | None) -> Tensor:
    """The part of a weight on this rank, which may be the whole weight.

    Raises:
        MisfitError: The weight is no matrix, or has no data yet.
    """
    if weight is None or not has_data(weight):
        raise reading.MisfitError(reading.NOT_2D)
    if len(weight.shape) != 2 or not weight.size or not _is_floating_point(weight):
        raise reading.MisfitError(reading.NOT_2D)
    return weight


def tokens_of(args: tuple[Any, ...], kwargs: Mapping[str, Any], hidden: int) -> Tensor | None:
    """The input of a router: its first tensor whose last dimension is the hidden size."""
    for value in (*args, reading.first_named(kwargs, reading.TOKENS, Tensor)):
        if isinstance(value, Tensor) and len(value.shape) > 1 and value.shape[-1] == hidden and _is_floating_point(value):
            return whole_rows(value)
    return None


def call_of(cell: nn.Cell, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> reading.RouterCall:
    """The size of a router's call."""
    experts = reading.rows_for(matrix_of(cell), partial(tokens_of, args, kwargs))
    return reading.RouterCall(count_tokens(args, kwargs), experts)


def whole_rows(x: Tensor) -> Tensor | None:
    """The tensor itself, since the dynamic graph shards no tensor invisibly; None if it has no data."""
    return x if has_data(x) else None


def _is_floating_point(x: Tensor) -> bool:
    return dtype_of(x) in FLOATS


def _attribute(cell: nn.Cell, name: str) -> Any:
    return next((found for place in _places(cell) if (found := place.get(name)) is not None), None)


def _places(cell: nn.Cell) -> tuple[Mapping[str, Any], ...]:
    return vars(cell), cell._params, cell._cells


__all__ = [
    "activation_of",
    "active_share",
    "beneath",
    "bias_of",
    "choices_of",
    "confirmed",
    "count_tokens",
    "dtype_of_routing",
    "embeds",
    "entropy_from",
    "entropy_of",
    "given_scores",
    "heads_of",
    "is_floating_point",
    "is_linear",
    "last_active",
    "local_matrix",
    "logit_sums_from",
    "logit_sums_of",
    "logits_from",
    "matrix_of",
    "norms_of",
    "searching",
    "similarity_of_rows",
    "spread",
    "summed",
    "tokens_of",
    "unseen",
    "unwrapped",
    "weight_placement",
    "whole_rows",
]


def unseen() -> AbstractContextManager[object]:
    """A context without effect: no dispatcher observes MindSpore's operations."""
    return nullcontext()


def beneath() -> AbstractContextManager[object]:
    """A context without effect: computation on the host needs none."""
    return nullcontext()


def is_floating_point(x: Any) -> bool:
    """Whether ``x`` is a tensor of floating-point numbers."""
    return isinstance(x, Tensor) and _is_floating_point(x)


def embeds(cell: nn.Cell) -> bool:
    """Whether the cell's weight is an embedding table."""
    return isinstance(cell, nn.Embedding | nn.EmbeddingLookup | mint.nn.Embedding)


def unwrapped(cell: nn.Cell) -> nn.Cell:
    """The cell itself: MindSpore wraps no cells."""
    return cell


def searching(cell: nn.Cell) -> None:
    """Nothing to prepare: the inner calls of a cell cannot be searched."""
    del cell


def weight_placement(framework: Any, rank: int, parameter: NamedParameter, seen: Any) -> Placement:
    """The placement of a weight during a forward, which is the same as between forwards."""
    del rank, seen
    found: Placement = framework.placement("param_origin", parameter)
    return found
