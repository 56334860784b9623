"""The ``csv`` format: one file per kind and record, readable by any tool. Contains the sink and ``read_csv``."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import islice, pairwise
from os import PathLike
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow.csv import ConvertOptions, ParseOptions, read_csv as read_arrow  # type: ignore[attr-defined]

from monitor.series import NO_MICRO_STEP, Series, SeriesTable, shown_kind
from monitor.sinks.csv_files import CsvShards
from monitor.sinks.protocol import SinkContext
from monitor.stats.features import FEATURES
from monitor.stats.histograms import COUNTED
from monitor.stats.host.array_kernel import is_wanted
from monitor.stats.ops import INTEGER_OPS, LAYOUT_OPS, NUMERIC_OPS, SPELLED_OPS, TEXT_OPS, derive_all, spelled
from monitor.stats.partials import Floats, KindRows, Partials, TensorLayout
from monitor.stats.table import StepRows

# --- Rows as text: caches of texts that repeat, blocks of rows, and columns formatted as lines of CSV.

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Growing(Protocol[T_co]):
    """An append-only sequence."""

    def __len__(self) -> int:
        """The number of items so far."""

    def __getitem__(self, index: int, /) -> T_co:
        """The item at ``index``."""


class TextCache(Generic[T]):
    """The text of each item of a growing sequence, made when it is first needed."""

    def __init__(self, of: Growing[T], text_of: Callable[[T], str]) -> None:
        self.of = of
        self._text_of = text_of
        self._texts: list[str] = []
        self._column = pa.array([], type=pa.string())
        self._characters = b"", np.zeros(1, dtype=np.int64)

    def characters(self) -> tuple[bytes, NDArray[np.int64]]:
        """All texts end to end in UTF-8, and their offsets; int64, shape ``(texts + 1,)``."""
        texts = self._known()
        text, offsets = self._characters
        if len(texts) >= len(offsets):
            new = [one.encode() for one in texts[len(offsets) - 1 :]]
            lengths = np.fromiter(map(len, new), dtype=np.int64, count=len(new))
            self._characters = b"".join((text, *new)), np.append(offsets, offsets[-1] + np.cumsum(lengths))
        return self._characters

    def take(self, index: NDArray[np.int64]) -> pa.StringArray:
        """The texts of the items numbered ``index``."""
        texts = self._known()
        if len(texts) > len(self._column):
            new = pa.array(texts[len(self._column) :], type=pa.string())
            self._column = pa.concat_arrays([self._column, new])
        return self._column.take(pa.array(index))

    def _known(self) -> list[str]:
        texts = self._texts
        texts += [self._text_of(self.of[i]) for i in range(len(texts), len(self.of))]
        return texts

    def once(self, index: NDArray[np.int64]) -> pa.DictionaryArray:
        """The texts of the items numbered ``index``, as a dictionary array whose dictionary holds only texts that occur."""
        occurs = np.zeros(len(self.of), dtype=np.bool_)
        occurs[index] = True
        place = np.cumsum(occurs) - 1
        texts = self.take(np.flatnonzero(occurs))
        return pa.DictionaryArray.from_arrays(pa.array(place[index].astype(np.int32)), texts)


# --- Blocks: the rows of several steps and kinds, cut or joined to a given size.


class RowPiece(NamedTuple):
    """Some of a step's rows of one kind."""

    step: StepRows
    kind: str
    rows: KindRows

    @property
    def ops(self) -> tuple[str, ...]:
        """The ops to write for these rows."""
        return self.step.ops_of(self.kind)

    @property
    def has_histograms(self) -> bool:
        """Whether magnitudes were counted in the step."""
        return self.rows.partials.histogram is not None

    @property
    def shared(self) -> tuple[int, tuple[str, ...], bool]:
        """Pieces can be in one block if this is equal: same layouts and ops, and both with histograms or both without.

        Beside rows with histograms, rows without would seem to have empty ones.
        """
        return id(self.step.layouts), self.ops, self.has_histograms


