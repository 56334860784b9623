"""Features: numbers of a module or parameter that are not a statistic of one tensor, such as attention entropy or update ratio.

A row of a feature kind has its own columns in place of ops. It is stored as sums in the columns of partials, so calls, ranks
and shards combine like all other rows: a mean is stored as sum and count, a norm as its square. Numbers that do not combine are
missing for combined rows. An example is the spectral norm of a matrix of which every rank holds a part.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from monitor.series import DIRECTION_KIND, FEATURE_KINDS, KIND_TABLE
from monitor.stats import partials
from monitor.stats.partials import COLUMNS, COUNT, MAX, MIN, NANS, POSINFS, SMALLS, SUM, SUMSQ, WRITES, Floats, Partials

Valid = NDArray[np.bool_]
Derived = tuple[Floats, Valid]

MATRICES: Final = SMALLS
"""The number of matrices in a row. Numbers of a single matrix are missing if there are several."""

SINK_QUERIES, HEADS, HEADS_ABOVE = SMALLS, NANS, POSINFS
"""Columns of ``attention_head_hook``, which add: queries of which the sinks' weights are, heads, and those above the bound."""
ASSIGNED, DROPPED, UNKNOWN_DROPS, ROUTERS = partials.POSINFS, partials.NEGINFS, NANS, SMALLS
"""Of a router or expert: assignments, and those that a capacity refused. ``UNKNOWN_DROPS`` is not 0 if a router may not
show them, which it does if there are any. ``ROUTERS`` is the number of rows of routers that a row combines, and 0 in rows of
experts.
"""

_IMBALANCE: Final = partials.M3
SUMMARY: Final = (MIN, SUMSQ, partials.M2, _IMBALANCE, partials.M4)
"""In a row of a router, what compares its experts: three percentiles of their loads, the greatest over the mean, and the number
without assignments. The row of a single router has them if the greatest over the mean is not 0.
"""
UPDATED: Final = partials.NEGINFS
"""The number of elements that have an update."""
WITH_MOMENT: Final = SUMSQ
"""The number of elements whose second moment is known."""

LEAST_SQUARES: Final = 1e-280
"""Smaller sums of squares may have lost terms that are too small for float64."""

_NUMBER_OF: Final = {name: number for number, name in enumerate(COLUMNS)}

Formula = Callable[[int, Partials], Derived]
"""Computes a column of a kind from the number of a partial, which most formulas read, and the partials."""


def _mean(column: int, p: Partials) -> Derived:
    return p.columns[column] / p.columns[COUNT], p.columns[COUNT] > 0


def _root(column: int, p: Partials) -> Derived:
    return np.sqrt(p.columns[column]), np.ones(len(p), dtype=np.bool_)


def _spectral(_column: int, p: Partials) -> Derived:
    return p.columns[MAX], p.columns[MATRICES] == 1


def _frobenius(_column: int, p: Partials) -> Derived:
    """Missing if squares of finite elements left the range of float64, which the spectral norm shows."""
    squares, spectral = p.columns[SUMSQ], p.columns[MAX]
    too_great = np.isposinf(squares) & np.isfinite(spectral)
    return np.sqrt(squares), ~too_great & ~((squares < LEAST_SQUARES) & (spectral > 0))


def _stable_rank(column: int, p: Partials) -> Derived:
    (frobenius, known), (spectral, there) = _frobenius(column, p), _spectral(column, p)
    return frobenius / spectral, known & there & (spectral != 0)


def _mean_of_one(column: int, p: Partials) -> Derived:
    mean, there = _mean(column, p)
    return mean, there & (p.columns[MATRICES] == 1)


def _ratio(_column: int, p: Partials) -> Derived:
    update, weight = np.sqrt(p.columns[SUM]), np.sqrt(p.columns[SUMSQ])
    return update / weight, weight != 0


def _largest(column: int, p: Partials) -> Derived:
    return p.columns[column], p.columns[COUNT] > 0


def _share_of_heads(_column: int, p: Partials) -> Derived:
    """NaN if it is not known which heads are above the bound."""
    share = p.columns[HEADS_ABOVE] / p.columns[HEADS]
    return np.where(np.isnan(p.columns[MAX]), np.nan, share), p.columns[COUNT] > 0


def _mean_of_sinks(column: int, p: Partials) -> Derived:
    return p.columns[column] / p.columns[SINK_QUERIES], p.columns[SINK_QUERIES] > 0


def _count(column: int, p: Partials) -> Derived:
    return p.columns[column], np.ones(len(p), dtype=np.bool_)


def _load(column: int, p: Partials) -> Derived:
    load, there = _mean(column, p)
    return load, there & (p.columns[ROUTERS] == 0)


