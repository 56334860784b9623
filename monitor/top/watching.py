"""What a job does now: its ranks, its numbers, its most unusual tensors and its alerts, from the files that ranks write.

Files are only read, and no lock is taken. ``progress.json`` of every rank is read at every look. Rows and events take longer to
read, so they are read again after four times as long as that took.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Final

from monitor.anomalies.events import EVENTS_FOLDER
from monitor.anomalies.ranking.loading import NothingReadError, files_in
from monitor.anomalies.ranking.ranking import Ranked, Ranking, ranking_of
from monitor.anomalies.ranking.report import described_value, found_first, tensor
from monitor.coordinator.manifest_format import MANIFEST_FILE, ManifestError, ManifestRecord, read_manifest
from monitor.coordinator.progress import ProgressRecord, read_progress
from monitor.merge.discovery import choose, discover, runs_of
from monitor.merge.execution import MergeError, NothingRecordedError
from monitor.top.newest_rows import Number, RowsNow, Unusual

SCHEMA_VERSION: Final = 1
"""Version of ``Look`` as JSON."""

RUNNING, WAITING, SILENT, ENDED, UNKNOWN = "running", "waiting", "silent", "ended", "unknown"
BEATS_MISSED: Final = 3
"""Signs of life that a silent rank has not given."""

ALIKE_STEPS: Final = 2
"""Steps by which equally fast ranks may be apart, besides those that a rank does in ``ALIKE_S``."""

ALIKE_S: Final = 1.0

STEPS_LONG: Final = 5.0
"""Usual durations of a step after which a rank waits."""

MOST_SAID: Final = 3
"""Sentences about wrong bits."""

STANDS_STILL_S: Final = 60.0
"""Time after which a job in which all ranks wait is not well. A checkpoint may take as long."""

MOST_ALERTS: Final = 3
MOST_EVENTS: Final = 1000
REST: Final = 4.0
"""After reading for a second, rows or events are not read for as many."""

DISCOVERED_S: Final = 30.0
"""Between two looks at the list of directories, if all ranks have one."""


@dataclass(frozen=True)
class RankState:
    """A rank now.

    Attributes:
        state: ``RUNNING``; ``WAITING``: alive, but in the same step for long; ``SILENT``: it gives no sign of life; ``ENDED``;
            ``UNKNOWN``: it has given none yet, or an earlier version of the monitor records.
        step: The last that training has ended; None if not known.
        steps_per_second: None until two steps have ended.
        silent_s: Since its last sign of life.
        same_step_s: Since its last step ended, when it gave that sign.
        recorded: The last step in files; -1: none.
        writer_share: CPU time of the writer thread in each second since the recording began.
    """

    rank: int
    directory: str
    host: str
    pid: int
    state: str
    step: int | None
    steps_per_second: float | None
    silent_s: float | None
    same_step_s: float | None
    recorded: int
    written: int
    dropped: int
    failures: int
    writer_share: float | None


@dataclass(frozen=True)
class AlertsNow:
    """What rules found.

    Attributes:
        first: What came first, in a sentence; empty without an event.
        newest: The last ones, a line each.
    """

    events: int
    first: str
    newest: list[str]


@dataclass(frozen=True)
class Look:
    """All that is known of a job at one moment. It is plain data, which ``--json`` prints.

    Attributes:
        world_size: Ranks that the job has; ``ranks`` has those whose directories are there.
        slowest: The rank that is behind the others; None if all are alike.
        numbers: The run's own, by name.
        rows_of: The ranks whose rows are read for ``numbers`` and ``unusual``; ``rows_to`` is the last step of these.
        alerts: None if no rules are configured or nothing was judged yet.
        wrong_bits: What ranks have found while they trained, the earliest first, ``MOST_SAID`` sentences at most.
        notes: What could not be looked at, and why.
    """

    schema_version: int
    run: str
    job: str
    at: float
    world_size: int
    ranks: list[RankState]
    slowest: int | None
    numbers: dict[str, Number]
    unusual: list[Unusual]
    rows_of: list[int]
    rows_to: int | None
    alerts: AlertsNow | None
    wrong_bits: list[str]
    notes: list[str]

    @property
    def has_ended(self) -> bool:
        return all(one.state == ENDED for one in self.ranks)

    @property
    def is_well(self) -> bool:
        """Whether everything was looked at and nothing is wrong. Wrong are ranks that are missing or silent, and a job that
        stands still. So are dropped steps, values and numbers of the run that are not finite, rules that have fired, and wrong
        bits that a rank has found.
        """
        whole = len(self.ranks) == self.world_size and not self.notes and (self.stands_still_s or 0) < STANDS_STILL_S
        steady = not any(one.state in (SILENT, UNKNOWN) or one.dropped for one in self.ranks)
        finite = all(one.deviations for one in self.unusual) and all(isfinite(one.value) for one in self.numbers.values())
        return whole and steady and finite and not (self.alerts and self.alerts.events) and not self.wrong_bits

    @property
    def stands_still_s(self) -> float | None:
        """For how long no rank has ended a step, if all that have not ended wait or are silent."""
        left = [one for one in self.ranks if one.state != ENDED]
        if not left or any(one.state not in (WAITING, SILENT) for one in left):
            return None
        return min((one.same_step_s or 0.0) + (one.silent_s or 0.0) for one in left)


class Paced:
    """Work that may take long, done again after ``REST`` times as long."""

    def __init__(self) -> None:
        self._next = 0.0

    def do(self, work: Callable[[], None], *, now: bool = False) -> None:
        began = time.monotonic()
        if now or began >= self._next:
            work()
            self._next = time.monotonic() + REST * (time.monotonic() - began)


class Watch:
    """A job that is looked at again and again.

    Args:
        job: The beginning of its id; None: the one that began last.

    Raises:
        MergeError: ``base`` cannot be listed.
        NothingRecordedError: No rank has a directory there yet.
    """

    def __init__(self, base: Path, job: str | None = None) -> None:
        self._base, self._wanted = base, job
        self._runs: Mapping[int, Path] = {}
        self._manifests: dict[int, tuple[int, ManifestRecord]] = {}
        self._discovered = 0.0
        self._gone: list[str] = []
        self._seen: dict[int, SignOfLife] = {}
        self._rows, self._events = RowsNow(base), EventsNow(base / EVENTS_FOLDER)
        self._paced_rows, self._paced_events, self._paced_discovery = Paced(), Paced(), Paced()
        self._paced_discovery.do(self._discover)

    def look(self) -> Look:
        """Read what is new."""
        if time.monotonic() - self._discovered > DISCOVERED_S or len(self._runs) < self._world_size:
            self._paced_discovery.do(self._discover)
        now = time.time()
        ranks = self._states(now)
        newest, last = max((one.recorded for one in ranks), default=-1), all(one.state == ENDED for one in ranks)
        if newest >= 0:
            self._paced_rows.do(lambda: self._rows.read(self._job, list(self._runs), newest), now=last)
        self._paced_events.do(lambda: self._events.read(self._job), now=last)
        return Look(
            SCHEMA_VERSION,
            str(self._base),
            self._job,
            round(now, 3),
            self._world_size,
            ranks,
            _slowest(ranks),
            self._rows.numbers,
            self._rows.unusual,
            self._rows.ranks,
            self._rows.newest if self._rows.newest >= 0 else None,
            self._events.alerts,
            self._wrong_bits(),
            [*self._gone, *self._rows.notes, *self._events.notes],
        )

    def _states(self, now: float) -> list[RankState]:
        """The states of the ranks whose directories are still there."""
        found, self._gone = [], []
        for rank, directory in sorted(self._runs.items()):
            try:
                found.append(self._state(rank, directory, now))
            except (ManifestError, OSError) as error:
                self._gone.append(f"rank {rank}: {error}")
        if not found:
            raise NothingRecordedError(f"the directories of all ranks in {self._base} are gone.")
        if self._gone:
            self._discovered = 0.0
        return found

    def _wrong_bits(self) -> list[str]:
        manifests = [(rank, self._manifests[rank][1]) for rank in self._runs if rank in self._manifests]
        found = [
            (one.step, rank, one.host or manifest.host, one.said) for rank, manifest in manifests for one in manifest.wrong_bits
        ]
        return [f"rank {rank} ({host}): {said}" for _, rank, host, said in sorted(found)[:MOST_SAID]]

    def _discover(self) -> None:
        found = discover(self._base)
        if not found.jobs:
            raise NothingRecordedError(f"{self._base} has no directory of a rank. A rank makes it with its first record.")
        begun = {job: max(run.manifest.started for run in runs) for job, runs in found.jobs.items()}
        job = choose(found, self._wanted) if self._wanted else max(begun, key=lambda one: begun[one])
        runs = runs_of(found, job)
        self._job, self._world_size = job, runs[-1].manifest.world_size
        self._runs = {run.rank: run.directory for run in runs}  # of a rank, the last
        self._discovered = time.monotonic()

    def _state(self, rank: int, directory: Path, now: float) -> RankState:
        manifest = self._manifest(rank, directory)
        progress = _progress(directory, manifest)
        common = (rank, directory.name, manifest.host, manifest.pid)
        if progress is None or manifest.closed:
            written = manifest.steps.written
            newest = written.newest
            lost = sum(one.count for one in manifest.dropped.values())
            state = ENDED if manifest.closed else UNKNOWN
            step = newest if manifest.closed and newest >= 0 else None
            failures = sum(manifest.failures.values())
            return RankState(*common, state, step, None, None, None, newest, written.count, lost, failures, None)
        silent = self._seen.setdefault(rank, SignOfLife()).age(progress.saved, now)
        return RankState(
            *common,
            _state_of(progress, silent),
            progress.step if progress.step >= 0 else None,
            progress.rate,
            round(silent, 1),
            round(progress.idle, 1),
            progress.recorded,
            progress.written,
            progress.dropped,
            progress.failures,
            progress.writer_seconds / progress.elapsed if progress.elapsed else None,
        )

    def _manifest(self, rank: int, directory: Path) -> ManifestRecord:
        """Read again only when it was saved anew."""
        saved = os.stat(directory / MANIFEST_FILE).st_mtime_ns
        if rank not in self._manifests or self._manifests[rank][0] != saved:
            self._manifests[rank] = saved, read_manifest(directory / MANIFEST_FILE)
        return self._manifests[rank][1]


@dataclass
class SignOfLife:
    """How old a rank's sign of life is. Clocks of machines differ: a sign that was seen to come tells by how much."""

    _saved: float = -1.0
    _apart: float | None = None

    def age(self, saved: float, now: float) -> float:
        if saved != self._saved:
            if self._saved >= 0:
                self._apart = now - saved if self._apart is None else min(self._apart, now - saved)
            self._saved = saved
        return max(now - saved - (self._apart or 0.0), 0.0)


