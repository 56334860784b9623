"""What the rules fired on in one step: columns, of which only what is shown or kept becomes events."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from monitor.anomalies.columns import Fired
from monitor.anomalies.events import Signal
from monitor.series import REPLICA_KIND, Series, SeriesTable
from monitor.stats.ops import derive
from monitor.stats.rows import KindRows


class Finding(NamedTuple):
    """One statistic of one row that a rule fired on.

    Attributes:
        series: Index in the rank's ``SeriesTable``.
    """

    call_id: int
    series: int
    micro_step: int
    signal: Signal
    nonfinite: bool


@dataclass(frozen=True, slots=True)
class Group:
    """What one rule saw of one statistic in the rows of one kind, which stand in call order."""

    rule: str
    kind: str
    rows: KindRows
    fired: Fired

    def __len__(self) -> int:
        return len(self.fired.rows)

    @property
    def cause(self) -> tuple[str, str]:
        """Rule and statistic."""
        return self.rule, self.fired.op

    def first(self, most: int, table: SeriesTable) -> Iterator[Finding]:
        """In the order of the step: see ``time_of``."""
        fired, order = self.fired, self._order(table)[:most]
        rows = fired.rows[order]
        values, _ = derive(fired.op, self.rows.partials.take(rows))
        columns = (column[rows].tolist() for column in (self.rows.call_id, self.rows.series, self.rows.micro_step))
        means = [None] * len(rows) if fired.means is None else fired.means[order].tolist()
        for call_id, series, micro_step, value, mean in zip(*columns, values.tolist(), means, strict=True):
            yield Finding(call_id, series, micro_step, Signal(self.rule, fired.op, value, mean), fired.nonfinite)

    def _order(self, table: SeriesTable) -> NDArray[np.intp]:
        """Replicas are of several kinds, the weights that the step began with among them."""
        order = np.arange(len(self))
        if self.kind != REPLICA_KIND:
            return order
        later = [not _began_with(table[one]) for one in self.rows.series[self.fired.rows].tolist()]
        return order[np.argsort(later, kind="stable")]


@dataclass(frozen=True, slots=True)
class Findings:
    """Of one step. The findings of a row are those of the first rule that fired on it: one for each statistic.

    Attributes:
        rows: How many rows the rules judged.
    """

    step: int
    groups: tuple[Group, ...]
    rows: int

    def __len__(self) -> int:
        return sum(map(len, self.groups))

    def by_rule(self) -> Counter[str]:
        """How many."""
        counts: Counter[str] = Counter()
        for group in self.groups:
            counts[group.rule] += len(group)
        return counts


def earliest(groups: Iterable[Group], most: int, series: SeriesTable) -> list[Finding]:
    """The first in the order of the step; of one row in the order of the groups."""
    in_order = heapq.merge(*(group.first(most, series) for group in groups), key=partial(time_of, series=series))
    return list(islice(in_order, most))


def time_of(finding: Finding, series: SeriesTable) -> tuple[bool, int]:
    """By which the findings of a step stand in the order in which they happened.

    The weights that a step begins with are measured at its end, when the optimizer steps: forward has used them before.
    """
    return not _began_with(series[finding.series]), finding.call_id


def _began_with(series: Series) -> bool:
    kind = series.name.partition("/")[0] if series.kind == REPLICA_KIND else series.kind
    return kind == "param_origin"
