"""Features: numbers of a module or parameter that are not a statistic of one tensor, such as attention entropy or update ratio.

A row of a feature kind has its own columns in place of ops. It is stored as sums in the columns of partials, so calls, ranks
and shards combine like all other rows: a mean is stored as sum and count, a norm as its square. Numbers that do not combine are
missing for combined rows. An example is the spectral norm of a matrix of which every rank holds a part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from monitor.series import DIRECTION_KIND
from monitor.stats.partials import COLUMNS, COUNT, MAX, MIN, NANS, SMALLS, SUM, SUMSQ, WRITES, Floats, Partials

Valid = NDArray[np.bool_]
Derived = tuple[Floats, Valid]

MATRICES: Final = SMALLS
"""The number of matrices in a row. Numbers of a single matrix are missing if there are several."""

LEAST_SQUARES: Final = 1e-280
"""Smaller sums of squares may have lost terms that are too small for float64."""

PLACES: Final[dict[str, tuple[int, ...]]] = {
    "attention_hook": (COUNT, SUM, SUMSQ),
    "linear_hook": (COUNT, MATRICES, SUMSQ, MAX),
    "moe_router_weight_hook": (COUNT, MATRICES, SUM),
    "moe_router_logit_hook": (COUNT, SUM),
    "update_ratio": (COUNT, SUM, SUMSQ),
    DIRECTION_KIND: (COUNT, SUM),
}
"""The columns of partials in which a kind keeps its numbers:

- ``attention_hook``: queries, and over them the sums of the entropy of the attention weights and of their greatest.
- ``linear_hook``: elements, matrices (1), the square of the Frobenius norm, the spectral norm.
- ``moe_router_weight_hook``: pairs of experts, matrices (1), the sum of the cosines of the pairs.
- ``moe_router_logit_hook``: tokens, and over them the sum of the entropy of the softmax over the experts.
- ``update_ratio``: elements, the squares of the norms of the update and of the weight before it.
- ``mg_direction``: elements, and the number of elements whose gradient and momentum have the same sign.
"""


def _mean(column: int) -> Callable[[Partials], Derived]:
    def derived(p: Partials) -> Derived:
        return p.columns[column] / p.columns[COUNT], p.columns[COUNT] > 0

    return derived


def _root(column: int) -> Callable[[Partials], Derived]:
    def derived(p: Partials) -> Derived:
        return np.sqrt(p.columns[column]), np.ones(len(p), dtype=np.bool_)

    return derived


def _spectral(p: Partials) -> Derived:
    return p.columns[MAX], p.columns[MATRICES] == 1


def _frobenius(p: Partials) -> Derived:
    """Missing if squares of finite elements left the range of float64, which the spectral norm shows."""
    squares, spectral = p.columns[SUMSQ], p.columns[MAX]
    too_great = np.isposinf(squares) & np.isfinite(spectral)
    return np.sqrt(squares), ~too_great & ~((squares < LEAST_SQUARES) & (spectral > 0))


def _stable_rank(p: Partials) -> Derived:
    (frobenius, known), (spectral, there) = _frobenius(p), _spectral(p)
    return frobenius / spectral, known & there & (spectral != 0)


def _similarity(p: Partials) -> Derived:
    mean, there = _mean(SUM)(p)
    return mean, there & (p.columns[MATRICES] == 1)


def _ratio(p: Partials) -> Derived:
    update, weight = np.sqrt(p.columns[SUM]), np.sqrt(p.columns[SUMSQ])
    return update / weight, weight != 0


COLUMNS_OF: Final[dict[str, dict[str, Callable[[Partials], Derived]]]] = {
    "attention_hook": {"entropy": _mean(SUM), "softmax_max": _mean(SUMSQ)},
    "linear_hook": {"sr": _stable_rank, "kernel_norm": _spectral, "frobenius_norm": _frobenius},
    "moe_router_weight_hook": {"router_weight_similarity": _similarity},
    "moe_router_logit_hook": {"per_token_expert_entropy": _mean(SUM)},
    "update_ratio": {"update_ratio": _ratio, "update_norm": _root(SUM), "weight_norm": _root(SUMSQ)},
}
"""The columns of each feature kind, by name."""

DERIVED: Final = {
    **{name: derived for columns in COLUMNS_OF.values() for name, derived in columns.items()},
    DIRECTION_KIND: _mean(SUM),
}

FEATURES: Final = tuple(DERIVED)


OF_ELEMENTS: Final = frozenset({"linear_hook", "update_ratio", DIRECTION_KIND})
"""Kinds whose ``count`` is the number of elements of a tensor, as for statistics."""


def own_columns(kind: str) -> tuple[str, ...]:
    """The names of a kind's own columns; empty for kinds that hold statistics of tensors."""
    return (DIRECTION_KIND,) if kind == DIRECTION_KIND else tuple(COLUMNS_OF.get(kind, ()))


def as_scalar(partials: Partials) -> Partials:
    """The partials of a scalar for each row of ``mg_direction``: the fraction of elements with equal signs.

    Rows must be combined before this call: the mean of fractions is wrong if parts differ in size.
    """
    share, there = DERIVED[DIRECTION_KIND](partials)
    columns = np.zeros((len(COLUMNS), len(partials)))
    known = there & ~np.isnan(share)
    columns[WRITES], columns[COUNT], columns[NANS] = 0.0, there, there & np.isnan(share)
    columns[MIN] = columns[MAX] = columns[SUM] = np.where(known, share, 0.0)
    columns[SUMSQ] = columns[SUM] ** 2
    columns[SMALLS] = known & (share == 0)
    return Partials(columns)
