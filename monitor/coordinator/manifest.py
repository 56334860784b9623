"""``Manifest``: records what a rank has written, lost and noticed, and saves it as ``manifest.json`` beside its shards.

The training thread leaves notes; the writer thread records steps and saves. Notes take no lock. The lock of the steps is held
only while numbers are changed or copied, never during I/O.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from threading import Lock
from time import thread_time
from typing import Any, Final

from monitor.coordinator import manifest_format as schema
from monitor.coordinator.output import DirectoryLock, write_whole
from monitor.coordinator.progress import Pulse, RecordedCounts
from monitor.coordinator.rank_facts import MOST_CHARACTERS, Note, RankFacts, fixed_fields, plain
from monitor.coordinator.series_file import MOST_EDGES, Flow, Measured, SeriesFile
from monitor.coordinator.thinning import DiskBound, ThinnedSteps, ThinningRule
from monitor.failures import Failures
from monitor.series import SeriesTable, encodable
from monitor.stats.table import Status, StepRows

MOST_NOTES: Final = 256
MOST_WRONG_BITS: Final = 100
MOST_FAILURES: Final = 100
MOST_CONFIGURATIONS: Final = 100
MORE_NOTES: Final = "more notes were left out"


# --- The steps of all runs that record to one directory, as one timeline. A later run replaces the steps that it repeats.

MOST_EARLIER_RUNS: Final = 100


class Timeline:
    """The outcome of each step. Not safe across threads.

    Attributes:
        first: The first step that this run has reported; None before.
        killed_before: The steps between the last one of an earlier run that was killed and the first of this run.
        begins: The step with which training begins in this run, if it is known. It may be collected later, or never.
        thinned: The steps that were removed from the files.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        self.killed_before: schema.StepRange | None = None
        self.begins: int | None = None
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
        if self.thinned.alerts:
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
            "thinned": self.thinned.record(self._written) if self._thins else schema.ThinnedRecord(),
            "first_step": self.first,
        }

    @property
    def _thins(self) -> bool:
        """Whether there is something to say of thinning: most runs have no bound, and save the manifest often."""
        return bool(self.thinned.removed or self.thinned.alerts or self.thinned.kept.count)

    def _find(self, step: int, missing: Collection[str]) -> None:
        """The files of all sinks but ``missing`` have the step. Of the steps before it a killed run may have said nothing."""
        if self._interval:  # it is known which steps were collected
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
        step = step if self.begins is None else min(step, self.begins)
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
        said: What was logged at the first failure of each cause.
    """

    timeline: Timeline = field(default_factory=Timeline)
    runs: tuple[schema.EarlierRun, ...] = ()
    failures: Mapping[str, int] = field(default_factory=dict)
    said: Mapping[str, str] = field(default_factory=dict)
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
        earlier = cls(Timeline.restored(record), runs, record.failures, record.said, record.notes, record.wrong_bits)
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


class Manifest:
    """The journal of one rank. Only ``save`` and ``close`` raise (``OSError``); in a forked child they do nothing.

    The size of the configuration and the groups bounds the manifest's size; the length of the run does not matter.

    Args:
        earlier: What earlier runs recorded to ``directory``; None: nothing.
        lock: The lock of ``directory``, released when the manifest is closed.

    Attributes:
        bound: The account of the directory's bytes; None: there is no bound.
    """

    bound: DiskBound | None = None

    def __init__(
        self,
        directory: Path,
        facts: RankFacts,
        series: SeriesTable,
        failures: Failures,
        earlier: Earlier | None = None,
        lock: DirectoryLock | None = None,
    ) -> None:
        self._directory = directory
        self._failures = failures
        self._pid = os.getpid()
        self._fixed = fixed_fields(facts) | {"started": _now()}
        self._earlier = Earlier() if earlier is None else earlier
        self._directory_lock = lock
        self._notes: dict[str, Note] = dict(self._earlier.notes)
        self._wrong_bits: list[schema.WrongBits] = []
        self._is_urgent = False
        self._recorded = _RecordedSteps(series, self._earlier.timeline)
        self._configurations: deque[schema.ConfigurationRecord] = deque(maxlen=MOST_CONFIGURATIONS)
        self._undecided_since: int | None = None
        self._closed = False
        self._warned_of_lost = False
        self._series_on_disk = ""
        self._writer_seconds = 0.0
        self._pulse = Pulse(directory, facts.identity.job_id, facts.world_size, self._counts, failures)

    def written(self, rows: StepRows) -> None:
        """Every sink has taken in the step."""
        self._recorded.add(rows)
        self._writer_seconds = thread_time()
        if self._is_urgent:
            self.save()
        self._warn_of_lost_steps()

    def dropped(self, step: int, reason: str) -> None:
        """No sink has the step."""
        self._recorded.drop(step, reason)
        self._warn_of_lost_steps()

    def lost(self, step: int, sink: str, reason: str, *, was_written: bool = False) -> None:
        """One sink does not have the step."""
        self._recorded.lose(step, sink, reason, was_written=was_written)

    @property
    def is_bounded(self) -> bool:
        """See ``monitor.pipeline.delivery.ThinningJournal``."""
        return self.bound is not None and self.bound.most > 0

    def recount(self) -> None:
        """See ``monitor.pipeline.delivery.ThinningJournal``."""
        if self.bound is not None:
            self.bound.recount()

    def excess(self, grown: int) -> list[int]:
        """See ``monitor.pipeline.delivery.ThinningJournal``."""
        if steps := self._recorded.to_remove():
            self.save()  # the last time it may have failed
            return steps
        if self.bound is None or not (count := self.bound.excess(grown, self._recorded.counts()[1])):
            return []
        steps = self._recorded.to_remove(self.bound.rule, count)
        if steps:
            self.save()  # before any file changes: the manifest never lists a step as written that was removed
        else:
            self.bound.warn(grown)
        return steps

    def removed(self) -> None:
        """See ``monitor.pipeline.delivery.ThinningJournal``."""
        self._recorded.removed()

    def alert(self, step: int) -> None:
        """A rule has fired in this step: it stays when steps are thinned. Any thread; never waits."""
        self._recorded.alert(step)
        self._is_urgent = self._is_urgent or self.is_bounded  # a restart must know that the step stays

    def _warn_of_lost_steps(self) -> None:
        lost = self._recorded.killed_before
        if lost is not None and not self._warned_of_lost:
            self._warned_of_lost = True
            self._failures.warn("killed before", _not_written(lost))

    def flows(self, flow: Flow) -> None:
        """Add how data flowed through this rank in a step."""
        self._recorded.flows(flow)
        if flow.cut:
            self.note("flow", f"only the first {MOST_EDGES} edges between series are kept")

    def note(self, key: str, value: Note) -> None:
        """Add a note on what the numbers do not show. It replaces an earlier one of this key. Any thread; never waits."""
        key = key[:MOST_CHARACTERS]
        if key not in self._notes and len(self._notes) >= MOST_NOTES:
            key, value = MORE_NOTES, True
        self._notes[key] = plain(value)

    @property
    def notes(self) -> Mapping[str, Note]:
        """A copy of all notes so far."""
        return self._notes.copy()

    def found_wrong(self, bits: schema.WrongBits) -> None:
        """Add what a check of bits has found, to be saved with the next step. Any thread; never waits."""
        if len(self._wrong_bits) < MOST_WRONG_BITS:
            self._wrong_bits.append(bits)
            self.alert(bits.step)
            self._is_urgent = True  # the job may be killed soon

    def also_in(self, formats: Sequence[str]) -> None:
        """Record in these formats as well from now on. Any thread; never waits."""
        self._fixed = {**self._fixed, "formats": tuple(dict.fromkeys((*self._fixed["formats"], *formats)))}

    def configured(self, record: schema.ConfigurationRecord) -> None:
        """A configuration has come into force. Any thread; never waits."""
        self._configurations.append(record)

    def undecided(self, since: int | None) -> None:
        """From this step on, this rank does not know the decision of the others; None: it knows again."""
        self._undecided_since = since

    def watch_steps(self, step_in_progress: Callable[[], int]) -> None:
        """Give signs of life from now on (``progress.json``), which say in which step training is.

        The call must not wait, and must keep no model alive.
        """
        self._pulse.start(step_in_progress)

    def save(self) -> None:
        """Rewrite the files atomically: a reader finds this state or the one before.

        Raises:
            OSError: they could not be written; the files still hold the state before.
        """
        self._save(durable=False)

    def close(self) -> None:
        """Save for the last time, marked as ended cleanly, wait for the disk, and release the directory.

        Raises like ``save``.
        """
        self._closed = True
        self._pulse.stop()
        self._save(durable=True)
        self._pulse.remove()
        if self._directory_lock is not None:
            self._directory_lock.release()

    def _save(self, *, durable: bool) -> None:
        if os.getpid() != self._pid:
            return
        fields, table = self._recorded.copy()
        content = self._record(fields, table).to_json()
        self._directory.mkdir(parents=True, exist_ok=True)
        urgent, self._is_urgent = self._is_urgent, False
        try:
            self._put(content, table, durable=durable)
        except BaseException:
            self._is_urgent = urgent
            raise
        self._remove_previous_table(table)

    def _put(self, content: bytes, table: SeriesFile | None, *, durable: bool) -> None:
        if table is not None and not (self._directory / table.name).exists():
            write_whole(self._directory / table.name, table.content, durable=durable)
        write_whole(self._directory / schema.MANIFEST_FILE, content, durable=durable)

    def _remove_previous_table(self, table: SeriesFile | None) -> None:
        """Delete the table before: the first steps still add series, and no manifest points at earlier tables."""
        if table is None or table.name == self._series_on_disk:
            return
        if self._series_on_disk and self._series_on_disk not in self._earlier.series_files:
            with suppress(OSError):
                (self._directory / self._series_on_disk).unlink()
        self._series_on_disk = table.name

    def _record(self, fields: dict[str, Any], table: SeriesFile | None) -> schema.ManifestRecord:
        failures = _most_frequent(Counter(self._earlier.failures) + self._counted())
        said = {**self._failures.messages, **self._earlier.said}
        return schema.ManifestRecord(
            **self._fixed,
            **fields,
            saved=_now(),
            closed=self._closed,
            series=schema.SeriesReference(file=table.name, count=table.count) if table else None,
            failures=failures,
            said={cause: encodable(said[cause]) for cause in failures if cause in said},
            notes=dict(self._notes),
            wrong_bits=(*self._wrong_before(fields["first_step"]), *self._wrong_bits.copy()),
            resumed=self._earlier.runs,
            configurations=tuple(self._configurations.copy()),
            undecided_since=self._undecided_since,
        )

    def _wrong_before(self, first_step: int | None) -> Iterator[schema.WrongBits]:
        """What earlier runs found in steps that this run has not done again."""
        return (one for one in self._earlier.wrong_bits if first_step is None or one.step < first_step)

    def _counts(self) -> RecordedCounts:
        return RecordedCounts(*self._recorded.counts(), sum(self._counted().values()), self._writer_seconds)

    def _counted(self) -> Counter[str]:
        """A copy of the failure counts. ``dict`` copies atomically, so that a concurrent report does no harm."""
        return Counter(dict(self._failures.counts))


class _RecordedSteps:
    """The outcome of each step, and the measured series. Safe across threads."""

    def __init__(self, series: SeriesTable, timeline: Timeline) -> None:
        self._lock = Lock()
        self._timeline = timeline
        self._measured = Measured(series)

    @property
    def killed_before(self) -> schema.StepRange | None:
        return self._timeline.killed_before

    def add(self, rows: StepRows) -> None:
        with self._lock:
            self._timeline.write(rows.step, rows.status)
            self._measured.see(rows)

    def flows(self, flow: Flow) -> None:
        with self._lock:
            self._measured.flows(flow)

    def drop(self, step: int, reason: str) -> None:
        with self._lock:
            self._timeline.drop(step, reason)

    def lose(self, step: int, sink: str, reason: str, *, was_written: bool) -> None:
        with self._lock:
            (self._timeline.remove if was_written else self._timeline.lose)(step, sink, reason)

    def to_remove(self, rule: ThinningRule | None = None, count: int = 0) -> list[int]:
        """The steps that files may still have, and that are no longer written; with a rule, after it has chosen more."""
        with self._lock:
            if rule is not None:
                self._timeline.thin(rule, count)
            return list(self._timeline.thinned.unfinished.between(0, schema.LAST_STEP))

    def removed(self) -> None:
        with self._lock:
            self._timeline.thinned.unfinished.take(0)

    def alert(self, step: int) -> None:
        self._timeline.thinned.alert(step)

    def counts(self) -> tuple[int, int, int]:
        """The last step written, and the numbers of steps written and dropped."""
        with self._lock:
            return self._timeline.newest, *self._timeline.counts

    def copy(self) -> tuple[dict[str, Any], SeriesFile | None]:
        """The current fields of ``ManifestRecord`` for steps, and the series table."""
        with self._lock:
            return self._timeline.manifest_fields(), self._measured.file()


def _not_written(lost: schema.StepRange) -> str:
    one = lost.size == 1
    steps = f"step {lost.first}. It has" if one else f"steps {lost.first} to {lost.last}. They have"
    return f"The killed run had not written {steps} no rows; `dropped` in manifest.json lists {'it' if one else 'them'}."


def _most_frequent(failures: Counter[str]) -> dict[str, int]:
    counts = sorted(failures.items(), key=lambda item: -item[1])
    return {cause[:MOST_CHARACTERS]: count for cause, count in counts[:MOST_FAILURES]}


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
