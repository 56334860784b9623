"""A merge from beginning to end: find, plan, do, and move the result to its place."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final, Protocol, TypeVar

from monitor.coordinator.resume import Span
from monitor.merge.atomic_output import MergeError, NothingRecordedError, draft_of
from monitor.merge.combine import Outcome, reduce
from monitor.merge.discovery import Found, RankRun, choose, discover, runs_of, unmerged_formats
from monitor.merge.executors import engine, run
from monitor.merge.gather import put_in_order
from monitor.merge.output import SUFFIXES, Format
from monitor.merge.plan import Plan, Window, in_groups, kinds, shards_found, visits, write_runs
from monitor.merge.report import Report
from monitor.merge.survey import look
from monitor.merge.tensors import catalogue
from monitor.sinks.files import StepSpan
from monitor.sinks.hdf5_read import ALL_STEPS

PIECE_ROWS: Final = 250_000
"""What a worker holds at a time, unless a single step of a kind has more."""

PIECES_AT_A_TIME: Final = 16
"""For each worker. So many rows lie on the disk unpacked, unless the shards of one record hold more."""

REPORT_FILE: Final = "report.json"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to merge, and into what.

    Attributes:
        job: Beginning of the job's id; None where there is only one.
        span: Timestamps of directories, the first and the last; None: all.
        kinds: None: all.
        rows: Of a piece of work, about.
    """

    base: Path
    output: Path
    job: str | None = None
    span: Span | None = None
    kinds: Collection[str] | None = None
    steps: StepSpan = ALL_STEPS
    format: Format = "hdf5"
    workers: int = 1
    dask: str | None = None
    rows: int = PIECE_ROWS


Progress = Callable[[int, int], None]
"""Told how many pieces are done, and of how many."""


Task = TypeVar("Task")
T = TypeVar("T")


class Do(Protocol):
    """Has tasks done; see ``monitor.merge.executors.run``."""

    def __call__(self, work: Callable[[Task], T], tasks: Iterable[Task], /) -> Iterator[tuple[Task, T]]:
        """Each task with its result, as they are done."""


def merge(wanted: Wanted, progress: Progress = lambda _done, _all: None) -> Report:
    """Write the merged data set to ``wanted.output``, which appears whole or not at all.

    Raises:
        MergeError: there is nothing to merge, or nothing to merge it into.
        OSError: the disk or the directory does not allow it.
    """
    found = discover(wanted.base, wanted.span)
    job = choose(found, wanted.job)
    with draft_of(wanted.output, "merge", "another directory with -o") as draft:
        draft.mkdir()
        return _merged(wanted, job, runs_of(found, job), found, draft, progress)


def _merged(wanted: Wanted, job: str, runs: Sequence[RankRun], found: Found, draft: Path, progress: Progress) -> Report:
    work = draft / "work"
    for directory in (work, draft / "per_rank", draft / "global"):
        directory.mkdir()
    missing = missing_ranks(runs, found.others_of_the_launch(job))
    report = Report(job, runs[0].manifest.world_size, runs, missing, [*found.set_aside, *unmerged_formats(runs)])
    with engine(wanted.workers, wanted.dask) as (executor, workers):
        do = partial(run, executor, workers)
        plan = _planned(wanted, runs, draft, report, do)
        _carry_out(plan, plan.windows(wanted.kinds, wanted.steps), workers, report, progress, do)
    if not report.steps:
        whole = wanted.kinds is None and wanted.steps == ALL_STEPS and not report.set_aside
        raise NothingRecordedError(_no_rows(job)) if whole else MergeError(_why_nothing(job, report))
    shutil.rmtree(work)
    (draft / REPORT_FILE).write_text(report.spelled())
    return report


def _planned(wanted: Wanted, runs: Sequence[RankRun], draft: Path, report: Report, do: Do) -> Plan:
    """Look at what is there, and find out what belongs together."""
    work = draft / "work"
    findings = {visit.first: found for visit, found in do(look, visits(runs, work))}
    for found in findings.values():
        report.set_aside += found.set_aside
    catalogues = {kind.name: kind.output for kind, _ in do(catalogue, kinds(runs, findings, work))}
    write_runs(runs, work / "runs.arrow")
    shards = shards_found(findings)
    return Plan(runs, shards, catalogues, work / "runs.arrow", work, draft, SUFFIXES[wanted.format], wanted.rows)


def _carry_out(plan: Plan, windows: Sequence[Window], workers: int, report: Report, progress: Progress, do: Do) -> None:
    done, total = 0, sum(len(one.shares) + len(one.pieces) for one in windows)
    for group in in_groups(windows, PIECES_AT_A_TIME * workers * plan.rows):
        for share, told in do(put_in_order, chain.from_iterable(map(plan.shares, group))):
            report.add(share.kind, Outcome.of_reading(told))
            progress(done := done + 1, total)
        for piece, outcome in do(reduce, chain.from_iterable(map(plan.pieces, group))):
            report.add(piece.kind, outcome)
            progress(done := done + 1, total)
        for window in group:
            plan.clear_up(window)


def _no_rows(job: str) -> str:
    return f'Job {job} recorded no rows, so there is nothing to merge. Switch a kind on, such as "wg_distribution": true.'


def _why_nothing(job: str, report: Report) -> str:
    why = [f"job {job} has no rows of what was asked for", *(f"{one.path}: {one.reason}" for one in report.set_aside[:5])]
    more = [f"and {len(report.set_aside) - 5} more"] if len(report.set_aside) > 5 else []
    return "\n  ".join([*why, *more])


def missing_ranks(runs: Sequence[RankRun], elsewhere: Collection[int] = ()) -> list[int]:
    """Of those that were to be monitored.

    Args:
        elsewhere: Ranks that recorded other models of the launch. Unless a group of the model has them, they did not watch it.
    """
    first = runs[0].manifest
    only = first.config.get("module_ranks") or range(first.world_size)
    members = {rank for one in runs for ranks in one.manifest.groups.values() for rank in ranks}
    return sorted(set(only) & set(range(first.world_size)) - {one.rank for one in runs} - (set(elsewhere) - members))
