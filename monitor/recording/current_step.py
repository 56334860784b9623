"""Returns the measurements of the current step as dictionaries for the training loop."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from monitor.series import SeriesTable
from monitor.stats.histograms import MAGNITUDES, histogram_text
from monitor.stats.ops import CALLS, INTEGER_OPS, LAYOUT_OPS, derive, has_histogram
from monitor.stats.table import KindRows, TensorLayout

REDUCED: Final = "grad_reduced"
UNREDUCED: Final = "grad_unreduced"
GRADIENT_KINDS: Final = (REDUCED, UNREDUCED)

Value = float | int | str
Metrics = dict[str, dict[str, Value]]
"""``{tag: {op: value}}``. Ops without a value are absent."""


def metrics_of(
    rows: KindRows | None, ops: Sequence[str], series: SeriesTable, layouts: Sequence[TensorLayout], rank: int
) -> Metrics:
    """The rows of one kind by tag; empty if there are none."""
    if rows is None:
        return {}
    columns = {op: _column(op, rows, layouts) for op in ops}
    found: Metrics = {}
    for place, (index, micro_step) in enumerate(zip(rows.series.tolist(), rows.micro_step.tolist(), strict=True)):
        values = {op: column[place] for op, column in columns.items()}
        found[series[index].tag(rank, micro_step)] = {op: value for op, value in values.items() if value is not None}
    return found


def of_kinds(
    kinds: Sequence[str],
    measured: Mapping[str, KindRows],
    ops: Sequence[str],
    series: SeriesTable,
    layouts: Sequence[TensorLayout],
    rank: int,
    counted: Collection[str] = (),
) -> list[Metrics]:
    """The rows of each of these kinds by tag.

    Args:
        counted: Kinds whose rows have the number of calls that they combine.
    """
    ops_of = {kind: (*ops, CALLS) if kind in counted else ops for kind in kinds}
    return [metrics_of(measured.get(kind), ops_of[kind], series, layouts, rank) for kind in kinds]


def reduced_from_local(unreduced: Metrics) -> Metrics:
    """``grad_reduced`` before the optimizer's step in a single process: equal to the local gradients of backward."""
    return {f"{tag.removesuffix(UNREDUCED)}{REDUCED}": dict(values) for tag, values in unreduced.items()}


def _column(op: str, rows: KindRows, layouts: Sequence[TensorLayout]) -> list[Value | None]:
    if op in LAYOUT_OPS:
        return _layout_column(op, rows, layouts)
    return _histograms(rows) if op == MAGNITUDES else _numbers(op, rows)


def _histograms(rows: KindRows) -> list[Value | None]:
    histogram = rows.partials.histogram
    there = has_histogram(rows.partials).tolist()
    return [histogram_text(histogram[i]) if histogram is not None and has_one else None for i, has_one in enumerate(there)]


def _numbers(op: str, rows: KindRows) -> list[Value | None]:
    values, valid = derive(op, rows.partials)
    whole = op in INTEGER_OPS
    return [None if not there else int(value) if whole else value for value, there in zip(values.tolist(), valid, strict=True)]


def _layout_column(op: str, rows: KindRows, layouts: Sequence[TensorLayout]) -> list[Value | None]:
    chosen = (layouts[index] for index in rows.layout.tolist())
    return [str(list(layout.shape)) if op == "shape" else layout.dtype for layout in chosen]
