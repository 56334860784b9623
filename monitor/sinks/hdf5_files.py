"""Reads the steps and rows of files of the ``hdf5`` format."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final

import h5py
import numpy as np
import pyarrow as pa
from h5py import h5a, h5d, h5f, h5g, h5l, h5p, h5s
from numpy.typing import NDArray

from monitor.sinks import arrow
from monitor.sinks.files import ALL_STEPS, StepSpan
from monitor.sinks.hdf5_write import CHUNK_ROWS, CONTENT, TABLES, Content
from monitor.sinks.spool import NotAShardError, Source
from monitor.stats.ops import CALLS
from monitor.stats.partials import COSTLY

# --- Datasets of an HDF5 file, read through h5py's low-level interface.
#
# A job has thousands of shards with some twenty columns per kind, and most shards have few rows. A column takes 50 µs to open
# and check, and 60 to 110 to unpack 5,000 rows. In half of them all rows are alike, and most other columns of whole numbers are
# the same on all ranks. An attribute says both, so the former are not opened, and the latter are kept for the next shard.

KEPT: Final = 64
"""Columns that are kept. They take 256 KB at most."""


def _all_of(dataset: h5d.DatasetID, shape: tuple[int, ...]) -> NDArray[Any]:
    values = np.empty(shape, dtype=dataset.dtype)
    dataset.read(h5s.ALL, h5s.ALL, values)
    return values


class DatasetColumn:
    """A dataset with one entry per row, whose content was written to this same file.

    Args:
        inner: The shape of an entry; empty for numbers. Entries with a shape may be missing from the file, and are zeros then.

    Raises:
        KeyError: the group has no such name.
        TypeError: the name is not of a dataset, or is a link.
        ValueError: the shape differs, the content is in another file, or fewer rows were written than the dataset states.
    """

    def __init__(self, group: h5g.GroupID, name: str, *inner: int) -> None:
        self._dataset = _own(group, name, h5d.open, "Dataset")
        self._created, self._shape = self._dataset.get_create_plist(), self._dataset.shape
        layout = self._created.get_layout()
        if tuple(self._shape[1:]) != inner or not self._shape or layout == h5d.VIRTUAL or self._created.get_external_count():
            raise ValueError(f"{_path(group, name)} is not a plain column: its shape or its storage is another")
        self._length, self._inner = int(self._shape[0]), inner
        chunk = self._created.get_chunk()[0] if layout == h5d.CHUNKED and not inner else self._length
        if chunk < self._length and self._dataset.get_num_chunks() * chunk < self._length:
            raise ValueError(f"{_path(group, name)} states more rows than were written")

    def __len__(self) -> int:
        return self._length

    def read(self, first: int = 0, end: int | None = None) -> NDArray[Any]:
        """The rows from ``first`` to before ``end``."""
        end = self._length if end is None else end
        if end - first == self._length:
            return _all_of(self._dataset, self._shape)
        values = np.empty((end - first, *self._inner), dtype=self._dataset.dtype)
        if len(values):
            rows = self._dataset.get_space()
            rows.select_hyperslab((first, *(0 for _ in self._inner)), values.shape)
            self._dataset.read(h5s.create_simple(values.shape), rows, values)
        return values

    def texts(self) -> pa.StringArray:
        """All rows, as UTF-8."""
        if self._dataset.dtype.kind == "S" and self._length:  # texts of one length, as the sink writes them
            return pa.array(self.read(), type=pa.binary()).cast(pa.string())
        return pa.array(h5py.Dataset(self._dataset).asstr()[...].tolist(), type=pa.string())


def group_in(file: h5g.GroupID, name: str) -> h5g.GroupID:
    """The group of this name in this same file.

    Raises:
        KeyError: there is none.
        TypeError: the name is not of a group, or is a link.
    """
    return _own(file, name, h5g.open, "Group")


def _own(group: h5g.GroupID, name: str, opened_as: Callable[[h5g.GroupID, bytes], Any], called: str) -> Any:
    encoded = name.encode()
    try:
        hard = group.links.get_info(encoded).type == h5l.TYPE_HARD
    except (KeyError, RuntimeError, OSError) as error:
        raise KeyError(f"{_path(group)} has no {name}") from error
    try:
        if hard:
            return opened_as(group, encoded)
    except (KeyError, ValueError, TypeError) as error:
        raise TypeError(f"{_path(group)} has no {called} {name}") from error
    raise TypeError(f"{_path(group)} has no {called} {name}")


def _path(group: h5g.GroupID, name: str = "") -> str:
    path: str = h5py.Group(group).name
    return f"{path}/{name}" if name else path


HISTOGRAMS_AT_ONCE: Final = 4096
"""Rows of histograms read in one call: 9 MB, of which the filled bins take a tenth."""

_FOREIGN: Final = (KeyError, TypeError, ValueError, OSError, RuntimeError, UnicodeDecodeError)
"""Raised by h5py and the checks below for files that are damaged or not of this format."""


@cache
def _access() -> h5p.PropFAID:
    """How files are opened: without locks, which some file systems do not have, and without a cache of chunks.

    Each chunk is read once, and the library would clear 64 KB for each dataset.
    """
    access = h5p.create(h5p.FILE_ACCESS)
    access.set_fclose_degree(h5f.CLOSE_STRONG)
    access.set_file_locking(False, False)
    access.set_cache(access.get_cache()[0], 1, 0, 0.0)
    return access


@contextmanager
def opened(source: Source) -> Iterator[h5g.GroupID]:
    """The root of the file, for reading. ``h5py.File`` takes three times as long.

    Raises:
        OSError: it cannot be opened, or is not HDF5.
        NotAShardError: the content is not HDF5, or is damaged.
    """
    if isinstance(source, Path):
        file = h5f.open(bytes(source), h5f.ACC_RDONLY, _access())
    else:
        try:
            file = h5py.File.in_memory(source).id
        except (OSError, RuntimeError, ValueError) as error:
            raise NotAShardError(str(error)) from error
    try:
        yield _root(file)
    finally:
        file.close()


def _root(file: h5f.FileID) -> h5g.GroupID:
    try:
        return h5g.open(file, b"/")
    except _FOREIGN as error:
        raise NotAShardError(str(error)) from error


def look(source: Source) -> tuple[arrow.ShardMetadata, dict[str, int]]:
    """See ``monitor.sinks.spool.ShardFormat``."""
    with opened(source) as file:
        return read_metadata(file), read_lengths(file)


def steps_of(source: Source) -> set[int]:
    """See ``monitor.sinks.spool.ShardFormat``."""
    with opened(source) as file:
        return read_steps(file)


def rows_of(source: Source, steps: StepSpan, kind: str | None) -> pa.Table:
    """See ``monitor.sinks.spool.ShardFormat``."""
    with opened(source) as file:
        return read_rows(file, steps=steps) if kind is None else read_kind(file, kind, steps)


def read_metadata(file: h5g.GroupID) -> arrow.ShardMetadata:
    """The metadata in the file's attributes.

    Raises:
        NotAShardError: the attributes are not those of a shard.
    """
    try:
        version = int(_attribute(file, "schema_version"))
        if version != arrow.SCHEMA_VERSION:
            raise NotAShardError(
                f"its schema version is {version}, and this version of the monitor reads {arrow.SCHEMA_VERSION}"
            )
        ops = tuple(str(op, "utf-8") for op in _attribute(file, "ops").tolist())
        skipped, incomplete = (
            tuple(_attribute(file, name).astype(np.int64, casting="safe").tolist()) for name in ("skipped", "incomplete")
        )
        rank, eps = int(_attribute(file, "rank")), float(_attribute(file, "eps"))
        return arrow.ShardMetadata(rank, eps, ops, skipped, incomplete)
    except _FOREIGN as error:
        raise _not_a_shard(error) from error


def _attribute(file: h5g.GroupID, name: str) -> NDArray[Any]:
    stored = h5a.open(file, name.encode())
    values = np.empty(stored.shape, dtype=stored.dtype)
    stored.read(values)
    return values


def read_rows(file: h5g.GroupID, kinds: Collection[str] | None = None, steps: StepSpan = ALL_STEPS) -> pa.Table:
    """The rows, kind by kind, in the columns ``SCHEMA``, or ``WITH_HISTOGRAMS`` if a kind has histograms.

    Args:
        kinds: The kinds to read; None: all. A kind that the file does not have yields no rows.

    Raises:
        NotAShardError: the file is not a shard.
    """
    facts = read_metadata(file)
    about = facts.only(steps).packed()
    try:
        tables = [_rows(kind, group, steps) for kind, group in _groups(file, kinds)] or [arrow.SCHEMA.empty_table()]
        joined = pa.concat_tables(tables, promote_options="default").unify_dictionaries()
        return joined.replace_schema_metadata(about)
    except _FOREIGN as error:
        raise _not_a_shard(error) from error


def read_kind(file: h5g.GroupID, kind: str, steps: StepSpan) -> pa.Table:
    """The rows of one kind, as ``read_rows`` returns them but without metadata.

    Raises:
        NotAShardError: the file is not a shard.
    """
    try:
        return _rows(kind, group_in(file, kind), steps)
    except _FOREIGN as error:
        raise _not_a_shard(error) from error


def read_steps(file: h5g.GroupID) -> set[int]:
    """The steps that have rows.

    Raises:
        NotAShardError: the file is not a shard.
    """
    try:
        return {step for _, group in _groups(file, None) for step in np.unique(DatasetColumn(group, "step").read()).tolist()}
    except _FOREIGN as error:
        raise _not_a_shard(error) from error


def read_lengths(file: h5g.GroupID) -> dict[str, int]:
    """The number of rows of each kind.

    Raises:
        NotAShardError: the file is not a shard.
    """
    try:
        return {kind: len(DatasetColumn(group, "step")) for kind, group in _groups(file, None)}
    except _FOREIGN as error:
        raise _not_a_shard(error) from error


def _groups(file: h5g.GroupID, kinds: Collection[str] | None) -> Iterator[tuple[str, h5g.GroupID]]:
    for name in file:
        kind = name.decode()
        if kinds is None or kind in kinds:
            yield kind, group_in(file, kind)


_NAMES: Final = arrow.SCHEMA.names
_FLOATS: Final = {name for name, column_type in arrow.PARTIAL_TYPES.items() if column_type == pa.float64()}
"""Looked up here once: a schema makes an object for each field that it is asked for."""


def _rows(kind: str, group: h5g.GroupID, steps: StepSpan) -> pa.Table:
    content = _content(group)
    said = content.pop("step", None)
    step = _kept(_KeptColumn("step", said, group)) if isinstance(said, dict) else _read("step", group)
    rows = _rows_of(step.to_numpy(), steps)
    content["kind"] = kind
    columns = [_column(name, content, group, rows, step) for name in _NAMES]
    if not group.links.exists(arrow.HISTOGRAM.encode()):
        return pa.Table.from_arrays(columns, schema=arrow.SCHEMA)
    return pa.Table.from_arrays([*columns, _histograms(kind, group, rows, len(step))], schema=arrow.WITH_HISTOGRAMS)


def _histograms(kind: str, group: h5g.GroupID, rows: slice, length: int) -> pa.ChunkedArray:
    histograms = DatasetColumn(group, arrow.HISTOGRAM, len(arrow.upper_of(kind)))
    if len(histograms) != length:
        raise ValueError(f"{kind}/{arrow.HISTOGRAM} has {len(histograms)} rows and not {length}")
    starts = range(rows.start, rows.stop, HISTOGRAMS_AT_ONCE)
    parts = (histograms.read(start, min(start + HISTOGRAMS_AT_ONCE, rows.stop)) for start in starts)
    return pa.chunked_array(
        [arrow.filled(part.astype(np.int64, casting="safe", copy=False)) for part in parts], type=arrow.FILLED
    )


def _rows_of(step: NDArray[np.int64], steps: StepSpan) -> slice:
    if (step[1:] < step[:-1]).any():
        raise ValueError("its steps are not in order")
    return slice(*np.searchsorted(step, [steps.first, steps.last + 1 if steps.last < ALL_STEPS.last else steps.last]).tolist())


def _content(group: h5g.GroupID) -> dict[str, Content]:
    """By column; see ``monitor.sinks.hdf5_write.CONTENT``. Older files do not say it."""
    if not h5a.exists(group, CONTENT.encode()):
        return {}
    found: dict[str, Content] = json.loads(_attribute(group, CONTENT).item())
    return found


def _column(name: str, content: Mapping[str, Content], group: h5g.GroupID, rows: slice, step: pa.Array) -> pa.Array:
    count, said = rows.stop - rows.start, content.get(name)
    if said is None and name in COSTLY and not group.links.exists(name.encode()):
        said = 0
    if name == "step":
        return step.slice(rows.start, count)
    if isinstance(said, dict):
        column = _kept(_KeptColumn(name, said, group))
        if len(column) != len(step):
            raise ValueError(f"{_path(group, name)} has {len(column)} rows and not {len(step)}")
        return column.slice(rows.start, count)
    if said is not None:
        return _all_alike(name, said).slice(0, count) if count <= CHUNK_ROWS else _repeated(name, said, count)
    if name == CALLS and not group.links.exists(CALLS.encode()):
        return pa.nulls(count, pa.int64())
    return _read(name, group, rows, len(step))


def _read(name: str, group: h5g.GroupID, rows: slice | None = None, length: int | None = None) -> pa.Array:
    """Some rows of a column, or all.

    Args:
        length: How many rows it must have.
    """
    numbers, table = TABLES.get(name, (name, None))
    column = DatasetColumn(group, numbers)
    if length not in (None, len(column)):
        raise ValueError(f"{_path(group, numbers)} has {len(column)} rows and not {length}")
    values = column.read() if rows is None else column.read(rows.start, rows.stop)
    return _converted(name, values, None if table is None else DatasetColumn(group, table))


class _KeptColumn:
    """A column that may be the same in other files: two are equal if their names and digests are.

    Attributes:
        group: Where to read it; None once it was read.
    """

    def __init__(self, name: str, content: Mapping[str, str], group: h5g.GroupID) -> None:
        self.name, self.group = name, group
        self._identity = name, content["digest"]

    def __hash__(self) -> int:
        return hash(self._identity)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _KeptColumn) and self._identity == other._identity


@lru_cache(maxsize=KEPT)
def _kept(column: _KeptColumn) -> pa.Array:
    """All rows of a column, as they were read from this file or another one."""
    group, column.group = column.group, None
    return _read(column.name, group)


@lru_cache(maxsize=KEPT)
def _all_alike(name: str, value: int | str) -> pa.Array:
    return _repeated(name, value, CHUNK_ROWS)


def _repeated(name: str, value: int | str, rows: int) -> pa.Array:
    if isinstance(value, str):
        return _texts(pa.array([value], type=pa.string()), np.zeros(rows, dtype=np.int64))
    return _converted(name, np.full(rows, value), None)


def _converted(name: str, numbers: NDArray[Any], texts: DatasetColumn | None) -> pa.Array:
    if texts is not None:
        return _texts(texts.texts(), numbers)
    wanted = np.float64 if name in _FLOATS else np.int64
    missing = numbers == arrow.MISSING if name in arrow.NULLABLE else None
    return pa.array(numbers.astype(wanted, casting="safe", copy=False), mask=missing)


def _texts(texts: pa.StringArray, numbers: NDArray[np.int64]) -> pa.DictionaryArray:
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(texts):
        raise ValueError("a dictionary index is out of range")
    return pa.DictionaryArray.from_arrays(pa.array(numbers.astype(np.int32)), texts)


def _not_a_shard(error: Exception) -> NotAShardError:
    return error if isinstance(error, NotAShardError) else NotAShardError(str(error.args[0]) if error.args else repr(error))
