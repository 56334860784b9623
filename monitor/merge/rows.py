"""Rows of all ranks as columns, in order of steps and ranks, with what the catalogue knows of each."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from monitor.merge.gather import is_exact
from monitor.merge.statistics import Flags, Index, Statistics
from monitor.merge.survey import UNKNOWN
from monitor.merge.tables import Columns, Texts, order_by
from monitor.merge.tensors import Catalogue
from monitor.series import MICRO_STEP_KINDS, NO_MICRO_STEP
from monitor.sinks.arrow import HISTOGRAM, counts_of
from monitor.stats.features import OF_ELEMENTS, own_columns
from monitor.stats.histograms import BINS, MAGNITUDES, Counts
from monitor.stats.ops import CALLS
from monitor.stats.partials import COLUMNS, COUNT, EMPTY, PARTIALS, WRITES, Floats, Partials


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of all ranks.

    Attributes:
        run: Place of the directory among those of the job, of each row.
        rank: That it is of.
        series: Its row in the catalogue, ``UNKNOWN`` where it has none.
        replica: Whether it is there to be compared alone.
        columns: ``step``, ``micro_step`` (or ``NO_MICRO_STEP``), ``call_id`` (or ``UNKNOWN``), ``vpp_stage``, ``calls`` (or 0);
            int64.
        texts: ``name``, ``shape``, ``dtype``.
    """

    catalogue: Catalogue
    run: Index
    rank: Index
    series: Index
    replica: Flags
    columns: dict[str, Index]
    texts: dict[str, Texts]

    def __len__(self) -> int:
        return len(self.rank)

    def known(self, column: str) -> Index:
        """A column of the catalogue, for each row; ``UNKNOWN`` for those that are not in it."""
        return self.catalogue.of(column, self.series)

    def column(self, name: str) -> Index:
        return self.columns[name]

    def micro_step(self) -> Index:
        return self.columns["micro_step"]

    def of_several(self) -> Flags:
        """Whether a row is of several micro-steps or calls of an operator, and so of more elements than its series has."""
        of_calls: Flags = self.columns[CALLS] > 0
        each = self.catalogue.kind in MICRO_STEP_KINDS
        return of_calls | (self.micro_step() == NO_MICRO_STEP) if each else of_calls

    def text(self, column: str, rows: Index) -> pa.Array:
        """A column of text of the catalogue, for some of the rows, which are in it."""
        return self.catalogue.texts(column, self.series[rows]).arrow()

    def only(self, rows: Index | Flags | slice) -> Rows:
        return Rows(
            self.catalogue,
            self.run[rows],
            self.rank[rows],
            self.series[rows],
            self.replica[rows],
            {name: column[rows] for name, column in self.columns.items()},
            {name: column.take(rows) for name, column in self.texts.items()},
        )


def gathered(tables: Sequence[pa.Table], ranks: Index, catalogue: Catalogue, kept: Columns) -> tuple[Rows, Statistics]:
    """The rows of these tables in order of steps, of one step as the tables stand.

    Args:
        tables: In order of ranks, as ``monitor.merge.gather.read`` gives them.
        ranks: Of each directory of the job.
    """
    found = _Gathering(tables)
    run, series = found.column("run"), found.column("series")
    texts = {name: found.texts(name) for name in ("shape", "dtype")}
    columns = {name: found.column(name) for name in ("step", "micro_step", "call_id", "vpp_stage", CALLS)}
    names = catalogue.names_or(found.texts("name"), series)
    rows = Rows(catalogue, run, ranks[run], series, catalogue.is_replica(series), columns, {"name": names, **texts})
    return rows, found.statistics(kept, _elements(rows))


