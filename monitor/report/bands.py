"""The band of a number: what its value may be after those of the steps before it, in robust standard deviations.

A value is compared with the median of the last ``LEVEL`` values, so a number that falls or rises slowly stays in its band. How
far it usually is from that median says how wide the band is. All is done in logarithms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Numbers = NDArray[np.float64]
"""Shape ``(steps, series)``, NaN where there is no number."""

LEVEL: Final = 8
"""Values whose median is the level."""
SPREAD: Final = 24
"""Distances from the level that say how wide the band is."""
ENOUGH: Final = 8
"""Distances that a band needs."""
DEVIATIONS_OF: Final = 1.4826
"""Standard deviations in a median absolute deviation of a normal distribution."""
SMALLEST: Final = 1e-38
"""Zero has no logarithm, and is treated as this."""
_BLOCK: Final = 2_000_000
"""Values of all windows that are sorted at once."""


class Limit(NamedTuple):
    """How far beyond its level a value has left its band: by both."""

    deviations: float
    factor: float


class Bands(NamedTuple):
    """The band of each value, shape ``(steps, series)``; NaN or False where there is no history.

    Attributes:
        level: The median of the values before.
        deviations: How far above the level it is.
        factor: Value over level, infinite if the value is not finite.
    """

    level: Numbers
    deviations: Numbers
    factor: Numbers

    def both_ways(self) -> Bands:
        """Values below their level are as far from it as those above."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return Bands(self.level, np.abs(self.deviations), np.maximum(self.factor, 1 / self.factor))

    def out(self, limit: Limit) -> NDArray[np.bool_]:
        """The values above their band."""
        out: NDArray[np.bool_] = (self.deviations >= limit.deviations) & (self.factor >= limit.factor)
        return out


def bands_of(values: Numbers, narrowest: float) -> Bands:
    """The bands of series of positive numbers. What is not finite is above each band.

    Args:
        narrowest: The least standard deviation of a logarithm.
    """
    with np.errstate(invalid="ignore"):
        logs = np.log(np.maximum(np.abs(values), SMALLEST))
    level = _before(logs, LEVEL, LEVEL)
    apart = logs - level
    usual = _before(apart, SPREAD, ENOUGH)
    spread = DEVIATIONS_OF * _before(apart, SPREAD, ENOUGH, around=usual)
    with np.errstate(invalid="ignore", over="ignore"):
        deviations = (apart - np.maximum(usual, 0)) / np.maximum(spread, narrowest)
        return Bands(np.exp(level), deviations, np.exp(apart))


def _before(values: Numbers, width: int, least: int, around: Numbers | None = None) -> Numbers:
    """The median of the finite ones among the ``width`` values before each value; NaN if there are fewer than ``least``.

    Args:
        around: Of each value, a center: then the median of the distances from it.
    """
    steps, series = values.shape
    found = np.full(values.shape, np.nan)
    padded = np.concatenate([np.full((width, series), np.nan), np.where(np.isfinite(values), values, np.nan)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, width, axis=0)[:steps]
    for block in _blocks(steps, width * max(series, 1)):
        some = windows[block] if around is None else np.abs(windows[block] - around[block][..., None])
        enough = np.isfinite(some).sum(axis=-1) >= least
        if enough.any():
            found[block][enough] = np.nanmedian(some[enough], axis=-1)
    return found


def _blocks(steps: int, each: int) -> Iterator[slice]:
    size = max(_BLOCK // each, 1)
    for first in range(0, steps, size):
        yield slice(first, min(first + size, steps))


# --- Rows as numbers by step.


class Means:
    """The mean over all ranks, and the greatest of them, for each step and series (``RowTaker``).

    Attributes:
        steps: All steps that rows may have, ascending.
    """

    def __init__(self, steps: Ints) -> None:
        self.steps = steps
        self._sums = self._counts = self._greatest = np.zeros((len(steps), 0))

    def add(self, step: Ints, micro_step: Ints, series: Ints, rank: Ints, values: Numbers) -> None:
        del micro_step, rank
        if len(step):
            self._grow(int(series.max()) + 1)
            place = np.searchsorted(self.steps, step), series
            np.add.at(self._sums, place, values)
            np.add.at(self._counts, place, 1)
            np.fmax.at(self._greatest, place, values)

    def _grow(self, count: int) -> None:
        if count > self._sums.shape[1]:
            more = (0, 0), (0, count - self._sums.shape[1])
            self._sums, self._counts = np.pad(self._sums, more), np.pad(self._counts, more)
            self._greatest = np.pad(self._greatest, more, constant_values=np.nan)

    def of(self, series: int) -> tuple[Ints, Numbers, Numbers]:
        """Steps with the number, its mean and its greatest."""
        there = np.flatnonzero(self._counts[:, series] > 0) if series < self._sums.shape[1] else np.zeros(0, np.int64)
        return self.steps[there], self._sums[there, series] / self._counts[there, series], self._greatest[there, series]


class Window:
    """All values of a kind in a few steps (``RowTaker``). A column is a series on a rank in a micro-step.

    Attributes:
        steps: Ascending.
        values: Of steps and columns, NaN where there is none.
        series, rank, micro_step: Of each column; -1 if its rows are about whole steps.
    """

    def __init__(self, steps: Ints) -> None:
        self.steps = steps
        self.values: Numbers = np.zeros((len(steps), 0))
        self.series = self.rank = self.micro_step = np.zeros(0, np.int64)
        self._rows: list[tuple[Ints, Ints, Ints, Ints, Numbers]] = []

    def add(self, step: Ints, micro_step: Ints, series: Ints, rank: Ints, values: Numbers) -> None:
        self._rows.append((step, micro_step, series, rank, values))

    def filled(self) -> Window:
        """With the rows in ``values``."""
        if not self._rows:
            return self
        step, micro_step, series, rank, values = (np.concatenate(column) for column in zip(*self._rows, strict=True))
        self._rows = []
        ranks, micro_steps = int(rank.max()) + 1, int(micro_step.max()) + 2
        keys, column = np.unique((series * ranks + rank) * micro_steps + micro_step + 1, return_inverse=True)
        self.series, self.rank = keys // (ranks * micro_steps), keys // micro_steps % ranks
        self.micro_step = keys % micro_steps - 1
        self.values = np.full((len(self.steps), len(keys)), np.nan)
        # NaN is where there is none, so a value that is NaN is infinite here: it is above each band, too.
        self.values[np.searchsorted(self.steps, step), column] = np.where(np.isnan(values), np.inf, values)
        return self

    def of(self, columns: Sequence[int]) -> Window:
        """Some of its columns."""
        found = Window(self.steps)
        found.series, found.rank, found.micro_step = (one[list(columns)] for one in (self.series, self.rank, self.micro_step))
        found.values = self.values[:, list(columns)]
        return found

    def together(self) -> Window:
        """The root of the sum of squares over all series: a column is a rank in a micro-step."""
        micro_steps = int(self.micro_step.max(initial=-1)) + 2
        keys, column = np.unique(self.rank * micro_steps + self.micro_step + 1, return_inverse=True)
        total = Window(self.steps)
        total.series, total.rank, total.micro_step = 0 * keys, keys // micro_steps, keys % micro_steps - 1
        squares, there = np.zeros((len(keys), len(self.steps))), np.zeros((len(keys), len(self.steps)))
        with np.errstate(over="ignore", invalid="ignore"):
            np.add.at(squares, column, np.nan_to_num(self.values.T, posinf=np.inf) ** 2)
        np.add.at(there, column, ~np.isnan(self.values.T))
        total.values = np.where(there > 0, np.sqrt(squares), np.nan).T
        return total
