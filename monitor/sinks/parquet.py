"""The ``parquet`` format: all kinds of a record in one file, sorted by name, with ops beside the partials. Has the sink.

Files are made in memory, as those of ``hdf5``. Nothing here uses Arrow's threads: where none can be started, Arrow ends the
process, and training with it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow.parquet import ParquetFile, ParquetWriter

from monitor.sinks import arrow, spool
from monitor.sinks.files import RecoveredFiles, StepSpan
from monitor.sinks.protocol import SinkContext
from monitor.stats.features import own_columns
from monitor.stats.histograms import MAGNITUDES, UNIT_UPPER, UPPER
from monitor.stats.ops import CHECKSUM, INTEGER_OPS, LAYOUT_OPS
from monitor.stats.partials import COSTLY

# --- Making a file.
#
# Rows of a series stand together, so a reader of one series needs one or two row groups of a file, and text and integers take
# next to nothing. All rows of a record are in memory for that, which limits the size of a part.

GROUP_ROWS: Final = 16_384
"""Rows of a row group, the unit of reading: 128 KB of a column."""

LEAST_ROWS: Final = GROUP_ROWS // 4
"""Fewest rows of a row group before a kind begins a new one. Each group describes thirty columns in 7 KB."""

AT_ONCE: Final = 4096
"""Rows whose histograms are unpacked at a time: 9 MB."""

_SORTED_BY: Final = ("kind", "name", "step", "call_id", "micro_step")
_MEASURED: Final = ("kind", "step", "call_id", "micro_step")
"""The order in which rows were measured, kind by kind."""

_SAID_ELSEWHERE: Final = {*arrow.PARTIAL_TYPES, *LAYOUT_OPS, MAGNITUDES}
"""Ops without a column of their own, since the columns of partials, identity and histograms say the same."""


def image(blocks: Iterable[spool.SpoolBlock]) -> memoryview:
    """The content of a file with the rows of these blocks.

    Raises:
        ValueError: there are no blocks.
    """
    rows, facts = _sorted(blocks)
    ops = _ops_beside(rows, facts.ops)
    schema = _schema(rows, ops, facts)
    sink = pa.BufferOutputStream()
    with ParquetWriter(sink, schema, **_encodings(schema)) as file:  # type: ignore[no-untyped-call]
        for start, end in pairwise(_cuts(rows)):
            file.write_table(_row_group(rows.slice(start, end - start), ops, facts.rank, schema))
    return memoryview(sink.getvalue())


def _cuts(rows: pa.Table) -> list[int]:
    """Where row groups begin, and the end.

    A kind begins a row group, unless the one before would be small. So a reader of one kind unpacks little else.
    """
    kind = rows["kind"].chunk(0).indices.to_numpy()
    cuts = [0]
    for end in (*(np.flatnonzero(np.diff(kind)) + 1).tolist(), len(kind)):
        cuts += range(cuts[-1] + GROUP_ROWS, end, GROUP_ROWS)
        if end - cuts[-1] >= LEAST_ROWS or end == len(kind):
            cuts.append(end)
    return cuts


def _sorted(blocks: Iterable[spool.SpoolBlock]) -> tuple[pa.Table, arrow.ShardMetadata]:
    left = list(blocks)
    if not left:
        raise ValueError("there are no rows")
    table, facts = spool.joined(left)
    columns = {name: table[name] for name in table.column_names}
    order = _order(columns, _SORTED_BY)
    left.clear()
    del table  # so that nothing is held twice but the column at hand
    return pa.table({name: columns.pop(name).combine_chunks().take(order) for name in list(columns)}), facts


def _order(columns: Mapping[str, pa.ChunkedArray], by: Sequence[str]) -> pa.Array:
    """The numbers of the rows in order of these columns, the first one first. Not for a table without rows."""
    keys = [_places(columns[name]) if arrow.IDENTITY[name] == arrow.TEXT else _numbers(columns[name]) for name in by]
    return pa.array(np.lexsort([_narrow(key) for key in reversed(keys)]))


def _places(column: pa.ChunkedArray) -> NDArray[np.int64]:
    """For each row, the place of its text among all texts in order."""
    codes = column.combine_chunks()
    places: NDArray[np.int64] = arrow.places_in_order(codes.dictionary)[codes.indices.to_numpy()]
    return places


def _numbers(column: pa.ChunkedArray) -> NDArray[np.int64]:
    numbers: NDArray[np.int64] = (column.fill_null(arrow.MISSING) if column.null_count else column).to_numpy()
    return numbers


def _narrow(key: NDArray[np.int64]) -> NDArray[Any]:
    """The same order in as few bits as it fits in: numpy sorts 16 bits by counting, and without Python's lock."""
    numbers = key - key.min()
    narrow: NDArray[Any] = numbers.astype(np.min_scalar_type(numbers.max()))
    return narrow