class _Gathering:
    """Columns of several tables as one, in order of steps."""

    def __init__(self, tables: Sequence[pa.Table]) -> None:
        self._tables = tables
        self._order: Index | slice = slice(None)
        order = order_by([self.column("step")])
        if order is not None:
            self._order = order

    def column(self, name: str) -> Index:
        """Of whole numbers; zero where it is left out."""
        values: Index = self._joined(partial(_numbers, name), np.int64)
        return values

    def texts(self, name: str) -> Texts:
        return Texts.of([chunk for table in self._tables for chunk in table[name].chunks]).take(self._order)

    def statistics(self, kept: Columns, elements: Index) -> Statistics:
        exact = self._joined(lambda table: np.full(len(table), _is_exact(table)), np.bool_)
        partials = np.ones((len(COLUMNS), len(exact)))
        for number, name in enumerate(PARTIALS, WRITES + 1):
            partials[number] = self._joined(partial(_partial, name, number), np.float64)
        count = np.where(exact, partials[COUNT], np.where(elements < 0, np.nan, elements))
        made = Statistics.derived(kept.ops, count, Partials(partials, self._histograms() if kept.histogram else None), exact)
        if not exact.all():
            for op in kept.numbers:
                made.set_op(op, self._joined(partial(_op, op), np.float64), self._joined(partial(_op_is_there, op), np.bool_))
            if made.partials.histogram is not None:
                elements_counted = made.partials.histogram.sum(axis=1).astype(np.float64)
                made.set_op(MAGNITUDES, elements_counted, elements_counted > 0)
        return made

    def _histograms(self) -> Counts:
        nothing = np.empty((0, BINS), dtype=np.int64)
        counts: Counts = np.concatenate([nothing, *map(_counts, self._tables)])[self._order]
        return counts

    def _joined(self, of: Callable[[pa.Table], NDArray[Any]], kind: type[np.generic]) -> NDArray[Any]:
        values = np.concatenate([np.empty(0, kind), *(of(table) for table in self._tables)], dtype=kind)
        return values[self._order]


def _is_exact(table: pa.Table) -> bool:
    return is_exact(table.column_names)


def _counts(table: pa.Table) -> Counts:
    """Zero where it is left out."""
    return counts_of(table[HISTOGRAM]) if HISTOGRAM in table.column_names else np.zeros((len(table), BINS), dtype=np.int64)


def _partial(name: str, number: int, table: pa.Table) -> NDArray[Any]:
    """One partial of each row: zero if the file leaves it out, the empty value if the row has no partials."""
    if not _is_exact(table):
        return np.full(len(table), EMPTY[number])
    return _numbers(name, table)


def _numbers(name: str, table: pa.Table) -> NDArray[Any]:
    numbers: NDArray[Any] = table[name].to_numpy() if name in table.column_names else np.zeros(len(table), dtype=np.int64)
    return numbers


def _op(op: str, table: pa.Table) -> Floats:
    values: Floats = np.zeros(len(table)) if _is_exact(table) else table[op].fill_null(0.0).to_numpy()
    return values


def _op_is_there(op: str, table: pa.Table) -> Flags:
    there: Flags = np.zeros(len(table), dtype=np.bool_) if _is_exact(table) else table[op].is_valid().to_numpy()
    return there


def _elements(rows: Rows) -> Index:
    """Of each row by its shape, or where that was not recorded by its series; ``UNKNOWN`` where neither says."""
    if not counts_elements(rows.catalogue.kind):
        return np.full(len(rows), UNKNOWN)
    shape = rows.texts["shape"]
    counts = np.array([*map(_product, shape.values.to_pylist()), UNKNOWN], dtype=np.int64)
    own = counts[shape.codes]
    elements = own if (own != UNKNOWN).all() else np.where(own == UNKNOWN, rows.known("elements"), own)
    return np.where(rows.of_several(), UNKNOWN, elements)


def counts_elements(kind: str) -> bool:
    """Whether ``count`` is of the elements of a tensor."""
    return not own_columns(kind) or kind in OF_ELEMENTS


def _product(shape: str) -> int:
    try:
        return math.prod(map(int, json.loads(shape)))
    except (ValueError, TypeError):
        return UNKNOWN
