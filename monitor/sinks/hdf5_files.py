"""Finds the files of the ``hdf5`` format in a directory, by name, and reads their steps and rows."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import h5py
import numpy as np
import pyarrow as pa
from h5py import h5d, h5g, h5l, h5o, h5s
from numpy.typing import NDArray

from monitor.sinks import arrow
from monitor.sinks.files import StepSpan
from monitor.sinks.hdf5_write import TABLES, SpoolBlock
from monitor.stats.ops import CALLS
from monitor.stats.partials import COSTLY

_SHARD_NAME: Final = re.compile(r"metrics_(\d+)-(\d+)(?:\.\d+)?\.h5")
_PART_NAME: Final = re.compile(r"\.metrics_(\d+)-(\d+)\.h5\.part")
_DRAFT_NAME: Final = re.compile(r"\.metrics_\d+-\d+(?:\.\d+)?\.h5(?:\.part)?\.draft")
_SIGNATURE: Final = b"\x89HDF\r\n\x1a\n"


def shard_name(steps: StepSpan, copy: int = 1) -> str:
    return f"metrics_{steps.first}-{steps.last}{f'.{copy}' if copy > 1 else ''}.h5"


def part_name(shard: str) -> str:
    """The name of the hidden file that becomes ``shard``."""
    return f".{shard}.part"


def is_shard(path: Path) -> bool:
    """Whether the file is HDF5, and not the blocks of an unfinished shard."""
    with open(path, "rb") as file:
        return file.read(len(_SIGNATURE)) == _SIGNATURE


def write_hidden(path: Path, content: bytes) -> None:
    """Replace the file's content atomically. The file is unchanged if that fails."""
    draft = path.with_name(f".{path.name.removeprefix('.')}.draft")
    try:
        draft.write_bytes(content)
        os.replace(draft, path)
    except OSError:
        with suppress(OSError):
            draft.unlink()
        raise


@dataclass(frozen=True, slots=True)
class Hdf5Shard:
    """A visible file of this format.

    Attributes:
        span: The first and the last step.
        size: In bytes.
    """

    path: Path
    facts: arrow.ShardMetadata
    span: StepSpan
    size: int

    @classmethod
    def read(cls, path: Path) -> Hdf5Shard | None:
        """The shard; None if the file is missing, not accessible, not of this format, or has no rows."""
        try:
            content = path.read_bytes()
            with _opened(content) as file:
                span = read_span(file)
                return cls(path, read_metadata(file), span, len(content)) if span else None
        except (FileNotFoundError, IsADirectoryError, PermissionError, NotAShardError):
            return None

    def rows(self, steps: StepSpan) -> pa.Table:
        """The rows of these steps, kind by kind."""
        with _opened(self.path.read_bytes()) as file:
            return read_rows(file, steps=steps)

    def steps(self) -> set[int]:
        """The steps that have rows in the file."""
        with _opened(self.path.read_bytes()) as file:
            return read_steps(file)

    def blocks(self, steps: StepSpan) -> list[SpoolBlock]:
        """The rows of these steps as blocks."""
        rows = self.rows(steps)
        return [SpoolBlock(batch, self.facts.only(steps)) for batch in rows.combine_chunks().to_batches()]


class ShardIndex:
    """The files of a directory, by the records whose steps they hold.

    Files named after a record are not stored: there may be very many, and their names follow from the record. The other files
    are listed once.
    """

    def __init__(self, directory: Path, steps_per_record: int) -> None:
        self._directory = directory
        self._steps_per_record = steps_per_record
        self._others: dict[Path, StepSpan] | None = None

    def add(self, path: Path) -> None:
        self._known().update(self._otherwise([path.name]))

    def of(self, record: StepSpan) -> list[Path]:
        """The files whose names state steps of this record only; first the file named after the record."""
        return self._existing(record, [path for path, steps in self._known().items() if record.holds(steps)])

    def shards_of(self, record: StepSpan, *, anywhere: bool = False) -> list[Hdf5Shard]:
        """The shards among the files ``of`` this record; with ``anywhere`` also those that hold steps of other records."""
        others = [path for path, steps in self._known().items() if steps.meets(record)]
        paths = self._existing(record, others) if anywhere else self.of(record)
        return [shard for path in paths if (shard := Hdf5Shard.read(path)) is not None]

    def _existing(self, record: StepSpan, others: list[Path]) -> list[Path]:
        return [path for path in (self._directory / shard_name(record), *others) if os.path.lexists(path)]

    def _known(self) -> dict[Path, StepSpan]:
        if self._others is None:
            self._others = dict(self._otherwise(_listed(self._directory)))
        return self._others

    def _otherwise(self, names: list[str]) -> Iterator[tuple[Path, StepSpan]]:
        """The files that are not named after a record."""
        for name in names:
            if match := _SHARD_NAME.fullmatch(name):
                steps = StepSpan(int(match[1]), int(match[2]))
                if name != shard_name(StepSpan.of_record(steps.first, self._steps_per_record)):
                    yield self._directory / name, steps


