"""Tables of rows: their columns, their order, and the files that they are read from."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow.ipc import new_file, open_file

from monitor.merge.discovery import SetAside, leads_out
from monitor.series import DIRECTION_KIND, KINDS, shown_kind
from monitor.sinks import files, hdf5, parquet
from monitor.sinks.arrow import FILLED, HISTOGRAM, IDENTITY, PARTIAL_TYPES, TEXT, parsed, places_in_order
from monitor.sinks.csv import COLUMN_TYPES, read_csv
from monitor.sinks.csv_files import BEGINNING
from monitor.sinks.files import StepSpan
from monitor.sinks.spool import PART, NotAShardError, ShardFormat
from monitor.stats.features import own_columns
from monitor.stats.histograms import LOSSES, MAGNITUDES, PERCENTILES
from monitor.stats.ops import CHECKSUM, MERGED_OPS, NUMERIC_OPS, SPELLED_OPS, has_op

# --- What there is of the rows of a kind, in shards and in merged tables.

Fields = tuple[tuple[str, pa.DataType], ...]


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a kind.

    Attributes:
        ops: In the order in which they stand in merged tables: of features their own columns. ``magnitude_histogram`` is text
            there, and as a number how many elements were counted.
        histogram: Whether rows may have a histogram of magnitudes.
    """

    kind: str
    ops: tuple[str, ...] = MERGED_OPS
    histogram: bool = False

    @classmethod
    def of(cls, kind: str, *, asked: Collection[str], histograms: bool, checksums: bool) -> Columns:
        """The columns that a job has of a kind.

        Args:
            asked: Ops that the job was asked for.
            histograms, checksums: Whether the job has counted magnitudes, and whether rows of the kind have checksums.
        """
        own = own_columns(kind)
        if own:
            return cls(kind, own)
        histogram = histograms and has_op(MAGNITUDES, kind)
        numbers = [op for op in NUMERIC_OPS if op in MERGED_OPS or op in asked]
        counted = (*LOSSES, *(op for op in PERCENTILES if op in asked), MAGNITUDES) if histogram else ()
        return cls(kind, (*numbers, *counted, *((CHECKSUM,) if checksums else ())), histogram=histogram)

    @property
    def numbers(self) -> tuple[str, ...]:
        """The ops that are numbers."""
        return tuple(op for op in self.ops if op not in SPELLED_OPS)

    @property
    def checked(self) -> bool:
        """Whether rows may have a checksum."""
        return CHECKSUM in self.ops

    @cache  # noqa: B019 - there are few kinds, and a schema takes as long as a column
    def exact(self, identity: Fields) -> pa.Schema:
        """The schema of rows whose partials are known."""
        return pa.schema([*identity, *PARTIAL_TYPES.items(), *self._histogram()])

    @cache  # noqa: B019
    def rounded(self, identity: Fields) -> pa.Schema:
        """The schema of rows of which only ops were kept. What is not known is null."""
        checksum = [(CHECKSUM, pa.uint64())] if self.checked else []
        return pa.schema([*identity, *((op, pa.float64()) for op in self.numbers), *checksum, *self._histogram()])

    def _histogram(self) -> list[tuple[str, pa.DataType]]:
        return [(HISTOGRAM, FILLED)] if self.histogram else []


# --- Putting rows in order by whole numbers.
#
# Rows have few different keys. Sorting by sixteen bits of the key at a time, lowest first, takes time in proportion to
# the number of rows whatever order they are in (numpy sorts numbers of 16 bits by counting them): 5 ns a row and pass,
# where a sort by several columns (``numpy.lexsort``) takes 20 to 200.

Index = NDArray[np.int64]

_DIGIT: Final = 16
_BITS: Final = 63
"""Bits of a key that all columns fit in."""


def order_by(columns: Sequence[Index]) -> Index | None:
    """The order of rows by these columns, the first one first. Equal rows stay in the order that they are in.

    Returns:
        The rows' numbers; None where they are in order as they are.
    """
    key = _packed(columns)
    if key is None:
        sorted_by_columns: Index = np.lexsort(columns[::-1])
        return sorted_by_columns
    if (key[1:] >= key[:-1]).all():
        return None
    order: Index | None = None
    for shift in range(0, int(key.max()).bit_length(), _DIGIT):
        digit = ((key if order is None else key[order]) >> shift).astype(np.uint16)
        if order is not None and (digit[1:] >= digit[:-1]).all():
            continue
        by_digit = np.argsort(digit, kind="stable")
        order = by_digit if order is None else order[by_digit]
    return order


