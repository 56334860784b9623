"""What the rules fired on in one step: columns, of which only what is shown or kept becomes events."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from monitor.anomalies.columns import Fired
from monitor.anomalies.events import Signal
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
    rows: KindRows
    fired: Fired

    def __len__(self) -> int:
        return len(self.fired.rows)

    @property
    def cause(self) -> tuple[str, str]:
        """Rule and statistic."""
        return self.rule, self.fired.op

    def first(self, most: int) -> Iterator[Finding]:
        """In call order."""
        fired, rows = self.fired, self.fired.rows[:most]
        values, _ = derive(fired.op, self.rows.partials.take(rows))
        columns = (column[rows].tolist() for column in (self.rows.call_id, self.rows.series, self.rows.micro_step))
        means = [None] * len(rows) if fired.means is None else fired.means[:most].tolist()
        for call_id, series, micro_step, value, mean in zip(*columns, values.tolist(), means, strict=True):
            yield Finding(call_id, series, micro_step, Signal(self.rule, fired.op, value, mean), fired.nonfinite)


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


def earliest(groups: Iterable[Group], most: int) -> list[Finding]:
    """The first in call order; of one row in the order of the groups."""
    in_order = heapq.merge(*(group.first(most) for group in groups), key=attrgetter("call_id"))
    return list(islice(in_order, most))
