"""The ``csv`` format: one file per kind and record, readable by any tool. Contains the sink and ``read_csv``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from os import PathLike
from typing import Final

import numpy as np
import pyarrow as pa
from pyarrow.csv import ConvertOptions, ParseOptions  # type: ignore[attr-defined]
from pyarrow.csv import read_csv as read_arrow  # type: ignore[attr-defined]

from monitor.series import NO_MICRO_STEP, Series, SeriesTable, shown_kind
from monitor.sinks import row_text
from monitor.sinks.csv_files import CsvShards
from monitor.sinks.protocol import SinkContext
from monitor.stats.features import FEATURES
from monitor.stats.histograms import LOSSES, MAGNITUDES, histogram_text
from monitor.stats.ops import INTEGER_OPS, LAYOUT_OPS, NUMERIC_OPS, TEXT_OPS, derive_all, has_histogram
from monitor.stats.partials import Partials
from monitor.stats.table import StepRows, TensorLayout

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
        self._series = row_text.TextCache(series, _series_cells)
        self._layouts: dict[str, row_text.TextCache[TensorLayout]] = {}
        self._join: row_text.Join = row_text.native_lines if row_text.is_native() else row_text.python_lines

    def of(self, steps: Sequence[StepRows]) -> Iterator[tuple[StepRows, str, memoryview]]:
        """The lines of each kind of each step, each ended by a newline. A kind of many rows yields several texts.

        One call for many small steps takes a fraction of the time of one call per step.
        """
        for block in row_text.row_blocks(steps, BLOCK_ROWS):
            self._use_layouts(block[0].step.layouts)
            texts = self._join(self._columns(block), [len(piece.rows) for piece in block], self._ndigits)
            for piece, text in zip(block, texts, strict=True):
                yield piece.step, piece.kind, text

    def _use_layouts(self, layouts: list[TensorLayout]) -> None:
        if not self._layouts or self._layouts["shape"].of is not layouts:
            self._layouts = {op: row_text.TextCache(layouts, _LAYOUT_CELLS[op]) for op in LAYOUT_OPS}

    def _columns(self, block: list[row_text.RowPiece]) -> list[row_text.Column]:
        """The columns of a block: series, step with micro-step, and the configured ops in their order."""
        series = np.concatenate([piece.rows.series for piece in block])
        return [row_text.TextColumn(self._series, series), _when(block), *self._op_columns(block[0].ops, block)]

    def _op_columns(self, ops: tuple[str, ...], block: list[row_text.RowPiece]) -> list[row_text.Column]:
        layout = np.concatenate([piece.rows.layout for piece in block])
        partials = Partials.joined(piece.rows.partials for piece in block)
        columns: dict[str, row_text.Column] = {
            op: row_text.TextColumn(self._layouts[op], layout) for op in ops if op in LAYOUT_OPS
        }
        columns |= {op: _histograms(partials) for op in ops if op == MAGNITUDES}
        numbers = derive_all([op for op in ops if op not in columns], partials)
        columns |= {
            op: (row_text.CountColumn if op in INTEGER_OPS else row_text.NumberColumn)(*of_op) for op, of_op in numbers.items()
        }
        return [columns[op] for op in ops]


def _histograms(partials: Partials) -> row_text.TextColumn:
    """The text of each row's histogram; empty for rows without one."""
    histogram, there = partials.histogram, has_histogram(partials).tolist()
    cells = [histogram_text(histogram[i]) if histogram is not None and has_one else "" for i, has_one in enumerate(there)]
    return row_text.TextColumn(row_text.TextCache(cells, str), np.arange(len(cells)))


def _when(block: list[row_text.RowPiece]) -> row_text.TextColumn:
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
    return row_text.TextColumn(
        row_text.TextCache([_when_cell(keys[cell // places], cell % places) for cell in cells.tolist()], str), index
    )


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
    **dict.fromkeys((*LOSSES, *FEATURES), pa.float64()),
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


def read_csv(path: str | PathLike[str]) -> pa.Table:
    """Read one CSV file of a recording. The columns have the types that were measured (``COLUMN_TYPES``).

    Raises:
        OSError: the file does not exist or cannot be read.
        pyarrow.ArrowInvalid: the file is not one of this format.
    """
    return read_arrow(path, parse_options=_DIALECT, convert_options=_CELLS)
