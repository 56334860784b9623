"""Each tensor against its own trailing history: the cells of the report's heat maps, and values that change suddenly.

A value is compared with the last ``WINDOW`` recorded values of the same tensor on the same rank. What counts is its distance
from their median, in robust standard deviations of the logarithm. The median and the quartiles hardly notice a few outliers. A
norm that falls steadily widens the quartiles, so it does not stand out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from monitor.series import GRADIENT_KINDS, LEFT_BY_STEP, MOMENT_KINDS, PARAMETER_KINDS

Ints = NDArray[np.int64]
Codes = NDArray[np.uint8]
Values = NDArray[np.float32]
Flags = NDArray[np.bool_]

WINDOW: Final = 32
"""Values of a tensor's history. With very many tensors and ranks it is shorter, but at least ``WARM_UP``."""
WARM_UP: Final = 8
"""Values that a history needs before it judges."""
BLOCK: Final = 16
"""Values that are judged by the same history, at most a quarter of what there was before."""
MOST_HELD: Final = 64 * 2**20
"""Values of all histories of a kind together."""

NARROWEST: Final = 0.05
"""The least standard deviation of a logarithm: weights change by a millionth in a step, and a hundredth is no fault."""
SMALLEST: Final = 1e-38
"""Zero has no logarithm, and is treated as this."""
ZERO: Final = np.float32(np.log(SMALLEST))
"""Its logarithm, rounded as those of the histories."""
SUDDEN: Final = 12.0
"""Standard deviations of a sudden change. It also is by ``FACTOR``: healthy gradients jump tenfold at times."""
FACTOR: Final = 30.0
FACTOR_OF_WEIGHTS: Final = 2.0
SMALL_SHARE: Final = 1 / 64
"""A gradient below this share of the greatest one of its kind in the step may be noise of rounding: that of a bias of keys is
zero in exact arithmetic.
"""

ROUNDING_SHARE: Final = 1e-4
"""A gradient below this share of the greatest one may be rounding alone. That of a bias in front of a BatchNorm is zero in
exact arithmetic; its share is about 1e-7 in float32.
"""

LEAST_TOGETHER: Final = 8
"""Fewest values that are compared with their median: that of fewer may be a fault's."""

# The cells of a heat map, such that the greatest of several is the one to show.
NOT_RECORDED: Final = 0
HISTORY_BEGINS: Final = 1
LEAST: Final = 2
CALM: Final = 4
"""Standard deviations from which on a value is worth a look. ``PARTLY`` is below them."""
PARTLY: Final = LEAST + CALM
MOST: Final = 25
"""Standard deviations; more look the same."""
DIFFERS: Final = LEAST + MOST + 2
"""The value is finite, and not that of another rank which should have the same."""
INFINITE: Final = DIFFERS + 1
NAN: Final = INFINITE + 1

LARGEST: Final = float(np.finfo(np.float32).max)
"""Finite values beyond it are drawn here."""
DEVIATIONS_OF: Final = 1.349
"""Standard deviations between the quartiles of a normal distribution."""


def is_moment(kind: str) -> bool:
    """Whether a kind is a moment of an optimizer, before or after its step."""
    return kind.removesuffix(LEFT_BY_STEP) in MOMENT_KINDS


FEW: Final = 2
"""Most elements of a tensor whose number comes near zero by chance: by ``FACTOR`` falls one in 1,300 norms of two normal
numbers, and one in 28,000 of three."""


class SuddenBound(NamedTuple):
    """What makes a value of a kind a sudden change, beside ``SUDDEN``.

    Attributes:
        factor: It differs from its history by this factor.
        small: A value is none if it and its history are below this share of the greatest value of its kind in the step. A value
            that becomes zero is one.
        of_few: The number of a tensor of ``FEW`` elements must rise by this factor. Infinity: it is not judged.
        adds_up: It adds up over many steps, as weights and moments do, and may grow for long. So the factor counts from the
            nearest value of its history or from the value before it, not from the median.
        in_batches: It is as large as the batch makes it, as gradients are. So where most others of its kind fall, the factor
            counts from their fall.
    """

    factor: float = FACTOR
    small: float = 0.0
    of_few: float = FACTOR
    adds_up: bool = False
    in_batches: bool = False

    @classmethod
    def of(cls, kind: str) -> SuddenBound:
        """The bound of a kind."""
        if kind in PARAMETER_KINDS:
            return cls(FACTOR_OF_WEIGHTS, adds_up=True)
        if kind == "update_ratio":
            return cls(of_few=math.inf)  # it is as large as one likes when the weight passes zero
        if is_moment(kind):
            return cls(small=ROUNDING_SHARE ** (2 if "_sq" in kind else 1), adds_up=True)
        return cls(small=SMALL_SHARE, in_batches=True) if kind in (*GRADIENT_KINDS, "actv_grad") else cls()


