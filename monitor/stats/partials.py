"""Partials: the mergeable numbers that a tensor is reduced to.

The mean of means is wrong if shards differ in size, and norms do not add: two shards with norms 3 and 4 make a tensor of norm
5. So a kernel never reports results. It reports partials, which combine exactly, and every op is derived from them afterwards
(``ops.py``).

Over all elements: ``count`` and the counts of NaN, +Inf, -Inf and of |x| < eps. Over the finite ones: ``min``, ``max``, and
sums divided by a power of two, so that no finite tensor overflows them:

    sum = Σ x / 2^e        sumsq = Σ x² / 4^e        m2 = Σ (x - mean)² / 4^e        e = exponent, almost always 0

``m2`` is stored beside ``sumsq`` because a variance computed as a difference of the other two loses every digit if the mean is
large compared with the spread. It merges by the pairwise formula of Chan, Golub and LeVeque (1979), "Updating formulae and a
pairwise algorithm for computing sample variances".

The *higher moments* are ``m3`` = Σ (x - mean)³ / 8^e and ``m4`` = Σ (x - mean)⁴ / 16^e. On a device they cost a second read of
the elements, so they are measured only if an op asks for them. They merge by the formulas of Pébay (2008), "Formulas for
robust, one-pass parallel computation of covariances and arbitrary-order statistical moments". A measured ``m4`` is at least
``m2``² / n. So ``m4`` = 0 beside a positive ``m2`` says that the higher moments are not known. In such rows, ``m3`` is 0, too.

The same read measures ``abssum`` = Σ |x| / 2^e and ``least``, the smallest magnitude of the finite elements other than 0. If
all are 0, both are 0. An ``abssum`` of 0 beside other elements says that both are not known.

The *check sums* tell whether two tensors hold the same bits. An element of up to four bytes is a word, an unsigned number of 32
bits; a longer one is several, the lowest first. Over the words b of a tensor in the order of memory, counted from 0,

    bits = count + Σ b(i) mod 2^64    places = Σ i b(i) mod 2^64

``bits`` is positive for any element, so 0 beside a positive ``count`` says that they were not measured. A column holds 53 bits
of an integer, so each sum has two columns, of 32 bits. If a part begins at word k of the whole, its ``places`` become those of
the whole by adding k Σ b, so the sums of parts add up. With less than 2^32 words, no change of one word or of two is missed,
nor are two that were swapped: if ``bits`` is the same, then the two changes are opposite, d and -d, and ``places`` differs by
d (i - j), which is not 0 and smaller than 2^64. What changes three words or more is missed if both sums happen to agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from monitor.series import NO_MICRO_STEP


@dataclass(frozen=True, slots=True)
class Partial:
    """A column of partials: everything that differs between columns outside of kernels and ``combine_groups``.

    Attributes:
        empty: Its number for a tensor without elements.
        whole: Whether files store it as an integer.
        power: Its sums are divided by 2 to the power of this times ``exponent``.
        seldom: Whether it is 0 in almost all rows. Temporary files of the merge may then leave it out.
        costly: Whether it is measured only if an op asks for it. HDF5 files then leave it out.
    """

    name: str
    empty: float = 0.0
    whole: bool = True
    power: int = 0
    seldom: bool = False
    costly: bool = False


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
    Partial("m3", whole=False, power=3, seldom=True, costly=True),
    Partial("m4", whole=False, power=4, seldom=True, costly=True),
    Partial("abssum", whole=False, power=1, seldom=True, costly=True),
    Partial("least", whole=False, seldom=True, costly=True),
    Partial("exponent", seldom=True),
    Partial("bits_low", seldom=True, costly=True),
    Partial("bits_high", seldom=True, costly=True),
    Partial("places_low", seldom=True, costly=True),
    Partial("places_high", seldom=True, costly=True),
)
"""The columns of a table row, float64 each. ``writes`` says whether the row was written since the last seal; the rest are
the partials. Counts are exact up to 2^53."""

COLUMNS: Final = tuple(one.name for one in PARTIAL_TABLE)
WRITES, COUNT, NANS, POSINFS, NEGINFS, SMALLS, MIN, MAX, SUM, SUMSQ, M2 = range(11)
M3, M4, ABSSUM, LEAST, EXPONENT = range(M2 + 1, M2 + 6)
BITS_LOW, BITS_HIGH, PLACES_LOW, PLACES_HIGH = range(EXPONENT + 1, len(COLUMNS))

COSTLY: Final = tuple(one.name for one in PARTIAL_TABLE if one.costly)
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


def exponent_for(absmax: float, *, higher: bool = False) -> int:
    """The power of two to divide by before squaring in float64; 0 wherever squares and their sums fit.

    Args:
        higher: Whether the sums of fourth powers must fit, too.
    """
    least, most = (1e-60, 1e60) if higher else (1e-100, 1e100)
    return math.frexp(absmax)[1] if absmax and not least < absmax < most else 0


LEAST_VARIANCE: Final = 1e-140
"""Least ``m2`` / n at which ``m4`` has all digits: no sum of fourth powers loses more than n times 1e-307 below the range."""


def higher_moments(n: float, pivot_off: float, squares: float, cubes: float, fourths: float) -> tuple[float, float]:
    """``m3`` and ``m4`` from sums of powers of x - pivot; zeros, which say not known, if they leave the range.

    Args:
        n: Number of elements.
        pivot_off: The mean minus the pivot. It should be small beside the spread: else digits are lost.
    """
    off = pivot_off
    m2 = squares - n * off * off
    m3 = cubes - off * (3 * squares - 2 * n * off * off)
    m4 = fourths - off * (4 * cubes - off * (6 * squares - 3 * n * off * off))
    known = math.isfinite(m3) and math.isfinite(m4) and m2 >= n * LEAST_VARIANCE
    return (m3, m4) if known else (0.0, 0.0)


Words = NDArray[np.uint64]
"""Check sums, or numbers of words. numpy computes modulo 2^64."""


def union(rows: Floats, words: int = 1) -> Floats:
    """The row of a tensor that was reduced in pieces.

    Args:
        rows: Table rows, shape ``(pieces, len(COLUMNS))``, in the order of the pieces.
        words: Words of an element, for the check sums.

    Returns:
        One row, shape ``(len(COLUMNS),)``; ``writes`` is 1.
    """
    before = np.cumsum(rows[:, COUNT]) - rows[:, COUNT]
    return combine_groups(Partials.from_rows(rows), np.zeros(1, dtype=np.int64), before.astype(np.int64) * words).columns[:, 0]


def combine_groups(parts: Partials, starts: NDArray[np.int64], begins: NDArray[np.int64] | None = None) -> Partials:
    """Combine runs of adjacent rows.

    Args:
        parts: Rows, those of a run next to each other, in the order in which their sums are to be added.
        starts: First row of each run, ascending from 0. No run is empty.
        begins: The word of the whole at which each row begins, negative if that is not known. Then, and without them, a run of
            several rows has no check sums.

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
    m2 = _lowered(c[M2], 2 * down)
    out[M2] = np.add.reduceat(m2 + n * off * off, starts)
    out[M3], out[M4] = _higher(c, n, off, m2, down, starts)
    out[ABSSUM], out[LEAST] = _magnitudes(c, down, starts)
    out[BITS_LOW:] = _check_sums_of_runs(c, starts, begins)
    return Partials(out, None if parts.histogram is None else np.add.reduceat(parts.histogram, starts, axis=0))