def row_blocks(steps: Iterable[StepRows], most: int) -> Iterator[list[RowPiece]]:
    """The rows of steps in blocks of at most ``most`` rows. Small kinds with the same ops share a block, also across steps.

    The pieces of one kind and step keep their order.
    """
    alike: dict[tuple[int, tuple[str, ...], bool], list[RowPiece]] = {}
    for piece in (RowPiece(step, kind, step.read(kind)) for step in steps for kind in step.kinds):
        alike.setdefault(piece.shared, []).append(piece)
    for pieces in alike.values():
        yield from _cut(pieces, most)


def _cut(pieces: Iterable[RowPiece], most: int) -> Iterator[list[RowPiece]]:
    """Pieces that can be in one block, in blocks of at most ``most`` rows."""
    block: list[RowPiece] = []
    room = most
    for whole in pieces:
        start, count = 0, len(whole.rows)
        while start < count:
            taken = min(count - start, room)
            fits = taken == count
            block.append(whole if fits else whole._replace(rows=whole.rows.take(slice(start, start + taken))))
            start, room = start + taken, room - taken
            if not room:
                yield block
                block, room = [], most
    if block:
        yield block


# --- Formats columns as lines of CSV text: in C (``lines.c``) where it was built, else in Python, with the same characters.
#
# The C module formats all rows and columns in one call without Python's lock. For few rows the call takes a few
# microseconds. All columns of a block of rows are aligned.


@dataclass(frozen=True, slots=True)
class TextColumn:
    """A column of cached texts.

    Attributes:
        of: The texts.
        index: The number of each row's text; int64, shape ``(rows,)``.
    """

    of: TextCache[Any]
    index: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class NumberColumn:
    """A column of floating-point numbers.

    Attributes:
        values: float64, shape ``(rows,)``.
        valid: Which values were measured, shape ``(rows,)``; the others become empty cells.
    """

    values: Floats
    valid: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class CountColumn(NumberColumn):
    """A column of integers."""


Column = TextColumn | NumberColumn

Join = Callable[[Sequence[Column], Sequence[int], int], Iterator[memoryview]]
"""Takes columns, the number of rows of each text, and ``ndigits``; yields the texts, whose lines each end with a newline."""

# --- Lines formatted in Python, where the C module was not built.
#
# With ``ndigits`` 6, a finite value is written as ``f"{x:.6f}"`` if its magnitude is from 1e-3 up to 1e15, else as
# ``f"{x:.6e}"``. A value that rounds to zero with so few decimals is scientific too, so only zero is written as zero.
# Zero itself is ``0``; the rest is ``nan``, ``inf``, ``-inf``, and an empty cell for what was not measured.

MOST_DIGITS: Final = 16
"""No more decimals are written: 17 significant digits distinguish every double from its neighbours."""

_FIXED_FROM: Final = 1e-3
_FIXED_BELOW: Final = 1e15
_VISIBLE_FROM: Final = (math.nextafter(0.5, 1.0), 0.05, 0.005)
"""The least value that does not round to zero, with 0, 1 and 2 decimals. With 3 and more decimals, 1e-3 does not."""


def python_lines(columns: Sequence[Column], lengths: Sequence[int], ndigits: int) -> Iterator[memoryview]:
    """See ``monitor.sinks.csv.Join``."""
    rows = zip(*(_cells(column, ndigits) for column in columns), strict=True)
    for length in lengths:
        yield memoryview("".join(f"{','.join(row)}\n" for row in islice(rows, length)).encode())


def fixed_from(ndigits: int) -> float:
    """The least magnitude that is written with a fixed point."""
    return max(_FIXED_FROM, _VISIBLE_FROM[ndigits]) if ndigits < len(_VISIBLE_FROM) else _FIXED_FROM


def rounded(value: float, ndigits: int) -> float:
    """The number that a reader gets for a value."""
    return float(_text(value, fixed_from(ndigits), min(ndigits, MOST_DIGITS)))


