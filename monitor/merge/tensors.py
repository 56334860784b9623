"""Which series of which ranks are the same tensor, a part of one, or a copy of a part."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import InitVar, dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow.compute import index_in  # type: ignore[attr-defined]

from monitor.coordinator.manifest_format import ManifestError
from monitor.coordinator.series_file import MeasuredColumns, MeasuredSeries, groups_of
from monitor.merge.discovery import RankRun, SetAside
from monitor.merge.layer_names import LayerNames
from monitor.merge.tables import NONE, Codes, Shard, Texts, order_by, read_file, shards_in, starts_of_runs, write_file
from monitor.series import CALL_KIND, DIRECTION_KIND, LOCAL, Placement, Ranks
from monitor.sinks.arrow import TEXT

# --- What lies in the directories of some ranks: their shards, and their series in columns.
#
# There may be thousands of directories with hundreds of files each, so the workers survey them in parts. A job has
# millions of series. They go to files: one for each kind, by rank, and in the order in which the rank first saw them.

UNKNOWN: Final = -1

WORDS: Final = {"float64": 2, "int64": 2, "uint64": 2, "complex64": 2, "complex128": 4}
"""Words of 32 bits in an element, by its type. Other types have one."""

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
        "begin": pa.int64(),  # element of the whole at which its part begins, UNKNOWN unless it is one range.
        "words": pa.int64(),  # of an element.
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
    """The directories to look at in one task.

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
    """What a visit found in its directories.

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
    survey = _Survey()
    for _, of_rank in itertools.groupby(visit.runs, key=lambda run: run.rank):
        runs = tuple(of_rank)
        survey.add(runs[-1], _series_of(runs, aside), groups)
    every = sorted([*shards, *_shares(shards, survey.ranks_of(DIRECTION_KIND), visit)], key=lambda row: row[0])
    return Findings(_table(every, SHARDS), survey.written(visit.directory), groups.known(), survey.names, aside)


def _shares(shards: Iterable[_ShardRow], ranks: Collection[int], visit: Visit) -> Iterator[_ShardRow]:
    """The files of CSV in which shares stand among calls of operators, as files of shares."""
    for run, kind, file, first, last, rows in shards:
        if kind == CALL_KIND and file.endswith(".csv") and visit.runs[run - visit.first].rank in ranks:
            yield run, DIRECTION_KIND, file, first, last, rows


def _shards(visit: Visit) -> tuple[list[_ShardRow], list[SetAside]]:
    found: list[tuple[int, Shard]] = []
    aside = []
    for number, run in enumerate(visit.runs, start=visit.first):
        shards, others = shards_in(run.directory, run.rank, run.end)
        found += [(number, one) for one in shards]
        aside += others
    return [(run, one.kind, one.path.name, *one.steps, one.rows) for run, one in found], aside


def _series_of(runs: Sequence[RankRun], aside: list[SetAside]) -> MeasuredColumns:
    """The series of a rank: from its last directory, and what that lacks from earlier ones."""
    known: dict[object, MeasuredSeries] = {}
    for run in reversed(runs):
        try:
            if len(runs) == 1:
                return run.measured()
            for one in run.series():
                known.setdefault(one.series, one)
        except ManifestError as error:
            aside.append(SetAside(run.directory.name, f"its series are not known: {error}"))
    return MeasuredColumns.of([*known.values()])


class _Survey:
    """Series of some ranks.

    Attributes:
        names: Of all of them, by stage of the pipeline.
    """

    def __init__(self) -> None:
        self.names: dict[int, set[str]] = {}
        self._numbers: dict[str, list[dict[str, NDArray[Any]]]] = {}
        self._texts: dict[str, list[str]] = {}

    def add(self, run: RankRun, series: MeasuredColumns, groups: _Groups) -> None:
        """Add those of a rank, whose last directory is ``run``."""
        kinds, kind, names, replica = series.measured()
        columns = {"replica": replica, **_facts(run, series, groups)}
        for stage in np.unique(columns["stage"][columns["stage"] != UNKNOWN]).tolist():
            self.names.setdefault(stage, set()).update(
                map(names.__getitem__, np.flatnonzero(columns["stage"] == stage).tolist())
            )
        for number, one in enumerate(kinds):
            order = np.flatnonzero(kind == number)
            if len(order):
                own = {"rank": np.full(len(order), run.rank), "order": order, **{n: c[order] for n, c in columns.items()}}
                self._numbers.setdefault(one, []).append(own)
                self._texts.setdefault(one, []).extend(map(names.__getitem__, order.tolist()))

    def ranks_of(self, kind: str) -> set[int]:
        return {int(each["rank"][0]) for each in self._numbers.get(kind, ())}

    def written(self, directory: Path) -> dict[str, Path]:
        """Files with the columns ``SERIES``, by kind."""
        directory.mkdir(exist_ok=True)  # a cluster does a task again whose worker it has lost
        # By number: a kind in a manifest may be anything.
        paths = (directory / f"{number}.arrow" for number in count())
        files = dict(zip(self._numbers, paths, strict=False))
        for kind, path in files.items():
            parts = self._numbers[kind]
            columns = {name: np.concatenate([each[name] for each in parts]) for name in parts[0]} | {"name": self._texts[kind]}
            write_file(path, pa.table([_column(columns[one.name], one.type) for one in SERIES], schema=SERIES), SERIES)
        return files


def _facts(run: RankRun, series: MeasuredColumns, groups: _Groups) -> dict[str, NDArray[Any]]:
    """The columns of ``SERIES`` that its number of layout, placement and chunk says."""
    pipeline = run.manifest.pipeline
    stages = np.array([*(pipeline.stages if pipeline is not None else ()), UNKNOWN])
    layouts = np.array([*(math.prod(one.shape) for one in series.layouts), UNKNOWN])
    elements = np.where(series.varies, UNKNOWN, layouts[series.layout])
    placed = [*series.placements, LOCAL]  # LOCAL_PLACEMENT is the last one
    whole = np.array([UNKNOWN if one.shard is None else math.prod(one.shard.global_shape) for one in placed])[series.placement]
    begin = np.array([_begin(one) for one in placed])[series.placement]
    words = np.array([*(WORDS.get(one.dtype.rpartition(".")[2], 1) for one in series.layouts), 1])[series.layout]
    numbers = np.array([[*map(groups.number, groups_of(one))] for one in placed])[series.placement]
    return {
        "vpp_stage": series.vpp_stage,
        "stage": stages[np.minimum(series.vpp_stage, len(stages) - 1)],
        "elements": elements,
        "size": np.where(whole == UNKNOWN, elements, whole),
        "begin": begin,
        "words": words,
        **dict(zip(_GROUPS, numbers.T, strict=True)),
        "term": np.array([one.partial for one in placed])[series.placement],
        "assumed": np.array([one.assumed for one in placed])[series.placement],
    }


def _begin(placement: Placement) -> int:
    """The element of the whole tensor at which a part begins, in the order of memory. ``UNKNOWN`` if the part is not one range,
    as far as its offset shows: a part that is cut in a later dimension, too, may have only zeros there.
    """
    shard = placement.shard
    if shard is None or not shard.offset or any(shard.offset[1:]):
        return UNKNOWN
    return shard.offset[0] if shard.flat else shard.offset[0] * math.prod(shard.global_shape[1:])


def _table(rows: Sequence[tuple[object, ...]], schema: pa.Schema) -> pa.Table:
    if not rows:
        return schema.empty_table()
    columns = zip(zip(*rows, strict=True), schema, strict=True)
    return pa.table([_column(column, one.type) for column, one in columns], schema=schema)


def _column(values: Sequence[object] | NDArray[Any], kind: pa.DataType) -> pa.Array:
    return pa.array(values, type=pa.string()).dictionary_encode() if kind == TEXT else pa.array(values, type=kind)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind whose catalogue is to be made.

    Attributes:
        series: Files of the survey, by rank; with each the numbers that its groups have in ``groups``.
        groups: Sets of ranks.
        ranks: Those that there are.
        names: Of the layers of the whole model.
        output: The file to write.
    """

    name: str
    series: tuple[tuple[Path, Index], ...]
    groups: tuple[Ranks, ...]
    ranks: frozenset[int]
    names: LayerNames
    output: Path


