"""What all conversions have in common: their arguments, their results, and what was not recorded."""

from __future__ import annotations

import itertools
import os
import re
import sqlite3
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from os import PathLike
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow.compute import call_function  # type: ignore[attr-defined]
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from monitor.coordinator.manifest_format import MANIFEST_FILE, NO_STEPS, StepsRecord
from monitor.coordinator.output import RankDirectory, timestamp_fields, timestamp_of
from monitor.coordinator.resume import Span, span_between
from monitor.failures import LOGGER
from monitor.merge.discovery import NO_END, Found, RankRun, SetAside, discover, runs_of
from monitor.merge.execution import MergeError
from monitor.merge.merge import missing_ranks
from monitor.merge.tables import ForeignError, Shard, csv_rows, csv_shards_in
from monitor.series import KINDS, shown_kind
from monitor.stats.ops import INTEGER_OPS, TEXT_OPS

# --- What stops a conversion.


class ConversionError(ValueError):
    """Nothing was converted. The message says what is wrong, and what to change."""


class NothingRecordedError(ConversionError):
    """The ranks' directories can be read, and hold no CSV rows."""


DATA_TYPES: Final = tuple(dict.fromkeys(map(shown_kind, KINDS)))
"""What files are called after."""


@dataclass(frozen=True, slots=True)
class Request:
    """What to convert, by how many processes.

    Attributes:
        base: The directory that the ranks' directories lie in.
        span: Timestamps of directories, the first and the last; None: all.
        job: Beginning of a job's id; None where there is only one.
        kinds: In the order of ``DATA_TYPES``; None: all.
        output: A directory, which need not be there.
    """

    base: Path
    span: Span | None
    job: str | None
    kinds: tuple[str, ...] | None
    workers: int
    output: Path

    @classmethod
    def of(
        cls,
        monitor_path: str | PathLike[str],
        time_start: str | None,
        time_end: str | None,
        process_num: int,
        data_type_list: Sequence[str] | None,
        output_dirpath: str | PathLike[str] | None,
        job: str | None,
        ending: str,
    ) -> Request:
        """The arguments as users give them.

        Args:
            ending: Of the name of the directory to write where ``output_dirpath`` is not given; the time stands before it.

        Raises:
            ConversionError: one of them cannot be what was meant.
        """
        base = Path(monitor_path).expanduser()
        output = (
            base / f"{timestamp_of(datetime.now())}_{ending}" if output_dirpath is None else Path(output_dirpath).expanduser()
        )
        span, kinds = _span(time_start, time_end), _kinds(data_type_list)
        return cls(base, span, job, kinds, natural("process_num", process_num), output)


