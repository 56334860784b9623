"""What lies in the directories of some ranks: their shards, and their series in columns.

There may be thousands of directories with hundreds of files each, so the workers survey them in parts. A job has millions of
series. They go to files: one for each kind, by rank, and in the order in which the rank first saw them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Final

import pyarrow as pa

from monitor.coordinator.manifest_format import ManifestError
from monitor.coordinator.series_file import MeasuredSeries
from monitor.merge.discovery import RankRun, SetAside
from monitor.merge.read_shards import Shard, shards_in
from monitor.merge.tables import write_file
from monitor.series import CALL_KIND, DIRECTION_KIND, REPLICA_KIND, Placement, Ranks
from monitor.sinks.arrow import TEXT

UNKNOWN: Final = -1

SHARDS: Final = pa.schema(
    {
        "run": pa.int64(),  # place of the directory among those of the job
        "kind": TEXT,
        "file": TEXT,
        "first": pa.int64(),  # steps that it may hold
        "last": pa.int64(),
        "rows": pa.int64(),
    }
)
"""A row for each shard: by run."""

SERIES: Final = pa.schema(
    {
        "rank": pa.int64(),
        "order": pa.int64(),  # in which the rank first saw its series
        "vpp_stage": pa.int64(),
        "name": TEXT,  # of a replica that of what it is compared with
        "replica": pa.bool_(),
        "stage": pa.int64(),  # place in the pipeline, UNKNOWN without one
        "elements": pa.int64(),  # that this rank holds, UNKNOWN where that changes
        "size": pa.int64(),  # of the whole tensor
        "replicas": pa.int64(),  # sets of ranks by number, UNKNOWN where it is empty
        "unclaimed": pa.int64(),
        "cut": pa.int64(),
        "term": pa.bool_(),  # of a sum over other ranks
        "assumed": pa.bool_(),  # to be one of `unclaimed`, unless its numbers differ from theirs
    }
)
"""A row for each series of each rank."""


_ShardRow = tuple[int, str, str, int, int, int]


@dataclass(frozen=True, slots=True)
class Visit:
    """What to look at.

    Attributes:
        first: Place of the first of these runs among those of the job.
        runs: Of some ranks, all of each: by rank, and of a rank in order of time.
        directory: Where files of series go; made here.
    """

    first: int
    runs: tuple[RankRun, ...]
    directory: Path


@dataclass
class Findings:
    """What was seen.

    Attributes:
        shards: In the columns ``SHARDS``.
        series: Files with the columns ``SERIES``, by kind.
        groups: Sets of ranks, in the order of their numbers.
        names: Names of all series, by stage of the pipeline.
    """

    shards: pa.Table
    series: dict[str, Path]
    groups: list[Ranks]
    names: dict[int, set[str]]
    set_aside: list[SetAside] = field(default_factory=list)


class _Groups:
    """Sets of ranks, numbered. Series share the objects: to look each up by its content would take longer than all the rest."""

    def __init__(self) -> None:
        self._numbers: dict[Ranks, int] = {}
        self._by_object: dict[int, tuple[Ranks, int]] = {}

    def number(self, ranks: Ranks) -> int:
        if not ranks:
            return UNKNOWN
        if id(ranks) not in self._by_object:  # it is kept, so no other one gets its id
            self._by_object[id(ranks)] = ranks, self._numbers.setdefault(ranks, len(self._numbers))
        return self._by_object[id(ranks)][1]

    def known(self) -> list[Ranks]:
        """In the order of their numbers."""
        return list(self._numbers)


def look(visit: Visit) -> Findings:
    """Look at what lies there.

    Raises:
        OSError: a file cannot be written.
    """
    shards, aside = _shards(visit)
    groups = _Groups()
    with_shares: set[int] = set()
    rows: dict[str, list[tuple[object, ...]]] = {}
    names: dict[int, set[str]] = {}
    for runs in _by_rank(visit.runs):
        for order, one in enumerate(_series_of(runs, aside)):
            kind, name = _measured(one)
            stage = _stage(runs[-1], one)
            if kind == DIRECTION_KIND:
                with_shares.add(runs[-1].rank)
            if stage != UNKNOWN:
                names.setdefault(stage, set()).add(name)
            rows.setdefault(kind, []).append((runs[-1].rank, order, *_row(one, name, stage, groups)))
    every = sorted([*shards, *_shares(shards, with_shares, visit)], key=lambda row: row[0])
    return Findings(_table(every, SHARDS), _written(rows, visit.directory), groups.known(), names, aside)


def _shares(shards: Iterable[_ShardRow], ranks: Collection[int], visit: Visit) -> Iterator[_ShardRow]:
    """The files of CSV in which shares stand among calls of operators, as files of shares."""
    for run, kind, file, first, last, rows in shards:
        if kind == CALL_KIND and file.endswith(".csv") and visit.runs[run - visit.first].rank in ranks:
            yield run, DIRECTION_KIND, file, first, last, rows


def _shards(visit: Visit) -> tuple[list[_ShardRow], list[SetAside]]:
    found: list[tuple[int, Shard]] = []
    aside = []
    for number, run in enumerate(visit.runs, start=visit.first):
        shards, others = shards_in(run.directory, run.rank)
        found += [(number, one) for one in shards]
        aside += others
    return [(run, one.kind, one.path.name, *one.steps, one.rows) for run, one in found], aside


def _by_rank(runs: Sequence[RankRun]) -> Iterator[list[RankRun]]:
    by_rank: dict[int, list[RankRun]] = {}
    for run in runs:
        by_rank.setdefault(run.rank, []).append(run)
    yield from by_rank.values()


def _series_of(runs: Sequence[RankRun], aside: list[SetAside]) -> Iterable[MeasuredSeries]:
    """Of a rank; of several directories the last one tells, and what it does not know the ones before."""
    known: dict[object, MeasuredSeries] = {}
    for run in reversed(runs):
        try:
            for one in run.series():
                known.setdefault(one.series, one)
        except ManifestError as error:
            aside.append(SetAside(run.directory.name, f"its series are not known: {error}"))
    return known.values()


def _measured(one: MeasuredSeries) -> tuple[str, str]:
    """The kind and the name of what is measured: a replica's are those of what it replicates."""
    if one.series.kind != REPLICA_KIND:
        return one.series.kind, one.series.name
    kind, _, name = one.series.name.partition("/")
    return kind, name


