"""What a job does now: its ranks, its numbers, its most unusual tensors and its alerts, from the files that ranks write.

Files are only read, and no lock is taken. ``progress.json`` of every rank is read at every look. Rows and events take longer to
read, so they are read again after four times as long as that took.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np
import pyarrow as pa

from monitor.anomalies.events import EVENTS_FOLDER
from monitor.anomalies.ranking.loading import NothingReadError, files_in
from monitor.anomalies.ranking.ranking import Ranked, Ranking, ranking_of
from monitor.anomalies.ranking.report import described_value, found_first, tensor
from monitor.coordinator.manifest_format import MANIFEST_FILE, ManifestError, ManifestRecord, read_manifest
from monitor.coordinator.progress import ProgressRecord, read_progress
from monitor.merge.discovery import choose, discover, runs_of
from monitor.merge.execution import MergeError, NothingRecordedError
from monitor.query.sources import QueryError, RankDirectories, RowChoice
from monitor.report.facts import NOT_JUDGED
from monitor.report.history import INFINITE, WINDOW, Axis, Ints, KindHistory, SuddenBound, most_unusual
from monitor.report.kind_reader import NOT_FINITE, judged_ops, shows_all, without_masks
from monitor.series import RUN_KIND
from monitor.sinks.spool import PART

SCHEMA_VERSION: Final = 1
"""Of ``Look`` as JSON."""

RUNNING, WAITING, SILENT, ENDED, UNKNOWN = "running", "waiting", "silent", "ended", "unknown"
BEATS_MISSED: Final = 3
"""Signs of life that a silent rank has not given."""

ALIKE_STEPS: Final = 2
"""By as many steps ranks may be apart that are as fast as each other, and by those of ``ALIKE_S``."""

ALIKE_S: Final = 1.0

STEPS_LONG: Final = 5.0
"""Usual durations of a step after which a rank waits."""

MOST_SAID: Final = 3
"""Sentences about wrong bits."""

STANDS_STILL_S: Final = 60.0
"""After which a job in which all ranks wait is not well. A checkpoint takes as long at times."""

MOST_RANKS: Final = 16
"""Whose rows are read, evenly chosen."""

COUNTS: Final = {"nans": float("nan"), "infs": float("inf")}
"""Ops that count elements which are not finite, used where no other op is judged, and what such an element is."""

MOST_UNUSUAL: Final = 5
NOTABLE: Final = 8.0
"""Deviations from which on a tensor is listed. In healthy runs of hundreds of tensors some always have six."""

NOW_STEPS: Final = 10
"""For how many steps a tensor that was unusual stays in the list."""

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
class Unusual:
    """A tensor whose newest values are far from its own history.

    Attributes:
        deviations: Robust standard deviations of the logarithm; None if the value is not finite.
        typical: The median of the values before.
    """

    kind: str
    name: str
    op: str
    rank: int
    step: int
    value: float | None
    typical: float | None
    deviations: float | None


@dataclass(frozen=True)
class Number:
    """One of the run's own numbers: its newest step, the mean over the ranks that have it there, and how many these are."""

    step: int
    value: float
    ranks: int


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
        """Those of the ranks whose directories are still there."""
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


# --- Rows.


