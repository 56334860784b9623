"""Rows of all ranks as columns, in order of steps and ranks, with what the catalogue knows of each."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from monitor.coordinator.manifest_format import StepsRecord
from monitor.merge.discovery import SetAside
from monitor.merge.statistics import Flags, Index, PartialColumns, Statistics, same_everywhere
from monitor.merge.tables import Columns, Shard, Texts, in_groups, order_by, read_batch, read_group, starts_of_runs, write_file
from monitor.merge.tensors import UNKNOWN, Catalogue
from monitor.series import DIRECTION_KIND, MICRO_STEP_KINDS, NO_MICRO_STEP
from monitor.sinks.arrow import HISTOGRAM, TEXT, counts_of
from monitor.sinks.files import StepSpan
from monitor.stats.features import OF_ELEMENTS, own_columns
from monitor.stats.histograms import BINS, MAGNITUDES, Counts
from monitor.stats.ops import CALLS, CHECKSUM
from monitor.stats.partials import COLUMNS, COUNT, EMPTY, PARTIAL_TABLE, WRITES, Floats, Words

# --- The rows of one kind that some directories have, each with its place in the job.
#
# The process that combines rows reads them from shards. Where what is combined at a time is only a small part of each
# shard, that would unpack every shard again and again; so there the shards are read once, some directories at a time,
# and their rows are put down in order of steps, unpacked, where every piece finds its own in one place.

IDENTITY: Final = (
    ("run", pa.int32()),  # place of the directory among those of the job
    ("series", pa.int32()),  # row of the catalogue, UNKNOWN where it has none
    ("vpp_stage", pa.int64()),
    ("name", TEXT),  # null where the catalogue knows it
    ("step", pa.int64()),
    ("micro_step", pa.int64()),
    ("call_id", pa.int64()),
    ("shape", TEXT),
    ("dtype", TEXT),
    (CALLS, pa.int64()),  # 0 where the row combines none
)

_OFTEN_ALIKE: Final = ("vpp_stage", "micro_step", "call_id", CALLS)
_OFTEN_ALIKE_IF_EXACT: Final = (*_OFTEN_ALIKE, COLUMNS[COUNT], *(one.name for one in PARTIAL_TABLE if one.seldom))
"""Columns of numbers that a file leaves out if all its rows have the same number."""

_ALIKE: Final = b"alike"
"""The key of the metadata that says, as JSON, what is in the columns that were left out."""


@dataclass(frozen=True, slots=True)
class Source:
    """What one directory has of the steps at hand.

    Attributes:
        run: Place of the directory among those of the job.
        end: Steps from here on do not count.
        left_out: Nor do these.
        shards: Of the kind.
        replicas: To be compared with it.
    """

    run: int
    rank: int
    end: int
    left_out: tuple[StepsRecord, ...]
    written: StepsRecord
    shards: tuple[Shard, ...]
    replicas: tuple[Shard, ...]

    def counts(self, step: int) -> bool:
        """Whether rows of the step count."""
        return step < self.end and not any(one.holds(step) for one in self.left_out)


@dataclass
class Told:
    """What reading finds out besides rows.

    Attributes:
        duplicates: By rank, steps that stood in several files.
        newest: By directory, the last step of which rows were found.
    """

    duplicates: dict[int, list[int]] = field(default_factory=dict)
    newest: dict[str, int] = field(default_factory=dict)
    set_aside: list[SetAside] = field(default_factory=list)


def read(sources: Iterable[Source], steps: StepSpan, columns: Columns, catalogue: Catalogue, told: Told) -> list[pa.Table]:
    """The rows that count, directory by directory, in tables of exact rows or of rounded ones, after ``IDENTITY``."""
    tables = []
    for source in sources:
        for shards, replicas in ((source.shards, False), (source.replicas, True)):
            for table, exact in _rows_that_count(source, shards, steps, columns, told):
                schema = columns.exact(IDENTITY) if exact else columns.rounded(IDENTITY)
                tables.append(_placed(table, schema, source, catalogue, replicas=replicas, shared=not exact))
    return [table for table in tables if len(table)]


def _rows_that_count(
    source: Source, shards: Iterable[Shard], steps: StepSpan, columns: Columns, told: Told
) -> Iterator[tuple[pa.Table, bool]]:
    """Each step once: from a format that has partials, and of several files of the format the last."""
    seen: dict[int, str] = {}
    for group in in_groups(sorted(shards, key=lambda one: (one.exact, one.suffix, one.steps, one.path.name), reverse=True)):
        form, directory = group[0].suffix, group[0].path.parent.name
        elsewhere = {step for step, other in seen.items() if other != form}
        wanted = [one for one in group if not _has_all(source.written, one, steps, elsewhere)]  # the same rows, or less of them
        tables, aside = read_group(wanted, steps, columns)
        told.set_aside.extend(aside)
        for table in tables:
            column = table["step"].to_numpy()
            there = np.unique(column[starts_of_runs([column])]).tolist()
            told.duplicates.setdefault(source.rank, []).extend(step for step in there if seen.get(step) == form)
            fresh = [step for step in there if step not in seen and source.counts(step)]
            seen |= dict.fromkeys(fresh, form)
            told.newest[directory] = max(told.newest.get(directory, -1), *fresh, -1)
            yield (table if fresh == there else table.filter(np.isin(column, fresh))), group[0].exact


def _has_all(written: StepsRecord, shard: Shard, steps: StepSpan, elsewhere: Collection[int]) -> bool:
    """Whether every step that the manifest puts into this file was found in another format."""
    if not elsewhere:
        return False
    within = written.between(max(shard.steps.first, steps.first), min(shard.steps.last, steps.last))
    return within.count > 0 and all(step in elsewhere for step in within.steps())


def _placed(
    table: pa.Table, schema: pa.Schema, source: Source, catalogue: Catalogue, *, replicas: bool, shared: bool
) -> pa.Table:
    """With the directory and the series of each row.

    Args:
        shared: Whether the file may hold rows of another kind.
    """
    series = _series(table, source.rank, catalogue, replicas=replicas)
    if replicas or (shared and catalogue.kind == DIRECTION_KIND):  # a file of replicas holds those of every kind
        own = series != UNKNOWN
        table, series = table.filter(own), series[own]
    elif shared and catalogue.others is not None and (series == UNKNOWN).any():
        own = (series != UNKNOWN) | (_series(table, source.rank, catalogue.others, replicas=False) == UNKNOWN)
        table, series = table.filter(own), series[own]
    columns = {
        **dict(zip(table.column_names, table.columns, strict=True)),
        "run": pa.array(np.full(len(table), source.run, dtype=np.int32)),
        "series": pa.array(series.astype(np.int32)),
        "name": _unless_known(table["name"], series),
        "micro_step": table["micro_step"].fill_null(NO_MICRO_STEP),
        "call_id": table["call_id"].fill_null(UNKNOWN),
        CALLS: table[CALLS].fill_null(0),
    }
    return pa.Table.from_arrays([columns[name] for name in schema.names], schema=schema)


def _series(table: pa.Table, rank: int, catalogue: Catalogue, *, replicas: bool) -> Index:
    """The number of the series of each row."""
    name, chunk = table["name"].combine_chunks(), table["vpp_stage"].to_numpy()
    codes, chunks = name.indices.to_numpy(), np.unique(chunk[starts_of_runs([chunk])]).tolist()
    numbers = [catalogue.numbers(rank, one, name.dictionary, replicas=replicas) for one in chunks]
    if len(chunks) == 1:
        only: Index = numbers[0][codes]
        return only
    series = np.full(len(table), UNKNOWN)
    for one, of_chunk in zip(chunks, numbers, strict=True):
        rows = chunk == one
        series[rows] = of_chunk[codes[rows]]
    return series


def _unless_known(name: pa.ChunkedArray, series: Index) -> pa.Array:
    if (series != UNKNOWN).all():
        return pa.nulls(len(series), TEXT)
    texts = name.combine_chunks()
    return pa.DictionaryArray.from_arrays(pa.array(texts.indices.to_numpy(), mask=series != UNKNOWN), texts.dictionary)


@dataclass(frozen=True, slots=True)
class Share:
    """Directories whose rows one worker puts down in order of steps.

    Attributes:
        steps: All that the pieces need.
        pieces: Ascending.
        catalogue: The file of the kind's catalogue; None where no manifest knows of it.
        others: Of the kind whose rows stand in the same files of CSV, if there is one.
        output: What the names of the files begin with.
    """

    columns: Columns
    steps: StepSpan
    pieces: tuple[StepSpan, ...]
    sources: tuple[Source, ...]
    catalogue: Path | None
    others: Path | None
    output: Path

    @property
    def kind(self) -> str:
        return self.columns.kind


def put_in_order(share: Share) -> Told:
    """Read the shards, and put the rows down so that those of each piece stand together.

    Raises:
        OSError: a file cannot be written.
    """
    told = Told()
    catalogue = Catalogue.read(share.catalogue, share.kind, share.others)
    tables = read(share.sources, share.steps, share.columns, catalogue, told)
    schemas = share.columns.exact(IDENTITY), share.columns.rounded(IDENTITY)
    for schema, path in zip(schemas, files_of(share.output), strict=True):
        if own := [table for table in tables if table.schema == schema]:
            _write(own, share.pieces, path)
    return told


def of_piece(shares: Sequence[Path], piece: int) -> list[pa.Table]:
    """What was put down for one piece, in tables as of ``read``; see ``_OFTEN_ALIKE``."""
    tables = (read_batch(path, piece) for share in shares for path in files_of(share) if path.exists())
    return [table for table in tables if len(table)]


def is_exact(names: Collection[str]) -> bool:
    """Whether these are the columns of rows whose partials are known."""
    return "sumsq" in names


def files_of(output: Path) -> tuple[Path, Path]:
    """The files with the rows of a share: exact rows, and rounded ones. Each exists if it has rows."""
    return output.with_name(f"{output.name}-exact.arrow"), output.with_name(f"{output.name}-rounded.arrow")


def _write(tables: Sequence[pa.Table], pieces: Sequence[StepSpan], path: Path) -> None:
    """A batch a piece: of each table in turn the rows of its steps."""
    rows = pa.concat_tables(map(_in_order_of_steps, tables)).unify_dictionaries()
    often = _OFTEN_ALIKE_IF_EXACT if is_exact(rows.column_names) else _OFTEN_ALIKE
    alike = {name: value for name in often if (value := _same(rows[name])) is not None}
    left_out = [*alike, *(name for name in (HISTOGRAM,) if name in rows.column_names and rows[name].null_count == len(rows))]
    rows = rows.drop_columns(left_out).replace_schema_metadata({_ALIKE: json.dumps(alike)})
    batches = rows.to_batches()
    bounds = [*(one.first for one in pieces), pieces[-1].last + 1]
    edges = [np.searchsorted(batch["step"].to_numpy(), bounds).tolist() for batch in batches]
    write_file(path, (_one_batch(batches, edges, number) for number in range(len(pieces))), rows.schema)


def _in_order_of_steps(table: pa.Table) -> pa.Table:
    order = order_by([table["step"].to_numpy()])
    return (table if order is None else table.take(pa.array(order))).combine_chunks()


def _one_batch(batches: Sequence[pa.RecordBatch], edges: Sequence[Sequence[int]], piece: int) -> pa.RecordBatch:
    parts = [batch.slice(of[piece], of[piece + 1] - of[piece]) for batch, of in zip(batches, edges, strict=True)]
    return pa.concat_batches(parts)


def _same(column: pa.ChunkedArray) -> float | None:
    """The number that all rows of a column have, if there is one."""
    values = [chunk.to_numpy() for chunk in column.chunks]
    if not all((each == values[0][0]).all() for each in values):
        return None
    number: float = values[0][0].item()
    return number


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of all ranks.

    Attributes:
        run: Place of the directory among those of the job, of each row.
        rank: That it is of.
        series: Its row in the catalogue, ``UNKNOWN`` where it has none.
        replica: Whether it is there to be compared alone.
        columns: ``step``, ``micro_step`` (or ``NO_MICRO_STEP``), ``call_id`` (or ``UNKNOWN``), ``vpp_stage``, ``calls`` (or 0);
            int64.
        texts: ``name``, ``shape``, ``dtype``.
    """

    catalogue: Catalogue
    run: Index
    rank: Index
    series: Index
    replica: Flags
    columns: dict[str, Index]
    texts: dict[str, Texts]

    def __len__(self) -> int:
        return len(self.rank)

    def known(self, column: str) -> Index:
        """A column of the catalogue, for each row; ``UNKNOWN`` for those that are not in it."""
        return self.catalogue.of(column, self.series)

    def column(self, name: str) -> Index:
        return self.columns[name]

    def micro_step(self) -> Index:
        return self.columns["micro_step"]

    def of_several(self) -> Flags:
        """Whether a row is of several micro-steps or calls of an operator, and so of more elements than its series has."""
        of_calls: Flags = self.columns[CALLS] > 0
        each = self.catalogue.kind in MICRO_STEP_KINDS
        return of_calls | (self.micro_step() == NO_MICRO_STEP) if each else of_calls

    def text(self, column: str, rows: Index) -> pa.Array:
        """A column of text of the catalogue, for some of the rows, which are in it."""
        return self.catalogue.texts(column, self.series[rows]).arrow()

    def only(self, rows: Index | Flags | slice) -> Rows:
        return Rows(
            self.catalogue,
            self.run[rows],
            self.rank[rows],
            self.series[rows],
            self.replica[rows],
            {name: column[rows] for name, column in self.columns.items()},
            {name: column.take(rows) for name, column in self.texts.items()},
        )