def catalogue(kind: Kind) -> None:
    """Find what belongs together among the series of a kind, and write it down.

    Raises:
        OSError: the file cannot be written.
    """
    series = pa.concat_tables(_renumbered(*one) for one in kind.series).unify_dictionaries().combine_chunks()
    write_file(kind.output, _tensor_table(series, kind), SCHEMA)


_GROUPS: Final = ("replicas", "unclaimed", "cut")
"""The columns of ``groups_of``, in its order."""


def _renumbered(path: Path, numbers: Index) -> pa.Table:
    """With the numbers of groups that hold for the job."""
    table = read_file(path)
    numbers = np.append(numbers, UNKNOWN)
    for column in _GROUPS:
        table = table.set_column(SERIES.get_field_index(column), column, pa.array(numbers[table[column].to_numpy()]))
    return table


def _tensor_table(series: pa.Table, kind: Kind) -> pa.Table:
    tensor, part = _labels(series, kind.groups)
    rank, order, stage = (series[name].to_numpy() for name in ("rank", "order", "stage"))
    parts, whole = _parts(series, tensor, part, kind), _whole(series, tensor)
    columns = {
        "global_name": _global_names(series, kind.names),
        "tensor": pa.array(_in_model_order(tensor, stage, order, rank)),
        "part": pa.array(part),
        "whole": pa.array(whole),
        "parts": pa.array(parts),
    }
    return pa.table([columns[one.name] if one.name in columns else series[one.name] for one in SCHEMA], schema=SCHEMA)


