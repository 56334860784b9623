"""Derives each op from partials; also the exact threshold of ``zeros``.

If the tensor has a NaN, `min max mean norm absmax std rms absmean` are NaN; with Inf they follow IEEE arithmetic. The other ops
are those of the finite elements. An op without a value, such as the mean of no elements, is missing, which is not NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from monitor.series import DIRECTION_KIND, RUN_KIND, SIGNED_KINDS
from monitor.stats import histograms
from monitor.stats.features import COLUMNS_OF, DERIVED, FEATURES, own_columns
from monitor.stats.histograms import COUNTED, HISTOGRAM_OPS, MAGNITUDES, PERCENTILES, histogram_text
from monitor.stats.partials import (
    ABSSUM,
    COUNT,
    EXPONENT,
    LEAST,
    LEAST_VARIANCE,
    M2,
    M3,
    M4,
    MAX,
    MIN,
    NANS,
    NEGINFS,
    POSINFS,
    SMALLS,
    SUM,
    SUMSQ,
    Floats,
    KindRows,
    Partials,
    Words,
    check_sums,
    knows_magnitudes,
)

Valid = NDArray[np.bool_]

DEFAULT_OP: Final = "norm"
LAYOUT_OPS: Final = ("shape", "dtype")
CHECKSUM: Final = "checksum"
"""A number of 64 bits that is the same for the same bits (``checksums``), as 16 hexadecimal digits."""
SPELLED_OPS: Final = (MAGNITUDES, CHECKSUM)
"""Texts that are derived from partials."""
TEXT_OPS: Final = (*LAYOUT_OPS, *SPELLED_OPS)
"""Ops whose values are texts."""
CALLS: Final = "calls"
"""A column beside the ops, for kinds whose rows are calls of operators: the number of calls that a row combines."""

INTEGER_OPS: Final = ("nans", "infs", CALLS)


def _min(p: Partials, special: bool) -> Floats:
    c = p.columns
    return _with_nan(p, np.where(c[NEGINFS] > 0, -np.inf, c[MIN])) if special else c[MIN].copy()


def _max(p: Partials, special: bool) -> Floats:
    c = p.columns
    return _with_nan(p, np.where(c[POSINFS] > 0, np.inf, c[MAX])) if special else c[MAX].copy()


def _absmax(p: Partials, special: bool) -> Floats:
    finite: Floats = np.maximum(np.abs(p.columns[MIN]), np.abs(p.columns[MAX]))
    return _with_nan(p, np.where(_has_infs(p), np.inf, finite)) if special else finite


def _mean(p: Partials, special: bool) -> Floats:
    c = p.columns
    finite = _unscaled(p, c[SUM] / np.maximum(p.finite if special else c[COUNT], 1))
    if not special:
        return finite
    infinite = np.where(c[POSINFS] > 0, np.inf, -np.inf)
    infinite = np.where((c[POSINFS] > 0) & (c[NEGINFS] > 0), np.nan, infinite)
    return _with_nan(p, np.where(_has_infs(p), infinite, finite))


def _norm(p: Partials, special: bool) -> Floats:
    finite = _unscaled(p, np.sqrt(p.columns[SUMSQ]))
    return _with_nan(p, np.where(_has_infs(p), np.inf, finite)) if special else finite


def _std(p: Partials, special: bool) -> Floats:
    """The standard deviation of the population (divided by n, not n - 1)."""
    finite = _unscaled(p, np.sqrt(p.columns[M2] / np.maximum(p.finite, 1)))
    return _with_nan(p, np.where(_has_infs(p), np.nan, finite)) if special else finite


def _kurtosis(p: Partials, _special: bool) -> Floats:
    """The excess kurtosis of the finite elements as a population: 0 for a normal distribution, at least -2 for any."""
    c, n = p.columns, np.maximum(p.finite, 1)
    excess: Floats = c[M4] / n / np.square(c[M2] / n) - 3.0
    return excess


def _skewness(p: Partials, _special: bool) -> Floats:
    """The skewness of the finite elements as a population: 0 for a symmetric distribution."""
    c, n = p.columns, np.maximum(p.finite, 1)
    skew: Floats = c[M3] / n / (c[M2] / n) ** 1.5
    return skew


def _rms(p: Partials, special: bool) -> Floats:
    """The root mean square."""
    count = np.maximum(p.finite if special else p.columns[COUNT], 1)
    finite = _unscaled(p, np.sqrt(p.columns[SUMSQ]) / np.sqrt(count))  # the norm itself may leave the range of float64
    return _with_nan(p, np.where(_has_infs(p), np.inf, finite)) if special else finite


def _absmean(p: Partials, special: bool) -> Floats:
    """The mean magnitude."""
    finite = _unscaled(p, p.columns[ABSSUM] / np.maximum(p.finite, 1))
    return _with_nan(p, np.where(_has_infs(p), np.inf, finite)) if special else finite


def _smallest_nonzero(p: Partials, _special: bool) -> Floats:
    least: Floats = p.columns[LEAST].copy()
    return least


def _has_absmean(p: Partials) -> Valid:
    known: Valid = knows_magnitudes(p.columns) & (p.columns[COUNT] > 0)
    return known


def _has_nonzero(p: Partials) -> Valid:
    least: Valid = p.columns[LEAST] > 0
    return least


def _has_higher(p: Partials) -> Valid:
    """Where the higher moments were measured, elements differ, and no power of their distance from the mean left the range."""
    c = p.columns
    known: Valid = (c[M4] > 0) & (c[M2] >= LEAST_VARIANCE * p.finite) & (c[MIN] < c[MAX])
    return known


def _zeros(p: Partials, _special: bool) -> Floats:
    c = p.columns
    share: Floats = c[SMALLS] / np.maximum(c[COUNT], 1)
    return share


def _nans(p: Partials, _special: bool) -> Floats:
    nans: Floats = p.columns[NANS].copy()
    return nans


def _infs(p: Partials, _special: bool) -> Floats:
    infs: Floats = p.columns[POSINFS] + p.columns[NEGINFS]
    return infs


def _has_infs(p: Partials) -> Valid:
    return _infs(p, True) > 0


def _unscaled(p: Partials, values: Floats) -> Floats:
    """The values times the power of two by which sums are divided; it is 1 for almost all rows."""
    exponent = p.columns[EXPONENT]
    times: Floats = np.ldexp(values, exponent.astype(np.int64)) if exponent.any() else values
    return times


def _with_nan(p: Partials, values: Floats) -> Floats:
    poisoned: Floats = np.where(p.columns[NANS] > 0, np.nan, values)
    return poisoned


_DERIVED: Final[dict[str, Callable[[Partials, bool], Floats]]] = {
    "min": _min,
    "max": _max,
    "mean": _mean,
    "norm": _norm,
    "zeros": _zeros,
    "nans": _nans,
    "infs": _infs,
    "absmax": _absmax,
    "std": _std,
    "kurtosis": _kurtosis,
    "skewness": _skewness,
    "rms": _rms,
    "absmean": _absmean,
    "smallest_nonzero": _smallest_nonzero,
}
"""How each op is computed from partials, and from whether any of them have NaN or Inf."""

_KNOWN: Final[dict[str, Callable[[Partials], Valid]]] = {
    "kurtosis": _has_higher,
    "skewness": _has_higher,
    "absmean": _has_absmean,
    "smallest_nonzero": _has_nonzero,
}
"""Which rows have an op, where that is more than having elements."""

_DEFINED_WHEN_EMPTY: Final = frozenset({"norm", "nans", "infs"})

NUMERIC_OPS: Final = tuple(_DERIVED)
MERGED_OPS: Final = NUMERIC_OPS[: NUMERIC_OPS.index("kurtosis") + 1]
"""The ops that every merged set has. It has the others if the job was asked for them."""
OPS: Final = (*NUMERIC_OPS, *LAYOUT_OPS, *HISTOGRAM_OPS, CHECKSUM)


def derive(op: str, partials: Partials) -> tuple[Floats, Valid]:
    """The values of a numeric op, one per row, and which of them exist.

    Args:
        op: One of ``NUMERIC_OPS`` or ``COUNTED``, a column of features, or ``CALLS``.
    """
    return derive_all([op], partials)[op]


def derive_all(ops: Iterable[str], partials: Partials) -> dict[str, tuple[Floats, Valid]]:
    """``derive`` for several ops."""
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        special = bool(partials.columns[NANS : NEGINFS + 1].any())
        return {op: _derived(op, partials, special) for op in ops}


def _derived(op: str, partials: Partials, special: bool) -> tuple[Floats, Valid]:
    if op == CALLS:
        return partials["writes"], partials["writes"] > 0
    if op in COUNTED:
        return _of_histogram(op, partials)
    if op in DERIVED:
        return DERIVED[op](partials)
    values = _DERIVED[op](partials, special)
    if op in _KNOWN:
        return values, _KNOWN[op](partials)
    return values, np.ones(len(partials), dtype=np.bool_) if op in _DEFINED_WHEN_EMPTY else partials["count"] > 0


def spelled(op: str, partials: Partials) -> list[str | None]:
    """The values of one of ``SPELLED_OPS``, one per row; None where there is none."""
    if op == CHECKSUM:
        return [f"{one:016x}" if one else None for one in checksums(partials).tolist()]
    histogram, there = partials.histogram, has_histogram(partials).tolist()
    return [histogram_text(histogram[i]) if histogram is not None and it_is else None for i, it_is in enumerate(there)]


_BITS_TIMES, _PLACES_TIMES = np.uint64(0x9E3779B97F4A7C15), np.uint64(2 * 0x3F58476D1CE4E5B9)


def checksums(partials: Partials) -> Words:
    """One number of each row from its check sums; 0 where they were not measured.

    The first factor is odd, the second twice an odd number. So each word b(i) counts with an odd factor, and a change of one
    word is not missed. Nor are an opposite pair or a swap below 2^32 words: what they change, d (i - j), times the second
    factor, is a multiple of 2^64 only if d (i - j) is one of 2^63.
    """
    bits, places = check_sums(partials.columns)
    return np.where(bits > 0, bits * _BITS_TIMES + places * _PLACES_TIMES, np.uint64(0))


def total_norm(partials: Partials) -> float:
    """The norm of all rows as one vector."""
    norms, _ = derive("norm", partials)
    return math.nan if np.isnan(norms).any() else math.hypot(*norms.tolist())


def has_op(op: str, kind: str) -> bool:
    """Whether rows of a kind may have an op.

    Partials of features are sums of other quantities, and histograms of signed numbers do not hold magnitudes.
    """
    if kind in COLUMNS_OF or op in FEATURES:
        return op in own_columns(kind)
    return not (kind in (*SIGNED_KINDS, DIRECTION_KIND) and op in (*HISTOGRAM_OPS, CHECKSUM))


def has_histogram(partials: Partials) -> Valid:
    """Which rows have a complete histogram, with all finite elements in it."""
    if partials.histogram is None:
        return np.zeros(len(partials), dtype=np.bool_)
    whole: Valid = partials.histogram.sum(axis=1) == partials.finite
    return whole & (partials["count"] > 0)


def _of_histogram(op: str, partials: Partials) -> tuple[Floats, Valid]:
    counts, there = partials.histogram, has_histogram(partials)
    if counts is None:
        return np.zeros(len(partials)), there
    if op in PERCENTILES:
        values, known = histograms.percentiles(op, counts, _absmax(partials, special=False))
        return values, there & known
    return histograms.lost_elements(op, counts) / partials["count"], there


def known_ops(ops: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The ops that exist, each once and in the given order (``norm`` if there are none), and the ops that do not exist."""
    asked = tuple(dict.fromkeys(ops))
    known = tuple(op for op in asked if op in OPS)
    return known or (DEFAULT_OP,), tuple(op for op in asked if op not in OPS)