def _cells(column: Column, ndigits: int) -> list[str]:
    if isinstance(column, TextColumn):
        texts: list[str] = column.of.take(column.index).to_pylist()
        return texts
    cells = zip(column.values.tolist(), column.valid.tolist(), strict=True)
    if isinstance(column, CountColumn):
        return [f"{int(value)}" if valid else "" for value, valid in cells]
    least, digits = fixed_from(ndigits), min(ndigits, MOST_DIGITS)
    return [_text(value, least, digits) if valid else "" for value, valid in cells]


def _text(value: float, least: float, digits: int) -> str:
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return f"{value}"
    return f"{value:.{digits}f}" if least <= abs(value) < _FIXED_BELOW else f"{value:.{digits}e}"


try:
    from monitor.sinks import _lines
except ImportError:
    _lines = None  # type: ignore[assignment]

_TEXT, _NUMBER, _COUNT = range(3)

LEAST_POWER: Final = -308
MOST_POWER: Final = MOST_DIGITS + 324
"""Greatest power of ten in the table. Powers from ``LEAST_POWER`` on scale any double to an integer of all written digits."""

SCALE: Final = 1400
"""Bits behind the binary point while powers of ten are computed: the least power keeps more than 128 significant bits."""

_WORD: Final = (1 << 64) - 1


def is_native() -> bool:
    """Whether the C module was built and is not switched off."""
    return _lines is not None and is_wanted()


def native_lines(columns: Sequence[Column], lengths: Sequence[int], ndigits: int) -> Iterator[memoryview]:
    """See ``monitor.sinks.csv.Join``."""
    ends = np.cumsum(lengths)
    positions = np.empty_like(ends)
    digits = min(ndigits, MOST_DIGITS)
    given = tuple(map(_native_column, columns))
    text = memoryview(_lines.lines(given, ends, _powers_of_ten(), LEAST_POWER, digits, fixed_from(ndigits), positions))
    for begin, end in pairwise((0, *positions.tolist())):
        yield text[begin:end]


def _native_column(column: Column) -> tuple[Any, ...]:
    if isinstance(column, TextColumn):
        return (_TEXT, *column.of.characters(), column.index)
    return (_COUNT if isinstance(column, CountColumn) else _NUMBER, column.values, column.valid)


@cache
def _powers_of_ten() -> NDArray[np.uint64]:
    """``10**k = (high * 2**64 + low) * 2**exponent``, cut off after 128 bits; shape ``(powers, 3)``."""
    rows = []
    for k in range(LEAST_POWER, MOST_POWER + 1):
        bits = 10**k << SCALE if k >= 0 else (1 << SCALE) // 10**-k
        shift = bits.bit_length() - 128
        top = bits >> shift
        rows.append((top >> 64, top & _WORD, (shift - SCALE) & _WORD))
    return np.array(rows, dtype=np.uint64)


# --- Rows as lines of CSV text, a block of rows at a time. Texts that repeat (series, layout, micro-step) are made once.

BLOCK_ROWS: Final = 8192
"""Rows formatted in one call: so many that their data stays in the cache."""

_STRUCTURAL: Final = frozenset(',"\r\n')


def header(rows: StepRows, kind: str) -> bytes:
    """The first line of a file of ``kind``."""
    return _header(kind in rows.micro_step_kinds, rows.ops_of(kind))


@lru_cache(maxsize=64)
def _header(with_micro_step: bool, ops: tuple[str, ...]) -> bytes:
    micro_step = ("micro_step",) if with_micro_step else ()
    return (",".join(("vpp_stage", "name", "step", *micro_step, *ops)) + "\n").encode()


def quoted(cell: str) -> str:
    """``cell`` as CSV text: in quotes only if it holds a comma, a quote or a line break."""
    return '"' + cell.replace('"', '""') + '"' if _STRUCTURAL.intersection(cell) else cell


