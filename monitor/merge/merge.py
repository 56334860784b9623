"""A merge from beginning to end: find, plan, do, and move the result to its place."""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from hashlib import file_digest, sha256
from itertools import chain, groupby
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from monitor.coordinator.manifest_format import StepsRecord, checks_replicas
from monitor.coordinator.resume import Span
from monitor.merge.combine import ROLES, RUNS, SCHEMA_VERSION, Outcome, Piece, worked
from monitor.merge.discovery import Found, RankRun, SetAside, asked_of, choose, discover, runs_of, unmerged_formats
from monitor.merge.execution import MergeError, NothingRecordedError, draft_of, engine, run
from monitor.merge.layer_names import LayerNames
from monitor.merge.outputs import SUFFIXES, Format
from monitor.merge.report import Report, chosen_of
from monitor.merge.rows import Share, Source, files_of
from monitor.merge.tables import Columns, Index, Shard, read_file, write_file
from monitor.merge.tensors import SHARDS, Findings, Kind, Visit, catalogue, look
from monitor.series import CALL_KIND, CHECKED_KINDS, DIRECTION_KIND, KINDS, REPLICA_KIND, Ranks
from monitor.sinks.files import ALL_STEPS, StepSpan
from monitor.stats.histograms import HISTOGRAM_OPS
from monitor.stats.ops import CHECKSUM, has_op

PIECE_ROWS: Final = 1_000_000
"""What a worker holds at a time, unless a single step of a kind has more. A question about one tensor reads a part of every
piece's file, so fewer pieces make it faster.
"""

SHARE_ROWS: Final = 250_000
"""Rows of shards that a worker reads at a time to put them in order."""

PIECES_AT_A_TIME: Final = 4
"""For each worker. So many rows lie on the disk unpacked, unless the shards of one record hold more: half of them are read
while the other half is combined.
"""