def gathered(
    tables: Sequence[pa.Table], ranks: Index, catalogue: Catalogue, kept: Columns, *, by_name: bool = False
) -> tuple[Rows, Statistics]:
    """The rows of these tables in order of steps, of one step as the tables stand.

    Args:
        tables: In order of ranks, as ``monitor.merge.rows.read`` gives them.
        ranks: Of each directory of the job.
        by_name: In order of names, and for one name of steps.
    """
    found = _Gathering(tables, catalogue if by_name else None)
    run, series = found.column("run"), found.column("series")
    texts = {name: found.texts(name) for name in ("shape", "dtype")}
    columns = {name: found.column(name) for name in ("step", "micro_step", "call_id", "vpp_stage", CALLS)}
    names = catalogue.names_or(found.texts("name"), series)
    rows = Rows(catalogue, run, ranks[run], series, catalogue.is_replica(series), columns, {"name": names, **texts})
    return rows, found.statistics(kept, _elements(rows))


class _Gathering:
    """Columns of several tables as one, in order of steps; given a catalogue, in order of names and steps."""

    def __init__(self, tables: Sequence[pa.Table], names_of: Catalogue | None) -> None:
        self._tables = tables
        self._rows = sum(map(len, tables))
        self._alike = _alike(tables)
        self._order: Index | slice = slice(None)
        keys = [self.column("step")]
        if names_of is not None:
            keys.insert(0, names_of.names_or(self.texts("name"), self.column("series")).places())
        order = order_by(keys)
        if order is not None:
            self._order = order

    def column(self, name: str) -> Index:
        """A column of whole numbers, also where files leave it out."""
        if name in self._alike:
            return same_everywhere(int(self._alike[name]), self._rows)
        values: Index = self._joined(partial(_numbers, name), np.int64)
        return values

    def texts(self, name: str) -> Texts:
        return Texts.of([chunk for table in self._tables for chunk in table[name].chunks]).take(self._order)

    def statistics(self, kept: Columns, elements: Index) -> Statistics:
        exact = self._joined(lambda table: np.full(len(table), _is_exact(table)), np.bool_)
        histogram = self._histograms() if kept.histogram else None
        partials = PartialColumns(tuple(map(self._partials, range(len(COLUMNS)))), histogram)
        count = np.where(exact, partials.columns[COUNT], np.where(elements < 0, np.nan, elements))
        made = Statistics.derived(kept.ops, count, partials, exact)
        if not exact.all():
            for op in kept.numbers:
                made.set_op(op, self._joined(partial(_op, op), np.float64), self._joined(partial(_op_is_there, op), np.bool_))
            if kept.checked:
                made.set_checksums(self._joined(_checksums, np.uint64))
            if made.partials.histogram is not None:
                elements_counted = made.partials.histogram.sum(axis=1).astype(np.float64)
                made.set_op(MAGNITUDES, elements_counted, elements_counted > 0)
        return made

    def _partials(self, number: int) -> Floats:
        """One column of them."""
        name = COLUMNS[number]
        if number == WRITES or name in self._alike:
            return same_everywhere(float(self._alike.get(name, 1.0)), self._rows)
        values: Floats = self._joined(partial(_partial, name, number), np.float64)
        return values

    def _histograms(self) -> Counts:
        nothing = np.empty((0, BINS), dtype=np.int64)
        counts: Counts = np.concatenate([nothing, *map(_counts, self._tables)])[self._order]
        return counts

    def _joined(self, of: Callable[[pa.Table], NDArray[Any]], kind: type[np.generic]) -> NDArray[Any]:
        return np.concatenate([np.empty(0, kind), *map(of, self._tables)], dtype=kind)[self._order]