def natural(name: str, value: int) -> int:
    """``value``, where it is an integer from 1 on.

    Raises:
        ConversionError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConversionError(f"{name} is {value!r}. Give an integer from 1 on.")
    return value


def _span(start: str | None, end: str | None) -> Span | None:
    for name, value in (("time_start", start), ("time_end", end)):
        if value is not None and not isinstance(value, str):
            raise ConversionError(f"{name} is {value!r}. Give a timestamp like 'Dec03_21-34-40', or None.")
    try:
        return span_between(start, end)
    except ValueError as error:
        raise ConversionError(str(error)) from error


def _kinds(asked: Sequence[str] | None) -> tuple[str, ...] | None:
    if not asked:
        return None
    if isinstance(asked, str):
        raise ConversionError(f"data_type_list is the text {asked!r}. Give a list: [{asked!r}].")
    if unknown := [one for one in asked if one not in DATA_TYPES]:
        raise ConversionError(f"there is no data type {unknown[0]!r}. There are {', '.join(DATA_TYPES)}.")
    return tuple(kind for kind in DATA_TYPES if kind in asked)


# --- What was not recorded, as far as the manifests of the ranks know.

SHOWN: Final = 10
"""Ranks; more are counted."""


def absent_from(request: Request) -> Iterator[str]:
    """A sentence for ranks that left no directory, and for the steps that a rank dropped."""
    try:
        found = discover(request.base, request.span)
    except MergeError:
        return
    jobs = [one for one in found.job_ids() if one.startswith(request.job or "")]
    runs = runs_of(found, jobs[0]) if len(jobs) == 1 else ()
    if runs and (missing := missing_ranks(runs)):
        shown = ", ".join(map(str, missing[:SHOWN])) + (f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else "")
        yield f"no directory of rank {shown}, of {runs[0].manifest.world_size} ranks"
    for run in runs:
        for reason, steps in _dropped(run):
            yield f"rank {run.rank}: {steps.count:,} steps are missing: {reason}"


def _dropped(run: RankRun) -> Iterator[tuple[str, StepsRecord]]:
    yield from run.manifest.dropped.items()
    yield from run.manifest.lost.get("csv", {}).items()


MOST_SAID: Final = 20
"""Files set aside that are named one by one."""

_NO_GUARD: Final = (
    "a process that did the work has died. In a script of your own the call has to stand under "
    "`if __name__ == '__main__':`, for each process reads the script; otherwise memory may have run out: try fewer processes."
)


@dataclass(frozen=True, slots=True)
class Converted:
    """What was written.

    Attributes:
        output: The directory of the files, or the file.
        rows: How many of the ranks' rows are in it.
        ranks: Those that rows are of.
        set_aside: Files and directories that are torn, unfinished or not ours.
        absent: What the manifests say is missing, a sentence each: ranks, and steps that were dropped.
    """

    output: Path
    rows: int
    ranks: tuple[int, ...]
    set_aside: tuple[SetAside, ...]
    absent: tuple[str, ...] = ()

    def log(self) -> Converted:
        """Name what was set aside, and what is missing."""
        for one in self.set_aside[:MOST_SAID]:
            LOGGER.warning("%s was not converted: %s", one.path, one.reason)
        if len(self.set_aside) > MOST_SAID:
            LOGGER.warning("%d more were not converted.", len(self.set_aside) - MOST_SAID)
        for absent in self.absent[:MOST_SAID]:
            LOGGER.warning("%s", absent)
        return self


@dataclass
class Gathered:
    """Grows while the work is done.

    Attributes:
        rows: Written so far.
    """

    set_aside: list[SetAside]
    rows: int = 0
    ranks: set[int] = field(default_factory=set)

    def add(self, rank: int, rows: int, set_aside: Iterable[SetAside]) -> None:
        self.set_aside += set_aside
        self.rows += rows
        if rows:
            self.ranks.add(rank)

    def converted(self, request: Request, output: Path) -> Converted:
        """What there is to say in the end.

        Raises:
            ConversionError: nothing was written.
        """
        aside = sorted(set(self.set_aside), key=lambda one: (one.path, one.reason))
        if not self.rows:
            nothing = ConversionError if aside or request.kinds else NothingRecordedError
            raise nothing(_nothing(request, aside))
        return Converted(output, self.rows, tuple(sorted(self.ranks)), tuple(aside), tuple(absent_from(request)))


def _nothing(request: Request, aside: Sequence[SetAside]) -> str:
    what = (
        f"{request.base} has no CSV rows of {' or '.join(request.kinds)}"
        if request.kinds
        else f"{request.base} has no CSV rows"
    )
    return f"{what}. Set aside: {aside[0].path}: {aside[0].reason} ({len(aside)} in all)" if aside else what


@contextmanager
def plainly() -> Iterator[None]:
    """What goes wrong within is said as a ``ConversionError``; what the operating system does not allow as an ``OSError``."""
    try:
        yield
    except MergeError as error:
        dead = isinstance(error.__cause__, BrokenProcessPool)
        raise ConversionError(_NO_GUARD if dead else str(error)) from error
    except sqlite3.Error as error:
        raise ConversionError(f"the database cannot be written: {error}") from error


@contextmanager
def bar() -> Iterator[Progress]:
    """Shows in a terminal how far the work is."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress


# --- What there is to convert: the CSV files of each rank, with those together that may hold the same steps.


@dataclass(frozen=True, slots=True)
class RankFiles:
    """A directory of a rank, and which of the steps in it count.

    Attributes:
        end: Steps from here on are those of a later directory.
        abandoned: Nor do these count: a resumed run has gone back behind them.
    """

    path: Path
    rank: int
    end: int = NO_END
    abandoned: StepsRecord = NO_STEPS

    def counts(self, step: int) -> bool:
        return step < self.end and not self.abandoned.holds(step)


@dataclass(frozen=True, slots=True)
class Record:
    """The files of one kind and rank that may hold the same steps.

    Attributes:
        files: With the directory of each. Of a step that stands in several the last has what counts.
    """

    files: tuple[tuple[RankFiles, Shard], ...]

    @property
    def rows(self) -> int:
        """How many there are, about."""
        return sum(shard.rows for _, shard in self.files)


@dataclass(frozen=True, slots=True)
class Course:
    """All records of one kind and rank, in order of their steps."""

    kind: str
    rank: int
    records: tuple[Record, ...]


