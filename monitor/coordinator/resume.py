"""Which of the directories that are there a rank goes on in, and what its manifest knows."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any, Final

from monitor.coordinator.identity import RankDirectory, timestamp_fields
from monitor.coordinator.manifest_format import (
    MANIFEST_FILE,
    EarlierRun,
    ManifestError,
    ManifestRecord,
    RecordedModel,
    RecordedSteps,
    StepsRecord,
    WatchedRecord,
    read_manifest,
)
from monitor.coordinator.step_ranges import LAST_STEP, MOST_RANGES_OF_A_CAUSE, Rest, StepRange, StepRanges, StepsByCause
from monitor.failures import LOGGER
from monitor.stats.rows import Status

Span = tuple[str, str]
"""Two timestamps and all between. They have no year: where the first is the later one, New Year lies between."""


BEGINNING_OF_THE_YEAR, END_OF_THE_YEAR = "Jan01_00-00-00", "Dec31_23-59-59"


def span_between(first: str | None, last: str | None) -> Span | None:
    """A span that is open where a moment is not given, to the year's beginning or end; None where neither is.

    Raises:
        ValueError: one of them is not a timestamp.
    """
    if first is None and last is None:
        return None
    span = first or BEGINNING_OF_THE_YEAR, last or END_OF_THE_YEAR
    for timestamp in span:
        timestamp_fields(timestamp)
    return span


def in_order(timestamp: str, span: Span) -> tuple[bool, tuple[int, ...]] | None:
    """A key by which timestamps within ``span`` are in order of time; None for one outside."""
    moment, first, last = (timestamp_fields(one) for one in (timestamp, *span))
    if first <= last:
        return (False, moment) if first <= moment <= last else None
    return (moment <= last, moment) if moment >= first or moment <= last else None


def directories(base: Path, rank: int, span: Span) -> list[Path]:
    """Those of ``rank`` whose timestamps lie in ``span``, the newest first; of one second, that which was begun last.

    Raises:
        OSError: ``base`` cannot be listed.
    """
    found = [(name, RankDirectory.parse(name)) for name in os.listdir(base)]
    keyed = [(in_order(known.timestamp, span), base / name) for name, known in found if known and known.rank == rank]
    within = [(key, path) for key, path in keyed if key is not None and path.is_dir()]
    seconds = [key for key, _ in within]
    ordered = sorted(within, key=lambda one: (one[0], _begun(one[1]) if seconds.count(one[0]) > 1 else 0.0, one[1].name))
    return [path for _, path in reversed(ordered)]


def preferred(newest_first: Sequence[Path], recording: int, watched: RecordedModel | None = None) -> Path:
    """The newest one of a recording that watched the same; where none did, the newest that holds the same of its process's
    recordings, and where none does, the newest.

    Args:
        recording: How many recordings this process has begun before.
        watched: What it watches.
    """
    if len(newest_first) == 1:
        return newest_first[0]
    known = [(path, one) for path in newest_first if (one := _known(path)) is not None]
    same = [path for path, one in known if watched is not None and one.watched == WatchedRecord.of(watched)]
    named = [path for path, one in known if watched is not None and one.watched and one.watched.names == watched.names]
    same += named if not same and len(named) == 1 else []
    same += [path for path, one in known if one.recording == recording]
    return next(iter(same), newest_first[0])


def last_manifest(directory: Path) -> ManifestRecord | None:
    """The manifest of the run that recorded here last; None if it left none. One that cannot be read is set aside.

    Raises:
        OSError: it cannot be set aside.
    """
    path = directory / MANIFEST_FILE
    if not path.exists():
        return None
    try:
        return read_manifest(path)
    except ManifestError as error:
        names = (f"{MANIFEST_FILE}.unreadable{f'.{copy}' if copy > 1 else ''}" for copy in count(1))
        target = next(target for name in names if not os.path.lexists(target := path.with_name(name)))
        os.rename(path, target)
        LOGGER.warning("%s: it was renamed to %s, and what it said is not carried on.", error, target.name)
        return None


def _begun(directory: Path) -> float:
    """Seconds since 1970."""
    known = _known(directory)
    return directory.stat().st_mtime if known is None else datetime.fromisoformat(known.started).timestamp()


def _known(directory: Path) -> ManifestRecord | None:
    try:
        return read_manifest(directory / MANIFEST_FILE)
    except ManifestError:
        return None


# --- What the runs that record to one directory have done, told as one: a run that is resumed goes on where it was resumed.

MOST_EARLIER_RUNS: Final = 100

KILLED: Final = "killed before it was written"


class Timeline:
    """What became of each step. Not safe across threads.

    Attributes:
        first: The first step that this run has told of; None before.
        killed_before: The steps between the last one that an earlier run left, which was killed, and the first of this one.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        self.killed_before: StepRange | None = None
        self._resumed, self._killed, self._interval = False, False, 1
        self._written, self._skipped, self._incomplete = StepRanges(), StepRanges(), StepRanges()
        self._abandoned = StepRanges()
        self._dropped = StepsByCause()
        self._lost: dict[str, StepsByCause] = {}

    @classmethod
    def restored(cls, record: ManifestRecord) -> Timeline:
        """As an earlier run left it, for another one to go on."""
        line = cls()
        line._resumed, line._killed = True, _was_killed(record)
        line._interval = collected_every(record)
        steps = record.steps
        line._written, line._skipped, line._incomplete, line._abandoned = (
            _restored(one) for one in (steps.written, steps.skipped, steps.incomplete, steps.abandoned)
        )
        line._dropped = _restored_by_cause(record.dropped)
        line._lost = {sink: _restored_by_cause(causes) for sink, causes in record.lost.items()}
        return line

    @classmethod
    def found(cls) -> Timeline:
        """Of an earlier run that left no word."""
        line = cls()
        line._resumed = line._killed = True
        return line

    @property
    def newest(self) -> int:
        """The last of the steps written; -1 if there are none."""
        return self._written.newest

    def correct(self, ranges: Iterable[tuple[int, int]], held: Mapping[str, Collection[int]], cut: Iterable[int]) -> None:
        """Go by the files of the earlier run, which may have been killed after its last word.

        Args:
            ranges: First steps and last ones.
            held: By sink, those of the steps in these ranges that its files hold. A step that all of them hold was written.
            cut: Steps of which they held a part.
        """
        held = {sink: frozenset(steps) for sink, steps in held.items()}
        for first, last in ranges:
            within = {sink: {step for step in steps if first <= step <= last} for sink, steps in held.items()}
            somewhere = set[int]().union(*within.values())
            known = {step for taken in self._written.take(first, last) for step in taken.steps()}
            abandoned = {step for taken in self._abandoned.take(first, last) for step in taken.steps()}
            for step in sorted(somewhere):
                missing = [sink for sink, steps in within.items() if step not in steps]
                if missing and step in abandoned:  # one sink's record was written again, another one's not yet
                    self._abandoned.add(step)
                else:
                    self._find(step, missing)
            for step in known - somewhere:
                self._dropped.add(step, KILLED)
        for step in cut:
            self._dropped.add(step, KILLED)

    def write(self, step: int, status: Status) -> None:
        """Every sink has taken it in."""
        self._reach(step)
        self._abandoned.take(step, step)
        self._written.add(step)
        if status == "skipped":
            self._skipped.add(step)
        elif status == "incomplete":
            self._incomplete.add(step)

    def drop(self, step: int, reason: str) -> None:
        """No sink has it."""
        self._reach(step)
        self._dropped.add(step, reason)

    def lose(self, step: int, sink: str, reason: str) -> None:
        """One sink does not have it."""
        self._reach(step)
        self._lost.setdefault(sink, StepsByCause()).add(step, reason)

    def manifest_fields(self) -> dict[str, Any]:
        """Fields of ``ManifestRecord``."""
        written, skipped, incomplete, abandoned = (
            StepsRecord.of(steps) for steps in (self._written, self._skipped, self._incomplete, self._abandoned)
        )
        return {
            "steps": RecordedSteps(written=written, skipped=skipped, incomplete=incomplete, abandoned=abandoned),
            "dropped": _by_cause(self._dropped),
            "lost": {sink: _by_cause(causes) for sink, causes in self._lost.items()},
            "first_step": self.first,
        }

    def _find(self, step: int, missing: Collection[str]) -> None:
        """Files have it, but for those of the sinks in ``missing``."""
        if not missing:
            self._written.add(step)
        for sink in missing:
            causes = self._lost.setdefault(sink, StepsByCause())
            if step not in causes:
                causes.add(step, KILLED)

    def _reach(self, step: int) -> None:
        """Steps may be told of in any order."""
        if self.first is None or step < self.first:
            if self._resumed:
                self._leave(step, LAST_STEP if self.first is None else self.first - 1)
                self._miss(step)
            self.first = step

    def _miss(self, step: int) -> None:
        """A run that was killed had measured what lies between its last step and the one that it is resumed at."""
        if self.first is not None or not self._killed:
            return
        known = max(self._written.newest, self._dropped.newest, *(causes.newest for causes in self._lost.values()), -1)
        if known >= 0 and (gap := steps_between(known, step, self._written.interval or self._interval)) is not None:
            self.killed_before = gap
            self._dropped.add_range(gap, KILLED)

    def _leave(self, first: int, last: int) -> None:
        """What the earlier run did there was done in vain."""
        self._abandoned.add_all(self._written.take(first, last))
        self._skipped.take(first, last)
        self._incomplete.take(first, last)
        for causes in (self._dropped, *self._lost.values()):
            causes.take(first, last)
        self._lost = {sink: causes for sink, causes in self._lost.items() if any(steps.count for _, steps in causes.items())}


