"""What there is to convert: the CSV files of each rank, with those together that may hold the same steps."""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow.compute import call_function  # type: ignore[attr-defined]

from monitor.convert.conversion import DATA_TYPES, ConversionError, Request
from monitor.coordinator.manifest_format import MANIFEST_FILE, NO_STEPS, StepsRecord
from monitor.coordinator.output import RankDirectory, timestamp_fields
from monitor.coordinator.resume import Span
from monitor.merge.discovery import NO_END, Found, SetAside, discover, runs_of
from monitor.merge.tables import ForeignError, Shard, csv_rows, csv_shards_in
from monitor.stats.ops import INTEGER_OPS, TEXT_OPS


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
