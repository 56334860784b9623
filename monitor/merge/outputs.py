"""The files of a merged data set: their columns, and how rows stand in each format."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from os import PathLike
from pathlib import Path
from typing import Any, Final, Literal

import h5py
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow.compute import replace_substring_regex  # type: ignore[attr-defined]
from pyarrow.csv import ConvertOptions, ParseOptions, read_csv as parse_csv, write_csv  # type: ignore[attr-defined]
from pyarrow.parquet import ParquetWriter, SortingColumn, read_table as read_parquet

from monitor.merge.tables import Columns, Index, Texts, order_by
from monitor.series import CALL_KIND
from monitor.sinks.arrow import TEXT, places_in_order
from monitor.stats.features import FEATURES
from monitor.stats.histograms import COUNTED
from monitor.stats.ops import CALLS, NUMERIC_OPS, SPELLED_OPS

Format = Literal["hdf5", "csv", "parquet"]

PER_RANK: Final = pa.schema(
    [
        ("kind", TEXT),
        ("rank", pa.int64()),
        ("dp", pa.int64()),
        ("tp", pa.int64()),
        ("pp", pa.int64()),
        ("stage", pa.int64()),
        ("vpp_stage", pa.int64()),
        ("name", TEXT),
        ("global_name", TEXT),
        ("step", pa.int64()),
        ("micro_step", pa.int64()),
        ("call_id", pa.int64()),
        ("shape", TEXT),
        ("dtype", TEXT),
        ("count", pa.int64()),
    ]
)
"""The columns of a rank's row, before its ops."""

GLOBAL: Final = pa.schema(
    [
        ("kind", TEXT),
        ("stage", pa.int64()),
        ("name", TEXT),
        ("step", pa.int64()),
        ("micro_step", pa.int64()),
        ("ranks", TEXT),
        ("term", pa.bool_()),
        ("count", pa.int64()),
    ]
)
"""One row for each tensor and step, before its ops."""

_NUMBERS: Final = (*NUMERIC_OPS, *COUNTED, *FEATURES)
_OPS: Final = pa.schema([*((op, pa.float64()) for op in _NUMBERS), *((op, TEXT) for op in SPELLED_OPS), (CALLS, pa.int64())])
"""All ops. ``calls``: how many calls of an operator a row combines; null in a row that does not count calls."""

FILE_NAME: Final = re.compile(r"(?P<kind>[a-z][a-z_]*)_(?P<first>\d{1,19})-(?P<last>\d{1,19})\.(?:h5|csv|parquet)")
"""The name of a file with rows."""

SUFFIXES: Final[dict[Format, str]] = {"hdf5": ".h5", "csv": ".csv", "parquet": ".parquet"}

SORTED: Final = (SUFFIXES["parquet"],)
"""The suffixes of files whose rows stand in order of names. The others have them in order of steps."""

_FORMULA: Final = r"^[=+\-@\t\r]"
"""Matches the beginning of a text that a spreadsheet takes for a formula."""

_NULLS: Final = "_missing"


CHUNK_ROWS: Final = 65536
"""Rows of a chunk in HDF5: half a megabyte of a column."""


def columns_of(kept: Columns, rows: pa.Schema) -> pa.Schema:
    """``PER_RANK`` or ``GLOBAL`` as files of a kind have it: all of them alike, so that they can be read as one table."""
    ops = [*kept.ops, CALLS] if kept.kind == CALL_KIND else kept.ops
    return pa.schema([*rows, *map(_OPS.field, ops)])


def write_table(rows: pa.Table, path: Path) -> None:
    """Write a file of the format that the suffix of ``path`` says. The same rows make the same bytes.

    In Parquet they stand in order of names, and the file keeps the metadata of their schema. In the other formats they stand
    as they are.

    Raises:
        OSError: it cannot be written.
    """
    _WRITERS[path.suffix](rows, path)


def read_merged(path: str | PathLike[str]) -> pa.Table:
    """The rows of one file of a merged data set as they stand there, in the columns ``columns_of`` its kind. What is missing is
    null.
    """
    path = Path(path)
    return _READERS[path.suffix](path)


def _write_csv(rows: pa.Table, path: Path) -> None:
    columns = [_neutralised(column) if pa.types.is_dictionary(column.type) else column for column in rows.columns]
    write_csv(pa.table(columns, names=rows.column_names), str(path))