@dataclass(frozen=True, slots=True)
class Earlier:
    """What a run takes over from those that recorded to its directory before.

    Attributes:
        timeline: What became of the steps so far.
        runs: Of what is known, oldest first.
        failures: How often each cause of failure was met.
    """

    timeline: Timeline = field(default_factory=Timeline)
    runs: tuple[EarlierRun, ...] = ()
    failures: Mapping[str, int] = field(default_factory=dict)
    notes: Mapping[str, str | int | float | bool] = field(default_factory=dict)

    @classmethod
    def of(cls, record: ManifestRecord | None) -> Earlier:
        """What the last run said; None: it left no word."""
        if record is None:
            return cls(Timeline.found())
        last = EarlierRun(**{name: getattr(record, name) for name in EarlierRun.model_fields})
        return cls(Timeline.restored(record), (*record.resumed, last)[-MOST_EARLIER_RUNS:], record.failures, record.notes)

    @property
    def series_files(self) -> frozenset[str]:
        """Which the manifest still points at."""
        return frozenset(run.series.file for run in self.runs if run.series is not None)


def collected_every(record: ManifestRecord) -> int:
    """The interval between two collected steps, as configured."""
    interval = record.config.get("step_interval", 1)
    return interval if isinstance(interval, int) and interval > 0 else 1