def _progress(directory: Path, manifest: ManifestRecord) -> ProgressRecord | None:
    try:
        progress = read_progress(directory)
    except (ManifestError, OSError):
        return None
    return progress if progress.job_id == manifest.job_id else None


def _state_of(progress: ProgressRecord, silent: float) -> str:
    if silent > BEATS_MISSED * progress.every:
        return SILENT
    long = progress.rate is not None and progress.idle > max(STEPS_LONG / max(progress.rate, 1e-9), 2 * progress.every)
    return WAITING if long else RUNNING


def _slowest(ranks: Sequence[RankState]) -> int | None:
    """The rank that is behind, with its steps since its last sign of life as its rate gives them."""
    alive = {one.rank: _step_now(one) for one in ranks if one.state in (RUNNING, WAITING) and one.step is not None}
    if not alive:
        return None
    rate = median(one.steps_per_second or 0.0 for one in ranks if one.rank in alive)
    last = min(alive, key=lambda rank: alive[rank])
    return None if max(alive.values()) - alive[last] <= ALIKE_STEPS + ALIKE_S * rate else last


def _step_now(one: RankState) -> float:
    return (one.step or 0) + ((one.steps_per_second or 0.0) * (one.silent_s or 0.0) if one.state == RUNNING else 0.0)