def starts_of_runs(columns: Sequence[Index]) -> Index:
    """The first row of each run of rows that are alike in these columns."""
    changes = np.ones(len(columns[0]), dtype=np.bool_)
    if len(changes):
        changes[1:] = columns[0][1:] != columns[0][:-1]
        for column in columns[1:]:
            changes[1:] |= column[1:] != column[:-1]
    return np.flatnonzero(changes)


def distinct(numbers: Index) -> Index:
    """Each number once, ascending. Numbers that are close to each other are marked and not sorted."""
    low, high = (int(numbers.min()), int(numbers.max())) if len(numbers) else (0, 0)
    if high - low > 8 * len(numbers):
        return np.unique(numbers)
    return np.flatnonzero(np.bincount(numbers - low)) + low


def _packed(columns: Sequence[Index]) -> Index | None:
    """All of them in one number for each row; None where that has not enough bits."""
    key = np.zeros(len(columns[0]), dtype=np.int64)
    bits = 0
    for column in columns if len(key) else ():
        least = int(column.min())
        width = (int(column.max()) - least).bit_length()
        bits += width
        if bits > _BITS:
            return None
        if width:
            key = (key << width) | (column - least)
    return key


# --- Tables that one task leaves for another in a file of Arrow, read as they lie on the disk.


def write_file(path: Path, rows: pa.Table | Iterable[pa.RecordBatch], schema: pa.Schema) -> None:
    """Write a table, or batches that can be read one by one.

    Raises:
        OSError: it cannot be written.
    """
    with pa.OSFile(str(path), "wb") as file, new_file(file, schema) as writer:  # type: ignore[no-untyped-call]
        if isinstance(rows, pa.Table):
            writer.write_table(rows)
        else:
            for batch in rows:
                writer.write_batch(batch)


def read_file(path: Path) -> pa.Table:
    """All of a file. Nothing is copied: the table holds on to the file."""
    with pa.memory_map(str(path)) as file:
        return open_file(file).read_all()  # type: ignore[no-untyped-call]


def read_batch(path: Path, number: int) -> pa.Table:
    """One batch of a file."""
    with pa.memory_map(str(path)) as file:
        return pa.Table.from_batches([open_file(file).get_batch(number)])  # type: ignore[no-untyped-call]


# --- Columns of text: an index for each row, and the texts.

NONE: Final = -1
"""The number of a row without text."""

Codes = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Texts:
    """A column of text.

    Attributes:
        codes: int32, shape ``(rows,)``: of each row the place of its text in ``values``, or ``NONE``.
        values: Each text once.
    """

    codes: Codes
    values: pa.StringArray

    @classmethod
    def of(cls, parts: Sequence[pa.DictionaryArray]) -> Texts:
        """One after the other."""
        known = [one for one in parts if one.null_count < len(one)]
        if not known:
            return cls(np.full(sum(map(len, parts)), NONE, dtype=np.int32), pa.array([], type=pa.string()))
        column = pa.chunked_array(parts, type=TEXT).unify_dictionaries().combine_chunks() if len(parts) > 1 else parts[0]
        codes = column.indices.fill_null(NONE) if column.null_count else column.indices
        return cls(codes.to_numpy(), column.dictionary)

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_] | slice) -> Texts:
        return Texts(self.codes[rows], self.values)

    def places(self) -> Index:
        """For each row, the place of its text among all values in order of their UTF-8. Rows without text come last."""
        places: Index = np.append(places_in_order(self.values), len(self.values))[self.codes]
        return places

    def column(self) -> pa.DictionaryArray:
        missing = self.codes == NONE
        return pa.DictionaryArray.from_arrays(pa.array(self.codes, mask=missing if missing.any() else None), self.values)

    def arrow(self) -> pa.StringArray:
        return self.values.take(pa.array(self.codes, mask=self.codes == NONE))

    def in_use(self) -> pa.DictionaryArray:
        """With no other values than those in use, in order of first use: equal columns are equal in every byte."""
        if not len(self.codes):
            return pa.array([], type=TEXT)
        low, high = self.codes.min(), self.codes.max()
        if low == high:  # as most are
            numbers, used = np.zeros(len(self.codes), dtype=np.int32), self.codes[:1]
        else:
            numbers, used = _by_first_use(self.codes, len(self.values))
        missing = self.codes == NONE if low == NONE else None
        return pa.DictionaryArray.from_arrays(pa.array(numbers, mask=missing), self.values.take(pa.array(used[used != NONE])))


