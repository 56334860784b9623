"""What there is to convert: the CSV files of each rank, with those together that may hold the same steps."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from monitor.convert.errors import ConversionError
from monitor.convert.request import DATA_TYPES, Request
from monitor.coordinator.identity import RankDirectory, timestamp_fields
from monitor.coordinator.manifest_format import MANIFEST_FILE, NO_STEPS, StepsRecord
from monitor.coordinator.resume import Span
from monitor.merge.discovery import NO_END, Found, SetAside, discover, runs_of
from monitor.merge.read_shards import Shard, csv_shards_in


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