USUAL: Final = SuddenBound()


class Sudden(NamedTuple):
    """A value that is not finite, or far from the values before it.

    Attributes:
        typical: The median of the values before; NaN if there were too few.
    """

    step: int
    micro_step: int
    series: int
    rank: int
    value: float
    typical: float
    deviations: float


@dataclass(frozen=True)
class Axis:
    """The steps of a run as columns of a heat map. A column has the same number of steps, in order.

    Attributes:
        steps: All that were recorded or are known to be missing, ascending.
        bins: Number of columns.
    """

    steps: Ints
    bins: int

    def bin_of(self, steps: Ints) -> Ints:
        """The column of each step."""
        places = np.clip(np.searchsorted(self.steps, steps), 0, len(self.steps) - 1)
        bins: Ints = places * self.bins // len(self.steps)
        return bins

    @property
    def first(self) -> Ints:
        """The first step of each column."""
        places = -(-np.arange(self.bins) * len(self.steps) // self.bins)
        first: Ints = self.steps[places]
        return first

    @property
    def last(self) -> Ints:
        """The last step of each column."""
        places = -(-np.arange(1, self.bins + 1) * len(self.steps) // self.bins) - 1
        last: Ints = self.steps[places]
        return last


def without_number(rows: pa.Table, op: str, own: Sequence[str]) -> int:
    """The number of rows of elements of which nothing says whether they are finite.

    Args:
        op: The column that is judged.
        own: All columns of the kind, if it has its own. They lack numbers that are not defined, such as a ratio to a weight of
            0 or a share of no updates, and none because an element is not finite. Another one may show that.
    """
    lacking = rows[op].is_null().to_numpy() & (rows["count"].to_numpy() > 0)
    if own and lacking.any():
        values = np.array([rows[name].cast(pa.float64()).to_numpy() for name in own])
        there = np.array([rows[name].is_valid().to_numpy() for name in own])
        lacking &= (there & ~np.isfinite(values)).any(axis=0)
    return int(lacking.sum())


class Exempt(NamedTuple):
    """Series of a kind of which some values are no events.

    Attributes:
        of_few: The series of tensors of ``FEW`` elements, which may grow. Their numbers come near zero by chance, as when an
            element changes its sign. So a fall is no change, unless the number stays zero.
        scaled: The series of gradients, which a loss scale multiplies.
        overflows: The steps in which this scale was too high. A NaN or infinity of ``scaled`` is no event there.
    """

    of_few: Collection[int] = ()
    scaled: Collection[int] = ()
    overflows: Collection[int] = ()


NOTHING_EXEMPT: Final = Exempt()


class RowTaker(Protocol):
    """Takes the rows of a kind in order of steps."""

    def add(self, step: Ints, micro_step: Ints, series: Ints, rank: Ints, values: NDArray[np.float64]) -> None:
        """Take rows of later steps than those before; see ``KindHistory.add``."""


class KindHistory:
    """The rows of a kind in order of steps, each judged by those before it. Its memory does not grow with the steps.

    A pair is a series on a rank. Series are numbered by the caller, in their order of execution.

    Attributes:
        grid: Of each series and column the greatest cell of all ranks and steps.
        pair_series, pair_rank: Of each pair, the number of its series and of its rank.
        last: Of each pair, the last step with a row.
        deviations: Of each pair the greatest that was judged; ``at`` has its step, ``value`` and ``typical`` what was compared.
        events: Of each pair, the first value that is not finite or changes suddenly: by step and then in order of execution.
            Beyond a bound only the first of each series is kept.
        judged: Number of values that had a history.
        infinite: Number of values that are NaN or infinite; ``first_infinite`` is the first of them.
    """

    def __init__(
        self,
        axis: Axis,
        ranks: int,
        most_kept: int = 0,
        most_events: int = 50,
        bound: SuddenBound = USUAL,
        exempt: Exempt = NOTHING_EXEMPT,
    ) -> None:
        """Take no rows yet.

        Args:
            most_kept: Cells of all pairs to keep; more, and ``cells`` and ``values`` are None.
            exempt: Its collections may grow.
        """
        self._bound, self._exempt = bound, exempt
        self._axis, self._ranks, self._most_kept, self._most_events = axis, ranks, most_kept, most_events
        self.grid: Codes = np.zeros((0, axis.bins), np.uint8)
        self.pair_series: Ints = np.zeros(0, np.int64)
        self.pair_rank: Ints = np.zeros(0, np.int64)
        self.last: Ints = np.zeros(0, np.int64)
        self._pair_of = np.full(0, -1, np.int32)
        self._held: Values = np.zeros((WINDOW, 0), np.float32)
        self._seen = np.zeros(0, np.bool_)
        self._has_event = np.zeros(0, np.bool_)
        self._times = 0
        self.deviations: Values = np.zeros(0, np.float32)
        self.value: NDArray[np.float64] = np.zeros(0)
        self.typical: NDArray[np.float64] = np.zeros(0)
        self.at: Ints = np.zeros(0, np.int64)
        self.cells: Codes | None = np.zeros((0, axis.bins), np.uint8)
        self.values: Values | None = np.zeros((0, axis.bins), np.float32)
        self.events: list[Sudden] = []
        self._single_zeros: dict[int, Sudden] = {}  # by pair, a sudden zero that was the last value
        self.judged = 0
        self.infinite = 0
        self.first_infinite: Sudden | None = None

    def keep_from(self, axis: Axis) -> None:
        """Keep the cells and values of every pair from the next row on, in the columns of ``axis``."""
        self._axis, self._most_kept = axis, 2**62
        self.grid = np.zeros((len(self.grid), axis.bins), np.uint8)
        self.cells = np.zeros((len(self.pair_series), axis.bins), np.uint8)
        self.values = np.full((len(self.pair_series), axis.bins), np.nan, np.float32)

    def mark_differing(self, step: int, series: int, rank: int, value: float) -> None:
        """Show at a step that a rank has another value than other ranks, which should have the same.

        Args:
            value: What it has; NaN if that is not of the op that is shown.
        """
        if series >= len(self.grid) or step not in self._axis.steps:
            return
        column = int(self._axis.bin_of(np.array([step]))[0])
        self.grid[series, column] = max(self.grid[series, column], DIFFERS)
        pair = self._pairs(np.array([series]), np.array([rank]))[0]
        if self.cells is not None and self.values is not None:
            self.cells[pair, column] = max(self.cells[pair, column], DIFFERS)
            if np.isnan(self.values[pair, column]):
                self.values[pair, column] = np.clip(value, -LARGEST, LARGEST)

    def add(self, step: Ints, micro_step: Ints, series: Ints, rank: Ints, values: NDArray[np.float64]) -> None:
        """Take rows of later steps than those before.

        Args:
            step: Ascending.
            micro_step: -1 in a row about the whole step.
            rank: Numbers of ranks, from 0.
        """
        if not len(step):
            return
        micro_steps = int(micro_step.max()) + 2
        begins = np.diff(step, prepend=step[0] - 1) != 0
        steps = step[begins]
        time = (np.cumsum(begins) - 1) * micro_steps + micro_step + 1
        there = np.bincount(time, minlength=len(steps) * micro_steps) > 0
        times = np.flatnonzero(there)
        pairs = self._pairs(series, rank)
        self.last[pairs] = step  # of equal pairs, numpy keeps what comes last
        own = np.unique(self.pair_series * self._ranks + self.pair_rank, return_index=True)[1]
        column = np.empty(len(own), np.int64)
        column[own] = np.arange(len(own))
        matrix = np.full((len(times), len(own)), np.nan)
        recorded = np.zeros(matrix.shape, np.bool_)
        place = (np.cumsum(there) - 1)[time], column[pairs]
        matrix[place], recorded[place] = values, True
        self._judge(own, steps[times // micro_steps], times % micro_steps - 1, matrix, recorded)

    def _pairs(self, series: Ints, rank: Ints) -> Ints:
        key = series * self._ranks + rank
        most = (int(series.max()) + 1) * self._ranks
        if most > len(self._pair_of):
            self._pair_of = np.append(self._pair_of, np.full(most - len(self._pair_of), -1, np.int32))
        new = np.flatnonzero(np.bincount(key[self._pair_of[key] < 0], minlength=1))
        if len(new):
            self._pair_of[new] = len(self.pair_series) + np.arange(len(new))
            self._grow(new // self._ranks, new % self._ranks)
        found: Ints = self._pair_of[key].astype(np.int64)
        return found

    def _grow(self, series: Ints, rank: Ints) -> None:
        count = len(self.pair_series) + len(series)
        more = int(series.max()) + 1 - len(self.grid)
        if more > 0:
            self.grid = np.append(self.grid, np.zeros((more, self._axis.bins), np.uint8), axis=0)
        self.pair_series, self.pair_rank = np.append(self.pair_series, series), np.append(self.pair_rank, rank)
        window = max(WARM_UP, min(WINDOW, MOST_HELD // count))
        added = np.full((window, len(series)), np.nan, np.float32)
        self._held = np.append(self._held[-window:], added, axis=1)
        self._seen, self._has_event = (np.append(one, np.zeros(len(series), np.bool_)) for one in (self._seen, self._has_event))
        self.deviations = np.append(self.deviations, np.full(len(series), -1, np.float32))
        self.at, self.last = (np.append(one, np.full(len(series), -1, np.int64)) for one in (self.at, self.last))
        self.value, self.typical = (np.append(one, np.full(len(series), np.nan)) for one in (self.value, self.typical))
        if self.cells is None or self.values is None or count * self._axis.bins > self._most_kept:
            self.cells = self.values = None
            return
        self.cells = np.append(self.cells, np.zeros((len(series), self._axis.bins), np.uint8), axis=0)
        self.values = np.append(self.values, np.full((len(series), self._axis.bins), np.nan, np.float32), axis=0)

    def _judge(self, own: Ints, step: Ints, micro_step: Ints, matrix: NDArray[np.float64], recorded: Flags) -> None:
        first = 0
        while first < len(step):
            end = first + min(max(self._times // 4, 1), BLOCK)
            block = slice(first, end)
            self._judge_block(own, step[block], micro_step[block], matrix[block], recorded[block])
            self._times += len(step[block])
            first = end

    def _judge_block(self, own: Ints, step: Ints, micro_step: Ints, matrix: NDArray[np.float64], recorded: Flags) -> None:
        """Args: own: Of each column of ``matrix``, its pair: sorted by series and rank."""
        finite = np.isfinite(matrix)
        with np.errstate(invalid="ignore"):
            logarithm = np.log(np.maximum(np.abs(matrix), SMALLEST)).astype(np.float32)
        logarithm[~finite] = np.nan
        held = np.sort(self._held[:, own], axis=0)  # NaN comes last
        number = len(held) - np.isnan(held).sum(axis=0)
        low, median, high = (_taken(held, number * part // 4) for part in (1, 2, 3))
        deviation = np.maximum((high - low) / DEVIATIONS_OF, NARROWEST)
        apart = np.abs(logarithm - median)
        apart[(logarithm <= ZERO) & (held[0] <= ZERO)] = 0  # it is zero now and then
        of_few = np.isin(self.pair_series[own], list(self._exempt.of_few))
        apart[of_few & (logarithm > ZERO) & ((logarithm < median) | np.isinf(self._bound.of_few))] = 0
        # Nothing is known of what follows a history of zeros: a weight that begins to be trained, an expert that is chosen.
        judged = finite & (number >= WARM_UP) & ((median > ZERO) | (logarithm <= ZERO))
        deviations = np.where(judged, apart / deviation, 0).astype(np.float32)
        cells = self._cells(recorded, matrix, judged, deviations)
        self.judged += int(judged.sum())
        self._note_greatest(own, step, matrix, deviations, judged, median)
        zero = recorded & (logarithm <= ZERO)
        if self._single_zeros:
            self._judge_single_zeros(own, zero, recorded)
        factor = np.where(of_few, self._bound.of_few, self._bound.factor)
        if self._bound.adds_up:
            apart = np.minimum(apart, np.maximum(logarithm - _taken(held, np.maximum(number - 1, 0)), held[0] - logarithm))
            apart = np.fmin(apart, np.abs(logarithm - np.concatenate([self._held[-1:, own], logarithm[:-1]])))
        far = judged & (deviations >= SUDDEN) & (apart >= np.log(factor))
        if self._bound.in_batches:
            far &= ~_fall_together(far & (logarithm > ZERO), logarithm - median, judged, np.log(factor))
        lost = recorded & ~finite
        if len(self._exempt.overflows):
            lost &= ~self._is_overflow(step, own)
        sudden = lost | (far & ~self._is_small(logarithm, median))
        if sudden.any():
            typical = np.where(number >= WARM_UP, _numbers_of(median), np.nan)
            about = own, step, micro_step, matrix, typical, deviations
            follows, is_last = _next_ones(zero, recorded)
            if self._bound.adds_up:  # the moments of one expert may be zero once, those of most tensors only if they were reset
                follows |= 2 * (zero & judged).sum(axis=1, keepdims=True) > judged.sum(axis=1, keepdims=True)
            waits = sudden & zero & is_last & (np.cumsum(sudden, axis=0) == 1)
            for time, column in np.argwhere(waits)[: self._most_events].tolist():
                self._single_zeros[int(own[column])] = self._value_at(time, column, *about)
            self._note_events(sudden & (follows | ~zero), *about)
            infinite = np.argwhere(lost)
            self.infinite += len(infinite)
            if len(infinite) and self.first_infinite is None:
                self.first_infinite = self._value_at(*infinite[0].tolist(), *about)
        self._note_cells(own, self._axis.bin_of(step), matrix, cells, recorded)
        kept = self._held[len(step) :, own] if len(step) < len(self._held) else self._held[:0, own]
        self._held[:, own] = np.concatenate([kept, logarithm[-len(self._held) :]])
        self._seen[own] |= recorded.any(axis=0)

    def _is_overflow(self, step: Ints, own: Ints) -> Flags:
        """Whether the loss scale of a value may have been too high."""
        steps = np.isin(step, list(self._exempt.overflows))
        scaled: Flags = np.isin(self.pair_series[own], list(self._exempt.scaled))
        return steps[:, None] & scaled

    def _is_small(self, logarithm: Values, median: Values) -> Flags:
        """Whether a value and its history are small beside the greatest value of its step."""
        greatest = np.fmax.reduce(logarithm, axis=1, keepdims=True, initial=ZERO)
        small: Flags = np.maximum(logarithm, median) < greatest + np.log(max(self._bound.small, SMALLEST))
        return small & (logarithm > ZERO)

    def _judge_single_zeros(self, own: Ints, zero: Flags, recorded: Flags) -> None:
        """A zero is a sudden change if the next value is zero, too. The gradient of an expert that no token chose is a zero."""
        columns = {pair: column for column, pair in enumerate(own.tolist()) if pair in self._single_zeros}
        for pair, column in columns.items():
            if recorded[:, column].any():
                event = self._single_zeros.pop(pair)
                if zero[recorded[:, column].argmax(), column] and not self._has_event[pair]:
                    self._has_event[pair] = True
                    self.events.append(event)

    @staticmethod
    def _cells(recorded: Flags, matrix: NDArray[np.float64], judged: Flags, deviations: Values) -> Codes:
        level = np.minimum(deviations, MOST).astype(np.uint8)
        cells: Codes = np.where(judged, level + np.uint8(LEAST) + (level >= CALM), np.uint8(HISTORY_BEGINS)).astype(np.uint8)
        cells[np.isinf(matrix)] = INFINITE
        cells[np.isnan(matrix)] = NAN
        cells[~recorded] = NOT_RECORDED
        return cells

    def _note_greatest(
        self, own: Ints, step: Ints, matrix: NDArray[np.float64], deviations: Values, judged: Flags, median: Values
    ) -> None:
        when = deviations.argmax(axis=0)
        columns = np.arange(len(own))
        greatest = deviations[when, columns]
        more = judged[when, columns] & (greatest > self.deviations[own])
        pairs, when = own[more], when[more]
        self.deviations[pairs], self.at[pairs] = greatest[more], step[when]
        self.value[pairs], self.typical[pairs] = matrix[when, columns[more]], _numbers_of(median[more])

    def _note_events(self, sudden: Flags, own: Ints, *about: NDArray[Any]) -> None:
        columns = np.flatnonzero(sudden.any(axis=0) & ~self._has_event[own])
        when = sudden[:, columns].argmax(axis=0)
        order = np.argsort(when, kind="stable")
        columns, when = columns[order], when[order]
        series = self.pair_series[own[columns]]
        self._has_event[own[columns]] = True
        first = np.zeros(len(columns), np.bool_)
        first[np.unique(series, return_index=True)[1]] = True
        first &= ~np.isin(series, [one.series for one in self.events])
        kept = np.flatnonzero(first | (np.arange(len(columns)) < self._most_events - len(self.events)))
        for column, time in zip(columns[kept].tolist(), when[kept].tolist(), strict=True):
            self.events.append(self._value_at(time, column, own, *about))

    def _value_at(self, time: int, column: int, own: Ints, *about: NDArray[Any]) -> Sudden:
        step, micro_step, matrix, typical, deviations = about
        pair = own[column]
        at = int(step[time]), int(micro_step[time]), int(self.pair_series[pair]), int(self.pair_rank[pair])
        return Sudden(*at, float(matrix[time, column]), float(typical[column]), float(deviations[time, column]))

    def _note_cells(self, own: Ints, bins: Ints, matrix: NDArray[np.float64], cells: Codes, recorded: Flags) -> None:
        shown = cells.copy()
        shown[~recorded & self._seen[own]] = PARTLY
        begins = np.flatnonzero(np.diff(self.pair_series[own], prepend=-1))
        of_series = np.maximum.reduceat(shown, begins, axis=1)
        of_series[~np.logical_or.reduceat(recorded, begins, axis=1)] = NOT_RECORDED
        series = self.pair_series[own[begins]]
        for one, times in _runs(bins):
            self.grid[series, one] = np.maximum(self.grid[series, one], of_series[times].max(axis=0))
            if self.cells is not None and self.values is not None:
                when = cells[times].argmax(axis=0)
                worst, columns = cells[times][when, np.arange(len(own))], np.arange(len(own))
                more = worst >= np.maximum(self.cells[own, one], 1)
                self.cells[own[more], one] = worst[more]
                values = matrix[times][when[more], columns[more]]
                self.values[own[more], one] = np.where(np.isfinite(values), np.clip(values, -LARGEST, LARGEST), values)


def _next_ones(flags: Flags, recorded: Flags) -> tuple[Flags, Flags]:
    """For each value, the flag of the next recorded value of its pair, and whether there is none."""
    following, is_last = np.zeros(flags.shape, np.bool_), np.ones(flags.shape, np.bool_)
    for time in range(len(flags) - 2, -1, -1):
        following[time] = np.where(recorded[time + 1], flags[time + 1], following[time + 1])
        is_last[time] = ~recorded[time + 1] & is_last[time + 1]
    return following, is_last


def _taken(held: Values, place: Ints) -> Values:
    taken: Values = np.take_along_axis(held, np.minimum(place, len(held) - 1)[None], axis=0)[0]
    return taken


def _fall_together(far: Flags, change: Values, judged: Flags, factor: NDArray[np.float64]) -> Flags:
    """Whether a value that fell ``far`` is not that far below what the median change of its step and kind would make of it.

    Args:
        change, factor: As logarithms; ``change`` from the history of each value.
    """
    together = np.zeros_like(far)
    for time in np.flatnonzero((far & (change < 0)).any(axis=1)).tolist():
        others = change[time, judged[time]]
        if len(others) >= LEAST_TOGETHER:
            together[time] = far[time] & (change[time] < 0) & (change[time] > min(float(np.median(others)), 0.0) - factor)
    return together


def _numbers_of(logarithm: Values) -> NDArray[np.float64]:
    numbers: NDArray[np.float64] = np.where(logarithm <= ZERO, 0, np.exp(logarithm.astype(np.float64)))
    return numbers


def _runs(bins: Ints) -> Iterator[tuple[int, slice]]:
    """Adjacent times in the same column."""
    starts = np.flatnonzero(np.diff(bins, prepend=-1)).tolist()
    for start, end in zip(starts, [*starts[1:], len(bins)], strict=True):
        yield int(bins[start]), slice(start, end)


def by_rank(history: KindHistory, cells: Codes, ranks: int) -> Codes:
    """One column of ``cells`` as a matrix of ranks and series, in ``NOT_RECORDED`` where there is no pair."""
    found: Codes = np.zeros((ranks, len(history.grid)), np.uint8)
    found[history.pair_rank, history.pair_series] = cells
    return found


def most_unusual(histories: Sequence[KindHistory], most: int) -> list[tuple[int, int]]:
    """Numbers of the history and the pair of those with the greatest deviations, each series once."""
    numbers = np.concatenate([np.zeros(0, np.int64), *(np.full(len(one.at), place) for place, one in enumerate(histories))])
    pairs = np.concatenate([np.zeros(0, np.int64), *(np.arange(len(one.at)) for one in histories)])
    deviations = np.concatenate([np.zeros(0, np.float32), *(one.deviations for one in histories)])
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for place in np.argsort(-deviations, kind="stable").tolist():
        if len(found) >= most or deviations[place] < CALM:
            break
        number, pair = int(numbers[place]), int(pairs[place])
        found.setdefault((number, int(histories[number].pair_series[pair])), (number, pair))
    return list(found.values())