def shards_in(directory: Path) -> Iterator[tuple[Path, StepSpan]]:
    """The files that a reader sees, with the steps in their names."""
    return _matching(_SHARD_NAME, directory)


def parts_in(directory: Path) -> Iterator[tuple[Path, StepSpan]]:
    """The hidden unfinished files, with their records."""
    return _matching(_PART_NAME, directory)


def drafts_in(directory: Path) -> list[Path]:
    """The hidden files that were to replace other files."""
    return [directory / name for name in _listed(directory) if _DRAFT_NAME.fullmatch(name)]


def _matching(pattern: re.Pattern[str], directory: Path) -> Iterator[tuple[Path, StepSpan]]:
    for name in _listed(directory):
        if match := pattern.fullmatch(name):
            yield directory / name, StepSpan(int(match[1]), int(match[2]))


def _listed(directory: Path) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except FileNotFoundError:
        return []


def _opened(content: bytes) -> h5py.File:
    try:
        return h5py.File.in_memory(content)
    except (OSError, RuntimeError, ValueError) as error:
        raise NotAShardError(str(error)) from error


# --- Datasets of an HDF5 file, read through h5py's low-level interface.
#
# A job has thousands of shards with some twenty columns per kind. Through ``h5py.Dataset`` the columns of a kind take
# 8 ms to open, however few rows there are; through the low-level interface they take 4 ms.


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
        self._dataset = _own(group, name, h5d.DatasetID, "Dataset")
        created, shape = self._dataset.get_create_plist(), self._dataset.shape
        layout = created.get_layout()
        if tuple(shape[1:]) != inner or not shape or layout == h5d.VIRTUAL or created.get_external_count():
            raise ValueError(f"{_path(group, name)} is not a plain column: its shape or its storage is another")
        self._length, self._inner = int(shape[0]), inner
        if not inner and layout == h5d.CHUNKED and self._dataset.get_num_chunks() * created.get_chunk()[0] < self._length:
            raise ValueError(f"{_path(group, name)} states more rows than were written")

    def __len__(self) -> int:
        return self._length

    def read(self, first: int = 0, end: int | None = None) -> NDArray[Any]:
        """The rows from ``first`` to before ``end``."""
        count = (self._length if end is None else end) - first
        values = np.empty((count, *self._inner), dtype=self._dataset.dtype)
        if count == self._length:
            self._dataset.read(h5s.ALL, h5s.ALL, values)
        elif count:
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
    return _own(file, name, h5g.GroupID, "Group")


def _own(group: h5g.GroupID, name: str, kind: type[Any], called: str) -> Any:
    encoded = name.encode()
    if not group.links.exists(encoded):
        raise KeyError(f"{_path(group)} has no {name}")
    hard = group.links.get_info(encoded).type == h5l.TYPE_HARD
    found = h5o.open(group, encoded) if hard else None
    if not isinstance(found, kind):
        raise TypeError(f"{_path(group)} has no {called} {name}")
    return found


def _path(group: h5g.GroupID, name: str = "") -> str:
    path: str = h5py.Group(group).name
    return f"{path}/{name}" if name else path


ALL_STEPS: Final = StepSpan(0, 2**63 - 1)

HISTOGRAMS_AT_ONCE: Final = 4096
"""Rows of histograms read in one call: 9 MB, of which the filled bins take a tenth."""

_FOREIGN: Final = (KeyError, TypeError, ValueError, OSError, RuntimeError, UnicodeDecodeError)
"""Raised by h5py and the checks below for files that are damaged or not of this format."""


class NotAShardError(ValueError):
    """The file is damaged or not a shard of this format. The message states the difference."""


