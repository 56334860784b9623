"""``Timeline``: the outcome of each step of all runs in one directory. A later run replaces steps that it repeats."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from monitor.coordinator import manifest_format as schema
from monitor.coordinator.thinning import ThinnedSteps, ThinningRule
from monitor.stats.table import Status

MOST_EARLIER_RUNS: Final = 100


class Timeline:
    """The outcome of each step. Not safe across threads.

    Attributes:
        first: The first step that this run has reported; None before.
        killed_before: The steps between the last one of an earlier run that was killed and the first of this run.
        thinned: The steps that were removed from the files.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        self.killed_before: schema.StepRange | None = None
        self._resumed, self._killed, self._interval = False, False, 0  # 0: it may have changed while the run went on
        self._written, self._skipped, self._incomplete = (
            schema.StepRanges(),
            schema.StepRanges(),
            schema.StepRanges(),
        )
        self._abandoned = schema.StepRanges()
        self._dropped = schema.StepsByCause()
        self._lost: dict[str, schema.StepsByCause] = {}
        self.thinned = ThinnedSteps()

    @classmethod
    def restored(cls, record: schema.ManifestRecord) -> Timeline:
        """The timeline of an earlier run, to be continued by this run."""
        line = cls()
        line._resumed, line._killed = True, schema.was_killed(record)
        line._interval = 0 if record.configurations else schema.collected_every(record)
        steps = record.steps
        line._written, line._skipped, line._incomplete, line._abandoned = (
            one.restored() for one in (steps.written, steps.skipped, steps.incomplete, steps.abandoned)
        )
        line._dropped = _restored_by_cause(record.dropped)
        line._lost = {sink: _restored_by_cause(causes) for sink, causes in record.lost.items()}
        line.thinned = ThinnedSteps.restored(record.thinned)
        return line

    @classmethod
    def found(cls) -> Timeline:
        """The timeline of an earlier run that left no manifest."""
        line = cls()
        line._resumed = line._killed = True
        return line

    @property
    def newest(self) -> int:
        """The last of the steps written; -1 if there are none."""
        return self._written.newest

    @property
    def counts(self) -> tuple[int, int]:
        """How many steps were written, and how many dropped."""
        return self._written.count, sum(steps.count for _, steps in self._dropped.items())

    def correct(self, ranges: Iterable[tuple[int, int]], held: Mapping[str, Collection[int]], cut: Iterable[int]) -> None:
        """Correct the timeline by the earlier run's files: it may have been killed after its last save.

        Args:
            ranges: First and last steps.
            held: By sink, the steps in these ranges that its files hold. A step in the files of all sinks was written.
            cut: Steps that the files held only partly.
        """
        held = {sink: frozenset(steps) for sink, steps in held.items()}
        for first, last in sorted(ranges):
            within = {sink: {step for step in steps if first <= step <= last} for sink, steps in held.items()}
            somewhere = set[int]().union(*within.values())
            known = {step for taken in self._written.take(first, last) for step in taken.steps()}
            abandoned = {step for taken in self._abandoned.take(first, last) for step in taken.steps()}
            for step in sorted(somewhere):
                missing = [sink for sink, steps in within.items() if step not in steps]
                if missing and step in abandoned:  # one sink wrote the step again, another did not yet
                    self._abandoned.add(step)
                else:
                    self._find(step, missing)
            for step in known - somewhere:
                self._dropped.add(step, schema.KILLED)
        for step in cut:
            self._dropped.add(step, schema.KILLED)

    def write(self, step: int, status: Status) -> None:
        """Every sink has the step."""
        self._reach(step)
        self._abandoned.take(step, step)
        self._written.add(step)
        self.thinned.reach(self._written, step)
        if status == "skipped":
            self._skipped.add(step)
        elif status == "incomplete":
            self._incomplete.add(step)

    def drop(self, step: int, reason: str) -> None:
        """No sink has the step."""
        self._reach(step)
        self._dropped.add(step, reason)

    def lose(self, step: int, sink: str, reason: str) -> None:
        """One sink does not have the step."""
        self._reach(step)
        self._lost.setdefault(sink, schema.StepsByCause()).add(step, reason)

    def remove(self, step: int, sink: str, reason: str) -> None:
        """One sink no longer has the step."""
        self._written.take(step, step)
        self.lose(step, sink, reason)

    def thin(self, rule: ThinningRule, count: int) -> None:
        """Enter at least so many steps as removed from the files, or all that can be."""
        chosen = rule.choose(self._written, self.thinned, count)
        self.thinned.remove(chosen, (self._written, self._skipped, self._incomplete))

    def manifest_fields(self) -> dict[str, Any]:
        """Fields of ``ManifestRecord``."""
        written, skipped, incomplete, abandoned = (
            schema.StepsRecord.of(steps) for steps in (self._written, self._skipped, self._incomplete, self._abandoned)
        )
        return {
            "steps": schema.RecordedSteps(written=written, skipped=skipped, incomplete=incomplete, abandoned=abandoned),
            "dropped": _by_cause(self._dropped),
            "lost": {sink: _by_cause(causes) for sink, causes in self._lost.items()},
            "thinned": self.thinned.record(self._written),
            "first_step": self.first,
        }

    def _find(self, step: int, missing: Collection[str]) -> None:
        """The files of all sinks but ``missing`` have the step. Of the steps before it a killed run may have said nothing."""
        self._miss(step)
        if not missing:
            self._written.add(step)
            for causes in self._lost.values():
                causes.take(step, step)
        for sink in missing:
            causes = self._lost.setdefault(sink, schema.StepsByCause())
            if step not in causes:
                causes.add(step, schema.KILLED)

    def _reach(self, step: int) -> None:
        """Note a step of this run. Steps may be reported in any order."""
        if self.first is None or step < self.first:
            if self._resumed:
                self._leave(step, schema.LAST_STEP if self.first is None else self.first - 1)
                self._miss(step)
            self.first = step

    def _miss(self, step: int) -> None:
        """Mark the steps between a killed run's last known step and ``step`` as dropped: the killed run had them."""
        if self.first is not None or not self._killed:
            return
        known = max(self._written.newest, self._dropped.newest, *(causes.newest for causes in self._lost.values()), -1)
        if known >= 0 and (gap := schema.steps_between(known, step, self._interval or self._written.interval or 1)) is not None:
            self.killed_before = gap
            self._dropped.add_range(gap, schema.KILLED)

    def _leave(self, first: int, last: int) -> None:
        """Mark the earlier run's steps in this range as abandoned."""
        self._abandoned.add_all(self._written.take(first, last))
        self.thinned.leave(first, last, self._abandoned)
        self._skipped.take(first, last)
        self._incomplete.take(first, last)
        for causes in (self._dropped, *self._lost.values()):
            causes.take(first, last)
        self._lost = {sink: causes for sink, causes in self._lost.items() if any(steps.count for _, steps in causes.items())}