def _alike(tables: Sequence[pa.Table]) -> dict[str, float]:
    """The columns that all tables leave out for the same number, and that number."""
    left_out = [json.loads((table.schema.metadata or {}).get(_ALIKE, "{}")).items() for table in tables]
    return dict(set.intersection(*map(set, left_out))) if left_out else {}


def _is_exact(table: pa.Table) -> bool:
    return is_exact(table.column_names)


def _counts(table: pa.Table) -> Counts:
    """Zero where it is left out."""
    return counts_of(table[HISTOGRAM]) if HISTOGRAM in table.column_names else np.zeros((len(table), BINS), dtype=np.int64)


def _partial(name: str, number: int, table: pa.Table) -> NDArray[Any]:
    """One partial of each row: the empty value if the row has no partials."""
    if not _is_exact(table):
        return np.full(len(table), EMPTY[number])
    return _numbers(name, table)


def _numbers(name: str, table: pa.Table) -> NDArray[Any]:
    if name in table.column_names:
        numbers: NDArray[Any] = table[name].to_numpy()
        return numbers
    return np.full(len(table), json.loads(table.schema.metadata[_ALIKE])[name])


def _checksums(table: pa.Table) -> Words:
    sums: Words = np.zeros(len(table), dtype=np.uint64) if _is_exact(table) else table[CHECKSUM].fill_null(0).to_numpy()
    return sums