def same(text: str, rows: int) -> Texts:
    """The same text in every row."""
    return Texts(np.zeros(rows, dtype=np.int32), pa.array([text], type=pa.string()))


def _by_first_use(codes: Codes, values: int) -> tuple[Codes, Codes]:
    """The codes numbered anew in order of first use, and which ones these are. ``NONE`` is numbered, too, last."""
    first = np.full(values + 1, len(codes))
    first[codes[::-1]] = np.arange(len(codes) - 1, -1, -1)  # of several the last one stays, which is the first use
    first[NONE] = len(codes)
    used = np.flatnonzero(first < len(codes))
    ordered: NDArray[np.int32] = used[np.argsort(first[used])].astype(np.int32)
    number = np.zeros(values + 1, dtype=np.int32)
    number[ordered] = np.arange(len(ordered))
    return number[codes], ordered


# --- The shards of a rank, of any format, read into columns of one form.

_IDENTITY: Final = tuple((name, kind) for name, kind in IDENTITY.items() if name != "kind")

_SAME_OF_A_SCALAR: Final = ("mean", "min", "max", "norm", "absmax")
"""Ops that of a share are the share itself."""

BYTES_A_ROW: Final = 100
"""Bytes of a row in CSV, about."""

FAR: Final = 2**62
"""Beyond any step."""

UNFINISHED: Final = (
    "unfinished: the run still writes it, or was killed. A run that continues in its directory (append_output) recovers it"
)

GONE: Final = (
    "it was removed while it was read: the run has thinned its steps (max_output_bytes) or done them again. Repeat the command"
)

_KIND: Final = re.compile(r"[a-z][a-z_]{0,63}")
_CSV_KINDS: Final = frozenset(map(shown_kind, KINDS))

EXACT: Final = {form.suffix: form for form in (hdf5.FORMAT, parquet.FORMAT)}
"""The formats whose shards hold partials, by the suffix of their files."""


ROWS_TOGETHER: Final = 50_000
"""Rows of CSV files that are read in one call."""


class ForeignError(Exception):
    """The file is not one of ours, or is torn. The message says in what."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A file with rows of one kind.

    Attributes:
        steps: That it may hold.
        rows: How many it holds, of CSV about.
    """

    path: Path
    kind: str
    steps: StepSpan
    rows: int

    @property
    def suffix(self) -> str:
        """The suffix of its format; ``.part`` follows if the file is unfinished."""
        return self.path.with_suffix("").suffix + PART if self.is_part else self.path.suffix

    @property
    def is_part(self) -> bool:
        """Whether it is unfinished."""
        return self.path.suffix == PART

    @property
    def exact(self) -> bool:
        """Whether it holds partials."""
        return self.suffix.removesuffix(PART) in EXACT

    def read(self, steps: StepSpan, columns: Columns) -> pa.Table:
        """Its rows of these steps, with the columns of rows that are exact if it is, otherwise with those of rounded ones.

        Raises:
            ForeignError: it is torn, or not one of ours.
        """
        return _read_exact_shard(self, steps, columns) if self.exact else _read_csv_shard(self, steps, columns)


def shards_in(directory: Path, rank: int, end: int) -> tuple[list[Shard], list[SetAside]]:
    """The shards of a rank, and the files that look like ones and are not.

    Of a run that was killed, or still writes, the whole steps of an unfinished file count, too: they are the last that it
    recorded. Files of CSV are set aside while they are unfinished, if they have steps before ``end``.
    """
    found: list[Shard] = []
    aside = [SetAside(str(named.path), UNFINISHED) for named in files.parts_in(directory) if named.steps.first < end]
    for named in files.shards_in(directory):
        if _KIND.fullmatch(named.kind):
            try:
                found.append(_csv_shard(named))
            except (ForeignError, OSError) as error:
                aside.append(SetAside(str(named.path), _reason(error, named.path)))
    for form in EXACT.values():
        for path, steps in (*form.shards_in(directory), *form.parts_in(directory)):
            try:
                found.extend(_kinds_of(path, form, steps, rank))
            except (ForeignError, NotAShardError, OSError) as error:
                aside.append(SetAside(str(path), _reason(error, path)))
    return found, aside


