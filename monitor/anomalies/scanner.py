"""The scanner: has every rule judge every step, kind by kind, and hands on what fired."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from monitor.anomalies.alignment import Aligned
from monitor.anomalies.columns import Columns, Fired, Flags, Rule
from monitor.anomalies.findings import Findings, Group
from monitor.stats.features import own_columns
from monitor.stats.rows import KindRows, StepRows


class Listener(Protocol):
    """Who is told what the rules found."""

    def judged(self, findings: Findings) -> None:
        """Every rule has judged the step, whether or not one fired."""

    def not_judged(self, step: int, reason: str) -> None:
        """No rule will see the step."""

    def save(self) -> None:
        """Make what was told so far visible."""

    def close(self) -> None:
        """The run has ended; nothing follows."""


class Scanner:
    """Looks at the rows of each step on the writer thread, all but those of features, which are no statistics of a tensor.

    Args:
        rules: The most important first: for each row and statistic the first that fires counts.
        listeners: Told in this order. One that fails keeps none of the others from being told.
    """

    def __init__(self, rules: Sequence[Rule], listeners: Sequence[Listener]) -> None:
        self._rules = tuple(rules)
        self._listeners = tuple(listeners)
        self._known: dict[str, Aligned] = defaultdict(lambda: Aligned(sum(rule.fields for rule in self._rules)))

    def look(self, rows: StepRows) -> None:
        """Judge the step."""
        try:
            judged = ((kind, part) for kind, part in rows.kinds.items() if len(part) and not own_columns(kind))
            groups = tuple(group for kind, part in judged for group in self._groups(kind, part))
        except Exception as error:
            self.dropped(rows.step, f"the rules failed: {error!r}")
            raise
        self._tell(lambda listener: listener.judged(Findings(rows.step, groups)))

    def dropped(self, step: int, reason: str) -> None:
        """The step was lost before it could be looked at."""
        self._tell(lambda listener: listener.not_judged(step, reason))

    def save(self) -> None:
        """Make visible what was found. Like all of these, it raises the first of the listeners' errors once all were told."""
        self._tell(lambda listener: listener.save())

    def close(self) -> None:
        """The run has ended."""
        self._tell(lambda listener: listener.close())

    def _tell(self, call: Callable[[Listener], None]) -> None:
        errors: list[Exception] = []
        for listener in self._listeners:
            try:
                call(listener)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _groups(self, kind: str, rows: KindRows) -> Iterator[Group]:
        columns, known = Columns(rows.partials), self._known[kind].with_rows(rows)
        claims, begin = _Claims(columns), 0
        for rule in self._rules:
            state = known[begin : begin + rule.fields]
            begin += rule.fields
            for fired in claims.of(list(rule.judge(columns, state))):
                yield Group(rule.name, rows, fired)


class _Claims:
    """Which rows an earlier rule has fired on: by statistic, and for a row with a NaN or an Inf as a whole."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._claimed: dict[str, Flags] = {}

    def of(self, fired: Sequence[Fired]) -> list[Fired]:
        """What is left to a rule of what it fired on, which is then claimed."""
        left = [self._left(one) for one in fired if len(one.rows)]
        for one in left:
            rows = np.zeros(len(self._columns.partials), np.bool_)
            rows[one.rows] = True
            what = "" if one.nonfinite else one.op
            self._claimed[what] = rows | self._claimed.get(what, False)
        return [one for one in left if len(one.rows)]

    def _left(self, fired: Fired) -> Fired:
        claimed = self._claimed.get("" if fired.nonfinite else fired.op)
        return fired if claimed is None else fired.among(~claimed[fired.rows])
