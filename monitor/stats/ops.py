"""What each op means, derived from partials. With a NaN in the tensor `min max mean norm absmax std` are NaN; with Inf they
are what IEEE arithmetic gives. What has no value (the mean of no elements) is missing, which is not NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from monitor.series import ADAM_KINDS, DIRECTION_KIND
from monitor.stats.features import COLUMNS_OF, DERIVED, FEATURES, own_columns
from monitor.stats.histograms import HISTOGRAM_OPS, LOSSES, MAGNITUDES, lost
from monitor.stats.partials import COUNT, EXPONENT, M2, MAX, MIN, NANS, NEGINFS, POSINFS, SMALLS, SUM, SUMSQ, Floats, Partials

Valid = NDArray[np.bool_]

DEFAULT_OP: Final = "norm"
LAYOUT_OPS: Final = ("shape", "dtype")
TEXT_OPS: Final = (*LAYOUT_OPS, MAGNITUDES)
"""Ops that are no number."""
CALLS: Final = "calls"
"""Beside the ops, of kinds whose rows are calls of operators: how many a row combines."""

INTEGER_OPS: Final = ("nans", "infs", CALLS)


def _min(p: Partials) -> Floats:
    c = p.columns
    return _with_nan(p, np.where(c[NEGINFS] > 0, -np.inf, c[MIN]))


def _max(p: Partials) -> Floats:
    c = p.columns
    return _with_nan(p, np.where(c[POSINFS] > 0, np.inf, c[MAX]))


def _absmax(p: Partials) -> Floats:
    c = p.columns
    return _with_nan(p, np.where(_infs(p) > 0, np.inf, np.maximum(np.abs(c[MIN]), np.abs(c[MAX]))))


def _mean(p: Partials) -> Floats:
    c = p.columns
    finite = np.ldexp(c[SUM] / np.maximum(p.finite, 1), c[EXPONENT].astype(np.int64))
    infinite = np.where(c[POSINFS] > 0, np.inf, -np.inf)
    infinite = np.where((c[POSINFS] > 0) & (c[NEGINFS] > 0), np.nan, infinite)
    return _with_nan(p, np.where(_infs(p) > 0, infinite, finite))


def _norm(p: Partials) -> Floats:
    c = p.columns
    return _with_nan(p, np.where(_infs(p) > 0, np.inf, np.ldexp(np.sqrt(c[SUMSQ]), c[EXPONENT].astype(np.int64))))


def _std(p: Partials) -> Floats:
    """Over the population (divided by n, not n - 1)."""
    c = p.columns
    finite = np.ldexp(np.sqrt(c[M2] / np.maximum(p.finite, 1)), c[EXPONENT].astype(np.int64))
    return _with_nan(p, np.where(_infs(p) > 0, np.nan, finite))


def _zeros(p: Partials) -> Floats:
    c = p.columns
    share: Floats = c[SMALLS] / np.maximum(c[COUNT], 1)
    return share


def _nans(p: Partials) -> Floats:
    nans: Floats = p.columns[NANS]
    return nans


def _infs(p: Partials) -> Floats:
    infs: Floats = p.columns[POSINFS] + p.columns[NEGINFS]
    return infs


def _with_nan(p: Partials, values: Floats) -> Floats:
    poisoned: Floats = np.where(p.columns[NANS] > 0, np.nan, values)
    return poisoned


_DERIVED: Final[dict[str, Callable[[Partials], Floats]]] = {
    "min": _min,
    "max": _max,
    "mean": _mean,
    "norm": _norm,
    "zeros": _zeros,
    "nans": _nans,
    "infs": _infs,
    "absmax": _absmax,
    "std": _std,
}
_DEFINED_WHEN_EMPTY: Final = frozenset({"norm", "nans", "infs"})

NUMERIC_OPS: Final = tuple(_DERIVED)
OPS: Final = (*NUMERIC_OPS, *LAYOUT_OPS, *HISTOGRAM_OPS)


def derive(op: str, partials: Partials) -> tuple[Floats, Valid]:
    """The values of a numeric op, one a row, and which of them exist.

    Args:
        op: One of ``NUMERIC_OPS`` or ``LOSSES``, a column of features, or ``CALLS``.
    """
    if op == CALLS:
        return partials["writes"], partials["writes"] > 0
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        if op in LOSSES:
            return _share_lost(op, partials)
        if op in DERIVED:
            return DERIVED[op](partials)
        values = _DERIVED[op](partials)
    valid = np.ones(len(partials), dtype=np.bool_) if op in _DEFINED_WHEN_EMPTY else partials["count"] > 0
    return values, valid


def is_of(op: str, kind: str) -> bool:
    """Whether rows of a kind may have an op: partials of features are sums of something else, and histograms of signed numbers
    say nothing of magnitudes.
    """
    if kind in COLUMNS_OF or op in FEATURES:
        return op in own_columns(kind)
    return not (kind in (*ADAM_KINDS, DIRECTION_KIND) and op in HISTOGRAM_OPS)


def counted(partials: Partials) -> Valid:
    """Which rows have a histogram: all of their finite elements are in it."""
    if partials.histogram is None:
        return np.zeros(len(partials), dtype=np.bool_)
    whole: Valid = partials.histogram.sum(axis=1) == partials.finite
    return whole & (partials["count"] > 0)


def _share_lost(op: str, partials: Partials) -> tuple[Floats, Valid]:
    if partials.histogram is None:
        return np.zeros(len(partials)), counted(partials)
    return lost(op, partials.histogram) / partials["count"], counted(partials)


def known_ops(ops: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The ops that exist, in the order asked for and each once, and those that do not. None left: ``norm``."""
    asked = tuple(dict.fromkeys(ops))
    known = tuple(op for op in asked if op in OPS)
    return known or (DEFAULT_OP,), tuple(op for op in asked if op not in OPS)