def _ops_beside(rows: pa.Table, configured: Sequence[str]) -> list[str]:
    """The columns that are derived: the configured ops, and those of features."""
    kinds = sorted(rows["kind"].chunk(0).dictionary.to_pylist())
    features = (column for kind in kinds for column in own_columns(kind))
    return [op for op in dict.fromkeys([*configured, *features]) if op not in _SAID_ELSEWHERE]


def _schema(rows: pa.Table, ops: Sequence[str], facts: arrow.ShardMetadata) -> pa.Schema:
    kind, *identity = arrow.IDENTITY.items()
    types = {**dict.fromkeys(INTEGER_OPS, pa.int64()), CHECKSUM: pa.string()}
    derived = [(op, types.get(op, pa.float64())) for op in ops]
    partials = [(name, of) for name, of in arrow.PARTIAL_TYPES.items() if name not in COSTLY or _any(rows[name])]
    columns = [kind, ("rank", pa.int64()), *identity, *derived, *partials]
    if arrow.HISTOGRAM not in rows.column_names:
        return pa.schema(columns, metadata=facts.packed())
    upper = {"magnitudes": _finite(UPPER), "signed": _finite(UNIT_UPPER)}
    return pa.schema([*columns, (arrow.HISTOGRAM, arrow.FILLED)], metadata=facts.packed(upper=upper))


def _any(column: pa.ChunkedArray) -> bool:
    """Whether a number is not 0."""
    return any(bool(chunk.to_numpy().any()) for chunk in column.chunks)


def _finite(upper: NDArray[np.float64]) -> list[float | None]:
    """For JSON, which has no infinity: null for the bin that has no upper end."""
    return [float(end) if np.isfinite(end) else None for end in upper]


def _encodings(schema: pa.Schema) -> dict[str, Any]:
    floats = [one.name for one in schema if pa.types.is_floating(one.type)]
    others = [one.name for one in schema if one.name not in (*floats, arrow.HISTOGRAM)]
    bins = [f"{arrow.HISTOGRAM}.list.element.{one.name}" for one in arrow.FILLED.value_type]
    return {
        "compression": "zstd",
        "use_dictionary": [*others, *bins],
        "use_byte_stream_split": floats,
        "write_page_index": True,
        "write_page_checksum": True,
    }


def _row_group(rows: pa.Table, ops: Sequence[str], rank: int, schema: pa.Schema) -> pa.Table:
    parts = [arrow.with_ops(rows.slice(start, AT_ONCE), ops) for start in range(0, len(rows), AT_ONCE)]
    columns = {name: rows[name] for name in rows.column_names}
    columns |= {name: _in_use(rows[name]) for name, kind in arrow.IDENTITY.items() if kind == arrow.TEXT}
    columns |= {op: pa.chunked_array([chunk for part in parts for chunk in part[op].chunks]) for op in ops}
    columns["rank"] = pa.array(np.full(len(rows), rank))
    return pa.table([columns[one.name] for one in schema], schema=schema)


def _in_use(column: pa.ChunkedArray) -> pa.DictionaryArray:
    """With no other texts than those in use: Parquet writes all of them into each row group."""
    codes = column.combine_chunks()
    index = codes.indices.to_numpy()
    occurs = np.zeros(len(codes.dictionary), dtype=np.bool_)
    occurs[index] = True
    number = (np.cumsum(occurs) - 1).astype(np.int32)
    return pa.DictionaryArray.from_arrays(pa.array(number[index]), codes.dictionary.filter(pa.array(occurs)))


# --- Reading a file back.

KEPT: Final = 16
"""Row groups of which columns are kept for the next file: most ranks have rows of the same names and steps."""

KEPT_BYTES: Final = 2**16
"""Largest stored column that is kept. In a larger one, rows are in no order that files have in common."""

LEAST_BYTES: Final = 1024
"""Fewest bytes of a row group, which describes over twenty columns. So a small file cannot claim to have very many rows."""

_FOREIGN: Final = (pa.ArrowException, OSError, KeyError, TypeError, ValueError, RuntimeError, OverflowError)
"""Raised by Arrow and the checks below for files that are damaged or not of this format."""


class ShardFile(ParquetFile):
    """A file of this format, of which also bytes can be read."""

    def __init__(self, content: pa.NativeFile) -> None:
        super().__init__(content, page_checksum_verification=True)  # type: ignore[no-untyped-call]
        self._content = content

    def stored(self, group: int, names: Collection[str]) -> tuple[bytes, ...]:
        """These columns of a row group as they are stored, if the sink wrote them, and they are small enough to be kept."""
        row_group = self.metadata.row_group(group)
        chunks = [chunk for chunk in map(row_group.column, range(row_group.num_columns)) if chunk.path_in_schema in names]
        places = [(chunk.total_compressed_size, chunk.dictionary_page_offset or chunk.data_page_offset) for chunk in chunks]
        if len(places) < len(names) or not all(0 < size <= KEPT_BYTES and start > 0 for size, start in places):
            return ()
        return tuple(self._content.read_at(*place) for place in places)