def _labels(series: pa.Table, groups: Sequence[Ranks]) -> tuple[Index, Index]:
    """The tensor of each series, as a number, and the part, as the lowest rank of those that hold it.

    Series of one name belong together as the sets of ranks in their placements say. Most names have the same sets, so what
    these make of the ranks is found once for each family of them.
    """
    name, rank = _dense([series["vpp_stage"].to_numpy(), _codes(series["name"])]), series["rank"].to_numpy()
    family, families = _families(name, [series[column].to_numpy() for column in _GROUPS])
    tensor, part = rank.copy(), rank.copy()
    for number, members in _members(family[name]):
        copies = {one for pair in families[number] for one in pair[:2]} - {UNKNOWN}
        every = {one for triple in families[number] for one in triple} - {UNKNOWN}
        parts, whole = (_Sets(groups[one] for one in sorted(sets)) for sets in (copies, every))
        part[members], tensor[members] = parts.of_all(rank[members]), whole.of_all(rank[members])
    return _dense([name, tensor]), part


def _families(name: Index, sets: Sequence[Index]) -> tuple[Index, list[tuple[tuple[int, ...], ...]]]:
    """For each name the number of its family, and of each family the triples of sets that its series have."""
    order = order_by([name, *sets])
    columns = [name, *sets] if order is None else [column[order] for column in (name, *sets)]
    distinct = starts_of_runs(columns)
    names, *triples = (column[distinct] for column in columns)
    starts = starts_of_runs([names]).tolist()
    listed = list(zip(*(column.tolist() for column in triples), strict=True))
    numbers: dict[tuple[tuple[int, ...], ...], int] = {}
    family = [numbers.setdefault(tuple(listed[a:b]), len(numbers)) for a, b in itertools.pairwise([*starts, len(listed)])]
    return np.array(family, dtype=np.int64), list(numbers)


def _members(of: Index) -> Iterator[tuple[int, Index]]:
    """Which entries have each number."""
    order = np.argsort(of, kind="stable")
    starts = starts_of_runs([of[order]])
    yield from zip(of[order][starts].tolist(), np.split(order, starts[1:]), strict=True)


@dataclass
class _Sets:
    """Ranks that belong together: sets that have a rank in common are one."""

    joined: InitVar[Iterable[Ranks]]
    _above: dict[int, int] = field(default_factory=dict)

    def __post_init__(self, joined: Iterable[Ranks]) -> None:
        for ranks in joined:
            for one, other in itertools.pairwise(ranks):
                low, high = sorted((self._of(one), self._of(other)))
                if low != high:
                    self._above[high] = low

    def of_all(self, ranks: Index) -> Index:
        """The lowest rank of those that each one is with."""
        each, where = np.unique(ranks, return_inverse=True)
        lowest: Index = np.array([self._of(rank) for rank in each.tolist()], dtype=np.int64)[where]
        return lowest

    def _of(self, rank: int) -> int:
        lowest = rank
        while (above := self._above.get(lowest, lowest)) != lowest:
            lowest = above
        while rank != lowest:  # shortens the way for the next search
            above, self._above[rank] = self._above[rank], lowest
            rank = above
        return lowest


def _whole(series: pa.Table, tensor: Index) -> Index:
    """Elements of the tensor of each series, where they are always as many."""
    _, first = np.unique(tensor, return_index=True)
    whole = series["size"].to_numpy()[first]
    whole[tensor[series["elements"].to_numpy() == UNKNOWN]] = UNKNOWN
    of_each: Index = whole[tensor]
    return of_each


