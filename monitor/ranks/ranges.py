"""Sets of step numbers, written as ranges with an interval, so that a run of any length takes a few lines of a manifest."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

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
    """Steps beyond the bound on ranges: how many were added (one added twice counts twice), the lowest and the highest."""

    count: int
    first: int
    last: int

    def with_step(self, step: int) -> Rest:
        return Rest(self.count + 1, min(self.first, step), max(self.last, step))


class StepRanges:
    """A set of steps that is exact until it would need more than ``most`` ranges; what does not fit is only counted.

    Steps may come in any order and more than once. Every n-th step is one range, for any n. Not safe across threads.
    """

    def __init__(self, steps: Iterable[int] = (), most: int = MOST_RANGES) -> None:
        self._most = most
        self._ranges: list[StepRange] = []  # in order, and no two overlap, not even between their steps
        self._rest: Rest | None = None
        self._held = 0
        for step in steps:
            self.add(step)

    @property
    def ranges(self) -> tuple[StepRange, ...]:
        return tuple(self._ranges)

    @property
    def rest(self) -> Rest | None:
        return self._rest

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


class StepsByCause:
    """Steps, set by set, under the cause of what happened to them. The number of causes and their length are bounded."""

    def __init__(self) -> None:
        self._sets: dict[str, StepRanges] = {}

    def add(self, step: int, cause: str) -> None:
        cause = cause[:MOST_CHARACTERS_OF_A_CAUSE]
        if cause not in self._sets and len(self._sets) >= MOST_CAUSES:
            cause = OTHER_CAUSES
        self._sets.setdefault(cause, StepRanges(most=MOST_RANGES_OF_A_CAUSE)).add(step)

    def items(self) -> Iterable[tuple[str, StepRanges]]:
        return self._sets.items()


def _first(steps: StepRange) -> int:
    return steps.first


def _below(ranges: Iterable[StepRange], step: int) -> Iterator[StepRange]:
    """The parts of ``ranges`` before ``step``, which none of them holds."""
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
    """Ranges in order, with neighbours that go on in the same interval made one."""
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