@dataclass
class _Kind:
    """The rows of a kind that were read so far.

    Attributes:
        beside: Ops that show elements which are not finite, and which ``op`` does not show.
        last: By rank, the last step. Ranks write at different times, and the files of a record one after the other.
        steps: Those that were added last.
        number: Of each series in the history, by chunk and name, in order.
        of_one: The numbers of tensors of one element, which the history knows, too.
    """

    history: KindHistory
    op: str
    beside: tuple[str, ...] = ()
    last: dict[int, int] = field(default_factory=dict)
    steps: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    number: dict[tuple[int, str], int] = field(default_factory=dict)
    of_one: set[int] = field(default_factory=set)

    def news(self, rows: pa.Table) -> pa.Table:
        """The rows that were not there at the last look."""
        rank, step = rows["rank"].to_numpy(), rows["step"].to_numpy()
        ranks, places = np.unique(rank, return_inverse=True)
        found = rows.filter(pa.array(step > np.array([self.last.get(one, -1) for one in ranks.tolist()])[places]))
        for one in ranks.tolist():
            self.last[one] = max(self.last.get(one, -1), int(step[rank == one].max()))
        return found

    def add(self, rows: pa.Table, ranks: Sequence[int]) -> None:
        """Take rows in order of steps, and forget how unusual those before were."""
        chunk, name = rows["vpp_stage"].fill_null(0).to_pylist(), rows["name"].to_pylist()
        series = [self.number.setdefault(one, len(self.number)) for one in zip(chunk, name, strict=True)]
        step, micro_step = rows["step"].to_numpy(), rows["micro_step"].fill_null(-1).to_numpy()
        self.of_one.update(np.array(series)[rows["count"].fill_null(0).to_numpy() == 1].tolist())
        rank = np.searchsorted(np.array(ranks), rows["rank"].to_numpy())
        self.forget()
        self.steps = np.unique(step)
        self.history.keep_from(Axis(self.steps, len(self.steps)))
        values = np.ones(len(rows)) if self.op in COUNTS else rows[self.op].to_numpy().astype(np.float64)
        for one in (self.op, *self.beside):  # an element that is counted would show in the ops that were not recorded
            seen = rows[one].fill_null(0).to_numpy().astype(np.float64)
            values = np.where(seen > 0, COUNTS[one], values) if one in COUNTS else np.where(np.isfinite(seen), values, seen)
        self.history.add(step, micro_step, np.array(series), rank, values)

    def forget(self) -> None:
        """Forget how unusual the rows were."""
        self.history.deviations[:] = -1
        if self.history.cells is not None:
            self.history.cells[:] = 0


def _is_growing(path: str) -> bool:
    """Whether it is a file of CSV that the job still writes. Its rows are read when it is complete."""
    return path.endswith(PART)


