"""Sets of step numbers, stored as ranges with an interval, so that a long run takes only a few lines of a manifest."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

LAST_STEP: Final = 2**63 - 1
MOST_RANGES: Final = 1000
MOST_RANGES_OF_A_CAUSE: Final = 200
MOST_CAUSES: Final = 16
MOST_CHARACTERS_OF_A_CAUSE: Final = 300
OTHER_CAUSES: Final = "other causes"


class StepRange(NamedTuple):
    """``first, first + interval, ..., last``. A single step has the interval 1."""

    first: int
    last: int
    interval: int = 1

    @property
    def size(self) -> int:
        return (self.last - self.first) // self.interval + 1

    def holds(self, step: int) -> bool:
        return self.first <= step <= self.last and (step - self.first) % self.interval == 0

    def steps(self) -> range:
        return range(self.first, self.last + 1, self.interval)


@dataclass(frozen=True, slots=True)
class Rest:
    """Steps beyond the bound on ranges: their number (a step added twice counts twice), the lowest and the highest."""

    count: int
    first: int
    last: int

    def with_step(self, step: int) -> Rest:
        return Rest(self.count + 1, min(self.first, step), max(self.last, step))


class StepRanges:
    """A set of steps. It is exact up to ``most`` ranges; further steps are only counted.

    Steps may come in any order and more than once. Every n-th step is one range, for any n. Not safe across threads.
    """

    def __init__(self, steps: Iterable[int] = (), most: int = MOST_RANGES) -> None:
        self._most = most
        self._ranges: list[StepRange] = []  # in order, and no two overlap, not even between their steps
        self._rest: Rest | None = None
        self._held = 0
        for step in steps:
            self.add(step)

    @classmethod
    def restored(cls, ranges: Iterable[tuple[int, int, int]], rest: Rest | None, most: int = MOST_RANGES) -> StepRanges:
        """From the ranges of a manifest, which are in order and do not overlap."""
        steps = cls(most=most)
        steps._ranges = [StepRange(*one) for one in ranges]
        steps._rest = rest
        steps._held = sum(one.size for one in steps._ranges)
        return steps

    @property
    def ranges(self) -> tuple[StepRange, ...]:
        return tuple(self._ranges)

    @property
    def rest(self) -> Rest | None:
        return self._rest

    @property
    def newest(self) -> int:
        """The last step, ``rest`` included; -1 if there are none."""
        return max(self._ranges[-1].last if self._ranges else -1, self._rest.last if self._rest else -1)

    @property
    def interval(self) -> int | None:
        """The interval of the last range; None if the range is a single step, or there is no range."""
        return self._ranges[-1].interval if self._ranges and self._ranges[-1].size > 1 else None

    @property
    def count(self) -> int:
        """Number of steps, those of ``rest`` included."""
        return self._held + (self._rest.count if self._rest else 0)

    def add(self, step: int) -> None:
        at = bisect_right(self._ranges, step, key=_first)
        begin, end = max(at - 1, 0), at + 1
        neighbours = self._ranges[begin:end]
        if any(neighbour.holds(step) for neighbour in neighbours):
            return
        parted = [*_below(neighbours, step), StepRange(step, step), *_above(neighbours, step)]
        joined = list(_joined(parted))
        if len(self._ranges) - len(neighbours) + len(joined) > self._most:
            self._rest = self._rest.with_step(step) if self._rest else Rest(1, step, step)
            return
        self._ranges[begin:end] = joined
        self._held += 1

    def take(self, first: int, last: int = LAST_STEP) -> list[StepRange]:
        """Remove the steps from ``first`` to ``last``, both included, and return them. Steps in ``rest`` cannot be removed."""
        taken = [cut for one in self._ranges if (cut := _between(one, first, last)) is not None]
        below = [cut for one in self._ranges if (cut := _between(one, 0, first - 1)) is not None]
        above = [cut for one in self._ranges if (cut := _between(one, last + 1, LAST_STEP)) is not None]
        if taken:
            self._ranges = below + above
            self._held -= sum(one.size for one in taken)
        return taken

    def add_all(self, ranges: Iterable[StepRange]) -> None:
        """Like ``add`` for each step; a range that does not touch others is added at once."""
        for one in ranges:
            at = bisect_right(self._ranges, one.first, key=_first)
            clear = (not at or self._ranges[at - 1].last < one.first) and all(
                one.last < following.first for following in self._ranges[at : at + 1]
            )
            if clear and len(self._ranges) < self._most:
                self._ranges[at:at] = [one]
                self._held += one.size
            else:
                for step in one.steps():
                    self.add(step)


def without_pairs(ranges: Iterable[StepRange]) -> list[StepRange]:
    """The same steps for people, without ranges of two distant steps: 0, 10 to 15 instead of 0 to 10 by 10, 11 to 15."""
    found: list[StepRange] = []
    for one in ranges:
        pair = one.size == 2 and one.interval > 1
        for part in (StepRange(one.first, one.first), StepRange(one.last, one.last)) if pair else (one,):
            last = found[-1] if found else None
            if last is not None and last.interval == part.interval == 1 and last.last + 1 == part.first:
                found[-1] = StepRange(last.first, part.last)
            else:
                found.append(part)
    return found


class StepsByCause:
    """Sets of steps by cause. The number and length of causes are bounded."""

    def __init__(self) -> None:
        self._sets: dict[str, StepRanges] = {}

    def add(self, step: int, cause: str) -> None:
        cause = cause[:MOST_CHARACTERS_OF_A_CAUSE]
        if cause not in self._sets and len(self._sets) >= MOST_CAUSES:
            cause = OTHER_CAUSES
        self._sets.setdefault(cause, StepRanges(most=MOST_RANGES_OF_A_CAUSE)).add(step)

    def add_range(self, steps: StepRange, cause: str) -> None:
        """Like ``add`` for each step."""
        self._sets.setdefault(cause, StepRanges(most=MOST_RANGES_OF_A_CAUSE)).add_all([steps])

    @property
    def newest(self) -> int:
        """The last step under any cause; -1 if there are none."""
        return max((one.newest for one in self._sets.values()), default=-1)

    def restore(self, cause: str, steps: StepRanges) -> None:
        """Set the steps of a cause, as read from a manifest."""
        self._sets[cause] = steps

    def take(self, first: int, last: int = LAST_STEP) -> None:
        """Remove the steps from ``first`` to ``last``, both included, and causes without steps."""
        for steps in self._sets.values():
            steps.take(first, last)
        self._sets = {cause: steps for cause, steps in self._sets.items() if steps.count}

    def __contains__(self, step: int) -> bool:
        """Whether any cause lists the step."""
        return any(one.holds(step) for steps in self._sets.values() for one in steps.ranges)

    def items(self) -> Iterable[tuple[str, StepRanges]]:
        return self._sets.items()


def _between(steps: StepRange, first: int, last: int) -> StepRange | None:
    """The part of ``steps`` from ``first`` to ``last``; None if empty."""
    low = steps.first + max(-((steps.first - first) // steps.interval), 0) * steps.interval
    high = steps.first + (min(last, steps.last) - steps.first) // steps.interval * steps.interval
    return _plain(low, high, steps.interval) if low <= high else None


def _first(steps: StepRange) -> int:
    return steps.first


def _below(ranges: Iterable[StepRange], step: int) -> Iterator[StepRange]:
    """The parts of ``ranges`` before ``step``. No range holds ``step``."""
    for first, last, interval in ranges:
        if first < step:
            yield _plain(first, min(last, first + (step - first) // interval * interval), interval)


def _above(ranges: Iterable[StepRange], step: int) -> Iterator[StepRange]:
    for first, last, interval in ranges:
        if last > step:
            yield _plain(max(first, last - (last - step) // interval * interval), last, interval)


def _plain(first: int, last: int, interval: int) -> StepRange:
    return StepRange(first, last, interval if first < last else 1)


def _joined(ranges: Iterable[StepRange]) -> Iterator[StepRange]:
    """Ranges in order; neighbours that continue at the same interval are merged."""
    ranges = iter(ranges)
    current = next(ranges)
    for following in ranges:
        gap = following.first - current.last
        if all(one.size == 1 or one.interval == gap for one in (current, following)):
            current = StepRange(current.first, following.last, gap)
        else:
            yield current
            current = following
    yield current