class CsvLines:
    """Formats the rows of one rank as CSV lines. Caches the text of each series and layout."""

    def __init__(self, series: SeriesTable, ndigits: int) -> None:
        self._ndigits = ndigits
        self._series = TextCache(series, _series_cells)
        self._layouts: dict[str, TextCache[TensorLayout]] = {}
        self._join: Join = native_lines if is_native() else python_lines

    def of(self, steps: Sequence[StepRows]) -> Iterator[tuple[StepRows, str, memoryview]]:
        """The lines of each kind of each step, each ended by a newline. A kind of many rows yields several texts.

        One call for many small steps takes a fraction of the time of one call per step.
        """
        for block in row_blocks(steps, BLOCK_ROWS):
            self._use_layouts(block[0].step.layouts)
            texts = self._join(self._columns(block), [len(piece.rows) for piece in block], self._ndigits)
            for piece, text in zip(block, texts, strict=True):
                yield piece.step, piece.kind, text

    def _use_layouts(self, layouts: list[TensorLayout]) -> None:
        if not self._layouts or self._layouts["shape"].of is not layouts:
            self._layouts = {op: TextCache(layouts, _LAYOUT_CELLS[op]) for op in LAYOUT_OPS}

    def _columns(self, block: list[RowPiece]) -> list[Column]:
        """The columns of a block: series, step with micro-step, and the configured ops in their order."""
        series = np.concatenate([piece.rows.series for piece in block])
        return [TextColumn(self._series, series), _when(block), *self._op_columns(block[0].ops, block)]

    def _op_columns(self, ops: tuple[str, ...], block: list[RowPiece]) -> list[Column]:
        layout = np.concatenate([piece.rows.layout for piece in block])
        partials = Partials.joined(piece.rows.partials for piece in block)
        columns: dict[str, Column] = {op: TextColumn(self._layouts[op], layout) for op in ops if op in LAYOUT_OPS}
        columns |= {op: _texts(spelled(op, partials)) for op in ops if op in SPELLED_OPS}
        numbers = derive_all([op for op in ops if op not in columns], partials)
        columns |= {op: (CountColumn if op in INTEGER_OPS else NumberColumn)(*of_op) for op, of_op in numbers.items()}
        return [columns[op] for op in ops]


def _texts(each: list[str | None]) -> TextColumn:
    """A text for each row; an empty cell for None."""
    return TextColumn(TextCache([text or "" for text in each], str), np.arange(len(each)))


