"""A merge from beginning to end: find, plan, do, and move the result to its place."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from monitor.merge.catalogue import catalogued
from monitor.merge.discovery import RankRun, SetAside, choose, discover, runs_of
from monitor.merge.engines import engine, run
from monitor.merge.errors import MergeError
from monitor.merge.output import SUFFIXES, Format
from monitor.merge.reduction import Piece, Source, planned, reduce
from monitor.merge.report import Report
from monitor.merge.shards import Shard, shards_in
from monitor.ranks.resume import Span
from monitor.series import REPLICA_KIND
from monitor.sinks.hdf5_content import ALL_STEPS
from monitor.sinks.shard_names import Steps

PIECE_ROWS: Final = 250_000
"""What a worker holds at a time, unless a single step of a kind has more. It takes about 1 KB of memory a row."""

REPORT_FILE: Final = "report.json"

_ROLES: Final = ("dp", "tp", "pp")


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
    steps: Steps = ALL_STEPS
    format: Format = "hdf5"
    workers: int = 1
    dask: str | None = None
    rows: int = PIECE_ROWS


Progress = Callable[[int, int], None]
"""Told how many pieces are done, and of how many."""


def merge(wanted: Wanted, progress: Progress = lambda _done, _all: None) -> Report:
    """Write the merged data set to ``wanted.output``, which appears whole or not at all.

    Raises:
        MergeError: there is nothing to merge, or nothing to merge it into.
        OSError: the disk or the directory does not allow it.
    """
    found = discover(wanted.base, wanted.span)
    job = choose(found, wanted.job)
    with _draft_of(wanted.output) as draft:
        return _merged(wanted, job, runs_of(found, job), found.set_aside, draft, progress)


def _merged(
    wanted: Wanted, job: str, runs: Sequence[RankRun], aside: Sequence[SetAside], draft: Path, progress: Progress
) -> Report:
    work = draft / "work"
    work.mkdir()
    report = Report(job, runs[0].manifest.world_size, runs, _missing_ranks(runs), list(aside))
    pieces = _pieces(wanted, runs, work, draft, report)
    with engine(wanted.workers, wanted.dask) as (executor, workers):
        for done, (piece, outcome) in enumerate(run(executor, workers, reduce, pieces), start=1):
            report.add(piece, outcome)
            progress(done, len(pieces))
    if not report.steps:
        raise MergeError(f"job {job} has no rows of what was asked for")
    shutil.rmtree(work)
    (draft / REPORT_FILE).write_text(report.spelled())
    return report


def _pieces(wanted: Wanted, runs: Sequence[RankRun], work: Path, draft: Path, report: Report) -> list[Piece]:
    shards: list[tuple[RankRun, list[Shard]]] = []
    for one in runs:
        found, aside = shards_in(one.directory, one.rank)
        report.set_aside += aside
        shards.append((one, found))
    catalogues, aside = catalogued(runs, work)
    report.set_aside += aside
    kinds = sorted({shard.kind for _, found in shards for shard in found})
    return [
        _piece(kind, steps, shards, catalogues.get(kind), _outputs(draft, kind, steps, SUFFIXES[wanted.format]))
        for kind in kinds
        if wanted.kinds is None or kind in wanted.kinds
        for steps in planned([one for _, found in shards for one in found if one.kind == kind], wanted.steps, wanted.rows)
    ]


def _outputs(draft: Path, kind: str, steps: Steps, suffix: str) -> tuple[Path, Path]:
    name = f"{kind}_{steps.first}-{steps.last}{suffix}"
    for folder in ("per_rank", "global"):
        (draft / folder).mkdir(exist_ok=True)
    return draft / "per_rank" / name, draft / "global" / name


def _piece(
    kind: str, steps: Steps, shards: Sequence[tuple[RankRun, list[Shard]]], catalogue: Path | None, outputs: tuple[Path, Path]
) -> Piece:
    sources = tuple(_source(one, found, kind, steps) for one, found in shards)
    return Piece(kind, steps, tuple(one for one in sources if one.shards or one.replicas), catalogue, outputs)


def _source(one: RankRun, shards: Sequence[Shard], kind: str, steps: Steps) -> Source:
    own, replicas = (
        tuple(shard for shard in shards if shard.kind == of and shard.steps.meets(steps)) for of in (kind, REPLICA_KIND)
    )
    known = one.manifest
    groups = [known.groups.get(role, ()) for role in _ROLES]
    dp, tp, pp = (group.index(one.rank) if one.rank in group else None for group in groups)
    return Source(
        one.rank,
        (dp, tp, pp),
        one.end,
        known.steps.abandoned,
        known.steps.written,
        own,
        () if kind == REPLICA_KIND else replicas,
        ndigits if isinstance(ndigits := known.config.get("ndigits"), int) else 6,
    )


def _missing_ranks(runs: Sequence[RankRun]) -> list[int]:
    """Of those that were to be monitored."""
    first = runs[0].manifest
    only = first.config.get("module_ranks") or range(first.world_size)
    return sorted(set(only) & set(range(first.world_size)) - {one.rank for one in runs})


@contextmanager
def _draft_of(output: Path) -> Iterator[Path]:
    """A directory that becomes ``output`` if all goes well, and of which nothing is left otherwise."""
    output = output.absolute()
    output.parent.mkdir(parents=True, exist_ok=True)
    with _alone(output):
        if os.path.lexists(output):
            raise MergeError(f"{output} exists. Remove it, or name another directory with -o.")
        _remove_drafts(output)
        draft = output.with_name(f".{output.name}.{secrets.token_hex(4)}.draft")
        draft.mkdir()
        try:
            yield draft
            os.rename(draft, output)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise


@contextmanager
def _alone(output: Path) -> Iterator[None]:
    # A lock that is a file would outlive a merge that is killed.
    lock = FileLock(output.with_name(f".{output.name}.lock"), timeout=0, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        raise MergeError(f"another merge is writing to {output}. Wait for it, or name another directory with -o.") from None
    try:
        yield
    finally:
        lock.release()


def _remove_drafts(output: Path) -> None:
    """What merges that were killed have left."""
    draft = re.compile(rf"\.{re.escape(output.name)}\.[0-9a-f]{{8}}\.draft")
    for path in output.parent.iterdir():
        if draft.fullmatch(path.name):
            shutil.rmtree(path)
