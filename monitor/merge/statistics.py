"""Statistics of rows as columns, and of the unions of what the rows are about.

Rows with partials are combined by the algebra of partials. Of rows of CSV only ops are known, and these combine where they
say enough: extremes and counts as they are, norms as the root of the sum of squares, and `mean`, `zeros` and `std` weighted
with the number of elements, where that is known. What cannot be combined is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from monitor.stats.ops import NUMERIC_OPS, derive
from monitor.stats.partials import COUNT, EMPTY, Floats, Partials, combine_groups

Flags = NDArray[np.bool_]
Index = NDArray[np.int64]

_AT: Final = {op: index for index, op in enumerate(NUMERIC_OPS)}
_WEIGHTED: Final = ("mean", "zeros")


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of some rows.

    Attributes:
        count: Elements of each row, float64, shape ``(rows,)``; NaN where that is not known.
        values: Of the ops, float64, shape ``(len(NUMERIC_OPS), rows)``.
        known: Which of them have a value, same shape.
        partials: Of the rows that are ``exact``; of the others they mean nothing.
        exact: Whether a row's partials are known.
    """

    count: Floats
    values: Floats
    known: Flags
    partials: Partials
    exact: Flags

    @classmethod
    def derived(cls, count: Floats, partials: Partials, exact: Flags) -> Statistics:
        """Ops of the rows that are ``exact``, from their partials."""
        values, known = np.empty((len(NUMERIC_OPS), len(exact))), np.empty((len(NUMERIC_OPS), len(exact)), dtype=np.bool_)
        for index, op in enumerate(NUMERIC_OPS):
            values[index], there = derive(op, partials)
            known[index] = there & exact
        return cls(count, values, known, partials, exact)

    def set_op(self, op: str, values: Floats, known: Flags) -> None:
        """Values of an op, in place of those of the rows that are not ``exact``."""
        self.values[_AT[op]] = np.where(self.exact, self.values[_AT[op]], values)
        self.known[_AT[op]] |= known & ~self.exact

    def __len__(self) -> int:
        return len(self.count)

    def take(self, rows: Index | Flags | slice) -> Statistics:
        return Statistics(
            self.count[rows], self.values[:, rows], self.known[:, rows], self.partials.take(rows), self.exact[rows]
        )

    def ops_of(self, rows: Index) -> Statistics:
        """The same without partials, which are more than half of all."""
        return Statistics(self.count[rows], self.values[:, rows], self.known[:, rows], _nothing(len(rows)), self.exact[rows])

    def op(self, op: str) -> pa.Array:
        """A column, null where there is no value."""
        known = self.known[_AT[op]]
        return pa.array(np.ascontiguousarray(self.values[_AT[op]]), mask=None if known.all() else ~known)

    def value(self, op: str, row: int) -> float | None:
        return float(self.values[_AT[op], row]) if self.known[_AT[op], row] else None


def combined(rows: Statistics, order: Index, starts: Index) -> Statistics:
    """Of the unions of runs of rows.

    Args:
        order: Which rows, those of a run next to each other.
        starts: Where each run begins in ``order``, ascending from 0; no run is empty.
    """
    if len(starts) == len(order):
        return rows.ops_of(order)
    parts = rows.take(order)
    exact = np.logical_and.reduceat(parts.exact, starts)
    if exact.all():
        return _of_partials(parts, starts)
    in_exact = np.repeat(exact, np.diff(starts, append=len(parts)))
    from_partials = _of_partials(parts.take(in_exact), _starts_among(starts, exact, len(parts)))
    from_ops = _of_ops(parts.take(~in_exact), _starts_among(starts, ~exact, len(parts)))
    return _interleaved(from_partials, from_ops, exact)


def _nothing(rows: int) -> Partials:
    """What stands for partials that are not known. It takes no memory."""
    return Partials(np.broadcast_to(np.array(EMPTY)[:, None], (len(EMPTY), rows)))


def _starts_among(starts: Index, chosen: Flags, length: int) -> Index:
    """Where the chosen runs start when only they are there."""
    sizes = np.diff(starts, append=length)[chosen]
    first: Index = np.cumsum(sizes) - sizes
    return first


def _of_partials(parts: Statistics, starts: Index) -> Statistics:
    if not len(starts):
        return parts
    partials = combine_groups(parts.partials, starts)
    return Statistics.derived(partials.columns[COUNT], partials, np.ones(len(starts), dtype=np.bool_))


def _of_ops(parts: Statistics, starts: Index) -> Statistics:
    if len(starts) == len(parts):
        return parts
    alone = np.diff(starts, append=len(parts)) == 1
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        columns = [_OpsOfRuns(parts, starts).of(op) for op in NUMERIC_OPS]
    values, known = (np.array([one[which] for one in columns]) for which in (0, 1))
    values[:, alone], known[:, alone] = parts.values[:, starts[alone]], parts.known[:, starts[alone]]
    return Statistics(
        np.add.reduceat(parts.count, starts), values, known, _nothing(len(starts)), np.zeros(len(starts), dtype=np.bool_)
    )


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
        if op in ("nans", "infs"):
            return np.add.reduceat(self._values(op, 0.0), self._starts), self._all(self._known(op))
        if op == "norm":
            return self._norm()
        return self._std() if op == "std" else self._weighted(op)

    def _values(self, op: str, neutral: float) -> Floats:
        values: Floats = np.where(self._known(op), self._parts.values[_AT[op]], neutral)
        return values

    def _known(self, op: str) -> Flags:
        known: Flags = self._parts.known[_AT[op]]
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

    def _norm(self) -> tuple[Floats, Flags]:
        values = self._values("norm", 0.0)
        norms = np.hypot.reduceat(values, self._starts)  # scales as it goes: no square overflows
        poisoned = np.logical_or.reduceat(np.isnan(values), self._starts)  # to hypot infinity outweighs NaN
        return np.where(poisoned, np.nan, norms), self._all(self._known("norm"))

    def _weighted(self, op: str) -> tuple[Floats, Flags]:
        known = self._known(op) & np.isfinite(self._share)
        weighted = np.where(known & ~self._empty, self._parts.values[_AT[op]] * self._share, 0.0)
        return np.add.reduceat(weighted, self._starts), self._there(known)

    def _std(self) -> tuple[Floats, Flags]:
        mean, mean_known = self._weighted("mean")
        off = self._parts.values[_AT["mean"]] - mean[self._run]
        known = self._known("std") & np.isfinite(self._share)
        squares = self._share * (np.square(self._parts.values[_AT["std"]]) + off * off)
        variance = np.add.reduceat(np.where(known & ~self._empty, squares, 0.0), self._starts)
        return np.sqrt(variance), self._there(known) & mean_known


def _interleaved(exact: Statistics, others: Statistics, which: Flags) -> Statistics:
    """One after the other, each from where ``which`` says."""
    order = np.empty(len(which), dtype=np.int64)
    order[which], order[~which] = np.arange(which.sum()), which.sum() + np.arange((~which).sum())
    return Statistics(
        np.concatenate([exact.count, others.count]),
        np.concatenate([exact.values, others.values], axis=1),
        np.concatenate([exact.known, others.known], axis=1),
        Partials.joined([exact.partials, others.partials]),
        np.concatenate([exact.exact, others.exact]),
    ).take(order)