def steps_between(known: int, resumed: int, interval: int) -> StepRange | None:
    """The steps that follow ``known`` in this interval, before ``resumed``; None if there are none."""
    last = known + (resumed - 1 - known) // interval * interval
    return StepRange(known + interval, last, interval if last > known + interval else 1) if last > known else None


def _was_killed(record: ManifestRecord) -> bool:
    """Whether the last run that told of steps, or one after it, did not end cleanly."""
    runs: list[ManifestRecord | EarlierRun] = [record, *reversed(record.resumed)]
    for run in runs:
        if not run.closed:
            return True
        if run.first_step is not None:
            return False
    return False


def newest_step(record: ManifestRecord | None) -> int:
    """The last of the steps written; -1 if there are none."""
    return Earlier.of(record).timeline.newest


def _restored(steps: StepsRecord, **most: int) -> StepRanges:
    over = steps.rest
    return StepRanges.restored(steps.ranges, Rest(over.count, over.first, over.last) if over else None, **most)


def _restored_by_cause(causes: Mapping[str, StepsRecord]) -> StepsByCause:
    steps = StepsByCause()
    for cause, record in causes.items():
        steps.restore(cause, _restored(record, most=MOST_RANGES_OF_A_CAUSE))
    return steps


def _by_cause(steps: StepsByCause) -> dict[str, StepsRecord]:
    return {cause: StepsRecord.of(ranges) for cause, ranges in steps.items()}
