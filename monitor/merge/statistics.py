"""Statistics of rows as columns, and of the unions of what the rows are about.

Rows with partials are combined by the algebra of partials. Of rows of CSV only ops are known, and these combine where they
say enough: extremes, counts and histograms as they are, norms as the root of the sum of squares, and `mean`, `zeros`, `std` and
shares weighted with the number of elements, where that is known. What cannot be combined is missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from monitor.series import KIND_TABLE
from monitor.stats.histograms import LOSSES, MAGNITUDES, Counts
from monitor.stats.ops import CHECKSUM, SPELLED_OPS, checksums, derive_all, has_histogram
from monitor.stats.partials import COLUMNS, COUNT, EMPTY, Floats, Partials, Words, combine_groups

Flags = NDArray[np.bool_]
Index = NDArray[np.int64]

_COMBINES: Final = {column.name: column.combines for kind in KIND_TABLE for column in kind.columns}
WEIGHTED: Final = ("mean", "absmean", "zeros", *LOSSES, *(name for name, how in _COMBINES.items() if how == "weighted"))
"""Ops that are combined as means weighted with the number of elements."""
WHOLE_ONLY: Final = tuple(name for name, how in _COMBINES.items() if how == "never")
"""Columns that no rank knows of a matrix that is cut, and that do not follow from those of its parts."""
_NORMS: Final = ("norm", *(name for name, how in _COMBINES.items() if how == "norm"))
_RATIO: Final = ("update_norm", "weight_norm")
_OTHERS: Final = ("ratio", "sum", "max")
FROM_EXPERTS: Final = tuple(name for name, how in _COMBINES.items() if how == "experts")
"""Columns of the load of experts, computed anew from the counts of all ranks (``monitor/merge/expert_loads.py``)."""


TABLE_ROWS: Final = 16_384
"""A table of partials is made of so many rows at a time: it is larger than all else that is known of a row."""


def same_everywhere(number: float, rows: int) -> NDArray[Any]:
    """A column in which all rows have the same number. It takes no memory."""
    return np.broadcast_to(np.asarray(number), (rows,))


@dataclass(frozen=True, slots=True)
class PartialColumns:
    """Partials of many rows, of which tables are made for some of them.

    Attributes:
        columns: In the order of ``monitor.stats.partials.COLUMNS``, float64, shape ``(rows,)``. Of a job that has no check sums
            and no numbers that are not finite, about half are of ``same_everywhere``.
        histogram: See ``monitor.stats.partials.Partials``.
    """

    columns: tuple[Floats, ...]
    histogram: Counts | None

    @classmethod
    def unknown(cls, rows: int, histogram: Counts | None = None) -> PartialColumns:
        """Partials of rows of which only ops are known, and perhaps a histogram."""
        return cls(tuple(same_everywhere(number, rows) for number in EMPTY), histogram)

    @classmethod
    def of(cls, partials: Partials) -> PartialColumns:
        return cls(tuple(partials.columns), partials.histogram)

    def __len__(self) -> int:
        return len(self.columns[COUNT])

    def only(self, rows: Index | Flags | slice) -> PartialColumns:
        """Some of the rows, each once."""
        histogram = None if self.histogram is None else self.histogram[rows]
        here = len(self.columns[COUNT][rows])
        # Indexing would fill a column that holds one number.
        columns = (column[:here] if column.strides == (0,) else column[rows] for column in self.columns)
        return PartialColumns(tuple(columns), histogram)

    def table(self) -> Partials:
        return Partials(np.stack(self.columns), self.histogram)


@dataclass(frozen=True, slots=True)
class Statistics:
    """The statistics of some rows.

    Attributes:
        count: Elements of each row, or what else a feature is of; float64, shape ``(rows,)``; NaN where that is not known.
        values: Of the ops, float64, shape ``(len(ops), rows)``.
        known: Which of them have a value, same shape. Of ``magnitude_histogram``: whether there is a histogram.
        partials: Of the rows that are ``exact``; of the others they mean nothing, but for their histogram.
        exact: Whether a row's partials are known.
        checksums: 0 where there is none.
    """

    ops: tuple[str, ...]
    count: Floats
    values: Floats
    known: Flags
    partials: PartialColumns
    exact: Flags
    checksums: Words

    @classmethod
    def derived(cls, ops: tuple[str, ...], count: Floats, partials: PartialColumns, exact: Flags) -> Statistics:
        """Ops of the rows that are ``exact``, from their partials."""
        rows = len(exact)
        values, known = np.empty((len(ops), rows)), np.empty((len(ops), rows), dtype=np.bool_)
        made = cls(ops, count, values, known, partials, exact, np.zeros(rows, dtype=np.uint64))
        for first in range(0, rows, TABLE_ROWS):
            made._derive(slice(first, first + TABLE_ROWS))
        return made

    def _derive(self, rows: slice) -> None:
        partials, exact = self.partials.only(rows).table(), self.exact[rows]
        if CHECKSUM in self.ops:
            self.checksums[rows] = np.where(exact, checksums(partials), np.uint64(0))
        numbers = derive_all([op for op in self.ops if op not in SPELLED_OPS], partials)
        for index, op in enumerate(self.ops):
            if op == CHECKSUM:
                values, there = np.zeros(len(exact)), self.checksums[rows] > 0
            else:
                values, there = _counted(partials) if op == MAGNITUDES else numbers[op]
            self.values[index, rows] = values
            np.logical_and(there, exact, out=self.known[index, rows])

    def set_op(self, op: str, values: Floats, known: Flags) -> None:
        """Values of an op, in place of those of the rows that are not ``exact``."""
        at = self.ops.index(op)
        self.values[at] = np.where(self.exact, self.values[at], values)
        self.known[at] |= known & ~self.exact

    def set_checksums(self, checksums: Words) -> None:
        """The same for checksums, 0 where there is none."""
        np.copyto(self.checksums, checksums, where=~self.exact)
        self.known[self.ops.index(CHECKSUM)] = self.checksums > 0

    def __len__(self) -> int:
        return len(self.count)

    def take(self, rows: Index | Flags | slice) -> Statistics:
        return self._of(rows, self.partials.only(rows))

    def ops_of(self, rows: Index | Flags | slice) -> Statistics:
        """The same without partials, which are more than half of all, but for histograms."""
        histogram = self.partials.histogram
        return self._of(rows, PartialColumns.unknown(len(self.count[rows]), None if histogram is None else histogram[rows]))

    def _of(self, rows: Index | Flags | slice, partials: PartialColumns) -> Statistics:
        columns = self.count[rows], self.values[:, rows], self.known[:, rows]
        return Statistics(self.ops, *columns, partials, self.exact[rows], self.checksums[rows])

    def op(self, op: str) -> pa.Array:
        """A column, null where there is no value."""
        at = self.ops.index(op)
        known = self.known[at]
        return pa.array(np.ascontiguousarray(self.values[at]), mask=None if known.all() else ~known)


def combined(rows: Statistics, order: Index | slice, starts: Index, begins: Index | None = None) -> Statistics:
    """The statistics of the unions of runs of rows.

    Args:
        order: Which rows, those of a run next to each other.
        starts: Where each run begins in ``order``, ascending from 0; no run is empty.
        begins: The word of the whole at which each of these rows begins; negative if that is not known (``combine_groups``).
    """
    if len(starts) == len(rows.count[order]):
        return rows.ops_of(order)
    exact = np.logical_and.reduceat(rows.exact[order], starts)
    if exact.all():
        return _of_partials(rows.ops, rows.partials.only(order), starts, begins)
    parts = rows.take(order)
    in_exact = np.repeat(exact, np.diff(starts, append=len(parts)))
    own = None if begins is None else begins[in_exact]
    from_partials = _of_partials(rows.ops, parts.partials.only(in_exact), _starts_among(starts, exact, len(parts)), own)
    from_ops = _of_ops(parts.take(~in_exact), _starts_among(starts, ~exact, len(parts)))
    return _interleaved(from_partials, from_ops, exact)


def _counted(partials: Partials) -> tuple[Floats, Flags]:
    """How many elements are in the histogram of each row, and whether there is one."""
    histogram = partials.histogram
    elements = np.zeros(len(partials)) if histogram is None else histogram.sum(axis=1).astype(np.float64)
    return elements, has_histogram(partials)


def _starts_among(starts: Index, chosen: Flags, length: int) -> Index:
    """Where the chosen runs start when only they are there."""
    sizes = np.diff(starts, append=length)[chosen]
    first: Index = np.cumsum(sizes) - sizes
    return first


def _of_partials(ops: tuple[str, ...], parts: PartialColumns, starts: Index, begins: Index | None) -> Statistics:
    made = [Partials(np.empty((len(COLUMNS), 0)))]
    with np.errstate(invalid="ignore", over="ignore"):  # the sums of features may be of any sort
        for runs, rows in _some_runs(starts, len(parts)):
            own = None if begins is None else begins[rows]
            made.append(combine_groups(parts.only(rows).table(), starts[runs] - rows.start, own))
    partials = Partials.joined(made)
    return Statistics.derived(ops, partials.columns[COUNT], PartialColumns.of(partials), np.ones(len(starts), dtype=np.bool_))


def _some_runs(starts: Index, rows: int) -> Iterator[tuple[slice, slice]]:
    """Some runs at a time, whole ones, and the rows of these."""
    first = 0
    while first < len(starts):
        end = max(first + 1, int(np.searchsorted(starts, starts[first] + TABLE_ROWS)))
        yield slice(first, end), slice(int(starts[first]), int(starts[end]) if end < len(starts) else rows)
        first = end


def _of_ops(parts: Statistics, starts: Index) -> Statistics:
    if len(starts) == len(parts):
        return parts
    alone = np.diff(starts, append=len(parts)) == 1
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        of_runs = _OpsOfRuns(parts, starts)
        columns = [of_runs.of(op) for op in parts.ops]
    values, known = (np.array([one[which] for one in columns]) for which in (0, 1))
    values[:, alone], known[:, alone] = parts.values[:, starts[alone]], parts.known[:, starts[alone]]
    histogram, exact = parts.partials.histogram, np.zeros(len(starts), dtype=np.bool_)
    partials = PartialColumns.unknown(len(starts), None if histogram is None else np.add.reduceat(histogram, starts, axis=0))
    sums = np.where(alone, parts.checksums[starts], np.uint64(0))
    return Statistics(parts.ops, np.add.reduceat(parts.count, starts), values, known, partials, exact, sums)


class _OpsOfRuns:
    """Ops of the unions of runs of rows of which only ops are known."""

    def __init__(self, parts: Statistics, starts: Index) -> None:
        self._parts, self._starts = parts, starts
        self._run = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(parts)))
        self._empty = parts.count == 0
        self._share = parts.count / np.add.reduceat(parts.count, starts)[self._run]

    def of(self, op: str) -> tuple[Floats, Flags]:
        if op in ("min", "max", "absmax"):
            return self._extreme(op)
        if op == "smallest_nonzero":
            return self._smallest()
        if op in ("nans", "infs"):
            return np.add.reduceat(self._values(op, 0.0), self._starts), self._all(self._known(op))
        if op == MAGNITUDES:
            return np.add.reduceat(self._values(op, 0.0), self._starts), self._there(self._known(op))
        if op in _NORMS:
            return self._norm(op)
        if _COMBINES.get(op) in _OTHERS:
            return self._other(op)
        if op in WEIGHTED:
            return self._weighted(op)
        if op == "rms":
            return self._root_mean_square()
        return self._std() if op == "std" else self._none()  # of a checksum of parts, too, whose places are not known

    def _other(self, op: str) -> tuple[Floats, Flags]:
        """An op of a feature that combines in a way of its own."""
        how = _COMBINES[op]
        if how == "ratio":
            return self._ratio()
        known = self._known(op)
        if how == "max":
            return np.maximum.reduceat(self._values(op, -np.inf), self._starts), self._all(known)
        return np.add.reduceat(self._values(op, 0.0), self._starts), self._all(known)

    def _none(self) -> tuple[Floats, Flags]:
        """No value: numbers of parts alone do not give one."""
        return np.zeros(len(self._starts)), np.zeros(len(self._starts), dtype=np.bool_)

    def _of_parts(self, op: str) -> Floats:
        values: Floats = self._parts.values[self._parts.ops.index(op)]
        return values

    def _values(self, op: str, neutral: float) -> Floats:
        values: Floats = np.where(self._known(op), self._of_parts(op), neutral)
        return values

    def _known(self, op: str) -> Flags:
        known: Flags = self._parts.known[self._parts.ops.index(op)]
        return known

    def _all(self, known: Flags) -> Flags:
        every: Flags = np.logical_and.reduceat(known, self._starts)
        return every

    def _there(self, known: Flags) -> Flags:
        """Runs of which everything is known and something is there; a tensor without elements adds nothing."""
        there: Flags = self._all(known | self._empty) & np.logical_or.reduceat(known & ~self._empty, self._starts)
        return there

    def _extreme(self, op: str) -> tuple[Floats, Flags]:
        reduce, neutral = (np.minimum, np.inf) if op == "min" else (np.maximum, -np.inf)
        return reduce.reduceat(self._values(op, neutral), self._starts), self._there(self._known(op))

    def _smallest(self) -> tuple[Floats, Flags]:
        """The smallest magnitude of the parts that have elements other than 0."""
        known = self._known("smallest_nonzero")
        zeros = self._known("absmax") & (self._of_parts("absmax") == 0)
        least = np.minimum.reduceat(self._values("smallest_nonzero", np.inf), self._starts)
        return least, self._all(known | zeros | self._empty) & np.isfinite(least)

    def _ratio(self) -> tuple[Floats, Flags]:
        (update, one), (weight, other) = (self._norm(op) for op in _RATIO)
        return update / weight, one & other & (weight != 0)

    def _norm(self, op: str) -> tuple[Floats, Flags]:
        return roots_of_squares(self._values(op, 0.0), self._starts), self._all(self._known(op))

    def _weighted(self, op: str) -> tuple[Floats, Flags]:
        known = self._known(op) & np.isfinite(self._share)
        weighted = np.where(known & ~self._empty, self._of_parts(op) * self._share, 0.0)
        return np.add.reduceat(weighted, self._starts), self._there(known)

    def _root_mean_square(self) -> tuple[Floats, Flags]:
        known = self._known("rms") & np.isfinite(self._share)
        roots = np.where(known & ~self._empty, self._of_parts("rms") * np.sqrt(self._share), 0.0)
        return roots_of_squares(roots, self._starts), self._there(known)

    def _std(self) -> tuple[Floats, Flags]:
        mean, mean_known = self._weighted("mean")
        off = self._of_parts("mean") - mean[self._run]
        known = self._known("std") & np.isfinite(self._share)
        squares = self._share * (np.square(self._of_parts("std")) + off * off)
        variance = np.add.reduceat(np.where(known & ~self._empty, squares, 0.0), self._starts)
        return np.sqrt(variance), self._there(known) & mean_known


def roots_of_squares(values: Floats, starts: Index) -> Floats:
    """The root of the sum of squares of each run of values that are not negative; squares cannot overflow.

    Args:
        starts: Where each run begins, ascending from 0.
    """
    if not len(starts):
        return values
    greatest = np.maximum.reduceat(values, starts)  # NaN, if there is one
    scale = np.where((greatest > 0) & np.isfinite(greatest), greatest, 1.0)
    with np.errstate(invalid="ignore", over="ignore"):
        scaled = values / np.repeat(scale, np.diff(starts, append=len(values)))
        found: Floats = np.sqrt(np.add.reduceat(scaled * scaled, starts)) * scale
    return found


def _interleaved(exact: Statistics, others: Statistics, which: Flags) -> Statistics:
    """One after the other, each from where ``which`` says."""
    order = np.empty(len(which), dtype=np.int64)
    order[which], order[~which] = np.arange(which.sum()), which.sum() + np.arange((~which).sum())
    return Statistics(
        exact.ops,
        np.concatenate([exact.count, others.count]),
        np.concatenate([exact.values, others.values], axis=1),
        np.concatenate([exact.known, others.known], axis=1),
        PartialColumns.of(Partials.joined([exact.partials.table(), others.partials.table()])),
        np.concatenate([exact.exact, others.exact]),
        np.concatenate([exact.checksums, others.checksums]),
    ).take(order)
