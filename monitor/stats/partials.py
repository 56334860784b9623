"""Partials: the mergeable numbers that a tensor is reduced to.

The mean of means is wrong if shards differ in size, and norms do not add: two shards with norms 3 and 4 make a tensor of norm
5. So a kernel never reports results. It reports partials, which combine exactly, and every op is derived from them afterwards
(``ops.py``).

Over all elements: ``count`` and the counts of NaN, +Inf, -Inf and of |x| < eps. Over the finite ones: ``min``, ``max``, and
three sums divided by a power of two, so that no finite tensor overflows them:

    sum = Σ x / 2^e        sumsq = Σ x² / 4^e        m2 = Σ (x - mean)² / 4^e        e = exponent, almost always 0

``m2`` is stored beside ``sumsq`` because a variance computed as a difference of the other two loses every digit if the mean is
large compared with the spread. It merges by the pairwise formula of Chan, Golub and LeVeque (1979), "Updating formulae and a
pairwise algorithm for computing sample variances".
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Partial:
    """A column of partials: everything that differs between columns outside of kernels and ``combine_groups``.

    Attributes:
        empty: Its number for a tensor without elements.
        whole: Whether files store it as an integer.
        power: Its sums are divided by 2 to the power of this times ``exponent``.
        seldom: Whether it is 0 in almost all rows. Temporary files of the merge then leave it out.
    """

    name: str
    empty: float = 0.0
    whole: bool = True
    power: int = 0
    seldom: bool = False


PARTIAL_TABLE: Final = (
    Partial("writes"),
    Partial("count"),
    Partial("nans", seldom=True),
    Partial("posinfs", seldom=True),
    Partial("neginfs", seldom=True),
    Partial("smalls", seldom=True),
    Partial("min", np.inf, whole=False),
    Partial("max", -np.inf, whole=False),
    Partial("sum", whole=False, power=1),
    Partial("sumsq", whole=False, power=2),
    Partial("m2", whole=False, power=2),
    Partial("exponent", seldom=True),
)
"""The columns of a table row, float64 each. ``writes`` says whether the row was written since the last seal; the rest are
the partials. Counts are exact up to 2^53."""

COLUMNS: Final = tuple(one.name for one in PARTIAL_TABLE)
WRITES, COUNT, NANS, POSINFS, NEGINFS, SMALLS, MIN, MAX, SUM, SUMSQ, M2, EXPONENT = range(len(COLUMNS))

PARTIALS: Final = COLUMNS[WRITES + 1 :]
SCALED: Final = tuple((column, one.power) for column, one in enumerate(PARTIAL_TABLE) if one.power)
"""The columns of sums, each with the power of two that divides it, in units of ``exponent``."""

Floats = NDArray[np.float64]

EMPTY: Final = tuple(one.empty for one in PARTIAL_TABLE)
"""The row of a tensor without elements (``writes`` aside): the neutral element of ``combine``."""


@dataclass(frozen=True, slots=True)
class Partials:
    """Aligned columns of partials, one entry per row.

    Attributes:
        columns: float64, shape ``(len(COLUMNS), rows)``, contiguous along rows.
        histogram: The elements of each row in each bin, int64, shape ``(rows, bins)``; zeros for rows without a histogram.
            None if no histograms were counted.
    """

    columns: Floats
    histogram: NDArray[np.int64] | None = None

    @classmethod
    def from_rows(cls, rows: Floats) -> Partials:
        """From table rows, shape ``(rows, len(COLUMNS))``."""
        return cls(np.ascontiguousarray(rows.T))

    @classmethod
    def joined(cls, parts: Iterable[Partials]) -> Partials:
        """The rows of all parts, one part after the other."""
        every = list(parts)
        return cls(np.concatenate([one.columns for one in every], axis=1), _joined_histograms(every))

    def __len__(self) -> int:
        return int(self.columns.shape[1])

    def __getitem__(self, name: str) -> Floats:
        column: Floats = self.columns[COLUMNS.index(name)]
        return column

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_] | slice) -> Partials:
        """Some of the rows, contiguous along rows as before; plain indexing would store them row by row."""
        histogram = None if self.histogram is None else self.histogram[rows]
        if isinstance(rows, slice):
            return Partials(self.columns[:, rows], histogram)
        index = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
        return Partials(self.columns.take(index, axis=1), histogram)

    @property
    def finite(self) -> Floats:
        """Number of finite elements of each row."""
        c = self.columns
        finite: Floats = c[COUNT] - c[NANS] - c[POSINFS] - c[NEGINFS]
        return finite


def exponent_for(absmax: float) -> int:
    """The power of two to divide by before squaring in float64; 0 wherever squares and their sums fit."""
    return math.frexp(absmax)[1] if absmax and not 1e-100 < absmax < 1e100 else 0


def union(rows: Floats) -> Floats:
    """The row of the union of several sets of elements.

    Args:
        rows: Table rows, shape ``(sets, len(COLUMNS))``, in the order in which their sums are to be added.

    Returns:
        One row, shape ``(len(COLUMNS),)``; ``writes`` is 1.
    """
    return combine_groups(Partials.from_rows(rows), np.zeros(1, dtype=np.int64)).columns[:, 0]


def combine_groups(parts: Partials, starts: NDArray[np.int64]) -> Partials:
    """Combine runs of adjacent rows.

    Args:
        parts: Rows, those of a run next to each other, in the order in which their sums are to be added.
        starts: First row of each run, ascending from 0. No run is empty.

    Returns:
        One row a run.
    """
    c = parts.columns
    if len(starts) == c.shape[1]:
        return parts
    run = np.repeat(np.arange(len(starts)), np.diff(starts, append=c.shape[1]))
    out = np.empty((len(COLUMNS), len(starts)))
    out[WRITES] = 1.0
    out[COUNT : SMALLS + 1] = np.add.reduceat(c[COUNT : SMALLS + 1], starts, axis=1)
    out[MIN] = np.minimum.reduceat(c[MIN], starts)
    out[MAX] = np.maximum.reduceat(c[MAX], starts)
    out[EXPONENT] = np.maximum.reduceat(_meaningful_exponent(parts), starts)
    out[EXPONENT] = np.where(np.isfinite(out[EXPONENT]), out[EXPONENT], 0.0)
    down = (out[EXPONENT][run] - c[EXPONENT]) if (c[EXPONENT] != 0).any() else np.zeros(1)
    sums, n = _lowered(c[SUM], down), parts.finite
    out[SUM] = np.add.reduceat(sums, starts)
    out[SUMSQ] = np.add.reduceat(_lowered(c[SUMSQ], 2 * down), starts)
    mean = out[SUM] / np.maximum(np.add.reduceat(n, starts), 1.0)
    off = sums / np.maximum(n, 1.0) - mean[run]
    out[M2] = np.add.reduceat(_lowered(c[M2], 2 * down) + n * off * off, starts)
    return Partials(out, None if parts.histogram is None else np.add.reduceat(parts.histogram, starts, axis=0))


def combine(a: Partials, b: Partials) -> Partials:
    """The partials of the union of two sets of elements, row by row."""
    pairs = Partials.joined([a, b]).take(np.arange(2 * len(a)).reshape(2, -1).T.ravel())
    return combine_groups(pairs, np.arange(0, 2 * len(a), 2))


def _joined_histograms(parts: list[Partials]) -> NDArray[np.int64] | None:
    """The histograms of all parts; None if no part has any."""
    bins = max((one.histogram.shape[1] for one in parts if one.histogram is not None), default=0)
    if not bins:
        return None
    joined = np.zeros((sum(map(len, parts)), bins), dtype=np.int64)
    start = 0
    for one in parts:
        if one.histogram is not None:
            joined[start : start + len(one), : one.histogram.shape[1]] = one.histogram
        start += len(one)
    return joined


def _meaningful_exponent(parts: Partials) -> Floats:
    """The exponent of rows whose sums are not zero, else -inf: a row of zeros must not push small numbers below the range."""
    exponents: Floats = np.where(parts.columns[SUMSQ] > 0, parts.columns[EXPONENT], -np.inf)
    return exponents


def _lowered(values: Floats, power: Floats) -> Floats:
    lowered: Floats = np.ldexp(values, -power.astype(np.int64)) if power.any() else values
    return lowered
