"""``Manifest``: records what a rank has written, lost and noticed, and saves it as ``manifest.json`` beside its shards.

The training thread leaves notes; the writer thread records steps and saves. Notes take no lock. The lock of the steps is held
only while numbers are changed or copied, never during I/O.
"""

from __future__ import annotations

import json
import math
import os
import socket
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from threading import Lock
from time import thread_time
from typing import Any, Final

from monitor.coordinator import manifest_format as schema
from monitor.coordinator.output import DirectoryLock, JobIdentity, write_whole
from monitor.coordinator.progress import Pulse, RecordedCounts
from monitor.coordinator.series_file import MOST_EDGES, Flow, Measured, SeriesFile
from monitor.coordinator.thinning import DiskBound, ThinningRule
from monitor.coordinator.timeline import Earlier, Timeline
from monitor.failures import Failures
from monitor.series import SeriesTable
from monitor.stats.table import StepRows

MOST_NOTES: Final = 256
MOST_WRONG_BITS: Final = 100
MOST_FAILURES: Final = 100
MOST_CHARACTERS: Final = 1000
MOST_CONFIGURATIONS: Final = 100
MORE_NOTES: Final = "more notes were left out"

Note = str | int | float | bool


@dataclass(frozen=True, slots=True)
class RankFacts:
    """The facts of a rank that are known when it begins to record, and do not change.

    Attributes:
        groups: Ranks of the groups that this rank belongs to, by role: ``{"dp": [0, 1]}``.
        chunks: Number of model chunks on this rank.
        recording: How many recordings the process had begun before this one.
        watched: The recorded model, identified so that ranks can match their recordings.
        versions: Versions of the framework and the monitor: ``{"torch": "2.13.0"}``.
        config: The configuration as used. Values that JSON cannot hold are converted by ``str``.
    """

    identity: JobIdentity
    rank: int
    world_size: int
    groups: Mapping[str, Sequence[int]]
    versions: Mapping[str, str]
    config: Mapping[str, Any]
    config_path: str
    formats: Sequence[str]
    chunks: int = 1
    recording: int = 0
    watched: schema.RecordedModel | None = None


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
        self._fixed = _fixed(facts)
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
        steps = self._recorded.to_remove()
        if steps or self.bound is None or not (count := self.bound.excess(grown, self._recorded.counts()[1])):
            return steps
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
        self._notes[key] = _plain(value)

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
        return schema.ManifestRecord(
            **self._fixed,
            **fields,
            saved=_now(),
            closed=self._closed,
            series=schema.SeriesReference(file=table.name, count=table.count) if table else None,
            failures=_most_frequent(Counter(self._earlier.failures) + self._counted()),
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
            lose = self._timeline.remove if was_written else self._timeline.lose
            lose(step, sink, reason)

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


def _fixed(facts: RankFacts) -> dict[str, Any]:
    return {
        "schema_version": schema.SCHEMA_VERSION,
        "job_id": facts.identity.job_id,
        "job_agreed": facts.identity.agreed,
        "timestamp": facts.identity.timestamp,
        "started": _now(),
        "rank": facts.rank,
        "world_size": facts.world_size,
        "groups": {role: tuple(ranks) for role, ranks in facts.groups.items()},
        "pipeline": schema.PipelineRecord.of(facts.rank, facts.groups.get("pp", ()), facts.chunks),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "versions": dict(facts.versions),
        "config_path": facts.config_path,
        "config": json.loads(json.dumps(facts.config, default=str)),
        "formats": tuple(facts.formats),
        "recording": facts.recording,
        "launch": facts.identity.launch,
        "watched": None if facts.watched is None else schema.WatchedRecord.of(facts.watched),
    }


def _not_written(lost: schema.StepRange) -> str:
    one = lost.size == 1
    steps = f"step {lost.first}. It has" if one else f"steps {lost.first} to {lost.last}. They have"
    return f"The killed run had not written {steps} no rows; `dropped` in manifest.json lists {'it' if one else 'them'}."


def _most_frequent(failures: Counter[str]) -> dict[str, int]:
    counts = sorted(failures.items(), key=lambda item: -item[1])
    return {cause[:MOST_CHARACTERS]: count for cause, count in counts[:MOST_FAILURES]}


def _plain(value: Note) -> Note:
    """A value that JSON can hold: text of bounded length; NaN and Inf become text."""
    if isinstance(value, str):
        return value[:MOST_CHARACTERS]
    return value if math.isfinite(value) else str(value)


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