def courses_of(request: Request) -> tuple[list[Course], list[SetAside]]:
    """What to convert, by kind and then by rank, and what looks like it and is set aside.

    Raises:
        ConversionError: there is nothing, or it is not clear which job is meant.
        MergeError: the directory cannot be read.
    """
    directories, aside = _directories(request)
    files: dict[tuple[str, int], list[tuple[RankFiles, Shard]]] = {}
    for directory in directories:
        shards, torn = csv_shards_in(directory.path, request.kinds)
        aside += torn
        for shard in sorted(shards, key=lambda one: (one.steps, one.path.name)):
            if shard.kind in DATA_TYPES:
                files.setdefault((shard.kind, directory.rank), []).append((directory, shard))
            else:
                aside.append(SetAside(str(shard.path), f"{shard.kind!r} is no kind of rows"))
    ordered = sorted(files, key=lambda one: (DATA_TYPES.index(one[0]), one[1]))
    return [Course(kind, rank, tuple(_records(files[kind, rank]))) for kind, rank in ordered], aside


def _records(files: Sequence[tuple[RankFiles, Shard]]) -> Iterator[Record]:
    """Files that may have a step in common stay together, in the order of ``files``."""
    records: list[list[int]] = []
    end = -1
    for index in sorted(range(len(files)), key=lambda index: files[index][1].steps):
        steps = files[index][1].steps
        if steps.first > end:
            records.append([])
        records[-1].append(index)
        end = max(end, steps.last)
    return (Record(tuple(files[index] for index in sorted(one))) for one in records)


def _directories(request: Request) -> tuple[list[RankFiles], list[SetAside]]:
    """By rank, and of a rank in order of time."""
    found = discover(request.base, request.span)
    aside = {one.path: one for one in found.set_aside}
    unsigned = set() if request.job else {name for name in aside if _has_no_manifest(request.base / name)}
    job = _job(found, request.job)
    runs = runs_of(found, job) if job else ()
    directories = [RankFiles(one.directory, one.rank, one.end, one.manifest.steps.abandoned) for one in runs]
    directories += [RankFiles(request.base / name, _rank(name)) for name in sorted(unsigned)]
    if not directories:
        raise ConversionError(_nothing_found(request, found.set_aside))
    _check_ranks(directories, unsigned)
    return sorted(directories, key=lambda one: one.rank), [one for name, one in aside.items() if name not in unsigned]


def _has_no_manifest(directory: Path) -> bool:
    """As those of other tools that write the same files, and of a rank that was killed early."""
    return directory.is_dir() and not os.path.lexists(directory / MANIFEST_FILE)


def _rank(name: str) -> int:
    known = RankDirectory.parse(name)
    assert known is not None  # discovery names no others
    return known.rank


def _job(found: Found, asked: str | None) -> str | None:
    """None where no directory says of which job it is."""
    every = found.job_ids()
    ids = [one for one in every if one.startswith(asked or "")]
    if len(ids) == 1:
        return ids[0]
    if not every and asked is None:
        return None
    known = ", ".join(f"{one} ({found.jobs[one][0].manifest.timestamp})" for one in every) or "none"
    what = f"job {asked!r} is the beginning of {len(ids)} ids" if asked else f"there are {len(ids)} jobs in this range of time"
    raise ConversionError(f"{what}. Choose one by the beginning of its id, with job, or by a narrower range: {known}.")


def _check_ranks(directories: Sequence[RankFiles], unsigned: Collection[str]) -> None:
    """What is not known to be of one job is not mixed."""
    count = Counter(one.rank for one in directories)
    for rank in sorted(map(_rank, unsigned)):
        if count[rank] > 1:
            names = ", ".join(sorted(one.path.name for one in directories if one.rank == rank))
            raise ConversionError(
                f"rank {rank} has {count[rank]} directories in this range of time, and no manifest says that one carries on "
                f"the other: {names}. Choose a narrower range."
            )


def _nothing_found(request: Request, aside: Sequence[SetAside]) -> str:
    if aside:
        first = f"{aside[0].path}: {aside[0].reason}"
        return f"no directory of a rank in {request.base} can be read. The first of {len(aside)}: {first}"
    if RankDirectory.parse(request.base.absolute().name) is not None:
        return f"{request.base} is the directory of one rank. Name the one that it lies in."
    span = _timestamps(request.base)
    if request.span is None or span is None:
        return f"there is no directory of a rank in {request.base}. Name the one that the ranks wrote to."
    asked = " to ".join(request.span)
    return f"there is no directory of a rank from {asked} in {request.base}. There are some from {' to '.join(span)}."