def _stage(run: RankRun, one: MeasuredSeries) -> int:
    pipeline, chunk = run.manifest.pipeline, one.series.vpp_stage
    return pipeline.stages[chunk] if pipeline is not None and chunk < len(pipeline.stages) else UNKNOWN


def _row(one: MeasuredSeries, name: str, stage: int, groups: _Groups) -> tuple[object, ...]:
    """The columns of ``SERIES`` but the first two."""
    placement = one.placement
    elements = UNKNOWN if one.layout is None or one.varies else math.prod(one.layout.shape)
    size = elements if placement.shard is None else math.prod(placement.shard.global_shape)
    numbers = map(groups.number, _groups_of(placement))
    replica = one.series.kind == REPLICA_KIND
    return one.series.vpp_stage, name, replica, stage, elements, size, *numbers, placement.partial, placement.assumed


def _groups_of(placement: Placement) -> tuple[Ranks, Ranks, Ranks]:
    return placement.replicas, placement.unclaimed, placement.shard.ranks if placement.shard else ()


def _written(rows: dict[str, list[tuple[object, ...]]], directory: Path) -> dict[str, Path]:
    directory.mkdir(exist_ok=True)  # a cluster does a task again whose worker it has lost
    # By number: a kind in a manifest may be anything.
    paths = (directory / f"{number}.arrow" for number in count())
    files = dict(zip(rows, paths, strict=False))
    for kind, path in files.items():
        write_file(path, _table(rows[kind], SERIES), SERIES)
    return files


def _table(rows: Sequence[tuple[object, ...]], schema: pa.Schema) -> pa.Table:
    if not rows:
        return schema.empty_table()
    columns = zip(zip(*rows, strict=True), schema, strict=True)
    return pa.table([_column(column, one.type) for column, one in columns], schema=schema)


def _column(values: Sequence[object], kind: pa.DataType) -> pa.Array:
    return pa.array(values, type=pa.string()).dictionary_encode() if kind == TEXT else pa.array(values, type=kind)