def _parts(series: pa.Table, tensor: Index, part: Index, kind: Kind) -> Index:
    """How many parts the tensor of each series has, those counted that somebody writes."""
    writes = ~series["replica"].to_numpy()
    holders_known = np.array([*(_within(ranks, kind.ranks) for ranks in kind.groups), True])  # the last: it is not cut
    unknown = writes & ~holders_known[series["cut"].to_numpy()]
    order = order_by([tensor, part, ~writes])
    columns = [column if order is None else column[order] for column in (tensor, part, writes)]
    distinct = starts_of_runs(columns)
    count = np.bincount(columns[0][distinct][columns[2][distinct]], minlength=tensor.max() + 1)
    count[tensor[unknown]] = UNKNOWN
    of_each: Index = count[tensor]
    return of_each


def _within(ranks: Ranks, known: Collection[int]) -> bool:
    return all(rank in known for rank in ranks)


def _in_model_order(tensor: Index, stage: Index, order: Index, rank: Index) -> Index:
    """The tensors numbered anew: by stage, and as the ranks saw them."""
    model = order_by([stage, order, rank])
    in_order = tensor if model is None else tensor[model]
    tensors, first = np.unique(in_order, return_index=True)
    number = np.empty(len(tensors), dtype=np.int64)
    number[np.argsort(first)] = np.arange(len(tensors))
    numbered: Index = number[tensor]
    return numbered


def _global_names(series: pa.Table, names: LayerNames) -> pa.DictionaryArray:
    stage, chunk, codes = series["stage"].to_numpy(), series["vpp_stage"].to_numpy(), _codes(series["name"])
    texts = series["name"].chunk(0).dictionary.to_pylist()
    chunk = np.where(stage == UNKNOWN, chunk, 0)
    place = _dense([stage, chunk, codes])
    _, first = np.unique(place, return_index=True)
    spelled = (
        names.of(which, texts[code]) if which != UNKNOWN else f"chunk{model}:{texts[code]}" if model else texts[code]
        for which, model, code in zip(*(column[first].tolist() for column in (stage, chunk, codes)), strict=True)
    )
    each = pa.array(spelled, type=pa.string()).dictionary_encode()
    return pa.DictionaryArray.from_arrays(pa.array(each.indices.to_numpy()[place]), each.dictionary)


def _codes(column: pa.ChunkedArray) -> Index:
    codes: Index = column.chunk(0).indices.to_numpy().astype(np.int64)
    return codes


def _dense(columns: Sequence[Index]) -> Index:
    """A number from 0 on for each combination that occurs."""
    order = order_by(columns)
    in_order = columns if order is None else [column[order] for column in columns]
    changes = np.zeros(len(columns[0]), dtype=np.int64)
    changes[starts_of_runs(in_order)[1:]] = 1
    dense = np.empty_like(changes)
    dense[slice(None) if order is None else order] = np.cumsum(changes)
    return dense


# --- What is known of the series of a kind: which tensor each is, or which part of one. Made by ``catalogue``.

Index = NDArray[np.int64]
Flags = NDArray[np.bool_]

SCHEMA: Final = pa.schema(
    {
        "rank": pa.int64(),
        "vpp_stage": pa.int64(),
        "name": TEXT,
        "replica": pa.bool_(),  # that is only there to be compared
        "global_name": TEXT,
        "stage": pa.int64(),  # place in the pipeline, UNKNOWN without one.
        "tensor": pa.int64(),  # number of the tensor among those of its kind, in model order.
        "part": pa.int64(),  # number of the part, equal for all copies.
        "elements": pa.int64(),  # of this rank's part. UNKNOWN if the number changes.
        "whole": pa.int64(),  # elements of the whole tensor. UNKNOWN if the number changes.
        "begin": pa.int64(),  # element of the whole at which this rank's part begins. UNKNOWN if the part is not one range.
        "words": pa.int64(),  # of an element, for check sums.
        "parts": pa.int64(),  # number of parts. UNKNOWN if a rank that may hold one is missing.
        "term": pa.bool_(),  # a term of a sum over other ranks.
        "assumed": pa.bool_(),  # assumed to be a copy of its part, unless the numbers differ.
    }
)
"""A row for each series of each rank: by rank, and in the order in which the rank first saw them."""


