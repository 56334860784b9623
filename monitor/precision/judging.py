"""How much each format loses of each operand, under each way of scaling: the worst row of all steps, against limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from monitor.precision.operands import GRADIENT, LAST_CALL, OPERANDS, OperandRows
from monitor.precision.rounding import GRIDS, Grid, Index, Lost, Magnitudes, lost
from monitor.stats.partials import Floats

CURRENT, DELAYED, UNSCALED = "current", "delayed", "none"
FP8: Final = ("e4m3", "e5m2")

MOST_UNDERFLOW: Final = 0.01
"""Largest share of elements that may become zero."""
MOST_SATURATED: Final = 1e-3
"""Largest share of elements that may become the greatest number without being near it."""
MOST_TIMES_USUAL: Final = 2.0
"""Errors, over the expected error of normal numbers of the format: 2.4 % in e4m3, 4.7 % in e5m2."""

LIMITS: Final = {
    "underflow": MOST_UNDERFLOW,
    "saturated": MOST_SATURATED,
    "error": {name: MOST_TIMES_USUAL * GRIDS[name].usual_error for name in FP8},
}
"""Above them an operand is not safe."""

LARGEST_SCALE: Final = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class Scaling:
    """How operands are scaled before they are cast.

    Attributes:
        way: ``current`` or ``delayed``: the one that verdicts are about.
        history: Of delayed scaling, the recorded rows before this one of which the greatest magnitude is taken.
        margin: Powers of two that delayed scaling leaves free.
        power_of_two: Whether scales are rounded down to powers of two.
        loss_scale: What gradients are multiplied by in fp16.
    """

    way: str = CURRENT
    history: int = 16
    margin: float = 0.0
    power_of_two: bool = False
    loss_scale: float = 1.0

    def scale(self, grid: Grid, absmax: Floats, margin: float = 0.0) -> Floats:
        """The scale that takes ``absmax`` to the greatest number of a format."""
        with np.errstate(divide="ignore", over="ignore"):
            found = np.where(absmax > 0, grid.greatest / absmax, 1.0) * 2.0**-margin
            found = np.minimum(found, LARGEST_SCALE)
            chosen: Floats = np.exp2(np.floor(np.log2(found))) if self.power_of_two else found
            return chosen


class Casting(NamedTuple):
    """A format, and how it is scaled."""

    format: str
    way: str


CASTINGS: Final = (
    *(Casting(name, way) for name in FP8 for way in (CURRENT, DELAYED)),
    Casting("fp16", UNSCALED),
    Casting("bf16", UNSCALED),
)


class Worst:
    """For each GEMM, the row of which a casting loses most, measured against the limits.

    Attributes:
        badness: The greatest number over its limit; above 1 it is not safe. NaN where no row was judged.
        step, rank: Where that was. Rank -1: of the whole tensor.
        numbers: The fields of ``Lost`` there, shape ``(fields, gemms)``.
    """

    def __init__(self, gemms: int) -> None:
        self.badness: Floats = np.full(gemms, np.nan)
        self.step: Index = np.zeros(gemms, dtype=np.int64)
        self.rank: Index = np.zeros(gemms, dtype=np.int64)
        self.numbers: Floats = np.zeros((len(Lost._fields), gemms))

    def add(self, casting: Casting, rows: OperandRows, found: Lost, judged: Any) -> None:
        """Args: judged: Which rows the casting applies to."""
        badness = np.where(judged, badness_of(GRIDS[casting.format], found), -1.0)
        order = np.lexsort((-rows.rank, -rows.step, badness, rows.gemm))  # of equal rows the first
        last = order[np.append(np.diff(rows.gemm[order]) > 0, [True] * (len(order) > 0)).astype(np.bool_)]
        gemm = rows.gemm[last]
        better = (badness[last] >= 0) & ~(badness[last] <= self.badness[gemm])
        gemm, last = gemm[better], last[better]
        self.badness[gemm], self.step[gemm], self.rank[gemm] = badness[last], rows.step[last], rows.rank[last]
        self.numbers[:, gemm] = np.stack(found)[:, last]

    def at(self, gemm: int) -> dict[str, float]:
        """The numbers of a GEMM."""
        return dict(zip(Lost._fields, self.numbers[:, gemm].tolist(), strict=True))


def badness_of(grid: Grid, found: Lost) -> Floats:
    """The greatest of all numbers over their limits."""
    error = np.maximum(found.error, found.small_error) / (MOST_TIMES_USUAL * grid.usual_error)
    badness: Floats = np.maximum.reduce([found.underflow / MOST_UNDERFLOW, found.saturated / MOST_SATURATED, error])
    return badness


def reason(name: str, numbers: Mapping[str, float]) -> str:
    """The number of a cast to an FP8 format that is furthest above its limit."""
    most = MOST_TIMES_USUAL * GRIDS[name].usual_error
    found = {
        f"{numbers['underflow']:.2%} become zero in {name}": numbers["underflow"] / MOST_UNDERFLOW,
        f"{numbers['saturated']:.2%} saturate in {name}": numbers["saturated"] / MOST_SATURATED,
        f"error of {numbers['error']:.1%} in {name}": numbers["error"] / most,
        f"error of {numbers['small_error']:.1%} in {name}, of the lesser half": numbers["small_error"] / most,
    }
    return max(found, key=lambda one: found[one])


class Errors(NamedTuple):
    """Relative errors of the rows of an operand under a casting: expected, and at most. NaN where no scale is known."""

    expected: Floats
    most: Floats


@dataclass(slots=True)
class OperandJudge:
    """Judges the rows of one operand of all GEMMs, some steps at a time in order.

    Attributes:
        judged: Of each GEMM, the rows that were judged.
        not_finite: The first step with NaN or an infinity; -1 if there is none.
        without: Rows without a histogram, norm or greatest magnitude.
    """

    what: str
    gemms: int
    scaling: Scaling
    worst: dict[Casting, Worst] = field(init=False)
    judged: Index = field(init=False)
    not_finite: Index = field(init=False)
    without: Index = field(init=False)
    _tails: dict[int, Floats] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.worst = {one: Worst(self.gemms) for one in CASTINGS}
        self.judged, self.without = np.zeros(self.gemms, dtype=np.int64), np.zeros(self.gemms, dtype=np.int64)
        self.not_finite = np.full(self.gemms, -1)

    def add(self, rows: OperandRows) -> tuple[OperandRows, dict[str, Errors]]:
        """Judge rows. Returns those that could be judged, and their errors in each FP8 format under the scaling asked for."""
        self._count(rows)
        rows = rows.of(rows.has_numbers & np.isfinite(rows.absmax) & np.isfinite(rows.norm))
        self.judged += np.bincount(rows.gemm, minlength=self.gemms)
        magnitudes, before = rows.magnitudes(), self._greatest_before(rows)
        errors: dict[str, Errors] = {}
        for casting in CASTINGS:
            grid = GRIDS[casting.format]
            scale = self._scale(casting, grid, magnitudes, before)
            known = ~np.isnan(scale)
            found = lost(grid, magnitudes, np.where(known, scale, 1.0))
            self.worst[casting].add(casting, rows, found, known)
            if casting.way == self.scaling.way:
                expected = np.maximum(found.error, found.small_error)
                errors[casting.format] = Errors(*(np.where(known, one, np.nan) for one in (expected, found.most_error)))
        return rows, errors

    def _count(self, rows: OperandRows) -> None:
        bad = ~np.isfinite(rows.absmax) | ~np.isfinite(rows.norm)
        self.without += np.bincount(rows.gemm[~rows.has_numbers], minlength=self.gemms)
        for gemm, step in zip(rows.gemm[bad].tolist(), rows.step[bad].tolist(), strict=True):
            if self.not_finite[gemm] < 0:
                self.not_finite[gemm] = step

    def _scale(self, casting: Casting, grid: Grid, rows: Magnitudes, before: Floats) -> Floats:
        if casting.way == CURRENT:
            return self.scaling.scale(grid, rows.absmax)
        if casting.way == DELAYED:
            return np.where(np.isnan(before), np.nan, self.scaling.scale(grid, before, self.scaling.margin))
        scaled = casting.format == "fp16" and self.what == GRADIENT
        return np.full(len(rows), self.scaling.loss_scale if scaled else 1.0)

    def _greatest_before(self, rows: OperandRows) -> Floats:
        """For each row, the greatest magnitude of the rows of the same operand before it; NaN if there are none."""
        found = np.full(len(rows), np.nan)
        calls = rows.call ^ LAST_CALL if self.what == GRADIENT else rows.call  # backward begins with the last call
        order = np.lexsort((calls, rows.step, rows.series))
        series = rows.series[order]
        starts = np.flatnonzero(np.diff(series, prepend=-1))
        for each in np.split(order, starts[1:]) if len(order) else []:
            one = int(rows.series[each[0]])
            tail = self._tails.get(one, np.zeros(0))
            history = min(self.scaling.history, len(tail) + len(each))
            values = np.concatenate([np.zeros(history), tail, rows.absmax[each]])
            windows = np.lib.stride_tricks.sliding_window_view(values[:-1], history)[len(tail) :]
            greatest = windows.max(axis=1)
            if not len(tail):
                greatest[0] = np.nan
            found[each], self._tails[one] = greatest, values[history:][-self.scaling.history :].copy()
        return found


def judges(gemms: int, scaling: Scaling) -> dict[str, OperandJudge]:
    """One for each operand."""
    return {what: OperandJudge(what, gemms, scaling) for what in OPERANDS}