def read_metadata(file: h5py.File) -> arrow.ShardMetadata:
    """The metadata in the file's attributes.

    Raises:
        NotAShardError: the attributes are not those of a shard.
    """
    try:
        version = int(file.attrs["schema_version"])
        if version != arrow.SCHEMA_VERSION:
            raise NotAShardError(
                f"its schema version is {version}, and this version of the monitor reads {arrow.SCHEMA_VERSION}"
            )
        ops = tuple(str(op) for op in file.attrs["ops"])
        marked = (tuple(np.asarray(file.attrs[name], dtype=np.int64).tolist()) for name in ("skipped", "incomplete"))
        return arrow.ShardMetadata(int(file.attrs["rank"]), float(file.attrs["eps"]), ops, *marked)
    except _FOREIGN as error:
        raise _not_a_shard(error) from error


def read_rows(file: h5py.File, kinds: Collection[str] | None = None, steps: StepSpan = ALL_STEPS) -> pa.Table:
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


def read_kind(file: h5py.File, kind: str, steps: StepSpan) -> pa.Table:
    """The rows of one kind, as ``read_rows`` returns them but without metadata.

    Raises:
        NotAShardError: the file is not a shard.
    """
    try:
        return _rows(kind, group_in(file.id, kind), steps)
    except _FOREIGN as error:
        raise _not_a_shard(error) from error


def read_steps(file: h5py.File) -> set[int]:
    """The steps that have rows.

    Raises:
        NotAShardError: the file is not a shard.
    """
    try:
        return {step for _, group in _groups(file, None) for step in np.unique(DatasetColumn(group, "step").read()).tolist()}
    except _FOREIGN as error:
        raise _not_a_shard(error) from error


def read_lengths(file: h5py.File) -> dict[str, int]:
    """The number of rows of each kind.

    Raises:
        NotAShardError: the file is not a shard.
    """
    try:
        return {kind: len(DatasetColumn(group, "step")) for kind, group in _groups(file, None)}
    except _FOREIGN as error:
        raise _not_a_shard(error) from error


def read_span(file: h5py.File) -> StepSpan | None:
    """The first and the last step that have rows; None if there are no rows.

    Raises:
        NotAShardError: the file is not a shard.
    """
    try:
        steps = [DatasetColumn(group, "step") for _, group in _groups(file, None)]
        ends = [(int(step.read(0, 1)[0]), int(step.read(len(step) - 1)[0])) for step in steps if len(step)]
        return StepSpan(min(first for first, _ in ends), max(last for _, last in ends)) if ends else None
    except _FOREIGN as error:
        raise _not_a_shard(error) from error


def _groups(file: h5py.File, kinds: Collection[str] | None) -> Iterator[tuple[str, h5g.GroupID]]:
    for kind in file:
        if kinds is None or kind in kinds:
            yield kind, group_in(file.id, kind)


def _rows(kind: str, group: h5g.GroupID, steps: StepSpan) -> pa.Table:
    step = DatasetColumn(group, "step").read()
    rows = _rows_of(step, steps)
    columns = [_column(field, kind, group, rows, len(step)) for field in arrow.SCHEMA]
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


def _column(field: pa.Field, kind: str, group: h5g.GroupID, rows: slice, length: int) -> pa.Array:
    if field.name == "kind":
        return _texts(pa.array([kind], type=pa.string()), np.zeros(rows.stop - rows.start, dtype=np.int64))
    if field.name == CALLS and not group.links.exists(CALLS.encode()):
        return pa.nulls(rows.stop - rows.start, field.type)
    if field.name in COSTLY and not group.links.exists(field.name.encode()):
        return pa.array(np.zeros(rows.stop - rows.start))
    name, table = TABLES.get(field.name, (field.name, None))
    column = DatasetColumn(group, name)
    if len(column) != length:
        raise ValueError(f"{kind}/{name} has {len(column)} rows and not {length}")
    numbers = column.read(rows.start, rows.stop)
    if table is not None:
        return _texts(DatasetColumn(group, table).texts(), numbers)
    wanted = np.float64 if field.type == pa.float64() else np.int64
    missing = numbers == arrow.MISSING if name in arrow.NULLABLE else None
    return pa.array(numbers.astype(wanted, casting="safe", copy=False), mask=missing)


def _texts(texts: pa.StringArray, numbers: NDArray[np.int64]) -> pa.DictionaryArray:
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(texts):
        raise ValueError("a dictionary index is out of range")
    return pa.DictionaryArray.from_arrays(pa.array(numbers.astype(np.int32)), texts)


def _not_a_shard(error: Exception) -> NotAShardError:
    return error if isinstance(error, NotAShardError) else NotAShardError(str(error.args[0]) if error.args else repr(error))