class Catalogue:
    """The tensors of a kind, in the columns ``SCHEMA``.

    Args:
        others: Of the kind whose rows stand in the same files of CSV.
    """

    def __init__(self, table: pa.Table, kind: str = "", others: Catalogue | None = None) -> None:
        self._table = table.combine_chunks()
        self._columns: dict[str, NDArray[Any]] = {}
        self._last_codes: dict[bool, tuple[pa.StringArray, Codes]] = {}
        self.kind = kind
        self.others = others

    @classmethod
    def read(cls, path: Path | None, kind: str, others: Path | None = None) -> Catalogue:
        """An empty one where there is no file."""
        table = SCHEMA.empty_table() if path is None else read_file(path)
        return cls(table, kind, None if others is None else cls(read_file(others)))

    def of(self, column: str, series: Index) -> Index:
        """A column for rows of these series; ``UNKNOWN`` for those that are not in it."""
        taken: Index = _taken(self._column(column), series, UNKNOWN)
        return taken

    def is_replica(self, series: Index) -> Flags:
        """Whether rows are of replicas; False for a series that is not in the catalogue."""
        return self._flags("replica", series)

    def is_term(self, series: Index) -> Flags:
        return self._flags("term", series)

    def is_assumed(self, series: Index) -> Flags:
        return self._flags("assumed", series)

    def _flags(self, column: str, series: Index) -> Flags:
        taken: Flags = _taken(self._column(column), series, False)
        return taken

    def _column(self, name: str) -> NDArray[Any]:
        """A column of numbers or flags, kept: a column of a table copies its numbers each time that it is asked for them."""
        if name not in self._columns:
            self._columns[name] = self._table[name].combine_chunks().to_numpy(zero_copy_only=False)
        return self._columns[name]

    def texts(self, column: str, series: Index) -> Texts:
        """A column of text, for rows of these series; none for those that are not in it."""
        values = self._table[column].combine_chunks()
        return Texts(_taken(values.indices.to_numpy(), series, NONE), values.dictionary)

    def names_or(self, names: Texts, series: Index) -> Texts:
        """The names of rows of these series: ``names`` of those that are not in it."""
        known = self.texts("name", series)
        if not len(names.values):
            return known
        values = pa.concat_arrays([known.values, names.values]).dictionary_encode()
        codes = np.where(series == UNKNOWN, names.codes + len(known.values), known.codes)
        return Texts(values.indices.to_numpy()[codes], values.dictionary)

    @cached_property
    def writers(self) -> Index:
        """The ranks that measure this kind, and not only replicas of it."""
        ranks: Index = np.unique(self._column("rank")[~self._column("replica")])
        return ranks

    def numbers(self, rank: int, chunk: int, names: pa.StringArray, *, replicas: bool) -> Index:
        """The series of a rank that have these names; ``UNKNOWN`` where there is none.

        Args:
            replicas: The names are those of replicas, with the kind before them.
        """
        first, end = np.searchsorted(self._column("rank"), [rank, rank + 1]).tolist()
        own = slice(first, end)
        which = first + np.flatnonzero((self._column("vpp_stage")[own] == chunk) & (self._column("replica")[own] == replicas))
        series = np.full(len(self._names.values) + 1, UNKNOWN)  # of each name; the last entry is of no name
        series[self._names.codes[which[::-1]]] = which[::-1]  # the first, if a damaged file has a name twice
        found: Index = series[self._codes(names, replicas=replicas)]
        return found

    @cached_property
    def _names(self) -> Texts:
        return Texts.of([self._table["name"].combine_chunks()])

    def _codes(self, names: pa.StringArray, *, replicas: bool) -> Codes:
        """The places of names in ``_names``, -1 where it lacks one. Kept for the next call: most ranks have the same names."""
        known, codes = self._last_codes.get(replicas, (None, None))
        if known is None or codes is None or not names.equals(known):
            values = self._names.values
            if replicas:
                values = pa.array([f"{self.kind}/{name}" for name in values.to_pylist()], type=pa.string())
            codes = index_in(names, value_set=values).fill_null(UNKNOWN).to_numpy()
            self._last_codes[replicas] = names, codes
        return codes


def _taken(values: NDArray[Any], series: Index, otherwise: Any) -> NDArray[Any]:
    if not len(values):
        return np.full(len(series), otherwise, dtype=values.dtype)
    taken = values[series]
    taken[series == UNKNOWN] = otherwise
    return taken
