"""Measurements as a table of Arrow: a row each, their partials in columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from monitor.series import DIRECTION_KIND, NO_MICRO_STEP, SeriesTable
from monitor.sinks.bins import FILLED, HISTOGRAM, counts_of, of_kinds
from monitor.sinks.cells import Cells
from monitor.stats.features import FEATURES, as_scalar
from monitor.stats.histograms import MAGNITUDES, spelled
from monitor.stats.ops import CALLS, INTEGER_OPS, LAYOUT_OPS, OPS, counted, derive, is_of
from monitor.stats.partials import COLUMNS, WRITES, Partials
from monitor.stats.rows import Layout, StepRows

TEXT: Final = pa.dictionary(pa.int32(), pa.string())

IDENTITY: Final = {
    "kind": TEXT,
    "vpp_stage": pa.int64(),
    "name": TEXT,
    "step": pa.int64(),
    "micro_step": pa.int64(),
    "call_id": pa.int64(),
    "shape": TEXT,
    "dtype": TEXT,
    CALLS: pa.int64(),
}
"""What a row is of, and where it stands. ``micro_step`` is null where the row belongs to the step as a whole, ``calls`` where
it combines no calls of operators.
"""

NULLABLE: Final = ("micro_step", CALLS)
MISSING: Final = -1
"""What stands for null in a file."""

PARTIALS: Final = COLUMNS[WRITES + 1 :]
SUMS: Final = ("min", "max", "sum", "sumsq", "m2")
"""The partials that are float64. The others are integers."""

SCHEMA: Final = pa.schema([*IDENTITY.items(), *((name, pa.float64() if name in SUMS else pa.int64()) for name in PARTIALS)])

WITH_HISTOGRAMS: Final = SCHEMA.append(pa.field(HISTOGRAM, FILLED))
"""``SCHEMA`` where a row has a histogram."""

_AS_THEY_ARE: Final = (*LAYOUT_OPS, CALLS)
"""Columns that are not derived."""


class Measurements:
    """Makes tables of the rows of one rank. Keeps the text of each series and layout that it has met."""

    def __init__(self, series: SeriesTable) -> None:
        self._names = Cells(series, lambda one: one.name)
        self._stages = np.zeros(0, dtype=np.int64)
        self._series = series
        self._layouts: dict[str, Cells[Layout]] = {}

    def of(self, rows: StepRows) -> pa.RecordBatch:
        """All rows of a step, kind by kind, in the columns ``SCHEMA`` or ``WITH_HISTOGRAMS``."""
        kinds = list(rows.kinds.values())
        series, micro_step, call_id, layout = (
            np.concatenate([getattr(kind, column) for kind in kinds])
            for column in ("series", "micro_step", "call_id", "layout")
        )
        identity = [
            _texts(np.repeat(np.arange(len(kinds), dtype=np.int32), [*map(len, kinds)]), rows.kinds),
            pa.array(self._stages_of(series)),
            self._names.once(series),
            pa.array(np.full(len(series), rows.step)),
            pa.array(micro_step, mask=micro_step == NO_MICRO_STEP),
            pa.array(call_id),
            *(cells.once(layout) for cells in self._cells_of(rows.layouts).values()),
            _calls(rows),
        ]
        partials = [pa.array(column) for column in _columns([kind.partials for kind in kinds])]
        histograms = of_kinds([kind.partials for kind in kinds])
        if histograms is None:
            return pa.RecordBatch.from_arrays([*identity, *partials], schema=SCHEMA)
        return pa.RecordBatch.from_arrays([*identity, *partials, histograms], schema=WITH_HISTOGRAMS)

    def _stages_of(self, series: NDArray[np.int64]) -> NDArray[np.int64]:
        known, now = len(self._stages), len(self._series)
        if now > known:
            new = [self._series[i].vpp_stage for i in range(known, now)]
            self._stages = np.concatenate([self._stages, np.array(new, dtype=np.int64)])
        stages: NDArray[np.int64] = self._stages[series]
        return stages

    def _cells_of(self, layouts: list[Layout]) -> dict[str, Cells[Layout]]:
        if not self._layouts or self._layouts["shape"].of is not layouts:
            self._layouts = {
                "shape": Cells(layouts, lambda layout: str(list(layout.shape))),
                "dtype": Cells(layouts, lambda layout: layout.dtype),
            }
        return self._layouts


def partials_of(table: pa.Table) -> Partials:
    """The partials of each row, for ``derive`` and ``combine``.

    Args:
        table: With the columns ``PARTIALS``, and ``HISTOGRAM`` if there is any.
    """
    columns = np.ones((len(COLUMNS), len(table)))
    for number, name in enumerate(PARTIALS, WRITES + 1):
        columns[number] = table[name].to_numpy()
    return Partials(columns, counts_of(table[HISTOGRAM]) if HISTOGRAM in table.column_names else None)


def with_ops(table: pa.Table, ops: Sequence[str]) -> pa.Table:
    """The table with ops in place of partials; what has no value is null, and so is what a row's kind has none of.

    Raises:
        ValueError: there is no such op.
    """
    if unknown := [op for op in ops if op not in (*OPS, *FEATURES, CALLS)]:
        raise ValueError(f"there is no op {unknown[0]!r}; there are {', '.join((*OPS, *FEATURES))}")
    partials, kinds = _as_read(table), table["kind"].combine_chunks()
    columns = {name: table[name] for name in IDENTITY if name not in LAYOUT_OPS}
    columns |= {op: table[op] if op in _AS_THEY_ARE else _derived(op, partials, _rows_with(op, kinds)) for op in ops}
    return pa.table(columns, metadata=table.schema.metadata)


def completed(rows: pa.RecordBatch) -> pa.RecordBatch:
    """The rows with all columns of ``SCHEMA``: those that were written before ``calls`` was counted say nothing of it."""
    if CALLS in rows.schema.names:
        return rows
    columns = [pa.nulls(len(rows), one.type) if one.name == CALLS else rows[one.name] for one in SCHEMA]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA.with_metadata(rows.schema.metadata))


def by_kind(rows: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Runs of rows of one kind."""
    kind = rows["kind"].indices.to_numpy()
    starts = np.flatnonzero(np.diff(kind, prepend=-1))
    names = rows["kind"].dictionary.to_pylist()
    for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(kind)], strict=True):
        yield names[kind[start]], rows.slice(start, end - start)


