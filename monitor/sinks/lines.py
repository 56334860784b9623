"""Rows as lines of CSV text, a block of rows at a time.

Every cell is made as a column of strings and Arrow joins the columns to lines, outside the GIL. What repeats is spelled once:
the name of a series, a layout, a micro-step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Final

import numpy as np
import pyarrow as pa
from pyarrow.compute import call_function  # type: ignore[attr-defined]

from monitor.series import Series, SeriesTable
from monitor.sinks.cells import Cells
from monitor.sinks.decimals import spell, spell_counts
from monitor.sinks.few_lines import FEW_NUMBERS, few_lines, histogram_cells
from monitor.sinks.pieces import Piece, blocks
from monitor.stats.histograms import MAGNITUDES
from monitor.stats.ops import INTEGER_OPS, LAYOUT_OPS, derive, derive_all
from monitor.stats.partials import Partials
from monitor.stats.rows import Layout, StepRows

BLOCK_ROWS: Final = 8192
"""Rows that are spelled together: a column of doubles (64 KB) stays in the cache, and is below the size from which every
allocation is a mapping of its own and each of its pages a fault."""

_COMMA: Final = pa.scalar(",", type=pa.string())
_NEWLINE: Final = pa.scalar("\n", type=pa.string())
_NOTHING: Final = pa.scalar("", type=pa.string())
_STRUCTURAL: Final = frozenset(',"\r\n')


def header(rows: StepRows, kind: str) -> bytes:
    """The first line of a file of ``kind``."""
    return _header(kind in rows.micro_step_kinds, rows.ops_of(kind))


@lru_cache(maxsize=64)
def _header(with_micro_step: bool, ops: tuple[str, ...]) -> bytes:
    micro_step = ("micro_step",) if with_micro_step else ()
    return (",".join(("vpp_stage", "name", "step", *micro_step, *ops)) + "\n").encode()


def quoted(cell: str) -> str:
    """``cell`` as CSV spells it: in quotes only if it holds a comma, a quote or a line break."""
    return '"' + cell.replace('"', '""') + '"' if _STRUCTURAL.intersection(cell) else cell


class Lines:
    """Spells the rows of one rank. Keeps the text of each series and layout that it has met."""

    def __init__(self, series: SeriesTable, ndigits: int) -> None:
        self._ndigits = ndigits
        self._series = Cells(series, _series_cells)
        self._layouts: dict[str, Cells[Layout]] = {}

    def of(self, steps: Sequence[StepRows]) -> Iterator[tuple[StepRows, str, memoryview]]:
        """The lines of each kind of each step, each ended by a newline. A kind of many rows comes in several pieces.

        One call for many small steps takes a fraction of what a call for each does.
        """
        for block in blocks(steps, BLOCK_ROWS):
            self._know(block[0].step.layouts)
            lengths = [len(piece.rows) for piece in block]
            if sum(lengths) * len(block[0].ops) <= FEW_NUMBERS:
                texts = few_lines(block, self._series, self._layouts, self._ndigits)
            else:
                texts = _texts(self._columns(block), lengths)
            for piece, text in zip(block, texts, strict=True):
                yield piece.step, piece.kind, text

    def _know(self, layouts: list[Layout]) -> None:
        if not self._layouts or self._layouts["shape"].of is not layouts:
            self._layouts = {op: Cells(layouts, _LAYOUT_CELLS[op]) for op in LAYOUT_OPS}

    def _columns(self, block: list[Piece]) -> list[pa.StringArray]:
        """The columns of one block, as strings: series, when, and the ops in the order asked for."""
        series = np.concatenate([piece.rows.series for piece in block])
        return [self._series.take(series), _when(block), *self._op_columns(block[0].ops, block)]

    def _op_columns(self, ops: tuple[str, ...], block: list[Piece]) -> list[pa.StringArray]:
        layout = np.concatenate([piece.rows.layout for piece in block])
        partials = Partials.joined(piece.rows.partials for piece in block)
        columns = {op: self._layouts[op].take(layout) for op in ops if op in LAYOUT_OPS}
        columns |= {op: pa.array(histogram_cells(partials), type=pa.string()) for op in ops if op == MAGNITUDES}
        columns |= {op: spell_counts(*derive(op, partials)) for op in ops if op in INTEGER_OPS}
        columns |= self._number_columns([op for op in ops if op not in columns], partials)
        return [columns[op] for op in ops]

    def _number_columns(self, ops: list[str], partials: Partials) -> dict[str, pa.StringArray]:
        """Of many rows an op at a time, which stays in the cache; of few all ops at once, since then the calls cost."""
        columns: dict[str, pa.StringArray] = {}
        at_once = max(BLOCK_ROWS // len(partials), 1)
        for first in range(0, len(ops), at_once):
            some = ops[first : first + at_once]
            values, valid = zip(*derive_all(some, partials).values(), strict=True)
            texts = spell(np.concatenate(values), np.concatenate(valid), self._ndigits)
            columns |= {op: texts.slice(i * len(partials), len(partials)) for i, op in enumerate(some)}
        return columns


def _texts(columns: list[pa.StringArray], lengths: list[int]) -> Iterator[memoryview]:
    """The first ``lengths[0]`` lines as one text, then the next, and so on, each line ended by a newline."""
    *others, last = columns
    ended = call_function("binary_join_element_wise", [last, _NOTHING, _NEWLINE])
    lines = call_function("binary_join_element_wise", [*others, ended, _COMMA])
    _, offsets, characters = lines.buffers()
    where = np.frombuffer(offsets, dtype=np.int32)[lines.offset + np.cumsum([0, *lengths])]
    text = memoryview(characters)  # one line behind the other, as they stand in the array
    for begin, end in pairwise(where.tolist()):
        yield text[begin:end]


def _when(block: list[Piece]) -> pa.StringArray:
    """Step and micro-step of each row: without that column, with an empty one, or with micro-step 0, 1, and so on."""
    micro_step = np.concatenate([piece.rows.micro_step for piece in block])
    cells: list[str] = []
    first: dict[int, int] = {}
    last = int(micro_step.max())
    for step in {piece.step.step for piece in block}:
        first[step] = len(cells)
        cells += [f"{step}", f"{step},", *(f"{step},{i}" for i in range(last + 1))]
    lengths = [len(piece.rows) for piece in block]
    begin = np.repeat([first[piece.step.step] for piece in block], lengths)
    with_micro_step = np.repeat([piece.kind in piece.step.micro_step_kinds for piece in block], lengths)
    return pa.array(cells, type=pa.string()).take(pa.array(begin + np.where(with_micro_step, micro_step + 2, 0)))


def _series_cells(series: Series) -> str:
    return f"{series.vpp_stage},{quoted(series.name)}"


def _shape_cell(layout: Layout) -> str:
    return quoted(str(list(layout.shape)))


def _dtype_cell(layout: Layout) -> str:
    return quoted(layout.dtype)


_LAYOUT_CELLS: Final = {"shape": _shape_cell, "dtype": _dtype_cell}
