"""The lines of a few rows, one by one: the calls that make columns of text cost more than their cells where these are few,
above all in training, where their code is cold each time. Character by character they are those of ``lines.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from monitor.series import NO_MICRO_STEP, Series
from monitor.sinks.cells import Cells
from monitor.sinks.decimals import spell_few, spell_few_counts
from monitor.sinks.pieces import Piece
from monitor.stats.histograms import MAGNITUDES, spelled
from monitor.stats.ops import INTEGER_OPS, LAYOUT_OPS, counted, derive_all
from monitor.stats.partials import Partials
from monitor.stats.rows import KindRows, Layout

FEW_NUMBERS: Final = 2048
"""Rows times ops up to which lines are made one by one: a loop gains up to half of that, training up to some thousands."""


def few_lines(
    block: list[Piece], series: Cells[Series], layouts: Mapping[str, Cells[Layout]], ndigits: int
) -> Iterator[memoryview]:
    """The text of each piece of a block, each line ended by a newline."""
    ops = block[0].ops
    numbers = _numbers(ops, Partials.joined(piece.rows.partials for piece in block), ndigits)
    start = 0
    for step, kind, of_kind in block:
        part = slice(start, start + len(of_kind))
        cells = [numbers[op][part] if op in numbers else layouts[op].listed(of_kind.layout) for op in ops]
        whens = _whens(step.step, of_kind, with_micro_step=kind in step.micro_step_kinds)
        lines = map(",".join, zip(series.listed(of_kind.series), whens, *cells, strict=True))
        yield memoryview("\n".join((*lines, "")).encode())
        start += len(of_kind)


def _numbers(ops: tuple[str, ...], partials: Partials, ndigits: int) -> dict[str, list[str]]:
    """The cells of each op that is not one of layouts."""
    numbers = derive_all([op for op in ops if op not in (*LAYOUT_OPS, MAGNITUDES)], partials)
    texts = {
        op: spell_few_counts(values, valid) if op in INTEGER_OPS else spell_few(values, valid, ndigits)
        for op, (values, valid) in numbers.items()
    }
    return texts | {op: histogram_cells(partials) for op in ops if op == MAGNITUDES}


def histogram_cells(partials: Partials) -> list[str]:
    """The histograms of rows, empty where there is none."""
    histogram, there = partials.histogram, counted(partials).tolist()
    return [spelled(histogram[i]) if histogram is not None and has_one else "" for i, has_one in enumerate(there)]


def _whens(step: int, of_kind: KindRows, *, with_micro_step: bool) -> list[str]:
    """Step and micro-step of each row."""
    if not with_micro_step:
        return [str(step)] * len(of_kind)
    return [f"{step}," if i == NO_MICRO_STEP else f"{step},{i}" for i in of_kind.micro_step.tolist()]
