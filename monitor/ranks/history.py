"""What the runs that record to one directory have done, told as one: a run that is resumed goes on where it was resumed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from monitor.ranks.ranges import LAST_STEP, MOST_RANGES_OF_A_CAUSE, Rest, StepRanges, StepsByCause
from monitor.ranks.records import EarlierRun, ManifestRecord, RecordedSteps, StepsRecord
from monitor.stats.rows import Status

MOST_EARLIER_RUNS: Final = 100

KILLED: Final = "lost when the process was killed"


class Timeline:
    """What became of each step. Not safe across threads.

    Attributes:
        first: The first step that this run has told of; None before.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        self._resumed = False
        self._written, self._skipped, self._incomplete = StepRanges(), StepRanges(), StepRanges()
        self._abandoned = StepRanges()
        self._dropped = StepsByCause()
        self._lost: dict[str, StepsByCause] = {}

    @classmethod
    def restored(cls, record: ManifestRecord) -> Timeline:
        """As an earlier run left it, for another one to go on."""
        line = cls()
        line._resumed = True
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
        line._resumed = True
        return line

    def correct(self, found: Iterable[tuple[tuple[int, int], set[int]]], cut: Iterable[int]) -> None:
        """Go by the files of the earlier run, which may have been killed after its last word.

        Args:
            found: Ranges of steps, and those of them that the files hold.
            cut: Steps of which they held a part.
        """
        for (first, last), steps in found:
            known = {step for taken in self._written.take(first, last) for step in taken.steps()}
            self._abandoned.take(first, last)
            for step in sorted(steps):
                self._written.add(step)
            for step in known - steps:
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

    def told(self) -> dict[str, Any]:
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

    def _reach(self, step: int) -> None:
        """Steps may be told of in any order."""
        if self.first is None or step < self.first:
            if self._resumed:
                self._leave(step, LAST_STEP if self.first is None else self.first - 1)
            self.first = step

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


def newest_step(record: ManifestRecord | None) -> int:
    """The last of the steps written; -1 if there are none."""
    written = None if record is None else record.steps.written
    if written is None:
        return -1
    return max([last for _, last, _ in written.ranges[-1:]] + ([written.rest.last] if written.rest else []), default=-1)


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