@dataclass(frozen=True, slots=True)
class Earlier:
    """The record of the earlier runs in a directory, which a run continues.

    Attributes:
        timeline: The outcome of the steps so far.
        runs: The known runs, oldest first.
        failures: The number of failures of each cause.
    """

    timeline: Timeline = field(default_factory=Timeline)
    runs: tuple[schema.EarlierRun, ...] = ()
    failures: Mapping[str, int] = field(default_factory=dict)
    notes: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    wrong_bits: tuple[schema.WrongBits, ...] = ()

    @classmethod
    def of(cls, record: schema.ManifestRecord | None) -> Earlier:
        """From the last run's manifest; None: it left no manifest."""
        if record is None:
            return cls(Timeline.found())
        shared = schema.EarlierRun.model_fields.keys() & schema.ManifestRecord.model_fields.keys()
        last = schema.EarlierRun(**{name: getattr(record, name) for name in shared})
        runs = (*record.resumed, last)[-MOST_EARLIER_RUNS:]
        earlier = cls(Timeline.restored(record), runs, record.failures, record.notes, record.wrong_bits)
        return earlier.ended()

    def ended(self) -> Earlier:
        """The same record, in which the last run ends with the newest step of the timeline."""
        *before, last = self.runs
        newest = self.timeline.newest
        return replace(self, runs=(*before, last.model_copy(update={"last_step": newest if newest >= 0 else None})))

    @property
    def series_files(self) -> frozenset[str]:
        """The series files that the manifest still points at."""
        return frozenset(run.series.file for run in self.runs if run.series is not None)


def _restored_by_cause(causes: Mapping[str, schema.StepsRecord]) -> schema.StepsByCause:
    steps = schema.StepsByCause()
    for cause, record in causes.items():
        steps.restore(cause, record.restored(schema.MOST_RANGES_OF_A_CAUSE))
    return steps


def _by_cause(steps: schema.StepsByCause) -> dict[str, schema.StepsRecord]:
    return {cause: schema.StepsRecord.of(ranges) for cause, ranges in steps.items()}
