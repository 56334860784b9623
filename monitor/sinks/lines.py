"""Rows as lines of CSV text, a block of rows at a time.

What repeats is spelled once: the name of a series, a layout, a micro-step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final

import numpy as np

from monitor.series import NO_MICRO_STEP, Series, SeriesTable
from monitor.sinks import native_lines
from monitor.sinks.cells import Cells
from monitor.sinks.columns import Column, Counts, Join, Numbers, Texts
from monitor.sinks.pieces import Piece, blocks
from monitor.sinks.python_lines import python_lines
from monitor.stats.histograms import MAGNITUDES, spelled
from monitor.stats.ops import INTEGER_OPS, LAYOUT_OPS, counted, derive_all
from monitor.stats.partials import Partials
from monitor.stats.rows import Layout, StepRows

BLOCK_ROWS: Final = 8192
"""Rows that are spelled together: what they are made of stays in the cache."""

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
        self._join: Join = native_lines.native_lines if native_lines.is_there() else python_lines

    def of(self, steps: Sequence[StepRows]) -> Iterator[tuple[StepRows, str, memoryview]]:
        """The lines of each kind of each step, each ended by a newline. A kind of many rows comes in several pieces.

        One call for many small steps takes a fraction of what a call for each does.
        """
        for block in blocks(steps, BLOCK_ROWS):
            self._know(block[0].step.layouts)
            texts = self._join(self._columns(block), [len(piece.rows) for piece in block], self._ndigits)
            for piece, text in zip(block, texts, strict=True):
                yield piece.step, piece.kind, text

    def _know(self, layouts: list[Layout]) -> None:
        if not self._layouts or self._layouts["shape"].of is not layouts:
            self._layouts = {op: Cells(layouts, _LAYOUT_CELLS[op]) for op in LAYOUT_OPS}

    def _columns(self, block: list[Piece]) -> list[Column]:
        """Series, when, and the ops in the order asked for."""
        series = np.concatenate([piece.rows.series for piece in block])
        return [Texts(self._series, series), _when(block), *self._op_columns(block[0].ops, block)]

    def _op_columns(self, ops: tuple[str, ...], block: list[Piece]) -> list[Column]:
        layout = np.concatenate([piece.rows.layout for piece in block])
        partials = Partials.joined(piece.rows.partials for piece in block)
        columns: dict[str, Column] = {op: Texts(self._layouts[op], layout) for op in ops if op in LAYOUT_OPS}
        columns |= {op: _histograms(partials) for op in ops if op == MAGNITUDES}
        numbers = derive_all([op for op in ops if op not in columns], partials)
        columns |= {op: (Counts if op in INTEGER_OPS else Numbers)(*of_op) for op, of_op in numbers.items()}
        return [columns[op] for op in ops]


def _histograms(partials: Partials) -> Texts:
    """The histograms of rows, empty where there is none."""
    histogram, there = partials.histogram, counted(partials).tolist()
    cells = [spelled(histogram[i]) if histogram is not None and has_one else "" for i, has_one in enumerate(there)]
    return Texts(Cells(cells, str), np.arange(len(cells)))


def _when(block: list[Piece]) -> Texts:
    """Step and micro-step of each row: without that column, with an empty one, or with micro-step 0, 1, and so on."""
    micro_step = np.concatenate([piece.rows.micro_step for piece in block])
    steps: dict[tuple[int, bool], int] = {}
    of_piece = [steps.setdefault((piece.step.step, piece.kind in piece.step.micro_step_kinds), len(steps)) for piece in block]
    with_micro_step = np.array([there for _, there in steps])
    step = np.repeat(of_piece, [len(piece.rows) for piece in block])
    place = np.where(with_micro_step[step], micro_step - NO_MICRO_STEP, 0)
    places = int(place.max()) + 1
    index = step * places + place
    cells = np.arange(len(steps) * places)
    if len(cells) > len(index):  # no more are spelled than there are rows
        cells, index = np.unique(index, return_inverse=True)
    keys = list(steps)
    return Texts(Cells([_when_cell(keys[cell // places], cell % places) for cell in cells.tolist()], str), index)


def _when_cell(of: tuple[int, bool], place: int) -> str:
    """
    Args:
        of: The step, and whether there is a column of micro-steps.
        place: 0 without a micro-step, 1 for micro-step 0, and so on.
    """
    step, with_micro_step = of
    if not with_micro_step:
        return f"{step}"
    return f"{step},{place + NO_MICRO_STEP}" if place else f"{step},"


def _series_cells(series: Series) -> str:
    return f"{series.vpp_stage},{quoted(series.name)}"


def _shape_cell(layout: Layout) -> str:
    return quoted(str(list(layout.shape)))


def _dtype_cell(layout: Layout) -> str:
    return quoted(layout.dtype)


_LAYOUT_CELLS: Final = {"shape": _shape_cell, "dtype": _dtype_cell}