class RowsNow:
    """Reads the newest rows of some ranks.

    Attributes:
        numbers, unusual: As in ``Look``, of the last steps.
        newest: The last step that was read; -1: none.
    """

    def __init__(self, base: Path) -> None:
        self._base = base
        self._job = ""
        self._begin([])

    def _begin(self, ranks: list[int]) -> None:
        self.ranks, self.newest = ranks, -1
        self.numbers: dict[str, Number] = {}
        self.unusual: list[Unusual] = []
        self._recent: list[Unusual] = []
        self.notes: list[str] = []
        self._kinds: dict[str, _Kind] = {}
        self._has_news = False

    def read(self, job: str, ranks: Sequence[int], newest: int) -> None:
        """Read what is new in the last ``WINDOW`` steps."""
        # The last rank is among them: it is the one that has the loss of a pipeline.
        chosen = sorted({ranks[place * (len(ranks) - 1) // (MOST_RANKS - 1)] for place in range(MOST_RANKS)})
        if (job, chosen) != (self._job, self.ranks):
            self._job = job
            self._begin(chosen)
        steps = range(max(newest - WINDOW, 0), newest + 1)
        self.notes, self._has_news = [], False
        try:
            source = RankDirectories(self._base, job)
            for kind in source.kinds(whole=False):
                if kind not in NOT_JUDGED:
                    self._read_kind(source, kind, steps)
        except (MergeError, QueryError, OSError, pa.ArrowException) as error:
            self.notes = [f"rows could not be read: {str(error).partition(chr(10))[0]}"]
            return
        aside = [Path(one.path).name + f" was not read: {one.reason}" for one in source.set_aside if not _is_growing(one.path)]
        self.notes += aside[:3]
        if self._has_news:
            self._note_unusual()

    def _read_kind(self, source: RankDirectories, kind: str, steps: range) -> None:
        columns = ("rank", "step", "micro_step", "vpp_stage", "name", "count")
        choice = RowChoice(kind, steps=steps, ranks=frozenset(self.ranks), columns=columns)
        if kind in self._kinds:
            op = self._kinds[kind].op
            rows = source.rows(replace(choice, columns=(*columns, op, *self._kinds[kind].beside)))
        else:
            recorded = source.scan(choice).kept.ops
            ops = list(dict.fromkeys([*judged_ops(kind, recorded), *(one for one in NOT_FINITE if one in recorded)]))
            rows = source.rows(replace(choice, columns=(*columns, *ops)))
            op = next((one for one in ops if rows[one].null_count < len(rows)), "")
        there, rows = len(rows), without_masks(source, choice, rows, op) if op else rows.slice(0, 0)
        rows = rows.filter(rows[op].is_valid()) if op else rows
        if not len(rows):
            self.notes += [f"rows of {kind} have no {op or 'op that is judged'}"] if there else []
            return
        self.newest = max(self.newest, int(rows["step"].to_numpy().max()))
        if kind == RUN_KIND:
            self._note_numbers(rows, op)
            return
        if kind not in self._kinds:
            more = [one for one in ops if one in NOT_FINITE and one != op and rows[one].null_count < len(rows)]
            beside = () if shows_all(kind, [op]) else tuple(more)
            of_one: set[int] = set()
            history = KindHistory(Axis(np.arange(1), 1), len(self.ranks), bound=SuddenBound.of(kind), of_one=of_one)
            self._kinds[kind] = _Kind(history, op, beside, of_one=of_one)
        read = self._kinds[kind]
        if not shows_all(kind, (op, *read.beside)):
            self.notes.append(f"NaN and infinity in {kind}: {', '.join((op, *read.beside))} does not show all")
        if len(news := read.news(rows)):
            self._has_news = True
            read.add(news, self.ranks)
        else:
            read.forget()

    def _note_numbers(self, rows: pa.Table, op: str) -> None:
        """Args: rows: In order of steps."""
        newest: dict[str, tuple[int, list[float]]] = {}
        for row in rows.select(["name", "step", op]).to_pylist():
            if row["name"] not in newest or newest[row["name"]][0] < row["step"]:
                newest[row["name"]] = row["step"], []
            newest[row["name"]][1].append(row[op])
        self.numbers |= {name: Number(step, sum(values) / len(values), len(values)) for name, (step, values) in newest.items()}

    def _note_unusual(self) -> None:
        kinds = list(self._kinds.items())
        found = [one for kind, read in kinds for one in self._not_finite(kind, read)]
        histories = [read.history for _, read in kinds]
        for number, pair in most_unusual(histories, MOST_UNUSUAL):
            kind, read = kinds[number]
            of = read.history
            numbers = (float(of.value[pair]), float(of.typical[pair]), float(of.deviations[pair]))
            if numbers[2] >= NOTABLE:
                found.append(self._unusual(kind, read, pair, int(of.at[pair]), *numbers))
        there = {(one.kind, one.name, one.rank) for one in found}
        late = [one for one in self._recent if one.step > self.newest - NOW_STEPS]
        found += [one for one in late if (one.kind, one.name, one.rank) not in there]
        found.sort(key=lambda one: (one.deviations is not None, -(one.deviations or 0.0), one.step))
        self._recent, self.unusual = found[: MOST_UNUSUAL**2], found[:MOST_UNUSUAL]

    def _not_finite(self, kind: str, read: _Kind) -> Iterable[Unusual]:
        cells, values = read.history.cells, read.history.values
        if cells is None or values is None:
            return
        for pair in np.flatnonzero(cells.max(axis=1, initial=0) >= INFINITE)[:MOST_UNUSUAL].tolist():
            column = int((cells[pair] >= INFINITE).argmax())
            yield self._unusual(kind, read, pair, int(read.steps[column]), float(values[pair, column]), None, None)

    def _unusual(
        self, kind: str, read: _Kind, pair: int, step: int, value: float, typical: float | None, deviations: float | None
    ) -> Unusual:
        chunk, name = list(read.number)[int(read.history.pair_series[pair])]
        rank = self.ranks[int(read.history.pair_rank[pair])]
        return Unusual(kind, f"{chunk}:{name}" if chunk else name, read.op, rank, step, value, typical, deviations)


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
            ranking = ranking_of(self._folder, MOST_EVENTS)
            self.notes = []
            if any(one.events.judged.job_id == job for one in ranking.job.members):
                self.alerts = AlertsNow(ranking.events, _first(ranking), [_line(one) for one in self._newest(ranking)])
            self._read_last = state
        except NothingReadError:
            return  # no rule has found anything yet
        except (MergeError, OSError) as error:
            self.notes = [f"events could not be read: {str(error).partition(chr(10))[0]}"]

    def _newest(self, ranking: Ranking) -> list[Ranked]:
        found = list(ranking.ranked)
        if ranking.events > len(found):
            found = list(ranking_of(self._folder, MOST_EVENTS, lambda step: step == step.max(initial=0)).ranked)
        return sorted(found, key=lambda one: one.step)[-MOST_ALERTS:][::-1]


def _first(ranking: Ranking) -> str:
    return found_first(ranking)[0] if ranking.events else ""


def _line(one: Ranked) -> str:
    return f"step {one.step} rank {one.member.rank}: {tensor(one)}, {described_value(one)} ({one.rule})"