def _higher(c: Floats, n: Floats, off: Floats, m2: Floats, down: Floats, starts: NDArray[np.int64]) -> Floats:
    """``m3`` and ``m4`` of each run, shape ``(2, runs)``.

    Args:
        off: Each row's mean minus that of its run.
        m2: Each row's, lowered by ``down`` to the exponent of its run.
    """
    known = np.logical_and.reduceat((c[M4] > 0) | ~(c[M2] > 0), starts)
    if not known.any():  # no op asks for them
        return np.zeros((2, len(starts)))
    m3, m4 = _lowered(c[M3], 3 * down), _lowered(c[M4], 4 * down)
    with np.errstate(over="ignore", invalid="ignore"):
        cubes = m3 + off * (3 * m2 + n * off * off)
        fourths = m4 + off * (4 * m3 + off * (6 * m2 + n * off * off))
        moments = np.array([np.add.reduceat(cubes, starts), np.add.reduceat(fourths, starts)])
    found: Floats = np.where(known & np.isfinite(moments).all(axis=0), moments, 0.0)
    return found


def _magnitudes(c: Floats, down: Floats, starts: NDArray[np.int64]) -> Floats:
    """``abssum`` and ``least`` of each run, shape ``(2, runs)``; zeros where a row lacks them."""
    known = np.logical_and.reduceat(knows_magnitudes(c), starts)
    if not c[ABSSUM].any():  # no op asks for them
        return np.zeros((2, len(starts)))
    least = np.minimum.reduceat(np.where(c[LEAST] > 0, c[LEAST], np.inf), starts)
    found = np.array([np.add.reduceat(_lowered(c[ABSSUM], down), starts), np.where(np.isfinite(least), least, 0.0)])
    return np.where(known, found, 0.0)