def _when(block: list[RowPiece]) -> TextColumn:
    """Step and micro-step of each row, as one column of text.

    A kind without micro-steps has no such cell. In the others it is empty for rows of the whole step, else 0, 1 and so on.
    """
    micro_step = np.concatenate([piece.rows.micro_step for piece in block])
    steps: dict[tuple[int, bool], int] = {}
    of_piece = [steps.setdefault((piece.step.step, piece.kind in piece.step.micro_step_kinds), len(steps)) for piece in block]
    with_micro_step = np.array([there for _, there in steps])
    step = np.repeat(of_piece, [len(piece.rows) for piece in block])
    place = np.where(with_micro_step[step], micro_step - NO_MICRO_STEP, 0)
    places = int(place.max()) + 1
    index = step * places + place
    cells = np.arange(len(steps) * places)
    if len(cells) > len(index):  # make no more texts than there are rows
        cells, index = np.unique(index, return_inverse=True)
    keys = list(steps)
    return TextColumn(TextCache([_when_cell(keys[cell // places], cell % places) for cell in cells.tolist()], str), index)


def _when_cell(of: tuple[int, bool], place: int) -> str:
    """The text of step and micro-step.

    Args:
        of: The step, and whether its kind has a micro-step column.
        place: 0 without a micro-step, 1 for micro-step 0, and so on.
    """
    step, with_micro_step = of
    if not with_micro_step:
        return f"{step}"
    return f"{step},{place + NO_MICRO_STEP}" if place else f"{step},"


def _series_cells(series: Series) -> str:
    return f"{series.vpp_stage},{quoted(series.name)}"


def _shape_cell(layout: TensorLayout) -> str:
    return quoted(str(list(layout.shape)))


def _dtype_cell(layout: TensorLayout) -> str:
    return quoted(layout.dtype)


_LAYOUT_CELLS: Final = {"shape": _shape_cell, "dtype": _dtype_cell}

COLUMN_TYPES: Final = {
    "vpp_stage": pa.int64(),
    "name": pa.string(),
    "step": pa.int64(),
    "micro_step": pa.int64(),
    **dict.fromkeys(NUMERIC_OPS, pa.float64()),
    **dict.fromkeys(INTEGER_OPS, pa.int64()),
    **dict.fromkeys((*COUNTED, *FEATURES), pa.float64()),
    **dict.fromkeys(TEXT_OPS, pa.string()),
}
"""The type of each column. Empty cells are null; in columns of text they are empty text."""

_DIALECT: Final = ParseOptions(newlines_in_values=True)
_CELLS: Final = ConvertOptions(column_types=COLUMN_TYPES, null_values=[""], strings_can_be_null=False)


class CsvSink:
    """Writes ``{kind}_{first}-{last}.csv`` into the rank's directory.

    A step is in the files of all kinds or of none. A file gets its name when its record is complete, or at ``flush``.

    Raises:
        OSError: from every method, if the disk, the directory or the limit on open files does not allow the operation. The
            files then hold whole steps, and the next step can be written as soon as the cause is gone.
    """

    def __init__(self, context: SinkContext) -> None:
        self._lines = CsvLines(context.series, context.ndigits)
        self._shards = CsvShards(context.directory, context.step_count_per_record)
        self._prepared: list[tuple[StepRows, list[tuple[str, memoryview]]]] = []

    def prepare(self, steps: Sequence[StepRows]) -> None:
        """Format the rows of several steps at once. Each step is then passed to ``write`` or discarded."""
        self._prepared = []
        texts: dict[int, list[tuple[str, memoryview]]] = {id(rows): [] for rows in steps}
        for rows, kind, text in self._lines.of(steps):
            texts[id(rows)].append((kind, text))
        self._prepared = [(rows, texts[id(rows)]) for rows in steps]

    def write(self, rows: StepRows) -> None:
        """Add one step to the files of its kinds.

        If the step was written before, its new rows replace the old ones and those of all later steps in its record.
        """
        headers = {shown_kind(kind): header(rows, kind) for kind in rows.kinds}
        with self._shards.step(rows.step, headers) as write:
            for kind, text in self._texts(rows):
                write(shown_kind(kind), text)

    @property
    def grown(self) -> int:
        """See ``monitor.sinks.protocol.ThinnableSink``."""
        return self._shards.grown

    def remove(self, steps: Collection[int]) -> None:
        """See ``monitor.sinks.protocol.ThinnableSink``."""
        self._shards.remove(steps)

    def flush(self) -> None:
        """Make the open record visible as it is. Later steps of the record are added to it."""
        self._shards.flush()

    def close(self) -> None:
        """Flush and close every file."""
        self._shards.close()

    def _texts(self, rows: StepRows) -> Iterable[tuple[str, memoryview]]:
        while self._prepared:  # steps before this one were discarded
            prepared, texts = self._prepared.pop(0)
            if prepared is rows:
                return texts
        return ((kind, text) for _, kind, text in self._lines.of([rows]))


def read_csv(path: str | PathLike[str] | pa.NativeFile) -> pa.Table:
    """Read one CSV file of a recording, or an open one. The columns have the types that were measured (``COLUMN_TYPES``).

    Raises:
        OSError: the file does not exist or cannot be read.
        pyarrow.ArrowInvalid: the file is not one of this format.
    """
    return read_arrow(path, parse_options=_DIALECT, convert_options=_CELLS)
