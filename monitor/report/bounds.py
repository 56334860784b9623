"""Finds the first recorded number beyond a bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from monitor.anomalies.bounds import Bound, BoundGroup
from monitor.anomalies.overflows import SCALED_KINDS
from monitor.query.sources import RowChoice
from monitor.report.facts import Facts
from monitor.report.findings import BAD, GOOD, NOT_LOOKED_AT, CheckFinding, Place
from monitor.report.history import Ints
from monitor.report.kind_reader import GLOBAL_NAME, KindReader
from monitor.report.trained_weights import is_of_rounding


class Beyond(NamedTuple):
    """A row beyond a bound."""

    step: int
    rank: int
    kind: str
    name: str
    column: str
    value: float
    bound: Bound
    is_nan: bool


def within(group: BoundGroup, facts: Facts) -> CheckFinding:
    """Whether all rows are within the bounds of a group."""
    asked = [
        (kind, column, bound)
        for kind, rows in facts.kinds.items()
        for column in rows.ops
        for bound in group.bounds
        if bound.is_of(kind, column)
    ]
    found = [one for each in asked for one in beyond(facts, *each)]
    if found:
        return first_beyond(facts, found)
    columns = sorted({column for _, column, _ in asked})
    said = f"{', '.join(columns)} {'is' if len(columns) == 1 else 'are'} within bounds."
    return CheckFinding(GOOD, said) if columns else CheckFinding(NOT_LOOKED_AT, group.nothing)


def beyond(facts: Facts, kind: str, column: str, bound: Bound) -> Iterator[Beyond]:
    """The first row beyond a bound, or with NaN, in the first file that has one. Where several rows in a row must be, the last
    of the first ones that are.
    """
    if bound.in_a_row > 1:
        yield from _lasting(facts, kind, column, bound)
        return
    for span in {**facts.kinds, **facts.others}[kind].spans:
        wanted = ("step", "rank", "name", GLOBAL_NAME, column)
        rows = facts.source.rows(RowChoice(kind, steps=range(span.first, span.last + 1), columns=wanted))
        rows = rows.filter(rows[column].is_valid())
        if kind in SCALED_KINDS and len(facts.overflows):
            rows = rows.filter(pa.array(~np.isin(rows["step"].to_numpy(), facts.overflows)))
        if bound.ends:
            rows = rows.filter([name.endswith(bound.ends) for name in rows["name"].to_pylist()])
        values = rows[column].to_numpy().astype(float)
        outside = bound.is_crossed(values)
        there = (outside | np.isnan(values)).nonzero()[0]
        if len(there):
            row: Mapping[str, Any] = rows.slice(int(there[0]), 1).to_pylist()[0]
            name, is_nan = row[GLOBAL_NAME] or row["name"], not outside[there[0]]
            yield Beyond(row["step"], row["rank"], kind, name, column, row[column], bound, is_nan)
            return


class _RowsInARow:
    """Counts the rows in a row at which each tensor of each rank is beyond a bound (``RowTaker``). The count begins anew if the
    gradient of the tensor is found to be rounding alone.

    Attributes:
        found: Step, number of the series, number of the rank, and value where a count is reached first, or where NaN comes
            first.
    """

    def __init__(self, bound: Bound, ranks: int, is_of_rounding: Callable[[int, int], bool]) -> None:
        """Count no rows yet.

        Args:
            is_of_rounding: Of the number of a series and a step.
        """
        self._bound, self._ranks, self._is_of_rounding = bound, ranks, is_of_rounding
        self._counts: Ints = np.zeros((2, 0), np.int64)  # of all rows, and of those in a row
        self.found: tuple[int, int, int, float] | None = None

    def add(self, step: Ints, micro_step: Ints, series: Ints, rank: Ints, values: NDArray[np.float64]) -> None:
        del micro_step
        pairs = series * self._ranks + rank
        more = int(pairs.max(initial=-1)) + 1 - self._counts.shape[1]
        self._counts = np.pad(self._counts, ((0, 0), (0, max(more, 0))))
        begins = np.flatnonzero(np.diff(step, prepend=step[:1] - 1))
        for first, end in zip(begins, [*begins[1:], len(step)], strict=True):
            self._take(int(step[first]), pairs[first:end], values[first:end])

    def _take(self, step: int, pairs: Ints, values: NDArray[np.float64]) -> None:
        seen, in_a_row = self._counts[:, pairs]
        in_a_row = self._bound.rows_in_a_row(values, seen, in_a_row)
        self._counts[:, pairs] = seen + 1, in_a_row
        there = np.flatnonzero((in_a_row >= self._bound.in_a_row) | np.isnan(values)) if self.found is None else ()
        for place in there:
            series, rank = divmod(int(pairs[place]), self._ranks)
            if np.isnan(values[place]) or not self._is_of_rounding(series, step):
                self.found = step, series, rank, float(values[place])
                return
            self._counts[1, pairs[place]] = 0


def _lasting(facts: Facts, kind: str, column: str, bound: Bound) -> Iterator[Beyond]:
    rows = KindReader(facts.source, kind, column)
    counted = _RowsInARow(bound, len(facts.ranks), partial(is_of_rounding, facts, rows))
    rows.feed(counted)
    if counted.found is not None:
        step, series, rank, value = counted.found
        means = bound._replace(means=f"{bound.means}, {bound.in_a_row} recorded steps in a row")
        yield Beyond(step, facts.ranks[rank], kind, rows.series[series][1], column, value, means, bool(np.isnan(value)))


def first_beyond(facts: Facts, found: Sequence[Beyond], then: str = "") -> CheckFinding:
    """The finding about the earliest of these rows.

    Args:
        then: What to do, where the bound does not say it.
    """
    one = min(found, key=lambda each: each[:5])
    means = "it cannot be computed from NaN" if one.is_nan else one.bound.means
    says = f"{one.kind} {one.name} on rank {one.rank} in step {one.step}: its {one.column} is {one.value:.3g}: {means}."
    place = Place(one.step, one.rank, one.kind, facts.shown_name(one.kind, one.name))
    return CheckFinding(BAD, says, place, "" if one.is_nan else one.bound.then or then)