# --- Events.


class EventsNow:
    """Reads what rules found, when files have changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read_last: list[tuple[str, int, int]] | None = None
        self.alerts: AlertsNow | None = None
        self.notes: list[str] = []

    def read(self, job: str) -> None:
        """Read the events of a job."""
        try:
            files = [one for each in files_in(self._folder) for one in (each.events, each.judged) if one.exists()]
            state = [(str(one), one.stat().st_mtime_ns, one.stat().st_size) for one in files]
            if not state or state == self._read_last:
                return
            self._read_last = state
            ranking = ranking_of(self._folder, MOST_EVENTS, jobs={job})
            self.notes = []
            self.alerts = AlertsNow(ranking.events, _first(ranking), [_line(one) for one in self._newest(ranking, job)])
        except NothingReadError:
            return  # no rule has found anything yet
        except (MergeError, OSError) as error:
            self._read_last = None  # another try may read them
            self.notes = [f"events could not be read: {str(error).partition(chr(10))[0]}"]

    def _newest(self, ranking: Ranking, job: str) -> list[Ranked]:
        found = list(ranking.ranked)
        if ranking.events > len(found):
            found = list(ranking_of(self._folder, MOST_EVENTS, lambda step: step == step.max(initial=0), {job}).ranked)
        return sorted(found, key=lambda one: one.step)[-MOST_ALERTS:][::-1]


def _first(ranking: Ranking) -> str:
    return found_first(ranking)[0] if ranking.events else ""


def _line(one: Ranked) -> str:
    return f"step {one.step} rank {one.member.rank}: {tensor(one)}, {described_value(one)} ({one.rule})"