# --- The threshold of `zeros`, made exact for each precision.


@dataclass(frozen=True, slots=True)
class Epsilon:
    """``|x| < eps`` as a comparison between numbers of one precision.

    Rounding eps to float32 can move it across a value of the tensor. ``bound`` is the smallest number of the precision that
    is not below eps. So for every x of the precision, ``|x| < eps`` and ``|x| < bound`` have the same result.

    Attributes:
        bound: See above.
        square: bound² rounded to the precision, if comparing squares is exact too; else None, as for an eps whose square
            underflows. Kernels compute squares anyway.
    """

    bound: float
    square: float | None

    @classmethod
    def of(cls, eps: float, precision: type[np.float32] | type[np.float64]) -> Epsilon:
        bound = precision(eps)
        if float(bound) < eps:
            bound = np.nextafter(bound, precision(np.inf))
        below = np.nextafter(bound, precision(0))
        with np.errstate(under="ignore", over="ignore"):
            square, square_below = bound * bound, below * below
        exact = np.finfo(precision).tiny <= square_below < square < np.inf
        return cls(float(bound), float(square) if exact else None)


# --- The total norm of a step's gradients, in the rows of its numbers.


@dataclass(frozen=True, slots=True)
class TotalNorm:
    """How the rows of gradients give the total norm of a step, for rows of ``run`` that have no number yet.

    Attributes:
        rows: The rows that ``grad_reduced`` must have.
        before: The series of the norm before clipping, if it has a row. The other row without a number is the norm after it.
        intact: Whether nothing is known to have changed the gradients since backward.
        alone: Whether ``grad_unreduced`` has the same gradients, as backward left them.
    """

    rows: int
    before: int | None = None
    intact: bool = False
    alone: bool = False


