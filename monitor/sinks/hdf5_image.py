"""The content of an HDF5 shard, made in memory.

The library touches no disk. While it does anything at all it holds a lock that ``os.fork`` takes, too, so that a disk that
hangs would hang training; a file that it has open in a process that forks is written by both; and after an error of the disk it
may not close a file any more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Final

import h5py
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow.compute import SetLookupOptions, call_function  # type: ignore[attr-defined]

from monitor.sinks.facts import SCHEMA_VERSION, Facts
from monitor.sinks.measurements import MISSING, SCHEMA, by_kind
from monitor.sinks.planes import LEVEL, compressed
from monitor.sinks.spool import Block
from monitor.stats.ops import CALLS

CHUNK_ROWS: Final = 32768
"""Rows of a chunk, the unit of compression and of reading: 256 KB of a column. Small kinds have one chunk of their size."""

READABLE_SINCE: Final = ("v110", "v110")
"""HDF5 1.10 (2016) reads it. What older ones read takes 2 KB more for each dataset."""

_TYPES: Final = {np.dtype(kind).char: h5py.h5t.py_create(np.dtype(kind)) for kind in (np.int64, np.float64)}

TABLES: Final = {"name": ("series_id", "series"), "shape": ("shape_id", "shape"), "dtype": ("dtype_id", "dtype")}
"""Of each column of text the dataset of its numbers and the one of what they stand for."""


def image(blocks: Iterable[Block]) -> bytes:
    """The content of a shard with the rows of these blocks.

    Raises:
        ValueError: there are none.
    """
    facts: Facts | None = None
    with h5py.File.in_memory(libver=READABLE_SINCE) as file:
        groups: dict[str, _Group] = {}
        for block in blocks:
            facts = block.facts if facts is None else facts.then(block.facts)
            for kind, rows in by_kind(block.rows):
                if kind not in groups:
                    groups[kind] = _Group(file.create_group(kind))
                groups[kind].add(rows)
        for group in groups.values():
            group.end()
        if facts is None:
            raise ValueError("there are no rows")
        file.attrs.update(attributes(facts))
        file.flush()
        content: bytes = file.id.get_file_image()
        return content


def attributes(facts: Facts) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "rank": facts.rank,
        "eps": facts.eps,
        "ops": np.array(facts.ops, dtype=h5py.string_dtype()),
        "skipped": np.array(facts.skipped, dtype=np.int64),
        "incomplete": np.array(facts.incomplete, dtype=np.int64),
    }


class _Group:
    """The group of a kind while it is written, a chunk at a time."""

    def __init__(self, group: h5py.Group) -> None:
        self._group = group
        self._numbering = {name: _Numbering() for name in TABLES}
        self._columns: dict[str, _Column] = {}
        self._waiting: dict[str, list[NDArray[Any]]] = defaultdict(list)
        self._rows_waiting = 0
        self._rows_written = 0

    def add(self, rows: pa.RecordBatch) -> None:
        for field, column in zip(SCHEMA, rows.columns, strict=True):
            if field.name in TABLES:
                self._waiting[TABLES[field.name][0]].append(self._numbering[field.name].of(column))
            elif field.name != "kind":
                self._waiting[field.name].append((column.fill_null(MISSING) if column.null_count else column).to_numpy())
        self._rows_waiting += len(rows)
        if self._rows_waiting >= CHUNK_ROWS:
            self._write(self._rows_waiting // CHUNK_ROWS * CHUNK_ROWS)

    def end(self) -> None:
        self._write(self._rows_waiting)
        for column, numbering in self._numbering.items():
            _write_texts(self._group, TABLES[column][1], numbering.texts.to_pylist())

    def _write(self, rows: int) -> None:
        if not rows:
            return
        for name, parts in self._waiting.items():
            numbers = np.concatenate(parts)
            self._write_column(name, numbers[:rows])
            self._waiting[name] = [numbers[rows:]]
        self._rows_waiting -= rows
        self._rows_written += rows

    def _write_column(self, name: str, numbers: NDArray[Any]) -> None:
        """``calls`` begins with the first rows that combine some: without any there is no such dataset."""
        if name not in self._columns:
            if name == CALLS:
                if (numbers == MISSING).all():
                    return
                numbers = np.concatenate([np.full(self._rows_written, MISSING), numbers])
            self._columns[name] = _Column(self._group, name, numbers)
        self._columns[name].add(numbers)


class _Column:
    """A dataset of numbers that grows. All that is added but the last is whole chunks."""

    def __init__(self, group: h5py.Group, name: str, first: NDArray[Any]) -> None:
        """``first`` is what is going to be added first; if that is less than a chunk, it is all there is."""
        self._chunk = min(len(first), CHUNK_ROWS)
        self._rows = 0
        # What group.create_dataset does, three times as fast: a shard has 18 columns a kind.
        storage = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        storage.set_chunk((self._chunk,))
        storage.set_shuffle()
        storage.set_deflate(LEVEL)
        most = len(first) if len(first) < CHUNK_ROWS else h5py.h5s.UNLIMITED
        space = h5py.h5s.create_simple((len(first),), (most,))
        self._dataset = h5py.h5d.create(group.id, name.encode(), _TYPES[first.dtype.char], space, storage)

    def add(self, numbers: NDArray[Any]) -> None:
        end = self._rows + len(numbers)
        if self._rows:
            self._dataset.set_extent((end,))
        for start in range(0, len(numbers), self._chunk):
            chunk = numbers[start : start + self._chunk]
            if len(chunk) < self._chunk:
                chunk = np.concatenate([chunk, np.zeros(self._chunk - len(chunk), dtype=chunk.dtype)])
            self._dataset.write_direct_chunk((self._rows + start,), compressed(chunk))
        self._rows = end


def _write_texts(group: h5py.Group, name: str, texts: Sequence[str]) -> None:
    """As UTF-8 of one length, since what has a length of its own is not compressed."""
    encoded = np.array([text.encode() for text in texts], dtype=np.bytes_)
    table = encoded.astype(h5py.string_dtype("utf-8", max(encoded.itemsize, 1)))
    group.create_dataset(name, data=table, compression="gzip", compression_opts=LEVEL)


class _Numbering:
    """Texts, numbered in the order in which they are met."""

    def __init__(self) -> None:
        self.texts = pa.array([], type=pa.string())
        self._last: tuple[pa.StringArray, NDArray[np.int64]] = self.texts, np.zeros(0, dtype=np.int64)

    def of(self, column: pa.DictionaryArray) -> NDArray[np.int64]:
        """The number of each text."""
        index = column.indices.to_numpy()
        occurs = np.zeros(len(column.dictionary), dtype=np.bool_)
        occurs[index] = True
        numbers = np.zeros(len(occurs), dtype=np.int64)
        numbers[occurs] = self._numbers(column.dictionary.filter(pa.array(occurs)))
        of_rows: NDArray[np.int64] = numbers[index]
        return of_rows

    def _numbers(self, texts: pa.StringArray) -> NDArray[np.int64]:
        """From step to step they are mostly the same."""
        known, numbers = self._last
        if not texts.equals(known):
            numbers = self._looked_up(texts)
            self._last = texts, numbers
        return numbers

    def _looked_up(self, texts: pa.StringArray) -> NDArray[np.int64]:
        found = self._find(texts)
        if found.null_count:
            new = texts.filter(found.is_null()).unique()
            self.texts = pa.concat_arrays([self.texts, new])
            found = self._find(texts)
        numbers: NDArray[np.int64] = found.to_numpy().astype(np.int64)
        return numbers

    def _find(self, texts: pa.StringArray) -> pa.Int32Array:
        return call_function("index_in", [texts], SetLookupOptions(self.texts))
