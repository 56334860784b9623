"""Which series of which ranks are the same tensor, a part of one, or a copy of a part."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from monitor.merge.discovery import RankRun, SetAside
from monitor.merge.naming import LayerNames
from monitor.placement import Placement, Ranks
from monitor.ranks.records import ManifestError, ManifestRecord
from monitor.ranks.series_file import MeasuredSeries
from monitor.series import REPLICA_KIND

UNKNOWN: Final = -1

SCHEMA: Final = pa.schema(
    {
        "rank": pa.int32(),
        "vpp_stage": pa.int64(),
        "name": pa.string(),
        "of": pa.string(),  # of a replica the kind that it is compared with, otherwise empty
        "global_name": pa.string(),
        "stage": pa.int64(),  # place in the pipeline, UNKNOWN without one
        "tensor": pa.int64(),  # number of the tensor among those of its kind, in model order
        "part": pa.int64(),  # number of the part, of which every copy has the same
        "elements": pa.int64(),  # that this rank holds, UNKNOWN where that changes
        "whole": pa.int64(),  # elements of the whole tensor, UNKNOWN where that changes
        "parts": pa.int64(),  # how many parts there are, UNKNOWN where a rank that may hold one is missing
        "term": pa.bool_(),  # of a sum over other ranks
    }
)
"""A row for each series of each rank: by rank, and in the order in which the rank first saw them."""


@dataclass(frozen=True, slots=True)
class Member:
    """What one rank has of a series."""

    rank: int
    stage: int
    order: int
    name: str
    global_name: str
    measured: MeasuredSeries

    @property
    def placement(self) -> Placement:
        return self.measured.placement

    @property
    def elements(self) -> int:
        layout = self.measured.layout
        return UNKNOWN if layout is None or self.measured.varies else math.prod(layout.shape)

    def of(self) -> tuple[str, str]:
        """The kind and the name of what is measured: a replica's are those of what it replicates."""
        series = self.measured.series
        if series.kind != REPLICA_KIND:
            return series.kind, series.name
        kind, _, name = series.name.partition("/")
        return kind, name


@dataclass
class _Sets:
    """Ranks that belong together."""

    _above: dict[int, int] = field(default_factory=dict)
    _joined: set[Ranks] = field(default_factory=set)

    def join(self, ranks: Ranks) -> None:
        if ranks in self._joined:
            return  # every member of a set of ranks names the whole of it
        self._joined.add(ranks)
        for one, other in itertools.pairwise(ranks):
            low, high = sorted((self.of(one), self.of(other)))
            self._above[high] = low

    def of(self, rank: int) -> int:
        """The lowest rank of those that ``rank`` is with."""
        while (above := self._above.get(rank, rank)) != rank:
            rank = above
        return rank


def catalogued(runs: Sequence[RankRun], directory: Path) -> tuple[dict[str, Path], list[SetAside]]:
    """Write the catalogue of each kind to a file in ``directory``.

    Returns:
        The files by kind, and the directories whose series cannot be read.
    """
    series, aside = _series_of(runs)
    manifests = {run.rank: run.manifest for run in runs}
    by_kind: dict[str, list[Member]] = {}
    for member in _members(series, manifests):
        by_kind.setdefault(member.of()[0], []).append(member)
    files = {}
    for number, (kind, members) in enumerate(by_kind.items()):
        files[kind] = directory / f"series-{number}.arrow"
        table = _table(kind, members, frozenset(series))
        with pa.OSFile(str(files[kind]), "wb") as file, pa.ipc.new_file(file, SCHEMA) as writer:
            writer.write_table(table)
    return files, aside


def read_catalogue(path: Path) -> pa.Table:
    """In the columns of ``SCHEMA``."""
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_file(file).read_all()


def of_rank(catalogue: pa.Table, rank: int) -> dict[tuple[str, int, str], int]:
    """The row of each series of a rank, by what a replica is compared with, chunk and name."""
    first, end = np.searchsorted(catalogue["rank"].to_numpy(), [rank, rank + 1]).tolist()
    own = catalogue.slice(first, end - first)
    keys = zip(own["of"].to_pylist(), own["vpp_stage"].to_pylist(), own["name"].to_pylist(), strict=True)
    return {key: first + index for index, key in enumerate(keys)}


def _series_of(runs: Sequence[RankRun]) -> tuple[dict[int, dict[object, MeasuredSeries]], list[SetAside]]:
    """Of each rank; of several directories the last one tells, and what it does not know the ones before."""
    found: dict[int, dict[object, MeasuredSeries]] = {}
    aside = []
    for run in reversed(runs):
        known = found.setdefault(run.rank, {})
        try:
            for one in run.series():
                known.setdefault(one.series, one)
        except ManifestError as error:
            aside.append(SetAside(run.directory.name, f"its series are not known: {error}"))
    return {rank: found[rank] for rank in sorted(found)}, aside