def _of_router(column: int, p: Partials) -> Derived:
    return p.columns[column], _has_logits(p)


def _mean_of_router(column: int, p: Partials) -> Derived:
    return _mean(column, p)[0], _has_logits(p)


def _has_logits(p: Partials) -> Valid:
    found: Valid = (p.columns[ROUTERS] > 0) & (p.columns[COUNT] > 0)
    return found


def _dropped(_column: int, p: Partials) -> Derived:
    every, dropped = p.columns[ASSIGNED] + p.columns[DROPPED], p.columns[DROPPED]
    shown = (p.columns[UNKNOWN_DROPS] == 0) | (dropped > 0)
    return dropped / every, (p.columns[ROUTERS] > 0) & shown & (every > 0)


def _summary(column: int, p: Partials) -> Derived:
    return p.columns[column], (p.columns[ROUTERS] == 1) & (p.columns[_IMBALANCE] > 0)


FORWARDS: Final = "smalls"
"""The number of forwards in a row of activations."""

MOST_EXACT: Final = 2.0**53
"""Sums of integers are exact up to here."""


def _mean_of_forwards(column: int, p: Partials) -> Derived:
    """Missing if a forward has none, which -Inf says."""
    return p.columns[column] / p[FORWARDS], ~np.isneginf(p.columns[column])


def _largest_ratio(column: int, p: Partials) -> Derived:
    """Missing if no forward has one, which -Inf says: their medians are 0."""
    return p.columns[column], ~np.isneginf(p.columns[column])


def _channel_of_all(_column: int, p: Partials) -> Derived:
    """The channel, if it is the same in all forwards: only then is the sum of its squares that of equal numbers."""
    ratio, known = _largest_ratio(MAX, p)
    channel, squares = p["posinfs"] / p[FORWARDS], p["neginfs"]
    alike = (squares < MOST_EXACT) & (squares == channel * channel * p[FORWARDS]) & (channel % 1 == 0)
    return channel, known & np.isfinite(ratio) & ((p[FORWARDS] == 1) | alike)


def _rest_of_one(column: int, p: Partials) -> Derived:
    """Shares of several forwards do not combine, unless all are 1: nothing says whether their units are the same."""
    share, number = p.columns[column], p.columns[NANS]
    return 1.0 - share, (number == 1) | ((number > 1) & (share == 1))


def _of_updates(column: int, p: Partials) -> Derived:
    return p.columns[column] / p.columns[UPDATED], p.columns[UPDATED] > 0


def _of_moments(column: int, p: Partials) -> Derived:
    """Missing if only a part of the tensor has a known second moment."""
    known = p.columns[WITH_MOMENT]
    return p.columns[column] / known, (known > 0) & (known == p.columns[COUNT])


def _root_of_moments(column: int, p: Partials) -> Derived:
    mean, there = _of_moments(column, p)
    return np.sqrt(mean), there


FORMULAS: Final[dict[str, Formula]] = {
    "mean": _mean,
    "largest": _largest,
    "share of heads": _share_of_heads,
    "mean of sinks": _mean_of_sinks,
    "mean of one matrix": _mean_of_one,
    "root": _root,
    "root mean square": _root_of_moments,
    "share of second moments": _of_moments,
    "share of updates": _of_updates,
    "ratio of roots": _ratio,
    "spectral norm": _spectral,
    "Frobenius norm": _frobenius,
    "stable rank": _stable_rank,
    "count": _count,
    "load of an expert": _load,
    "of a router": _of_router,
    "mean of a router": _mean_of_router,
    "share dropped": _dropped,
    "of the experts of one router": _summary,
    "mean of forwards": _mean_of_forwards,
    "largest ratio": _largest_ratio,
    "channel of all": _channel_of_all,
    "rest of one share": _rest_of_one,
}
"""The formulas that columns of kinds name in ``monitor/series.py``."""

_DERIVED_OF: Final = {
    kind.name: {one.name: partial(FORMULAS[one.formula], _NUMBER_OF.get(one.partial, WRITES)) for one in kind.columns}
    for kind in KIND_TABLE
}

COLUMNS_OF: Final = {kind: _DERIVED_OF[kind] for kind in FEATURE_KINDS}
"""The columns of each feature kind, by name."""

DERIVED: Final = {name: derived for columns in _DERIVED_OF.values() for name, derived in columns.items()}

FEATURES: Final = tuple(DERIVED)


OF_ELEMENTS: Final = frozenset(kind.name for kind in KIND_TABLE if kind.of_elements)
"""Kinds whose ``count`` is the number of elements of a tensor."""


def own_columns(kind: str) -> tuple[str, ...]:
    """The names of a kind's own columns; empty for kinds that hold statistics of tensors."""
    return tuple(_DERIVED_OF.get(kind, ()))


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
