"""The numbers of two runs side by side, as a comparison sees them: of each tensor and column of steps, the pair furthest apart.

A pair is the statistic of one tensor in the same step of both runs. What counts is the logarithm of its ratio, so that 0.001
against 0.002 is as far apart as 1 against 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from monitor.compare.rows import MOST_ROWS, Row, phase_of
from monitor.compare.tolerances import ELEMENTS
from monitor.query.batches import IDENTITY, numbers_in, place_of
from monitor.report.history import LARGEST, Axis, Codes, Flags, Ints
from monitor.report.kind_reader import judged_ops
from monitor.stats.ops import TEXT_OPS

Floats = NDArray[np.float64]

NOT_NUMBERS: Final = frozenset((*IDENTITY, *TEXT_OPS, ELEMENTS))

# The cells of the heat map, such that the greatest of several is the one to show.
NOT_COMPARED: Final = 0
LEAST: Final = 1
LEVELS: Final = 100
"""Steps of colour from the same to a factor of 2. Odd codes are larger in the run than in the other one, even codes smaller."""
ALONE: Final = LEAST + 2 * (LEVELS + 1)
"""One of the runs has no such row."""
NOT_FINITE: Final = ALONE + 1

SAME: Final = 1e-5
"""Logarithms of a ratio up to this are shown as the same. From there to 1, a factor of 2, the scale is logarithmic."""
OF_PRECISION: Final = 0.25
"""The share of the precision that rounding may change in one step, which is shown as the same, too."""


class SeriesKey(NamedTuple):
    """A tensor. ``stage`` is the model chunk of a rank, and 0 in whole tensors."""

    kind: str
    stage: int
    name: str


@dataclass
class PairGrid:
    """Pairs of one op.

    Attributes:
        numbers: Of both sides, shape ``(series, 2, columns)``; NaN where there is no pair.
        apart: The distance of each pair, shape ``(series, columns)``; negative where there is none.
    """

    numbers: Floats
    apart: NDArray[np.float32]

    @classmethod
    def empty(cls, series: int, columns: int) -> PairGrid:
        return cls(np.full((series, 2, columns), np.nan), np.full((series, columns), -1, np.float32))

    def grow(self, series: int) -> None:
        more = PairGrid.empty(series - len(self.apart), self.apart.shape[1])
        self.numbers = np.concatenate([self.numbers, more.numbers])
        self.apart = np.concatenate([self.apart, more.apart])


@dataclass
class AlignedKind:
    """The tensors of a kind that the comparison has seen."""

    numbers: dict[SeriesKey, int] = field(default_factory=dict)
    orders: list[int] = field(default_factory=list)
    grids: dict[str, PairGrid] = field(default_factory=dict)
    alone: dict[int, set[int]] = field(default_factory=dict)

    def number(self, key: SeriesKey, order: int) -> int:
        """The number of a series, new or known. Its place in the order of a step is that of its first row."""
        if key not in self.numbers:
            self.numbers[key] = len(self.orders)
            self.orders.append(order)
        return self.numbers[key]

    def grid(self, op: str, columns: int) -> PairGrid:
        """The grid of an op, with room for all series."""
        grid = self.grids.get(op)
        if grid is None:
            grid = self.grids[op] = PairGrid.empty(len(self.orders), columns)
        elif len(grid.apart) < len(self.orders):
            grid.grow(2 * len(self.orders))
        return grid


class AlignedNumbers:
    """Watches a comparison, and keeps what pictures need of it.

    Args:
        axis: The columns.
        only_shown: Whether only the op that a heat map shows is kept of each kind, because there are very many tensors.
    """

    def __init__(self, axis: Axis, *, only_shown: bool = False) -> None:
        self.axis = axis
        self.kinds: dict[str, AlignedKind] = {}
        self._only_shown = only_shown
        self._columns = dict(zip(axis.steps.tolist(), axis.bin_of(axis.steps).tolist(), strict=True))
        self._ops: dict[tuple[str, ...], list[str]] = {}

    def pair(self, kind: str, order: int, left: Row | None, right: Row | None) -> None:
        """Keep a pair if it is further apart than others of its column."""
        row = left or right or {}
        column = self._columns.get(row["step"])
        if column is None:
            return
        rows = self.kinds.setdefault(kind, AlignedKind())
        number = rows.number(SeriesKey(kind, row["vpp_stage"] or 0, row["name"]), order)
        if left is None or right is None:
            rows.alone.setdefault(number, set()).add(column)
            return
        for op in self._numbers(kind, tuple(row)):
            one, other = left[op], right[op]
            if one is not None and other is not None:
                grid, apart = rows.grid(op, self.axis.bins), _apart(one, other)
                if apart > grid.apart[number, column]:
                    grid.apart[number, column] = apart
                    grid.numbers[number, :, column] = one, other

    def equal(self, kind: str, rows: pa.Table) -> None:
        """Keep one of the numbers of each column that has no pair yet."""
        if not len(rows):
            return
        steps, which = np.unique(rows["step"].to_numpy(), return_inverse=True)
        column = np.array([self._columns.get(step, -1) for step in steps.tolist()], np.int64)[which]
        found = self.kinds.setdefault(kind, AlignedKind())
        series = _numbered(found, kind, rows)
        for op in self._numbers(kind, tuple(rows.column_names)):
            values, known = numbers_in(rows[op])
            grid = found.grid(op, self.axis.bins)
            at = np.flatnonzero(known & (column >= 0))
            at = at[grid.apart[series[at], column[at]] < 0]
            grid.apart[series[at], column[at]] = 0
            grid.numbers[series[at], :, column[at]] = values[at, None]

    def _numbers(self, kind: str, columns: tuple[str, ...]) -> list[str]:
        """The ops among columns that are kept."""
        key = (kind, *columns)
        if key not in self._ops:
            every = [op for op in columns if op not in NOT_NUMBERS]
            self._ops[key] = [shown_op(kind, every)] if self._only_shown and every else every
        return self._ops[key]


def shown_op(kind: str, ops: Sequence[str]) -> str:
    """The op of a kind that a heat map shows; empty if there is none."""
    return next(iter((*judged_ops(kind, ops), *ops)), "")


def _numbered(found: AlignedKind, kind: str, rows: pa.Table) -> Ints:
    """The number of the series of each row."""
    names = rows["name"].cast(pa.string()).combine_chunks().dictionary_encode()
    stages = rows["vpp_stage"].fill_null(0).to_numpy()
    most = int(stages.max()) + 1
    _, firsts, which = np.unique(names.indices.to_numpy() * most + stages, return_index=True, return_inverse=True)
    numbers = np.zeros(len(firsts), np.int64)
    for place in np.argsort(firsts).tolist():
        row: Mapping[str, Any] = rows.slice(int(firsts[place]), 1).select(list(IDENTITY)).to_pylist()[0]
        call = place_of(kind) * MOST_ROWS + int(firsts[place]) if row["call_id"] is None else row["call_id"]
        key = SeriesKey(kind, row["vpp_stage"] or 0, row["name"])
        numbers[place] = found.number(key, phase_of(kind, row["name"]) + call)
    series: Ints = numbers[which]
    return series


def _apart(left: float, right: float) -> float:
    """The magnitude of the logarithm of a ratio, base 2; infinite where there is none."""
    if left == right:
        return 0.0
    if not (math.isfinite(left) and math.isfinite(right)):
        return math.inf
    if left == 0 or right == 0 or (left < 0) != (right < 0):
        return LARGEST
    return abs(math.log2(abs(right)) - math.log2(abs(left)))


def same_of(precision: float) -> float:
    """The logarithm of a ratio, base 2, up to which it is shown as the same."""
    return max(SAME, OF_PRECISION * precision)


def codes_of(grid: PairGrid, alone: Flags, same: float) -> Codes:
    """The cells of the heat map.

    Args:
        alone: Where one side has no row, shape ``(series, columns)``.
        same: See ``same_of``.
    """
    left, right = grid.numbers[:, 0], grid.numbers[:, 1]
    with np.errstate(all="ignore"):
        ratio = np.log2(np.abs(right)) - np.log2(np.abs(left))
        ratio = np.where(np.sign(left) * np.sign(right) < 0, np.inf, np.abs(ratio))
        ratio = np.where(left == right, 0, ratio)
        level = np.clip(np.rint(LEVELS * (1 - np.log(ratio) / np.log(same))), 0, LEVELS)
        codes = LEAST + 2 * np.nan_to_num(level) + (right < left)
    codes = np.where(np.isfinite(left) & np.isfinite(right), codes, NOT_FINITE)
    codes = np.where(grid.apart < 0, NOT_COMPARED, codes)
    found: Codes = np.where(alone, np.maximum(codes, ALONE), codes).astype(np.uint8)
    return found