def _members(
    series: Mapping[int, Mapping[object, MeasuredSeries]], manifests: Mapping[int, ManifestRecord]
) -> Iterator[Member]:
    names = _LayersOfPipelines(series, manifests)
    for rank, own in series.items():
        for order, one in enumerate(own.values()):
            member = Member(rank, names.stage(rank, one), order, one.series.name, "", one)
            global_name = names.of(rank, one.series.vpp_stage, member.of()[1])
            yield Member(rank, member.stage, order, one.series.name, global_name, one)


class _LayersOfPipelines:
    """The names of all pipelines of the job, which are alike: what one rank of a stage does not hold another one does."""

    def __init__(self, series: Mapping[int, Mapping[object, MeasuredSeries]], manifests: Mapping[int, ManifestRecord]) -> None:
        self._stages = {rank: one.pipeline.stages for rank, one in manifests.items() if one.pipeline is not None}
        names: dict[int, set[str]] = {}
        for rank, own in series.items():
            for one in own.values():
                stage = self.stage(rank, one)
                if stage != UNKNOWN:
                    name = Member(rank, stage, 0, one.series.name, "", one).of()[1]
                    names.setdefault(stage, set()).add(name)
        count = max(
            (len(one.pipeline.ranks) * len(one.pipeline.stages) for one in manifests.values() if one.pipeline), default=0
        )
        whole = not any(one.config.get("targets") for one in manifests.values())
        self._names = LayerNames(names, count, whole=whole)

    def stage(self, rank: int, one: MeasuredSeries) -> int:
        stages, chunk = self._stages.get(rank, ()), one.series.vpp_stage
        return stages[chunk] if chunk < len(stages) else UNKNOWN

    def of(self, rank: int, chunk: int, name: str) -> str:
        stages = self._stages.get(rank, ())
        return self._names.of(stages[chunk], name) if chunk < len(stages) else name


def _table(kind: str, members: Sequence[Member], ranks: frozenset[int]) -> pa.Table:
    """The series of a kind and the replicas that are compared with them."""
    same: dict[tuple[int, str], list[Member]] = {}
    for member in members:
        same.setdefault((member.measured.series.vpp_stage, member.of()[1]), []).append(member)
    told = [one for group in same.values() for one in _placed(group, ranks)]
    number = {
        tensor: index for index, tensor in enumerate(dict.fromkeys(key for _, key, *_ in sorted(told, key=_in_model_order)))
    }
    told.sort(key=lambda one: (one[0].rank, one[0].order))
    columns = (
        (
            member.rank,
            member.measured.series.vpp_stage,
            member.name,
            kind if member.measured.series.kind == REPLICA_KIND else "",
            member.global_name,
            member.stage,
            number[tensor],
            part,
            member.elements,
            whole,
            parts,
            member.placement.partial,
        )
        for member, tensor, part, whole, parts in told
    )
    return pa.Table.from_arrays(
        [pa.array(column, type=one.type) for column, one in zip(zip(*columns, strict=True), SCHEMA, strict=True)], schema=SCHEMA
    )


_Placed = tuple[Member, tuple[int, str, int], int, int, int]
"""A member; its tensor, its part, the elements of the whole, and the number of parts."""


def _in_model_order(placed: _Placed) -> tuple[int, int, int, str]:
    member, tensor, *_ = placed
    return member.stage, member.order, member.rank, tensor[1]


def _placed(members: Sequence[Member], ranks: frozenset[int]) -> Iterator[_Placed]:
    """Find the tensors among the members of one name, and the parts of each."""
    tensors, parts = _Sets(), _Sets()
    for one in members:
        where = one.placement
        for copies in (where.replicas, where.unclaimed):
            parts.join(copies)
            tensors.join(copies)
        if where.shard:
            tensors.join(where.shard.ranks)
    of_tensor: dict[int, list[Member]] = {}
    for one in members:
        of_tensor.setdefault(tensors.of(one.rank), []).append(one)
    for tensor, own in of_tensor.items():
        series = own[0].measured.series
        key = (series.vpp_stage, own[0].of()[1], tensor)
        writers = [one for one in own if one.measured.series.kind != REPLICA_KIND]
        whole, count = _whole(own), _parts(writers, parts, ranks)
        yield from ((one, key, parts.of(one.rank), whole, count) for one in own)


def _whole(members: Sequence[Member]) -> int:
    """Elements of the tensor, where they are always as many."""
    if any(one.measured.varies or one.measured.layout is None for one in members):
        return UNKNOWN
    shard = members[0].placement.shard
    return members[0].elements if shard is None else math.prod(shard.global_shape)


def _parts(members: Sequence[Member], parts: _Sets, ranks: frozenset[int]) -> int:
    cuts = {one.placement.shard.ranks for one in members if one.placement.shard}
    holders = {rank for cut in cuts for rank in cut}
    return len({parts.of(one.rank) for one in members}) if holders <= ranks else UNKNOWN