def _timestamps(base: Path) -> Span | None:
    """The first and the last that there is, within a year."""
    known = [one for name in os.listdir(base) if (one := RankDirectory.parse(name)) is not None]
    ordered = sorted((one.timestamp for one in known), key=timestamp_fields)
    return (ordered[0], ordered[-1]) if ordered else None


# --- The rows of a record, each step once, in order of steps and as they were measured within a step.

IDENTITY: Final = {"vpp_stage": pa.int64(), "name": pa.string(), "step": pa.int64(), "micro_step": pa.int64()}
"""What a row is of. ``micro_step`` is null in a row that is about the whole step."""

MOST_COLUMNS: Final = 100
"""Of a file: there are a dozen ops, and fewer features."""

_EMPTY: Final = pa.scalar("", type=pa.string())

_OP: Final = re.compile(r"[a-z][a-z0-9_]{0,63}")
_TAKEN: Final = frozenset({*IDENTITY, "rank", "target_id"})
"""Names that mean something else in what is written."""


def read_record(record: Record) -> tuple[pa.Table, list[SetAside]]:
    """The rows in the columns ``IDENTITY`` and those of every op that a file has; null where there is no value.

    Returns:
        The rows, and the files that are torn or not ours.
    """
    tables, aside = [], []
    seen: set[int] = set()
    for directory, shard in reversed(record.files):
        try:
            table = _typed(csv_rows(shard))
        except ForeignError as error:
            aside.append(SetAside(str(shard.path), str(error)))
            continue
        tables.append(_counting(table, directory, seen))
    if not tables:
        return pa.schema(IDENTITY).empty_table(), aside
    return _in_order(pa.concat_tables(reversed(tables), promote_options="default")), aside


def steps_of(rows: pa.Table) -> Iterator[tuple[int, pa.Table]]:
    """Each step with its rows, of a table in order of steps."""
    steps = rows["step"].to_numpy()
    starts = np.flatnonzero(np.diff(steps, prepend=-1)).tolist()
    for start, end in itertools.pairwise([*starts, len(steps)]):
        yield int(steps[start]), rows.slice(start, end - start)


def ops_of(rows: pa.Table) -> list[str]:
    return [name for name in rows.column_names if name not in IDENTITY]


def numbers_of(column: pa.ChunkedArray) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Values, anything where there is none, and which are there."""
    valid: NDArray[np.bool_] = column.is_valid().to_numpy()
    values = column.fill_null(0) if column.null_count else column
    return values.to_numpy().astype(np.float64), valid


def _counting(table: pa.Table, directory: RankFiles, seen: set[int]) -> pa.Table:
    """The rows of steps that count and that no later file has."""
    column = table["step"].to_numpy()
    there = np.unique(column).tolist()
    fresh = [step for step in there if step not in seen and directory.counts(step)]
    seen.update(fresh)
    return table if fresh == there else table.filter(np.isin(column, fresh))


def _in_order(rows: pa.Table) -> pa.Table:
    step = rows["step"].to_numpy()
    return rows if (step[1:] >= step[:-1]).all() else rows.take(np.argsort(step, kind="stable"))


def _typed(table: pa.Table) -> pa.Table:
    """With the columns in one order and of one type each, whatever the file makes them look like.

    Raises:
        ForeignError: a column is neither identity nor op, or does not hold numbers.
    """
    names = table.column_names
    ops = [name for name in names if name not in IDENTITY]
    wrong = [name for name in ops if not _OP.fullmatch(name) or name in _TAKEN]
    if wrong or len(set(names)) < len(names) or len(names) > MOST_COLUMNS:
        raise ForeignError(f"its columns are not those of a shard: {', '.join(wrong or names)[:200]!r}")
    identity = [
        table[name] if name in names else pa.chunked_array([pa.nulls(len(table), kind)]) for name, kind in IDENTITY.items()
    ]
    return pa.table([*identity, *(_op(name, table[name]) for name in ops)], names=[*IDENTITY, *ops])


def _op(name: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
    if name in TEXT_OPS:
        return _without_empty(column)
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type) or pa.types.is_null(column.type)):
        raise ForeignError(f"its column {name} does not hold numbers")
    return column.cast(pa.int64() if name in INTEGER_OPS else pa.float64(), safe=False)


def _without_empty(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """With null in place of empty text, which was not measured."""
    return call_function("if_else", [call_function("equal", [column, _EMPTY]), pa.scalar(None, pa.string()), column])
