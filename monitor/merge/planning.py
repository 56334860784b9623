"""How the work is cut: into pieces by ranges of steps, and where shards hold many pieces into windows that are read at once.

A piece is what is combined at a time, and makes files of its own. A window is what shards are read for at a time. Where the
shards of all ranks together are no more than a piece, both are the same.

Both depend on what was recorded alone, so that the bytes depend neither on the engine nor on the number of workers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from monitor.coordinator.manifest_format import StepsRecord
from monitor.merge.ordering import Index
from monitor.sinks.files import Steps

Floats = NDArray[np.float64]

LAST_STEP: Final = 2**63 - 2

MOST_STEPS: Final = 100_000
"""Of a range that are looked at to cut it. A number in a damaged file may be any."""

MOST_OF_ONE: Final = 2
"""Rows of one shard that are read at a time, over those of a piece: what is not combined yet takes half the memory."""


@dataclass(frozen=True, slots=True)
class Window:
    """Steps whose rows are read at once.

    Attributes:
        pieces: Ascending, at least one.
        shares: Directories that are read together, as ranges of their places among those of the job, if rows are put in order
            before they are combined; otherwise none.
        rows: How many there are, about.
    """

    kind: str
    steps: Steps
    pieces: tuple[Steps, ...]
    shares: tuple[range, ...] = ()
    rows: float = 0


@dataclass(frozen=True)
class Planner:
    """Cuts the work.

    Attributes:
        limit: Steps outside are left out.
        rows: Of a piece, about.
        recorded: Steps that were, as far as is known, ascending: a shard's rows are spread over those of them that it may hold.
    """

    limit: Steps
    rows: int
    recorded: Index

    def windows(self, kind: str, shards: pa.Table, replicas: pa.Table) -> Iterator[Window]:
        """The work on one kind.

        Args:
            shards: In the columns ``SHARDS`` of ``monitor.merge.survey``.
            replicas: That are to be compared with them.
        """
        both = pa.concat_tables([shards, replicas])
        for segment in self._joined(self._segments(shards)):
            for steps in self._ranges(segment.steps, segment.largest / (MOST_OF_ONE * self.rows)):
                rows = segment.rows * self._count(steps) / max(1, self._count(segment.steps))
                pieces = tuple(self._ranges(steps, rows / self.rows))
                shares = tuple(self._shares(both, steps)) if len(pieces) > 1 else ()
                yield Window(kind, steps, pieces, shares, rows)

    def _segments(self, shards: pa.Table) -> Iterator[_Segment]:
        first, end, density = self._spans(shards, self.limit)
        bounds = np.unique(np.concatenate([first, end]))
        from_, to = np.searchsorted(bounds, first), np.searchsorted(bounds, end)
        which = np.repeat(np.arange(len(first)), to - from_)
        segment = np.arange(len(which)) - np.repeat(np.cumsum(to - from_) - to, to - from_)
        shards_there = np.bincount(segment, minlength=len(bounds))
        total, largest = np.bincount(segment, density[which], len(bounds)), np.zeros(len(bounds))
        np.maximum.at(largest, segment, density[which])
        for number, (begin, stop) in enumerate(itertools.pairwise(bounds.tolist())):
            steps = Steps(begin, stop - 1)
            if shards_there[number]:
                yield _Segment(steps, total[number] * self._count(steps), largest[number] * self._count(steps))

    def _joined(self, segments: Iterable[_Segment]) -> Iterator[_Segment]:
        """Several as one, where they are no more than a piece together."""
        waiting: _Segment | None = None
        for one in segments:
            if waiting and (not one.rows or waiting.rows + one.rows <= self.rows):
                waiting = waiting.then(one)
            else:
                yield from (waiting,) if waiting else ()
                waiting = one
        yield from (waiting,) if waiting else ()

    def _shares(self, shards: pa.Table, steps: Steps) -> Iterator[range]:
        """Directories, some at a time: each time as many as it takes to have the rows of a piece."""
        there = chosen(shards, steps)
        first, end, density = self._spans(there, steps)
        rows = density * (np.searchsorted(self.recorded, end) - np.searchsorted(self.recorded, first))
        of_run = np.bincount(there["run"].to_numpy(), rows)
        share = (np.cumsum(of_run) - of_run) // self.rows
        starts = np.flatnonzero(np.diff(share, prepend=-1)).tolist()
        for one, other in itertools.pairwise([*starts, len(of_run)]):
            yield range(one, other)

    def _spans(self, shards: pa.Table, limit: Steps) -> tuple[Index, Index, Floats]:
        """Of each shard that has any of these steps: the first of them, the one after the last, and its rows a step."""
        there = chosen(shards, limit)
        first, last, rows = (there[column].to_numpy() for column in ("first", "last", "rows"))
        steps = np.searchsorted(self.recorded, last, "right") - np.searchsorted(self.recorded, first)
        end = np.minimum(last, min(limit.last, LAST_STEP)) + 1
        return np.maximum(first, limit.first), end, rows / np.maximum(steps, 1)

    def _ranges(self, steps: Steps, parts: float) -> Iterator[Steps]:
        """With about as many recorded steps each; as many as asked for, if there are so many steps."""
        first, end = np.searchsorted(self.recorded, [steps.first, steps.last + 1]).tolist()
        count = min(max(1, math.ceil(parts)), max(1, end - first))
        inner = [int(self.recorded[first + (end - first) * number // count]) for number in range(1, count)]
        for one, other in itertools.pairwise([steps.first, *inner, steps.last + 1]):
            yield Steps(one, other - 1)

    def _count(self, steps: Steps) -> int:
        first, end = np.searchsorted(self.recorded, [steps.first, steps.last + 1]).tolist()
        return int(end - first)


def recorded_steps(manifests: Iterable[StepsRecord], shards: Iterable[pa.Table]) -> Index:
    """The steps of which there should be rows: those in the manifests, and where these know nothing, what shards may hold."""
    ranges = {one for record in manifests for one in record.ranges}
    listed = [np.zeros(0, dtype=np.int64), *(_some(*one) for one in ranges)]
    known = np.unique(np.concatenate(listed))
    spans = {span for table in shards for span in zip(table["first"].to_pylist(), table["last"].to_pylist(), strict=True)}
    guessed = [_some(*one) for one in sorted(spans) if not np.diff(np.searchsorted(known, [one[0], one[1] + 1]))]
    every: Index = np.unique(np.concatenate([known, *guessed]))
    return every


def _some(first: int, last: int, interval: int = 1) -> Index:
    """Steps from the first to the last: not all, where there are more than anything is cut into."""
    return np.arange(first, last + 1, interval * ((last - first) // interval // MOST_STEPS + 1))


@dataclass(frozen=True, slots=True)
class _Segment:
    """Steps in which no shard begins or ends.

    Attributes:
        rows: About.
        largest: Rows of the shard that has most.
    """

    steps: Steps
    rows: float
    largest: float

    def then(self, other: _Segment) -> _Segment:
        return _Segment(Steps(self.steps.first, other.steps.last), self.rows + other.rows, self.largest + other.largest)


def in_groups(windows: Iterable[Window], rows: float) -> Iterator[list[Window]]:
    """Some windows at a time, so that together they have ``rows`` rows; a single one may have more."""
    group: list[Window] = []
    for window in windows:
        if group and sum(one.rows for one in group) + window.rows > rows:
            yield group
            group = []
        group.append(window)
    if group:
        yield group


def chosen(shards: pa.Table, steps: Steps) -> pa.Table:
    """The shards that may have rows of these steps."""
    return shards.filter((shards["first"].to_numpy() <= steps.last) & (shards["last"].to_numpy() >= steps.first))


def by_kind(shards: pa.Table) -> dict[str, pa.Table]:
    """The shards of each kind, in the order in which they stand."""
    column = shards["kind"].combine_chunks()
    codes = column.indices.to_numpy()
    return {kind: shards.filter(codes == code) for code, kind in enumerate(column.dictionary.to_pylist())}