@contextmanager
def opened(source: spool.Source) -> Iterator[ShardFile]:
    """A file of this format, for reading.

    Raises:
        NotAShardError: it cannot be read, is not of this format, or is damaged; also from the code within.
    """
    try:
        size = source.stat().st_size if isinstance(source, Path) else len(source)
        with pa.OSFile(str(source)) if isinstance(source, Path) else pa.BufferReader(source) as content:
            file = ShardFile(content)
            if file.metadata.num_rows * LEAST_BYTES > size * GROUP_ROWS:
                raise spool.NotAShardError("it states more rows than it has room for")
            yield file
    except spool.NotAShardError:
        raise
    except _FOREIGN as error:
        raise spool.NotAShardError(str(error.args[0]) if error.args else repr(error)) from error


def look(source: spool.Source) -> tuple[arrow.ShardMetadata, dict[str, int]]:
    """See ``monitor.sinks.spool.ShardFormat``."""
    with opened(source) as file:
        groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
        only = [_only_kind(group.column(0)) for group in groups]
        lengths: Counter[str] = Counter()
        for group, kind in zip(groups, only, strict=True):
            if kind is not None:
                lengths[kind] += group.num_rows
        if mixed := [number for number, kind in enumerate(only) if kind is None]:
            kinds = _columns(file, pa.schema([("kind", arrow.TEXT)]), mixed)["kind"].combine_chunks()
            lengths.update(kinds.dictionary.take(kinds.indices).to_pylist())
        return read_metadata(file), dict(lengths)


def steps_of(source: spool.Source) -> set[int]:
    """See ``monitor.sinks.spool.ShardFormat``."""
    with opened(source) as file:
        step = _columns(file, pa.schema([("step", pa.int64())]), _row_groups(file))["step"]
        return set(np.unique(step.to_numpy()).tolist())


def rows_of(source: spool.Source, steps: StepSpan, kind: str | None = None) -> pa.Table:
    """See ``monitor.sinks.spool.ShardFormat``."""
    with opened(source) as file:
        groups = _row_groups(file, kind)
        whole, repeated, others = _schemas(tuple(file.schema_arrow.names))
        asked = _Asked.of(file, groups, repeated, steps, kind)
        rows = _kept(asked) if asked.stored else asked.read()
        measured = _columns(file, others, groups).take(rows.numbers)
        columns = dict(zip((*repeated.names, *others.names), (*rows.repeated.columns, *measured.columns), strict=True))
        about = read_metadata(file).only(steps).packed() if kind is None else None
        return pa.Table.from_arrays([columns[name] for name in whole.names], schema=whole.with_metadata(about))


_REPEATED: Final = (*arrow.IDENTITY, "count", "nans", "posinfs", "neginfs", "exponent")
"""Columns that are the same on many ranks."""


@lru_cache(maxsize=KEPT)
def _schemas(there: tuple[str, ...]) -> tuple[pa.Schema, pa.Schema, pa.Schema]:
    """The columns of rows that are read from a file with these columns: all, those that many files repeat, and the others."""
    whole = arrow.WITH_HISTOGRAMS if arrow.HISTOGRAM in there else arrow.SCHEMA
    repeats = [one.name in _REPEATED or (one.name in COSTLY and one.name not in there) for one in whole]
    every = list(zip(whole, repeats, strict=True))
    return whole, pa.schema([one for one, again in every if again]), pa.schema([one for one, again in every if not again])


class _Rows(NamedTuple):
    """Rows of some row groups, in the order in which they were measured: their numbers, and columns that many files repeat."""

    numbers: pa.Array
    repeated: pa.Table