def knows_magnitudes(columns: Floats) -> NDArray[np.bool_]:
    """Rows with ``abssum`` and ``least``: those that were measured, and those without a finite element other than 0."""
    known: NDArray[np.bool_] = (columns[ABSSUM] > 0) | ((columns[MIN] >= 0) & (columns[MAX] <= 0))
    return known


def check_sums(columns: Floats) -> Words:
    """``bits`` and ``places`` of rows, shape ``(2, rows)``; ``bits`` is 0 where they were not measured."""
    halves = columns[BITS_LOW:].astype(np.uint64)
    sums: Words = halves[0::2] | halves[1::2] << np.uint64(32)
    return sums


def check_columns(sums: Words) -> Floats:
    """The columns of ``bits`` and ``places``, shape ``(4, rows)``, from ``check_sums``."""
    columns = np.empty((4, sums.shape[1]))
    columns[0::2], columns[1::2] = sums & np.uint64(0xFFFF_FFFF), sums >> np.uint64(32)
    return columns


def _check_sums_of_runs(c: Floats, starts: NDArray[np.int64], begins: NDArray[np.int64] | None) -> Floats:
    """The columns of the check sums of each run; zeros where a row lacks them, or where its place is not known."""
    if not c[BITS_LOW:].any():  # nothing asks for them
        return np.zeros((4, len(starts)))
    bits, places = check_sums(c)
    known = np.logical_and.reduceat((bits > 0) | (c[COUNT] == 0), starts)
    sizes = np.diff(starts, append=c.shape[1])
    begins = np.full(c.shape[1], -1) if begins is None else begins
    known &= (sizes == 1) | (np.minimum.reduceat(begins, starts) >= 0)
    moved = np.where(np.repeat(sizes > 1, sizes), begins, 0).astype(np.uint64)
    places = places + moved * (bits - c[COUNT].astype(np.uint64))
    sums = np.array([np.add.reduceat(bits, starts), np.add.reduceat(places, starts)])
    return check_columns(np.where(known, sums, np.uint64(0)))


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


# --- Rows of partials: those of one kind in one step.


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Shape and dtype of a tensor as measured, for the ops ``shape`` and ``dtype`` and for the manifest."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class KindRows:
    """The rows of one kind. All columns are aligned and in call order.

    Attributes:
        series: Index of each row's series in the rank's ``SeriesTable``.
        micro_step: Micro-step of each row, ``NO_MICRO_STEP`` where the row belongs to the whole step.
        call_id: Position in the rank's execution order of the step.
        layout: Index of each row's ``TensorLayout`` in ``StepRows.layouts``.
        partials: The measured partials.
    """

    series: NDArray[np.int64]
    micro_step: NDArray[np.int64]
    call_id: NDArray[np.int64]
    layout: NDArray[np.int64]
    partials: Partials

    def __len__(self) -> int:
        return len(self.series)

    def take(self, where: NDArray[np.int64] | slice) -> KindRows:
        """Some of the rows."""
        columns = self.series[where], self.micro_step[where], self.call_id[where], self.layout[where]
        return KindRows(*columns, self.partials.take(where))

    def followed_by(self, other: KindRows) -> KindRows:
        """These rows, and then those of another."""
        return KindRows(
            np.concatenate([self.series, other.series]),
            np.concatenate([self.micro_step, other.micro_step]),
            np.concatenate([self.call_id, other.call_id]),
            np.concatenate([self.layout, other.layout]),
            Partials.joined([self.partials, other.partials]),
        )


def combined_micro_steps(rows: KindRows) -> KindRows:
    """One row per series: its micro-steps combined in ascending order, at the position of the first.

    ``writes`` becomes the number of micro-steps, 0 for a row of the whole step.
    """
    by_series = rows.take(np.lexsort((rows.micro_step, rows.series)))
    starts = np.flatnonzero(np.r_[True, np.diff(by_series.series) != 0]) if len(rows) else np.zeros(0, dtype=np.int64)
    first = by_series.take(starts)
    together = combine_groups(by_series.partials, starts)
    partials = replace(together, columns=together.columns.copy())
    partials.columns[WRITES] = _micro_steps(by_series, starts)
    combined = KindRows(first.series, np.full(len(starts), NO_MICRO_STEP), first.call_id, first.layout, partials)
    return combined.take(np.argsort(combined.call_id, kind="stable"))


def _micro_steps(by_series: KindRows, starts: NDArray[np.int64]) -> Floats:
    """The number of micro-steps in each run of rows; several rows may be of the same micro-step."""
    another = np.r_[True, np.diff(by_series.micro_step) != 0][: len(by_series)]
    another[starts] = True
    another &= by_series.micro_step != NO_MICRO_STEP
    counts: Floats = np.add.reduceat(another.astype(np.float64), starts) if len(starts) else np.zeros(0)
    return counts