REPORT_FILE: Final = "report.json"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to merge, and into what.

    Attributes:
        output: A directory; for ``monitor.merge.parts`` also a URL.
        job: Beginning of the job's id; None where there is only one.
        span: Timestamps of directories, the first and the last; None: all.
        kinds: None: all.
        rows: Of a piece of work, about.
    """

    base: Path
    output: Path | str
    job: str | None = None
    span: Span | None = None
    kinds: Collection[str] | None = None
    steps: StepSpan = ALL_STEPS
    format: Format = "parquet"
    workers: int = 1
    dask: str | None = None
    rows: int = PIECE_ROWS


Progress = Callable[[int, int], None]
"""Told how many pieces are done, and of how many."""


Task = TypeVar("Task")
T = TypeVar("T")


class Do(Protocol):
    """Does tasks, as ``monitor.merge.execution.run`` does."""

    def __call__(self, work: Callable[[Task], T], tasks: Iterable[Task], /) -> Iterator[tuple[Task, T]]:
        """Each task with its result, as they are done."""


def merge(wanted: Wanted, progress: Progress = lambda _done, _all: None) -> Report:
    """Write the merged data set to ``wanted.output``, which appears whole or not at all.

    Raises:
        MergeError: there is nothing to merge, or nothing to merge it into.
        OSError: the disk or the directory does not allow it.
    """
    with crew_of(wanted) as crew:  # its processes begin while this one looks for the job
        found = discover(wanted.base, wanted.span)
        job = choose(found, wanted.job)
        with draft_of(Path(wanted.output), "merge", "another directory with -o") as draft:
            draft.mkdir()
            work = planned_merge(wanted, found, job, draft, crew)
            for window, outcomes in work.done(work.windows, progress):
                work.add(window, outcomes)
            report = work.finished_report()
            shutil.rmtree(work.plan.work)
            (draft / REPORT_FILE).write_text(report.spelled())
    return report


@dataclass(frozen=True)
class PlannedMerge:
    """The work of a merge, cut into windows that can be done one by one.

    Attributes:
        windows: Of what is asked for.
        workers: How many tasks ``do`` works on at a time.
    """

    wanted: Wanted
    plan: Plan
    windows: Sequence[Window]
    report: Report
    workers: int
    do: Do

    def done(self, windows: Sequence[Window], progress: Progress) -> Iterator[tuple[Window, list[Outcome]]]:
        """Do some of the windows. Gives each when its files are written, with what there is to report of it."""
        done, total = 0, sum(len(one.shares) + len(one.pieces) for one in windows)
        groups = in_groups(windows, PIECES_AT_A_TIME // 2 * self.workers * self.plan.rows)
        window_of: dict[tuple[str, int], Window] = {}
        outcomes: dict[Window, list[Outcome]] = {}
        for group, following in itertools.pairwise([[], *groups, []]):  # one is put in order while another is combined
            window_of |= {(one.kind, steps.first): one for one in following for steps in one.pieces}
            outcomes |= {one: [] for one in following}
            tasks: Iterator[Piece | Share] = chain(*map(self.plan.pieces, group), *map(self.plan.shares, following))
            for task, outcome in self.do(worked, tasks):
                outcomes[window_of[task.kind, task.steps.first]].append(outcome)
                progress(done := done + 1, total)
            for window in group:
                self.plan.clear_up(window)
                yield window, outcomes.pop(window)

    def add(self, window: Window, outcomes: Iterable[Outcome]) -> None:
        """Take what came of a window into the report."""
        for outcome in outcomes:
            self.report.add(window.kind, outcome)

    def finished_report(self) -> Report:
        """The report, when all windows are in it.

        Raises:
            MergeError: nothing of what is asked for was recorded.
        """
        if not self.report.steps:
            whole = self.wanted.kinds is None and self.wanted.steps == ALL_STEPS and not self.report.set_aside
            job = self.plan.job
            raise NothingRecordedError(_no_rows(job, self.plan.runs)) if whole else MergeError(_why_nothing(job, self.report))
        return self.report


Crew = tuple[Executor, int]
"""An executor, and how many tasks it works on at a time."""


def crew_of(wanted: Wanted) -> AbstractContextManager[Crew]:
    """Who does the work of a merge, while the context lasts.

    Raises:
        MergeError: See ``monitor.merge.execution.engine``.
    """
    return engine(wanted.workers, wanted.dask, needs=worked.__module__)


def planned_merge(wanted: Wanted, found: Found, job: str, output: Path, crew: Crew, horizon: int | None = None) -> PlannedMerge:
    """Find out what is to be done to merge a job.

    Args:
        found: In ``wanted.base``.
        output: A directory for the files of the windows, which has nothing in it; its directory ``work`` is not part of the
            result.
        horizon: The last step up to which the ranks' files are complete, while the job runs; see ``Plan.up_to``. None: all
            there is.

    Raises:
        MergeError: there is nothing to merge.
        OSError: a file cannot be written.
    """
    runs, work = runs_of(found, job), output / "work"
    for directory in (work, output / "per_rank", output / "global"):
        directory.mkdir()
    missing = missing_ranks(runs, found.others_of_the_launch(job))
    aside = [*found.set_aside, *unmerged_formats(runs)]
    report = Report(job, runs[0].manifest.world_size, runs, missing, aside, chosen_of(wanted.kinds, wanted.steps))
    do = partial(run, *crew)
    plan, set_aside = planned(job, runs, work, output, do, suffix=SUFFIXES[wanted.format], rows=wanted.rows)
    report.set_aside += set_aside
    if horizon is None:
        plan.check(wanted.kinds)
    else:
        plan = plan.up_to(horizon)
    return PlannedMerge(wanted, plan, plan.windows(wanted.kinds, wanted.steps), report, crew[1], do)


def planned(
    job: str, runs: Sequence[RankRun], work: Path, output: Path, do: Do, *, suffix: str, rows: int
) -> tuple[Plan, list[SetAside]]:
    """Look at what is there, and find out what belongs together. Returns the plan, and what it leaves out.

    Args:
        work, output, suffix, rows: See ``Plan``.
    """
    findings = {visit.first: found for visit, found in do(look, visits(runs, work))}
    catalogues = {kind.name: kind.output for kind, _ in do(catalogue, kinds(runs, findings, work))}
    write_runs(runs, work / "runs.arrow")
    plan = Plan(job, runs, shards_found(findings), catalogues, work / "runs.arrow", work, output, suffix, rows)
    return plan, [one for first in sorted(findings) for one in findings[first].set_aside]


def _no_rows(job: str, runs: Sequence[RankRun]) -> str:
    said = f"Job {job} recorded no rows, so there is nothing to merge."
    if any(run.manifest.steps.written.count for run in runs):
        return f'{said} Switch a kind on, such as "wg_distribution": true.'
    return f"{said} No collected step has ended: see start_step, and whether set_monitor got the model that the loop trains."


def _why_nothing(job: str, report: Report) -> str:
    why = [f"job {job} has no rows of what was asked for", *(f"{one.path}: {one.reason}" for one in report.set_aside[:5])]
    more = [f"and {len(report.set_aside) - 5} more"] if len(report.set_aside) > 5 else []
    return "\n  ".join([*why, *more])


def missing_ranks(runs: Sequence[RankRun], elsewhere: Collection[int] = ()) -> list[int]:
    """The ranks that were to be monitored and are not among ``runs``.

    Args:
        elsewhere: Ranks that recorded other models of the launch. Unless a group of the model has them, they did not watch it.
    """
    first = runs[0].manifest
    only = first.config.get("module_ranks") or range(first.world_size)
    members = {rank for one in runs for ranks in one.manifest.groups.values() for rank in ranks}
    return sorted(set(only) & set(range(first.world_size)) - {one.rank for one in runs} - (set(elsewhere) - members))


# --- How the work is cut: into pieces by ranges of steps, and where shards hold many pieces into windows that are read at
# once.
#
# A piece is what is combined at a time, and makes files of its own. A window is what shards are read for at a time.
# Where the shards of all ranks together are no more than a piece, both are the same.
#
# Both depend on what was recorded alone, so that the bytes depend neither on the engine nor on the number of workers.

Floats = NDArray[np.float64]

LAST_STEP: Final = 2**63 - 2

MOST_STEPS: Final = 100_000
"""Most steps of a range that are looked at to cut it. A damaged file may state any number."""

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
    steps: StepSpan
    pieces: tuple[StepSpan, ...]
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

    limit: StepSpan
    rows: int
    recorded: Index

    def windows(self, kind: str, shards: pa.Table, replicas: pa.Table) -> Iterator[Window]:
        """The work on one kind.

        Args:
            shards: In the columns ``SHARDS`` of ``monitor.merge.tensors``.
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
            steps = StepSpan(begin, stop - 1)
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

    def _shares(self, shards: pa.Table, steps: StepSpan) -> Iterator[range]:
        """Directories, some at a time: each time as many as it takes to have the rows of a piece."""
        there = chosen(shards, steps)
        first, end, density = self._spans(there, steps)
        rows = density * (np.searchsorted(self.recorded, end) - np.searchsorted(self.recorded, first))
        of_run = np.bincount(there["run"].to_numpy(), rows)
        share = (np.cumsum(of_run) - of_run) // min(self.rows, SHARE_ROWS)
        starts = np.flatnonzero(np.diff(share, prepend=-1)).tolist()
        for one, other in itertools.pairwise([*starts, len(of_run)]):
            yield range(one, other)

    def _spans(self, shards: pa.Table, limit: StepSpan) -> tuple[Index, Index, Floats]:
        """For each shard with any of these steps: the first of them, the one after the last, and its rows a step."""
        there = chosen(shards, limit)
        first, last, rows = (there[column].to_numpy() for column in ("first", "last", "rows"))
        steps = np.searchsorted(self.recorded, last, "right") - np.searchsorted(self.recorded, first)
        end = np.minimum(last, min(limit.last, LAST_STEP)) + 1
        return np.maximum(first, limit.first), end, rows / np.maximum(steps, 1)

    def _ranges(self, steps: StepSpan, parts: float) -> Iterator[StepSpan]:
        """With about as many recorded steps each; as many as asked for, if there are so many steps."""
        first, end = np.searchsorted(self.recorded, [steps.first, steps.last + 1]).tolist()
        count = min(max(1, math.ceil(parts)), max(1, end - first))
        inner = [int(self.recorded[first + (end - first) * number // count]) for number in range(1, count)]
        for one, other in itertools.pairwise([steps.first, *inner, steps.last + 1]):
            yield StepSpan(one, other - 1)

    def _count(self, steps: StepSpan) -> int:
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

    steps: StepSpan
    rows: float
    largest: float

    def then(self, other: _Segment) -> _Segment:
        return _Segment(StepSpan(self.steps.first, other.steps.last), self.rows + other.rows, self.largest + other.largest)


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


def chosen(shards: pa.Table, steps: StepSpan) -> pa.Table:
    """The shards that may have rows of these steps."""
    return shards.filter((shards["first"].to_numpy() <= steps.last) & (shards["last"].to_numpy() >= steps.first))


def by_kind(shards: pa.Table) -> dict[str, pa.Table]:
    """The shards of each kind, in the order in which they stand."""
    column = shards["kind"].combine_chunks()
    codes = column.indices.to_numpy()
    return {kind: shards.filter(codes == code) for code, kind in enumerate(column.dictionary.to_pylist())}


# --- What is to be done, as tasks that a worker can do on its own: each has all that it needs, and no more.

RUNS_A_VISIT = 16

HISTOGRAM_ROWS: Final = 8
"""So many rows of ordinary kinds take the memory of one row with a histogram."""


def visits(runs: Sequence[RankRun], work: Path) -> Iterator[Visit]:
    """The tasks that look at directories: some at a time, and those of a rank together."""
    first = 0
    for end in range(1, len(runs) + 1):
        if end == len(runs) or (end - first >= RUNS_A_VISIT and runs[end].rank != runs[end - 1].rank):
            yield Visit(first, tuple(runs[first:end]), work / f"series-{first}")
            first = end


def kinds(runs: Sequence[RankRun], findings: Mapping[int, Findings], work: Path) -> list[Kind]:
    """The kinds whose catalogues are to be made.

    Args:
        findings: Of each visit, by its first directory.
    """
    in_order = [findings[first] for first in sorted(findings)]
    groups: dict[Ranks, int] = {}
    numbers = [np.array([groups.setdefault(one, len(groups)) for one in each.groups], dtype=np.int64) for each in in_order]
    names, ranks = _layer_names(runs, in_order), frozenset(run.rank for run in runs)
    files: dict[str, list[tuple[Path, Index]]] = {}
    for each, own in zip(in_order, numbers, strict=True):
        for kind, path in each.series.items():
            files.setdefault(kind, []).append((path, own))
    return [
        Kind(kind, tuple(own), tuple(groups), ranks, names, work / f"catalogue-{number}.arrow")
        for number, (kind, own) in enumerate(files.items())
    ]


def _layer_names(runs: Sequence[RankRun], findings: Iterable[Findings]) -> LayerNames:
    """The layer names of all pipelines of the job together, which are alike: a rank may hold what another one lacks."""
    names: dict[int, set[str]] = {}
    for one in findings:
        for stage, own in one.names.items():
            names.setdefault(stage, set()).update(own)
    pipelines = [run.manifest.pipeline for run in runs if run.manifest.pipeline is not None]
    count = max((len(one.ranks) * len(one.stages) for one in pipelines), default=0)
    return LayerNames(names, count, whole=not any(run.manifest.config.get("targets") for run in runs))


def shards_found(findings: Mapping[int, Findings]) -> dict[str, pa.Table]:
    """By kind, in the columns ``SHARDS``, by run."""
    tables = [findings[first].shards for first in sorted(findings)]
    return by_kind(pa.concat_tables([SHARDS.empty_table(), *tables]).unify_dictionaries().combine_chunks())


def write_runs(runs: Sequence[RankRun], path: Path) -> None:
    """Write what the pieces need to know of the directories."""
    groups = {one.manifest.groups.get(role, ()) for one in runs for role in ROLES}
    places = {group: {rank: place for place, rank in enumerate(group)} for group in groups}
    rows = [(one.rank, *(places[one.manifest.groups.get(role, ())].get(one.rank) for role in ROLES)) for one in runs]
    columns = [pa.array(column, type=pa.int64()) for column in zip(*rows, strict=True)]
    write_file(path, pa.table(columns, schema=RUNS), RUNS)


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return file_digest(file, "sha256").hexdigest()


def _identity(path: Path) -> tuple[str, int, int]:
    """The identity of a file, which differs after it was written again."""
    name = f"{path.parent.name}/{path.name}"
    try:
        status = path.stat()
    except OSError:  # it will be set aside when it is read
        return name, -1, -1
    return name, status.st_size, status.st_mtime_ns


@dataclass(frozen=True)
class Plan:
    """The work on the rows.

    Attributes:
        job: Its id.
        shards: By kind, in the columns ``SHARDS``, by run.
        catalogues: Files by kind.
        about_runs: See ``write_runs``.
        work: For files that are needed for a while.
        output: The directory for what is made.
        rows: Of a piece, about.
    """

    job: str
    runs: Sequence[RankRun]
    shards: Mapping[str, pa.Table]
    catalogues: Mapping[str, Path]
    about_runs: Path
    work: Path
    output: Path
    suffix: str
    rows: int

    @cached_property
    def _ndigits(self) -> int:
        every = (one.manifest.config.get("ndigits") for one in self.runs)
        return min(number if isinstance(number, int) else 6 for number in every)

    def check(self, kinds: Collection[str] | None) -> None:
        """Raises: MergeError: a kind is asked for that the job has not recorded."""
        there = {*self.shards, *self.catalogues}
        unknown = ", ".join(map(repr, sorted(set(kinds or ()) - there)))
        if unknown and there:
            raise MergeError(f"--kinds names {unknown}. Job {self.job} has recorded: {', '.join(sorted(there))}.")

    def up_to(self, horizon: int) -> Plan:
        """Without the shards that have later steps, and without those that have steps beside one of them. So the windows before
        the horizon stay as they are when it moves, but for the last one of each kind, which may grow.
        """
        every = pa.concat_tables([SHARDS.empty_table(), *self.shards.values()])
        first, last = (every[column].to_numpy() for column in ("first", "last"))
        while (cut := (first <= horizon) & (last > horizon)).any():
            horizon = int(first[cut].min()) - 1
        kept = {kind: shards.filter(shards["last"].to_numpy() <= horizon) for kind, shards in self.shards.items()}
        return replace(self, shards={kind: shards for kind, shards in kept.items() if len(shards)})

    def windows(self, kinds: Iterable[str] | None, steps: StepSpan) -> list[Window]:
        """The windows of the kinds that are asked for; None: of all."""
        asked_for = sorted(set(self.shards) if kinds is None else set(self.shards) & set(kinds))
        recorded = recorded_steps({one.manifest.steps.written for one in self.runs}, self.shards.values())
        planners = {kind: Planner(steps, self._rows_of_a_piece(kind), recorded) for kind in asked_for}
        return [
            one for kind, planner in planners.items() for one in planner.windows(kind, self.shards[kind], self._replicas(kind))
        ]

    @cached_property
    def _histograms(self) -> bool:
        """Whether the job has counted magnitudes: by its configuration, or one that came into force later."""
        return not self._asked.isdisjoint(HISTOGRAM_OPS)

    @cached_property
    def _checked_kinds(self) -> Collection[str]:
        """The kinds whose rows may have checksums, in the same way."""
        if CHECKSUM in self._asked:
            return [kind for kind in KINDS if has_op(CHECKSUM, kind)]
        later = not self._asked.isdisjoint(["replica_check", "alert"])  # no ops, so only a change can name them
        checked = later or any(checks_replicas(one.manifest.config) for one in self.runs)
        return (*CHECKED_KINDS, REPLICA_KIND) if checked else ()

    @cached_property
    def _asked(self) -> frozenset[str]:
        return asked_of(self.runs)

    def columns(self, kind: str) -> Columns:
        """The columns of the rows of a kind."""
        checked = kind in self._checked_kinds
        return Columns.of(kind, asked=self._asked, histograms=self._histograms, checksums=checked)

    def _rows_of_a_piece(self, kind: str) -> int:
        return max(1, self.rows // HISTOGRAM_ROWS) if self.columns(kind).histogram else self.rows

    def _replicas(self, kind: str) -> pa.Table:
        """The shards of replicas that are to be compared with rows of the kind."""
        nothing = SHARDS.empty_table()
        return nothing if kind == REPLICA_KIND else self.shards.get(REPLICA_KIND, nothing)

    def shares(self, window: Window) -> Iterator[Share]:
        """The tasks to do before the pieces of a window can be done."""
        for number, places in enumerate(window.shares):
            sources, columns = self.sources(window.kind, window.steps, places), self.columns(window.kind)
            catalogue, others = self.catalogues_of(window.kind)
            output = self._shared(window, number)
            yield Share(columns, window.steps, window.pieces, sources, catalogue, others, output)

    def pieces(self, window: Window) -> Iterator[Piece]:
        sources = () if window.shares else self.sources(window.kind, window.steps, range(len(self.runs)))
        shares = tuple(self._shared(window, number) for number in range(len(window.shares)))
        catalogue, others = self.catalogues_of(window.kind)
        for number, steps in enumerate(window.pieces):
            outputs, columns = self._outputs(window.kind, steps), self.columns(window.kind)
            about, ndigits = self.about_runs, self._ndigits
            yield Piece(columns, steps, sources, shares, number, catalogue, others, about, outputs, ndigits, self.job)

    def fingerprint(self, window: Window) -> str:
        """A number of all that decides what the files of a window hold, and what there is to report of it. While it is the
        same, the window need not be done again.
        """
        steps, columns = window.steps, self.columns(window.kind)
        about = [SCHEMA_VERSION, self.suffix, self.job, self._ndigits, columns, steps, window.pieces, len(window.shares)]
        about += [self._digests.get(path) for path in self.catalogues_of(window.kind) if path is not None]
        for one in self.sources(window.kind, steps, range(len(self.runs))):
            known = [record.between(steps.first, steps.last) for record in (one.written, *one.left_out)]
            about += [one.rank, min(one.end, steps.last + 1), *known, self._places[one.run]]
            about += [(shard.kind, _identity(shard.path)) for shard in (*one.shards, *one.replicas)]
        return sha256("\n".join(map(repr, about)).encode()).hexdigest()

    @cached_property
    def _digests(self) -> dict[Path, str]:
        """The digest of each catalogue."""
        return {path: _digest(path) for path in self.catalogues.values()}

    @cached_property
    def _places(self) -> list[dict[str, Any]]:
        """For each directory, the places of its rank in its groups."""
        places: list[dict[str, Any]] = read_file(self.about_runs).to_pylist()
        return places

    def catalogues_of(self, kind: str) -> tuple[Path | None, Path | None]:
        """The catalogue of the kind, and that of the kind whose rows are in the same CSV files."""
        return self.catalogues.get(kind), self.catalogues.get(DIRECTION_KIND) if kind == CALL_KIND else None

    def files(self, window: Window) -> Iterator[str]:
        """The files that were made of a window, as paths in ``output``: a piece without rows has none."""
        for path in chain.from_iterable(self._outputs(window.kind, steps) for steps in window.pieces):
            if path.exists():
                yield f"{path.parent.name}/{path.name}"

    def clear_up(self, window: Window) -> None:
        """Remove what only the pieces of this window needed."""
        for number in range(len(window.shares)):
            for path in files_of(self._shared(window, number)):
                path.unlink(missing_ok=True)

    def _shared(self, window: Window, share: int) -> Path:
        return self.work / f"{window.kind}_{window.steps.first}-{window.steps.last}-{share}"

    def _outputs(self, kind: str, steps: StepSpan) -> tuple[Path, Path]:
        name = f"{kind}_{steps.first}-{steps.last}{self.suffix}"
        return self.output / "per_rank" / name, self.output / "global" / name

    def sources(self, kind: str, steps: StepSpan, places: range) -> tuple[Source, ...]:
        """The files of a kind in the directories at these places."""
        own, replicas = (self._shards_by_run(shards, steps, places) for shards in (self.shards[kind], self._replicas(kind)))
        return tuple(self._source(run, own.get(run, ()), replicas.get(run, ())) for run in sorted({*own, *replicas}))

    def _shards_by_run(self, shards: pa.Table, steps: StepSpan, places: range) -> dict[int, tuple[Shard, ...]]:
        first, end = np.searchsorted(shards["run"].to_numpy(), [places.start, places.stop]).tolist()
        rows = chosen(shards.slice(first, end - first), steps).to_pylist()
        return {run: tuple(map(self._shard, own)) for run, own in groupby(rows, key=lambda row: row["run"])}

    def _shard(self, row: dict[str, Any]) -> Shard:
        path = self.runs[row["run"]].directory / row["file"]
        return Shard(path, row["kind"], StepSpan(row["first"], row["last"]), row["rows"])

    def _source(self, run: int, shards: tuple[Shard, ...], replicas: tuple[Shard, ...]) -> Source:
        one = self.runs[run]
        return Source(run, one.rank, one.end, one.left_out, one.manifest.steps.written, shards, replicas)