@dataclass(unsafe_hash=True, slots=True)
class _Asked:
    """Rows that are asked for. Those of two row groups are the same if ``stored`` is.

    Attributes:
        file: Where to read them; None once they were read.
        schema: The columns to read.
        stored: The bytes of the columns ``_REPEATED``.
        rows: Of the row groups.
    """

    file: ShardFile | None = field(compare=False)
    groups: list[int] = field(compare=False)
    schema: pa.Schema = field(compare=False)
    steps: StepSpan
    kind: str | None
    stored: tuple[bytes, ...]
    rows: int
    written_as: Any = field(hash=False)

    @classmethod
    def of(cls, file: ShardFile, groups: list[int], schema: pa.Schema, steps: StepSpan, kind: str | None) -> _Asked:
        """Args: schema: The columns to read."""
        stored = file.stored(groups[0], _REPEATED) if len(groups) == 1 else ()
        rows = sum(file.metadata.row_group(group).num_rows for group in groups)
        return cls(file, groups, schema, steps, kind, stored, rows, file.schema)

    def read(self) -> _Rows:
        """The rows, as they are in the file."""
        assert self.file is not None
        rows = _columns(self.file, self.schema, self.groups)
        self.file = None
        step = rows["step"].to_numpy()
        wanted = (step >= self.steps.first) & (step <= self.steps.last)
        if self.kind is not None:
            kinds = rows["kind"].combine_chunks()
            those = [one == self.kind for one in kinds.dictionary.to_pylist()]
            wanted &= np.array(those, dtype=np.bool_)[kinds.indices.to_numpy()]
        numbers = pa.array(np.flatnonzero(wanted))
        if len(numbers):
            numbers = numbers.take(_order(rows.take(numbers), _MEASURED))
        return _Rows(numbers, rows.take(numbers))


@lru_cache(maxsize=KEPT)
def _kept(asked: _Asked) -> _Rows:
    """Rows as they were read from this file or another one."""
    return asked.read()


def read_metadata(file: ParquetFile) -> arrow.ShardMetadata:
    """The metadata of the file.

    Raises:
        NotAShardError: its schema is of another version.
        KeyError, TypeError, ValueError: it is not that of a shard.
    """
    told = file.metadata.metadata or {}
    version = json.loads(told[arrow.METADATA])["schema_version"]
    if version != arrow.SCHEMA_VERSION:
        raise spool.NotAShardError(
            f"its schema version is {version}, and this version of the monitor reads {arrow.SCHEMA_VERSION}"
        )
    return arrow.ShardMetadata.unpacked(told)


def _row_groups(file: ParquetFile, kind: str | None = None) -> list[int]:
    """The row groups that may have rows of a kind; None: all."""
    every = range(file.num_row_groups)
    return [number for number in every if kind is None or _may_have(file.metadata.row_group(number).column(0), kind)]


def _may_have(chunk: Any, kind: str) -> bool:
    known = chunk.statistics if chunk.path_in_schema == "kind" else None
    return known is None or not known.has_min_max or known.min <= kind <= known.max


def _only_kind(chunk: Any) -> str | None:
    """What all rows of a row group are of; None if they may be of several kinds."""
    known = chunk.statistics if chunk.path_in_schema == "kind" else None
    if known is None or not known.has_min_max or known.min != known.max:
        return None
    kind: str = known.min
    return kind


def _columns(file: ParquetFile, schema: pa.Schema, row_groups: list[int]) -> pa.Table:
    """Read columns, which must be as the sink writes them. Partials that their version did not measure are 0."""
    there = set(file.schema_arrow.names)
    names = [name for name in schema.names if name not in COSTLY or name in there]
    table = file.read_row_groups(row_groups, columns=names, use_threads=False)  # type: ignore[no-untyped-call]
    for name in schema.names:
        if name not in names:
            table = table.append_column(name, pa.array(np.zeros(len(table)), type=schema.field(name).type))
    table = table.select(schema.names)
    for found, column, expected in zip(table.schema, table.columns, schema, strict=True):
        if found.type != expected.type:
            raise spool.NotAShardError(f"its column {found.name} has the type {found.type} and not {expected.type}")
        if column.null_count and found.name not in (*arrow.NULLABLE, arrow.HISTOGRAM):
            raise spool.NotAShardError(f"its column {found.name} lacks a value")
    table.validate(full=True)
    return table.unify_dictionaries()


# --- The sink, and the recovery of its files.

FORMAT: Final = spool.ShardFormat(
    suffix=".parquet",
    called="Parquet",
    signature=b"PAR1",
    image=image,
    look=look,
    steps=steps_of,
    rows=rows_of,
    most_bytes=16 * spool.MIB,  # about 300,000 rows; making a file of them takes 190 MB of memory
)


class ParquetSink(spool.SpooledSink):
    """Writes ``metrics_{first}-{last}.parquet`` into the rank's directory. See ``SpooledSink``."""

    def __init__(self, context: SinkContext) -> None:
        super().__init__(context, FORMAT)


def recover(directory: Path, newest: int, saved_ns: int, begun_ns: int) -> RecoveredFiles:  # noqa: ARG001 - one file has all kinds
    """See ``monitor.sinks.files.CrashRecovery``."""
    return spool.recover_shards(FORMAT, directory, newest, saved_ns)


def held(directory: Path, steps: StepSpan) -> set[int]:
    """See ``monitor.sinks.files.CrashRecovery``."""
    return spool.held_steps(FORMAT, directory, steps)
