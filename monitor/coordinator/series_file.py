"""The series table of a rank: a file that is named by its content's digest and written once; the manifest points at it.

Gzipped JSON of columns with one entry a series, in the order of their numbers. ``kind`` and ``layout`` index ``kinds`` and
``layouts``; a layout of -1 means that the series was not measured yet. ``varies`` lists the series whose shape or dtype has
changed since the first measurement. ``placement`` indexes ``placements``; -1 means that only this rank holds the series.
Placements index ``groups``, which holds each set of ranks once: a job of thousands of ranks has few different sets.
``flow_from`` and ``flow_to`` are the ends of edges between series, and ``passes`` the order of micro-batches, see ``Flow``.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from os import PathLike
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import model_validator

from monitor.coordinator import manifest_format
from monitor.series import KIND_TABLE, LOCAL, REPLICA_KIND, Placement, Ranks, Series, SeriesTable, Shard
from monitor.stats.partials import KindRows, TensorLayout
from monitor.stats.table import StepRows

SERIES_LIMIT: Final = 256 * 2**20
"""Largest size of an unpacked series file, in bytes."""

NOT_MEASURED: Final = -1
LOCAL_PLACEMENT: Final = -1

T = TypeVar("T", bound=Hashable)

MOST_EDGES: Final = 200_000
"""At most so many edges are kept; a single module with a thousand inputs and outputs has a million."""

MOST_PASSES: Final = 20_000

_FED_BY: Final = {kind.name: kind.fed_by for kind in KIND_TABLE}


class Edge(NamedTuple):
    """Two series by their numbers: the tensor of ``source`` was an input of the tensor of ``target``."""

    source: int
    target: int


class Pass(NamedTuple):
    """The forward or the backward of one micro-batch through one chunk of the model."""

    forward: bool
    vpp_stage: int
    micro_step: int


@dataclass(frozen=True, slots=True)
class Flow:
    """The dataflow of one rank in one step.

    Attributes:
        edges: Each edge once. Edges lead from earlier to later measurements, so the graph has no cycle.
        passes: In the order in which the rank began them.
        cut: Whether edges or passes were left out.
    """

    edges: tuple[Edge, ...] = ()
    passes: tuple[Pass, ...] = ()
    cut: bool = False


NO_FLOW: Final = Flow()


def edges_of_parameters(series: Sequence[Series]) -> Iterator[Edge]:
    """The edges between the kinds of each parameter: from its local gradient over the aggregated one to the new weight."""
    number = {one: index for index, one in enumerate(series)}
    for target, one in enumerate(series):
        for kind in _FED_BY.get(one.kind, ()):
            source = number.get(Series(kind, one.vpp_stage, one.name))
            if source is not None:
                yield Edge(source, target)


@dataclass(frozen=True, slots=True)
class MeasuredSeries:
    """An entry of the series table.

    Attributes:
        layout: Shape and dtype at the first measurement; None if the series was not measured.
        varies: Whether the series was measured in another layout since.
        placement: How the series relates to tensors of other ranks.
    """

    series: Series
    layout: TensorLayout | None
    varies: bool
    placement: Placement = LOCAL


@dataclass(frozen=True, slots=True)
class MeasuredColumns:
    """Entries of a series table as columns: each kind, layout and placement once, and its number for each series.

    Attributes:
        name: Of each series.
        kind, vpp_stage, layout, placement: int64, shape ``(series,)``. ``layout`` is ``NOT_MEASURED`` and ``placement``
            ``LOCAL_PLACEMENT`` where there is none.
        varies: Whether the series was measured in another layout since, same shape.
    """

    kinds: Sequence[str]
    layouts: Sequence[TensorLayout]
    placements: Sequence[Placement]
    name: Sequence[str]
    kind: NDArray[np.int64]
    vpp_stage: NDArray[np.int64]
    layout: NDArray[np.int64]
    placement: NDArray[np.int64]
    varies: NDArray[np.bool_]

    @classmethod
    def of(cls, series: Sequence[MeasuredSeries]) -> MeasuredColumns:
        kinds, kind = _coded(one.series.kind for one in series)
        layouts, layout = _coded(one.layout for one in series if one.layout is not None)
        # By object: a lookup by content would hash sets of thousands of ranks for each series.
        placed = {id(one.placement): one.placement for one in series}
        numbers = {key: number for number, key in enumerate(placed)}
        of_layout = iter(layout)
        return cls(
            kinds,
            layouts,
            [*placed.values()],
            [one.series.name for one in series],
            np.array(kind, dtype=np.int64),
            np.array([one.series.vpp_stage for one in series], dtype=np.int64),
            np.array([NOT_MEASURED if one.layout is None else next(of_layout) for one in series], dtype=np.int64),
            np.array([numbers[id(one.placement)] for one in series], dtype=np.int64),
            np.array([one.varies for one in series], dtype=np.bool_),
        )

    def measured(self) -> tuple[list[str], NDArray[np.int64], Sequence[str], NDArray[np.bool_]]:
        """What is measured: kinds, and of each series the number of its kind, its name, and whether it is a replica.

        A replica has the kind and the name of what it replicates.
        """
        kinds, kind, names = list(self.kinds), self.kind, self.name
        replica = kind == (kinds.index(REPLICA_KIND) if REPLICA_KIND in kinds else len(kinds))
        if replica.any():
            numbers, kind, names = {one: number for number, one in enumerate(kinds)}, kind.copy(), list(names)
            for at in np.flatnonzero(replica).tolist():
                of, _, names[at] = names[at].partition("/")
                kind[at] = numbers.setdefault(of, len(numbers))
            kinds = list(numbers)
        return kinds, kind, names, replica


@dataclass(frozen=True, slots=True)
class SeriesFile:
    """A file to be written. ``name`` contains the digest of ``content``, so an existing file need not be written again."""

    name: str
    count: int
    content: bytes


class Measured:
    """The measured series of a rank, with their first layouts. Columns are aligned with its ``SeriesTable``."""

    def __init__(self, series: SeriesTable) -> None:
        self._series = series
        self._layouts: list[TensorLayout] = []
        self._layout: NDArray[np.int64] = np.empty(0, np.int64)
        self._varies: NDArray[np.bool_] = np.empty(0, np.bool_)
        self._flow = NO_FLOW
        self._file: SeriesFile | None = None
        self._before: dict[str, tuple[bytes, bytes]] = {}

    def flows(self, flow: Flow) -> None:
        """Set the dataflow between series of the table, including series that are not measured yet."""
        self._flow, self._file = flow, None

    def see(self, rows: StepRows) -> None:
        """Add the rows of one step. A step without news costs one comparison a kind."""
        self._layouts = rows.layouts
        for kind, kind_rows in rows.kinds.items():
            seen = kind_rows.series.tobytes(), kind_rows.layout.tobytes()
            if len(kind_rows) and seen != self._before.get(kind):
                self._see(kind_rows)
                self._before[kind] = seen

    def file(self) -> SeriesFile | None:
        """The table as a file, the same object until it changes; None before the first measurement."""
        if self._file is None and len(self._layout):
            self._file = _named_by_content(self._columns(), len(self._layout))
        return self._file

    def _see(self, rows: KindRows) -> None:
        self._grow(int(rows.series.max()) + 1)
        fresh = self._layout[rows.series] == NOT_MEASURED
        if fresh.any():
            series, first = np.unique(rows.series[fresh], return_index=True)
            self._layout[series] = rows.layout[fresh][first]
            self._file = None
        other = rows.series[self._layout[rows.series] != rows.layout]
        if not self._varies[other].all():
            self._varies[other] = True
            self._file = None

    def _grow(self, size: int) -> None:
        missing = size - len(self._layout)
        if missing > 0:
            self._layout = np.append(self._layout, np.full(missing, NOT_MEASURED))
            self._varies = np.append(self._varies, np.zeros(missing, np.bool_))

    def _columns(self) -> dict[str, object]:
        """All columns. Only layouts in use are included: a rank with a new sequence length every step has many layouts."""
        series = [self._series[index] for index in range(len(self._layout))]
        kinds, kind = _coded(one.kind for one in series)
        used, layout = np.unique(self._layout, return_inverse=True)
        measured = used[used != NOT_MEASURED]
        return {
            "schema_version": manifest_format.SCHEMA_VERSION,
            "kinds": kinds,
            "layouts": [(self._layouts[index].shape, self._layouts[index].dtype) for index in measured],
            "kind": kind,
            "vpp_stage": [one.vpp_stage for one in series],
            "name": [one.name for one in series],
            "layout": (layout - (len(used) - len(measured))).tolist(),
            "varies": np.flatnonzero(self._varies).tolist(),
            **self._placed(series),
            **self._flowing(series),
        }

    def _flowing(self, series: Sequence[Series]) -> dict[str, object]:
        """The columns of the flow, for series in the table."""
        edges = [edge for edge in self._flow.edges if max(edge) < len(series)]
        edges = list(dict.fromkeys([*edges, *edges_of_parameters(series)]))
        return {
            "flow_from": [edge.source for edge in edges],
            "flow_to": [edge.target for edge in edges],
            "flow_cut": self._flow.cut,
            "passes": self._flow.passes,
        }

    def _placed(self, series: Sequence[Series]) -> dict[str, object]:
        """The columns of placements."""
        each = [self._series.placement(one) for one in series]
        placements, codes = _coded(one for one in each if one is not LOCAL)
        code = iter(codes)
        # Series share their sets of ranks. A lookup by content would take minutes in a job of thousands of ranks.
        ranks = {id(group): group for one in placements for group in groups_of(one)}
        groups, numbers = _coded(ranks.values())
        number = dict(zip(ranks, numbers, strict=True))
        return {
            "groups": groups,
            "placements": [_placement_columns(one, number) for one in placements],
            "placement": [LOCAL_PLACEMENT if one is LOCAL else next(code) for one in each],
        }


def groups_of(placement: Placement) -> tuple[Ranks, Ranks, Ranks]:
    """The groups of ranks that are saved with a series: ``replicas``, ``unclaimed``, and the ranks of the shards."""
    return placement.replicas, placement.unclaimed, placement.shard.ranks if placement.shard else ()


def _placement_columns(placement: Placement, number: Mapping[int, int]) -> dict[str, object]:
    """The columns of a placement. ``number`` maps the ``id`` of a set of ranks to its index."""
    shard = placement.shard
    cut = (
        {"ranks": number[id(shard.ranks)], "global_shape": shard.global_shape, "offset": shard.offset, "flat": shard.flat}
        if shard
        else None
    )
    return {
        "replicas": number[id(placement.replicas)],
        "unclaimed": number[id(placement.unclaimed)],
        "partial": placement.partial,
        "shard": cut,
        **({"assumed": True} if placement.assumed else {}),
    }


class ShardRecord(manifest_format.StrictRecord):
    """``monitor.series.Shard``, its ranks by number."""

    ranks: manifest_format.Natural
    global_shape: tuple[manifest_format.Natural, ...]
    offset: tuple[manifest_format.Natural, ...]
    flat: bool


class PlacementRecord(manifest_format.StrictRecord):
    """``monitor.series.Placement``, groups of ranks by number."""

    replicas: manifest_format.Natural
    unclaimed: manifest_format.Natural
    partial: bool
    shard: ShardRecord | None
    assumed: bool = False

    def placement(self, groups: Sequence[Ranks]) -> Placement:
        cut = self.shard
        shard = Shard(groups[cut.ranks], cut.global_shape, cut.offset, cut.flat) if cut else None
        return Placement(groups[self.replicas], groups[self.unclaimed], shard, self.partial, assumed=self.assumed)


class SeriesColumns(manifest_format.StrictRecord):
    """The schema of a series file."""

    schema_version: int
    kinds: tuple[str, ...]
    layouts: tuple[tuple[tuple[manifest_format.Natural, ...], str], ...]
    kind: tuple[manifest_format.Natural, ...]
    vpp_stage: tuple[manifest_format.Natural, ...]
    name: tuple[str, ...]
    layout: tuple[int, ...]
    varies: tuple[manifest_format.Natural, ...]
    groups: tuple[tuple[manifest_format.Natural, ...], ...] = ()
    placements: tuple[PlacementRecord, ...] = ()
    placement: tuple[int, ...] = ()
    flow_from: tuple[manifest_format.Natural, ...] = ()
    flow_to: tuple[manifest_format.Natural, ...] = ()
    flow_cut: bool = False
    passes: tuple[tuple[bool, manifest_format.Natural, manifest_format.Natural], ...] = ()

    @model_validator(mode="after")
    def _aligned(self) -> SeriesColumns:
        manifest_format.known_version(self.schema_version)
        if not len(self.kind) == len(self.vpp_stage) == len(self.name) == len(self.layout):
            raise ValueError("the columns differ in length")
        if (self.placement and len(self.placement) != len(self.name)) or len(self.flow_from) != len(self.flow_to):
            raise ValueError("the columns differ in length")
        for column, below in self._pointers():
            if max(column, default=-1) >= len(below):
                raise ValueError("an index is out of range of the list that it indexes")
        if min(self.layout, default=0) < NOT_MEASURED or min(self.placement, default=0) < LOCAL_PLACEMENT:
            raise ValueError("a layout or placement below -1")
        return self

    def _pointers(self) -> Iterator[tuple[Sequence[int], Sequence[object]]]:
        yield self.kind, self.kinds
        yield self.layout, self.layouts
        yield self.varies, self.name
        yield self.placement, self.placements
        yield [*self.flow_from, *self.flow_to], self.name
        for one in self.placements:
            yield [one.replicas, one.unclaimed, one.shard.ranks if one.shard else 0], self.groups

    def measured(self) -> MeasuredColumns:
        """The same as arrays. ``vpp_stage`` must fit into 64 bits."""
        varies = np.zeros(len(self.name), dtype=np.bool_)
        varies[list(self.varies)] = True
        numbers = (self.kind, self.vpp_stage, self.layout, self._placement())
        kind, vpp_stage, layout, placement = (np.array(each, dtype=np.int64) for each in numbers)
        layouts = [TensorLayout(shape, dtype) for shape, dtype in self.layouts]
        placements = [one.placement(self.groups) for one in self.placements]
        return MeasuredColumns(self.kinds, layouts, placements, self.name, kind, vpp_stage, layout, placement, varies)

    def _placement(self) -> tuple[int, ...]:
        return self.placement or (LOCAL_PLACEMENT,) * len(self.name)

    def series(self) -> tuple[MeasuredSeries, ...]:
        layouts = [TensorLayout(shape, dtype) for shape, dtype in self.layouts]
        varies = frozenset(self.varies)
        placed = [one.placement(self.groups) for one in self.placements]
        columns = zip(self.kind, self.vpp_stage, self.name, self.layout, self._placement(), strict=True)
        return tuple(
            MeasuredSeries(
                Series(self.kinds[kind], vpp_stage, name),
                None if layout == NOT_MEASURED else layouts[layout],
                index in varies,
                LOCAL if where == LOCAL_PLACEMENT else placed[where],
            )
            for index, (kind, vpp_stage, name, layout, where) in enumerate(columns)
        )

    def flow(self) -> Flow:
        edges = map(Edge, self.flow_from, self.flow_to)
        return Flow(tuple(edges), tuple(map(Pass._make, self.passes)), self.flow_cut)


def read_series(directory: str | PathLike[str], manifest: manifest_format.ManifestRecord) -> tuple[MeasuredSeries, ...]:
    """The series that the manifest in ``directory`` points at, in the order of their numbers.

    While the rank is alive its manifest may move on to another file; then read the manifest again.

    Raises:
        ManifestError: the file is missing, too large or damaged, or its content does not match the digest in its name.
    """
    columns = read_columns(Path(directory), manifest)
    return columns.series() if columns else ()


def read_flow(directory: Path, manifest: manifest_format.ManifestRecord) -> Flow:
    """The dataflow of this rank. Its edges index the series that ``read_series`` returns.

    Raises:
        ManifestError: as ``read_series`` does.
    """
    columns = read_columns(directory, manifest)
    return columns.flow() if columns else NO_FLOW


def read_columns(directory: Path, manifest: manifest_format.ManifestRecord) -> SeriesColumns | None:
    """The whole file, for callers that need series and flow; None before the first measurement. Raises like ``read_series``."""
    if manifest.series is None:
        return None
    path = directory / manifest.series.file
    content = _unpacked(path)
    if path.name != _name(content):
        raise manifest_format.ManifestError(f"{path} is damaged: its content does not match the digest in its name")
    return manifest_format.parsed(SeriesColumns, content, path)


def _unpacked(path: Path) -> bytes:
    packed, unpacking = manifest_format.content_of(path, SERIES_LIMIT, "series table"), zlib.decompressobj(zlib.MAX_WBITS | 16)
    try:
        content = unpacking.decompress(packed, SERIES_LIMIT + 1)
    except zlib.error as error:
        raise manifest_format.ManifestError(f"{path} cannot be read: {error}") from error
    if len(content) > SERIES_LIMIT:
        raise manifest_format.ManifestError(f"{path} is larger than any series table ({SERIES_LIMIT} bytes)")
    if not unpacking.eof:
        raise manifest_format.ManifestError(f"{path} cannot be read: it is cut off")
    return content


def _named_by_content(columns: dict[str, object], count: int) -> SeriesFile:
    content = json.dumps(columns, separators=(",", ":")).encode()
    return SeriesFile(_name(content), count, gzip.compress(content, mtime=0))


def _name(content: bytes) -> str:
    return f"series-{sha256(content).hexdigest()[:16]}.json.gz"


def _coded(values: Iterable[T]) -> tuple[list[T], list[int]]:
    """The distinct values, and the index of each entry's value."""
    codes: dict[T, int] = {}
    coded = [codes.setdefault(value, len(codes)) for value in values]
    return list(codes), coded
