"""Makes the content of an HDF5 shard in memory, so that the HDF5 library never touches a disk.

Whenever the library does anything, it holds a lock that ``os.fork`` takes too, so a hanging disk would hang training. If a
process forks with an open HDF5 file, parent and child both write it. And after a disk error the library may be unable to close
a file.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final

import h5py
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow.compute import SetLookupOptions, call_function  # type: ignore[attr-defined]

from monitor.sinks import arrow
from monitor.sinks.spool import SpoolBlock
from monitor.stats.features import own_columns
from monitor.stats.ops import CALLS, derive
from monitor.stats.partials import COLUMNS, COSTLY, PARTIALS, WRITES, Partials

CHUNK_ROWS: Final = 32768
"""Rows of a chunk, the unit of compression and of reading: 256 KB per column. A kind with fewer rows has one chunk."""

CHUNK_HISTOGRAMS: Final = 128
"""Rows of a chunk of histograms: 290 KB."""

NO_CACHE: Final = 0
"""Size of the library's chunk cache, in bytes. Without a cache, each write compresses its chunk without Python's lock. With
one, ``flush`` would compress the rest of 200 datasets in one call, and ``os.fork`` would wait for it.
"""

READABLE_SINCE: Final = ("v110", "v110")
"""HDF5 1.10 (2016) and later can read the files. The layout for older versions takes 2 KB more per dataset."""

_TYPES: Final = {np.dtype(kind).char: h5py.h5t.py_create(np.dtype(kind)) for kind in (np.int64, np.float64)}

_LEFT_OUT: Final[dict[str, float]] = {CALLS: arrow.MISSING, **dict.fromkeys(COSTLY, 0.0)}
"""Columns that have no dataset if all rows have this number."""

TABLES: Final = {"name": ("series_id", "series"), "shape": ("shape_id", "shape"), "dtype": ("dtype_id", "dtype")}
"""For each column of text: the dataset of indices, and the dataset of the texts that they refer to."""

CONTENT: Final = "content"
"""The attribute of a group that says of columns, as JSON, what a reader would find in their datasets: a whole number or a text
that all rows have, or ``{"digest": ...}``, which is the same in all files that have the same column. Opening datasets takes
most of the time of reading where a shard has few rows.
"""

Content = int | str | dict[str, str]

_REPEATED: Final = ("step", "call_id", *(numbers for numbers, _ in TABLES.values()))
"""Columns that are the same on many ranks."""


def image(blocks: Iterable[SpoolBlock]) -> bytes:
    """The content of a shard with the rows of these blocks.

    Raises:
        ValueError: there are no blocks.
    """
    facts: arrow.ShardMetadata | None = None
    with h5py.File.in_memory(libver=READABLE_SINCE, rdcc_nbytes=NO_CACHE) as file:
        groups: dict[str, _Group] = {}
        for block in blocks:
            facts = block.facts if facts is None else facts.then(block.facts)
            for kind, rows in arrow.by_kind(block.rows):
                if kind not in groups:
                    groups[kind] = _Group(file.create_group(kind), kind)
                groups[kind].add(rows)
        for group in groups.values():
            group.end()
        if facts is None:
            raise ValueError("there are no rows")
        file.attrs.update(attributes(facts))
        file.flush()
        content: bytes = file.id.get_file_image()
        return content


def attributes(facts: arrow.ShardMetadata) -> dict[str, Any]:
    return {
        "schema_version": arrow.SCHEMA_VERSION,
        "rank": facts.rank,
        "eps": facts.eps,
        "ops": np.array(facts.ops, dtype=h5py.string_dtype()),
        "skipped": np.array(facts.skipped, dtype=np.int64),
        "incomplete": np.array(facts.incomplete, dtype=np.int64),
    }


class _Group:
    """Writes the group of a kind, a chunk at a time."""

    def __init__(self, group: h5py.Group, kind: str) -> None:
        self._group = group
        self._features = own_columns(kind)
        self._histograms = _Histograms(group, arrow.upper_of(kind))
        self._numbering = {name: _Numbering() for name in TABLES}
        self._columns: dict[str, _Column] = {}
        self._content: dict[str, Content] = {}
        self._waiting: dict[str, list[NDArray[Any]]] = defaultdict(list)
        self._rows_waiting = 0
        self._rows_written = 0

    def add(self, rows: pa.RecordBatch) -> None:
        for field, column in zip(arrow.SCHEMA, rows.columns, strict=False):
            if field.name in TABLES:
                self._waiting[TABLES[field.name][0]].append(self._numbering[field.name].of(column))
            elif field.name != "kind":
                self._waiting[field.name].append((column.fill_null(arrow.MISSING) if column.null_count else column).to_numpy())
        self._histograms.add(rows[arrow.HISTOGRAM] if arrow.HISTOGRAM in rows.schema.names else None, len(rows))
        self._rows_waiting += len(rows)
        if self._rows_waiting >= CHUNK_ROWS:
            self._write(self._rows_waiting // CHUNK_ROWS * CHUNK_ROWS)

    def end(self) -> None:
        self._write(self._rows_waiting)
        self._histograms.end()
        for column, numbering in self._numbering.items():
            texts = numbering.texts.to_pylist()
            _write_texts(self._group, TABLES[column][1], texts)
            numbers = self._content.pop(TABLES[column][0], None)
            if numbers is not None:
                several = isinstance(numbers, dict)
                self._content[column] = _digest("\0".join([str(numbers), *texts]).encode()) if several else texts[0]
        self._group.attrs[CONTENT] = np.bytes_(json.dumps(self._content))

    def _write(self, rows: int) -> None:
        if not rows:
            return
        columns: dict[str, NDArray[Any]] = {}
        for name, parts in self._waiting.items():
            numbers = np.concatenate(parts)
            columns[name], self._waiting[name] = numbers[:rows], [numbers[rows:]]
            self._write_column(name, columns[name])
        for name in self._features:
            self._write_column(name, _derived(name, columns))
        self._rows_waiting -= rows
        self._rows_written += rows

    def _write_column(self, name: str, numbers: NDArray[Any]) -> None:
        """Write numbers to a dataset. The datasets in ``_LEFT_OUT`` are made only when a row has another number."""
        if name not in self._columns:
            if name in _LEFT_OUT:
                if (numbers == _LEFT_OUT[name]).all():
                    return
                numbers = np.concatenate([np.full(self._rows_written, _LEFT_OUT[name], dtype=numbers.dtype), numbers])
            self._columns[name] = _Column(self._group, name, numbers)
        self._columns[name].add(numbers)
        if numbers.dtype == np.int64:
            self._note(name, numbers)

    def _note(self, name: str, numbers: NDArray[np.int64]) -> None:
        """Note what can be said of a column, to which these numbers were added."""
        known = self._content.get(name)
        if not self._rows_written and (numbers == numbers[0]).all():
            self._content[name] = int(numbers[0])
        elif not self._rows_written and name in _REPEATED:
            self._content[name] = _digest(numbers.tobytes())
        elif not isinstance(known, int) or (numbers != known).any():
            self._content.pop(name, None)


def _digest(content: bytes) -> dict[str, str]:
    return {"digest": blake2b(content, digest_size=16).hexdigest()}


def _derived(feature: str, columns: Mapping[str, NDArray[Any]]) -> NDArray[np.float64]:
    """The values of a feature; NaN where there is none."""
    partials = np.ones((len(COLUMNS), len(columns["step"])))
    for number, name in enumerate(PARTIALS, WRITES + 1):
        partials[number] = columns[name]
    values, there = derive(feature, Partials(partials))
    return np.where(there, values, np.nan)


class _Histograms:
    """Writes the growing histograms of a kind. The dataset is made with the first histogram; rows not written are zero."""

    def __init__(self, group: h5py.Group, upper: NDArray[np.float64]) -> None:
        self._group, self._upper = group, upper
        self._dataset: h5py.Dataset | None = None
        self._rows = 0
        self._chunk: NDArray[np.int64] | None = None
        """The rows since the last whole chunk; None while none of them has a histogram."""

    def add(self, histograms: pa.LargeListArray | None, rows: int) -> None:
        """Add the histograms of the next ``rows`` rows; None if no row has one."""
        if histograms is None and self._chunk is None:
            self._rows += rows
            return
        start = 0
        while start < rows:
            first = self._rows % CHUNK_HISTOGRAMS
            count = min(CHUNK_HISTOGRAMS - first, rows - start)
            self._put(None if histograms is None else histograms.slice(start, count), first)
            self._rows, start = self._rows + count, start + count
            if first + count == CHUNK_HISTOGRAMS:
                self._write(self._rows - CHUNK_HISTOGRAMS)

    def end(self) -> None:
        first = self._rows - self._rows % CHUNK_HISTOGRAMS
        self._write(first)
        if self._dataset is not None:
            self._dataset.resize(self._rows, axis=0)

    def _put(self, histograms: pa.LargeListArray | None, first: int) -> None:
        if histograms is None or histograms.null_count == len(histograms):
            return
        if self._chunk is None:
            self._chunk = np.zeros((CHUNK_HISTOGRAMS, len(self._upper)), dtype=np.int64)
        self._chunk[first : first + len(histograms)] = arrow.counts_of(histograms, len(self._upper))

    def _write(self, first: int) -> None:
        if self._chunk is None:
            return
        chunk, self._chunk = self._chunk, None
        if self._dataset is None:
            rows = min(self._rows, CHUNK_HISTOGRAMS)
            self._dataset = self._new(rows)
        self._dataset.resize(self._rows, axis=0)
        self._dataset[first : self._rows] = chunk[: self._rows - first]

    def _new(self, chunk_rows: int) -> h5py.Dataset:
        bins = len(self._upper)
        shape, chunks, most = (self._rows, bins), (chunk_rows, bins), (None, bins)
        options = {"chunks": chunks, "maxshape": most, "shuffle": True, "compression": "lzf"}
        dataset = self._group.create_dataset(arrow.HISTOGRAM, shape, np.int64, **options)
        dataset.attrs["upper"] = self._upper
        return dataset


class _Column:
    """A growing dataset of numbers. Every ``add`` but the last adds whole chunks."""

    def __init__(self, group: h5py.Group, name: str, first: NDArray[Any]) -> None:
        """``first`` is the numbers of the first ``add``. If they are less than a chunk, nothing follows."""
        self._chunk = min(len(first), CHUNK_ROWS)
        self._rows = 0
        # Does what group.create_dataset does, three times as fast: a shard has 18 columns per kind.
        storage = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        storage.set_chunk((self._chunk,))
        storage.set_shuffle()
        storage.set_filter(h5py.h5z.FILTER_LZF, h5py.h5z.FLAG_OPTIONAL)
        most = len(first) if len(first) < CHUNK_ROWS else h5py.h5s.UNLIMITED
        space = h5py.h5s.create_simple((len(first),), (most,))
        self._dataset = h5py.h5d.create(group.id, name.encode(), _TYPES[first.dtype.char], space, storage)

    def add(self, numbers: NDArray[Any]) -> None:
        """Append numbers, one chunk per call: h5py holds a lock while it compresses, and ``os.fork`` waits for the lock."""
        end = self._rows + len(numbers)
        if self._rows:
            self._dataset.set_extent((end,))
        rows = self._dataset.get_space()
        for start in range(0, len(numbers), self._chunk):
            chunk = np.ascontiguousarray(numbers[start : start + self._chunk])
            rows.select_hyperslab((self._rows + start,), chunk.shape)
            self._dataset.write(h5py.h5s.create_simple(chunk.shape), rows, chunk)
        self._rows = end


def _write_texts(group: h5py.Group, name: str, texts: Sequence[str]) -> None:
    """Write texts as UTF-8 of fixed length: HDF5 does not compress texts of variable length."""
    encoded = np.array([text.encode() for text in texts], dtype=np.bytes_)
    table = encoded.astype(h5py.string_dtype("utf-8", max(encoded.itemsize, 1)))
    group.create_dataset(name, data=table, shuffle=True, compression="lzf")


class _Numbering:
    """Numbers texts in the order in which they first occur."""

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
        """The number of each text. The last result is cached, because most steps repeat the texts of the step before."""
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