def _texts(index: NDArray[np.int32], texts: Iterable[str]) -> pa.DictionaryArray:
    # With its type, or pyarrow looks for modules to guess it by, each time.
    return pa.DictionaryArray.from_arrays(pa.array(index), pa.array(list(texts), type=pa.string()))


def _calls(rows: StepRows) -> pa.Array:
    """How many calls each row combines."""
    counted = [kind in rows.counted_kinds for kind in rows.kinds]
    if not any(counted):
        return pa.nulls(len(rows), pa.int64())
    values, valid = zip(*(derive(CALLS, kind.partials) for kind in rows.kinds.values()), strict=True)
    there = np.concatenate(valid) & np.repeat(counted, [*map(len, rows.kinds.values())])
    return pa.array(np.concatenate(values).astype(np.int64), mask=~there)


def _as_read(table: pa.Table) -> Partials:
    """The partials that ops are derived from: of a share it is the scalar that it is to who reads."""
    partials, kinds = partials_of(table), table["kind"].combine_chunks()
    shares = np.flatnonzero(_are(kinds, lambda kind: kind == DIRECTION_KIND))
    if len(shares):
        partials.columns[:, shares] = as_scalar(partials.take(shares)).columns
    return partials


def _rows_with(op: str, kinds: pa.DictionaryArray) -> NDArray[np.bool_]:
    return _are(kinds, lambda kind: is_of(op, kind))


def _are(kinds: pa.DictionaryArray, which: Callable[[str], bool]) -> NDArray[np.bool_]:
    each = np.array([which(kind) for kind in kinds.dictionary.to_pylist()], dtype=np.bool_)
    of_rows: NDArray[np.bool_] = each[kinds.indices.to_numpy()]
    return of_rows


def _derived(op: str, partials: Partials, rows: NDArray[np.bool_]) -> pa.Array:
    """Of an op, null but in these rows."""
    if op == MAGNITUDES:
        return _spelled(partials, rows)
    # The scalar that stands for a share is its own mean.
    values, valid = derive("mean" if op == DIRECTION_KIND else op, partials)
    return pa.array(values.astype(np.int64) if op in INTEGER_OPS else values, mask=~(valid & rows))


def _spelled(partials: Partials, rows: NDArray[np.bool_]) -> pa.Array:
    histogram, there = partials.histogram, (counted(partials) & rows).tolist()
    texts = [spelled(histogram[i]) if histogram is not None and it_is else None for i, it_is in enumerate(there)]
    return pa.array(texts, type=pa.string())


def _columns(partials: Sequence[Partials]) -> Iterator[NDArray[np.float64] | NDArray[np.int64]]:
    for number, name in enumerate(PARTIALS, WRITES + 1):
        column = np.concatenate([one.columns[number] for one in partials])
        yield column if name in SUMS else column.astype(np.int64)