def _op(op: str, table: pa.Table) -> Floats:
    values: Floats = np.zeros(len(table)) if _is_exact(table) else table[op].fill_null(0.0).to_numpy()
    return values


def _op_is_there(op: str, table: pa.Table) -> Flags:
    there: Flags = np.zeros(len(table), dtype=np.bool_) if _is_exact(table) else table[op].is_valid().to_numpy()
    return there


def _elements(rows: Rows) -> Index:
    """The elements of each row: by its shape, or by its series if that was not recorded; ``UNKNOWN`` if neither says."""
    if not counts_elements(rows.catalogue.kind):
        return np.full(len(rows), UNKNOWN)
    shape = rows.texts["shape"]
    counts = np.array([*map(_product, shape.values.to_pylist()), UNKNOWN], dtype=np.int64)
    own = counts[shape.codes]
    elements = own if (own != UNKNOWN).all() else np.where(own == UNKNOWN, rows.known("elements"), own)
    return np.where(rows.of_several(), UNKNOWN, elements)


def counts_elements(kind: str) -> bool:
    """Whether ``count`` is of the elements of a tensor."""
    return not own_columns(kind) or kind in OF_ELEMENTS


def _product(shape: str) -> int:
    try:
        return math.prod(map(int, json.loads(shape)))
    except (ValueError, TypeError):
        return UNKNOWN