def _csv_shard(named: files.NamedShard) -> Shard:
    _check(named.path, named.steps)
    if named.kind not in _CSV_KINDS:
        raise ForeignError(f"{named.kind!r} is no kind of rows")
    return Shard(named.path, named.kind, named.steps, named.path.stat().st_size // BYTES_A_ROW + 1)


def _check(path: Path, steps: StepSpan) -> None:
    """Refuse a file that is not to be opened. To open a pipe would wait for somebody to write to it."""
    if leads_out(path) or not path.is_file():
        raise ForeignError("it leads to another directory" if leads_out(path) else "it is not a file")
    if not steps.first <= steps.last < FAR:
        raise ForeignError("its name does not give a range of steps")


def _kinds_of(path: Path, form: ShardFormat, steps: StepSpan, rank: int) -> Iterator[Shard]:
    _check(path, steps)
    found = _look_at_part(path, form) if path.suffix == PART else _look_at(path, form)
    if found is None:
        return
    written_by, rows = found
    if written_by != rank:
        raise ForeignError(f"it is of rank {written_by}")
    for kind, length in rows.items():
        if not _KIND.fullmatch(kind):
            raise ForeignError(f"{kind!r} is not a kind")
        yield Shard(path, kind, steps, length)


_Look = tuple[int, dict[str, int]]
"""The rank that wrote a file, and its rows by kind."""


def _look_at_part(path: Path, form: ShardFormat) -> _Look | None:
    found = form.look_at_part(path)
    return None if found is None else (found[0].rank, found[1])


def _look_at(path: Path, form: ShardFormat) -> _Look:
    status = path.stat()
    return _look_once(path, form, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=2**17)
def _look_once(path: Path, form: ShardFormat, _size: int, _changed: int) -> _Look:
    """A merge that follows a job looks at the same files again and again."""
    facts, rows = form.look(path)
    return facts.rank, rows


def _read_exact_shard(shard: Shard, steps: StepSpan, columns: Columns) -> pa.Table:
    try:
        form = EXACT[shard.suffix.removesuffix(PART)]
        read = form.rows_of_part if shard.is_part else form.rows
        rows = read(shard.path, steps, shard.kind)
    except (NotAShardError, OSError) as error:
        raise ForeignError(_reason(error, shard.path)) from error
    _check_steps(rows, shard)
    schema = columns.exact(_IDENTITY)
    if columns.histogram and HISTOGRAM not in rows.column_names:
        rows = rows.append_column(HISTOGRAM, pa.nulls(len(rows), FILLED))
    rows = rows.select(schema.names)
    return rows if rows.schema.equals(schema) else rows.cast(schema)


def in_groups(shards: Iterable[Shard]) -> Iterator[list[Shard]]:
    """Shards in this order, in groups for ``read_group``."""
    group: list[Shard] = []
    rows = 0
    for shard in shards:
        rows += shard.rows
        if not group or rows > ROWS_TOGETHER or shard.exact or not _goes_with(shard, group[-1]):
            yield from [group] if group else []
            group, rows = [], shard.rows
        group.append(shard)
    yield from [group] if group else []


def _goes_with(shard: Shard, later: Shard) -> bool:
    alike = (shard.suffix, shard.path.parent) == (later.suffix, later.path.parent)
    return alike and shard.steps.last < later.steps.first


def read_group(shards: Sequence[Shard], steps: StepSpan, columns: Columns) -> tuple[list[pa.Table], list[SetAside]]:
    """The rows of these steps. A thousand small files of CSV are read in a call: each call takes as long as a thousand rows.

    Returns:
        Tables, and the files that are torn or not ours.
    """
    if len(shards) > 1:
        try:
            return [_chosen(_rows_together(shards), steps, columns)], []
        except ForeignError:
            pass  # they say one by one what is wrong, or have different columns
    tables, aside = [], []
    for shard in shards:
        try:
            tables.append(shard.read(steps, columns))
        except ForeignError as error:
            aside.append(SetAside(str(shard.path), str(error)))
    return tables, aside


def _rows_together(shards: Sequence[Shard]) -> pa.Table:
    """The rows of several files with the same columns, read as ``_csv_rows`` does."""
    try:
        texts = [shard.path.read_bytes() for shard in shards]
    except OSError as error:
        raise ForeignError(_reason(error)) from error
    header = texts[0][: texts[0].find(b"\n") + 1]
    if not header.startswith(BEGINNING) or not all(text.startswith(header) and text.endswith(b"\n") for text in texts):
        raise ForeignError("they have different headers, or one does not end with a whole line")
    rows = _csv_rows(pa.BufferReader(b"".join([header, *(text[len(header) :] for text in texts)])))
    lengths = [text.count(b"\n") - 1 for text in texts]
    if sum(lengths) != len(rows):
        raise ForeignError("a name has several lines")
    first, last = (np.repeat(ends, lengths) for ends in zip(*(shard.steps for shard in shards), strict=True))
    step = rows["step"].to_numpy()
    if ((step < first) | (step > last)).any():
        raise ForeignError("a file has steps outside the range in its name")
    return rows


def _csv_rows(file: Path | pa.NativeFile) -> pa.Table:
    """All rows of a file, with all of its columns, as ``read_csv`` types them."""
    try:
        rows = read_csv(file)
        names = rows.column_names
    except (OSError, pa.ArrowInvalid, pa.ArrowKeyError, UnicodeDecodeError) as error:
        raise ForeignError(_reason(error, file if isinstance(file, Path) else None)) from error
    if len(set(names)) < len(names):
        raise ForeignError("two of its columns have the same name")
    if not {"vpp_stage", "name", "step"} <= set(names) or any(rows[name].null_count for name in ("vpp_stage", "step")):
        raise ForeignError("a row lacks its chunk, its name or its step")
    if foreign := [name for name in names if name not in COLUMN_TYPES]:
        raise ForeignError(f"its columns are not those of a shard: {', '.join(foreign)[:200]!r}")
    return rows


def _read_csv_shard(shard: Shard, steps: StepSpan, columns: Columns) -> pa.Table:
    try:
        _check_ends(shard.path)
    except OSError as error:
        raise ForeignError(_reason(error, shard.path)) from error
    rows = _csv_rows(shard.path)
    _check_steps(rows, shard)
    return _chosen(rows, steps, columns)


def _chosen(rows: pa.Table, steps: StepSpan, columns: Columns) -> pa.Table:
    step = rows["step"].to_numpy()
    inside = (step >= steps.first) & (step <= steps.last)
    rows = rows if inside.all() else rows.filter(inside)
    schema, found = columns.rounded(_IDENTITY), _found(rows, columns)
    known = [_cast(found[one.name], one.type) if one.name in found else pa.nulls(len(rows), one.type) for one in schema]
    return pa.table(known, schema=schema)


def _found(rows: pa.Table, columns: Columns) -> dict[str, pa.ChunkedArray]:
    """The columns of a file of CSV by the names that they have here."""
    found = {name: rows[name] for name in rows.column_names}
    if columns.checked and CHECKSUM in found:
        found[CHECKSUM] = _unspelled(found[CHECKSUM])
    if columns.kind == DIRECTION_KIND:
        share = next((op for op in _SAME_OF_A_SCALAR if op in found), None)
        return found if share is None else {**found, DIRECTION_KIND: found[share]}
    if columns.histogram and MAGNITUDES in found:
        try:
            found[HISTOGRAM] = pa.chunked_array([parsed(found[MAGNITUDES])])
        except (ValueError, pa.ArrowInvalid) as error:
            raise ForeignError(_reason(error)) from error
    return found


def _unspelled(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Checksums as numbers; null where there is none."""
    try:
        return pa.chunked_array([pa.array([int(text, 16) if text else None for text in column.to_pylist()], type=pa.uint64())])
    except (ValueError, pa.ArrowInvalid) as error:
        raise ForeignError(_reason(error)) from error


def _cast(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    if pa.types.is_dictionary(kind) and not pa.types.is_dictionary(column.type):
        return column.dictionary_encode().cast(kind)
    return column.cast(kind)


def _check_ends(path: Path) -> None:
    with open(path, "rb") as file:
        if file.read(len(BEGINNING)) != BEGINNING:
            raise ForeignError("it does not begin with the header of a shard")
        file.seek(-1, 2)
        if file.read(1) != b"\n":
            raise ForeignError("it is cut off in the middle of a row")


def _check_steps(rows: pa.Table, shard: Shard) -> None:
    step = rows["step"].to_numpy()
    if len(step) and not shard.steps.first <= step.min() <= step.max() <= shard.steps.last:
        raise ForeignError(
            f"it holds steps {step.min()} to {step.max()}, and its name says {shard.steps.first} to {shard.steps.last}"
        )


def _reason(error: Exception, path: Path | None = None) -> str:
    if path is not None and not os.path.lexists(path):
        return GONE
    return (str(error).splitlines() or [type(error).__name__])[0][:500]