def _neutralised(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """With an apostrophe before text that a spreadsheet would run."""
    return replace_substring_regex(column.cast(pa.string()), _FORMULA, r"'\0")


def _write_hdf5(rows: pa.Table, path: Path) -> None:
    """A dataset a column. A column of text holds indices into ``{column}_values``. Where something is missing,
    ``{column}_missing`` is 1.
    """
    with h5py.File(path, "w", rdcc_nbytes=0) as file:
        for name in rows.column_names:
            column = rows[name].combine_chunks()
            if pa.types.is_dictionary(column.type):
                column = Texts.of([column]).in_use()
                texts = np.array(column.dictionary.to_pylist(), dtype=object)
                file.create_dataset(f"{name}_values", data=texts, dtype=h5py.string_dtype())
                column = column.indices
            if column.null_count:
                _dataset(file, f"{name}{_NULLS}", column.is_null().to_numpy(zero_copy_only=False).astype(np.uint8))
                column = column.fill_null(0)
            _dataset(file, name, column.to_numpy(zero_copy_only=False))


def _dataset(file: h5py.File, name: str, values: NDArray[Any]) -> None:
    chunked = {"chunks": (min(len(values), CHUNK_ROWS),), "shuffle": True, "compression": "lzf"} if len(values) else {}
    file.create_dataset(name, data=values, **chunked)


def _read_hdf5(path: Path) -> pa.Table:
    with h5py.File(path, "r", locking=False) as file:
        schema = _schema(file)
        return pa.table([_column(file, field) for field in schema], schema=schema)


def _column(file: h5py.File, field: pa.Field) -> pa.Array:
    mask = file[field.name + _NULLS][...].astype(np.bool_) if field.name + _NULLS in file else None
    values = pa.array(file[field.name][...], mask=mask)
    if pa.types.is_dictionary(field.type):
        texts = pa.array(file[f"{field.name}_values"].asstr()[...].tolist(), type=pa.string())
        return pa.DictionaryArray.from_arrays(values, texts)
    return values


def _read_csv(path: Path) -> pa.Table:
    texts = pa.string()
    types = {one.name: texts if pa.types.is_dictionary(one.type) else one.type for one in (*PER_RANK, *GLOBAL, *_OPS)}
    cells = ConvertOptions(column_types=types, null_values=[""], strings_can_be_null=True, quoted_strings_can_be_null=False)
    rows = parse_csv(str(path), parse_options=ParseOptions(newlines_in_values=True), convert_options=cells)
    return rows.cast(_schema(rows.column_names))


def _schema(names: Collection[str]) -> pa.Schema:
    """The schema of a file with columns of these names."""
    return pa.schema([*(PER_RANK if "rank" in names else GLOBAL), *(one for one in _OPS if one.name in names)])


# --- Parquet. A question about one tensor needs few row groups of each file, because rows stand in order of names.

METADATA: Final = "monitor"
"""The key of what a file says about its rows, as JSON."""

ROW_GROUP: Final = 16_384
"""Rows that a reader unpacks at least. More would make a question about one tensor slower, fewer the whole file larger."""

_SORTED_BY: Final = ("name", "step", "rank", "ranks", "micro_step", "call_id")
"""Columns by which rows are sorted, as far as a file has them. Text is in order of its UTF-8, and null comes last."""


def _write_parquet(rows: pa.Table, path: Path) -> None:
    # Without the schema of Arrow, text is text in every tool. With it tools read categories, which many of them cannot filter
    # by statistics.
    floats = [one.name for one in rows.schema if pa.types.is_floating(one.type)]
    others = [one.name for one in rows.schema if pa.types.is_dictionary(one.type) or pa.types.is_integer(one.type)]
    keys = [name for name in _SORTED_BY if name in rows.column_names]
    with ParquetWriter(  # type: ignore[no-untyped-call]
        str(path),
        rows.schema.remove_metadata(),
        compression={name: "zstd" if name in floats else "snappy" for name in rows.column_names},
        use_dictionary=others,
        use_byte_stream_split=floats,
        write_statistics=["kind", *keys, *floats],
        write_page_index=True,
        write_page_checksum=True,
        write_batch_size=ROW_GROUP,
        store_schema=False,
        sorting_columns=[SortingColumn(rows.column_names.index(name)) for name in keys],
    ) as file:
        for group in _row_groups(rows, order_by([_in_numbers(rows[name]) for name in keys])):
            file.write_table(group, ROW_GROUP)
        file.add_key_value_metadata(rows.schema.metadata or {})


def _row_groups(rows: pa.Table, order: Index | None) -> Iterator[pa.Table]:
    """Each with no other text than its own: all text of a dictionary is written into each row group."""
    texts = {name: Texts.of(rows[name].chunks) for name in rows.column_names if pa.types.is_dictionary(rows[name].type)}
    alike = {name: text.in_use() for name, text in texts.items() if (text.codes == text.codes[:1]).all()}
    for first in range(0, len(rows), ROW_GROUP):
        which = slice(first, first + ROW_GROUP) if order is None else order[first : first + ROW_GROUP]
        group = rows.slice(first, ROW_GROUP) if order is None else rows.take(pa.array(which))
        some = {name: alike[name][: len(group)] if name in alike else text.take(which).in_use() for name, text in texts.items()}
        yield pa.table([some.get(name, group[name]) for name in rows.column_names], names=rows.column_names)


def _in_numbers(column: pa.ChunkedArray) -> Index:
    """Numbers that are in the same order as the values of a column. Null is the largest."""
    values = column.combine_chunks()
    if pa.types.is_dictionary(values.type):
        values = pa.array(places_in_order(values.dictionary)).take(values.indices)
    if not values.null_count:
        numbers: Index = values.to_numpy()
        return numbers
    known = values.fill_null(0).to_numpy()
    with_nulls: Index = np.where(values.is_valid().to_numpy(zero_copy_only=False), known, known.max() + 1)
    return with_nulls


def _read_parquet(path: Path) -> pa.Table:
    texts = [one.name for one in (*PER_RANK, *GLOBAL, *_OPS) if pa.types.is_dictionary(one.type)]
    rows = read_parquet(str(path), read_dictionary=texts, page_checksum_verification=True)  # type: ignore[no-untyped-call]
    return rows.unify_dictionaries().combine_chunks()


_WRITERS: Final[dict[str, Callable[[pa.Table, Path], None]]] = {
    ".h5": _write_hdf5,
    ".csv": _write_csv,
    ".parquet": _write_parquet,
}
_READERS: Final[dict[str, Callable[[Path], pa.Table]]] = {
    ".h5": _read_hdf5,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