def with_total(kinds: dict[str, KindRows], total: TotalNorm | None) -> dict[str, KindRows]:
    """``kinds``, with the total norm in one of the rows of ``run`` that have no number, and without the others of these rows.

    It is the norm before clipping if the gradients are as backward left them, and otherwise only the norm after it.
    """
    numbers = kinds.get(RUN_KIND)
    if numbers is None or not (numbers.partials.columns[COUNT] == 0).any():
        return kinds
    waiting, found = numbers.partials.columns[COUNT] == 0, kinds.get("grad_reduced")
    if total is None or found is None or len(found) != total.rows:
        filled = np.zeros_like(waiting)
    else:
        filled = waiting & ((numbers.series == total.before) == _are_intact(total, found, kinds.get("grad_unreduced")))
        columns = numbers.partials.columns.copy()
        columns[SUM, filled], columns[COUNT, filled] = total_norm(found.partials), 1.0
        numbers = replace(numbers, partials=Partials(columns))
    numbers = numbers.take(np.flatnonzero(~waiting | filled))
    return {kind: rows for kind, rows in {**kinds, RUN_KIND: numbers}.items() if len(rows)}


def _are_intact(total: TotalNorm, reduced: KindRows, unreduced: KindRows | None) -> bool:
    """Whether reduced gradients are those that backward left. If both were measured, their norms say it."""
    if total.before is None or not total.alone or unreduced is None:
        return total.before is not None and total.intact
    before, after = (np.sort(derive("norm", rows.partials)[0]) for rows in (_latest(unreduced), reduced))
    if len(before) == len(after):
        return bool(np.array_equal(before, after, equal_nan=True))
    return total.intact and {*map(str, before.tolist())} <= {*map(str, after.tolist())}  # as text, since NaN equals nothing


def _latest(rows: KindRows) -> KindRows:
    """The row of the last micro-step of each series."""
    order = np.lexsort((rows.micro_step, rows.series))
    return rows.take(order[np.diff(rows.series[order], append=-1) != 0]) if (rows.micro_step > 0).any() else rows
