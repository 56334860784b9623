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
        rules: The most important first: the events of a row in a step are those of the first rule that fires on it.
        listeners: Told in this order. One that fails keeps none of the others from being told.
    """

    def __init__(self, rules: Sequence[Rule], listeners: Sequence[Listener]) -> None:
        self._rules = tuple(rules)
        self._listeners = tuple(listeners)
        self._known: dict[str, Aligned] = defaultdict(lambda: Aligned(sum(rule.fields for rule in self._rules)))

    def look(self, rows: StepRows) -> None:
        """Judge the step."""
        try:
            judged = {kind: part for kind, part in rows.kinds.items() if len(part) and not own_columns(kind)}
            groups = tuple(group for kind, part in judged.items() for group in self._groups(kind, part))
        except Exception as error:
            self.dropped(rows.step, f"the rules failed: {error!r}")
            raise
        findings = Findings(rows.step, groups, sum(map(len, judged.values())))
        self._tell(lambda listener: listener.judged(findings))

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
        claims, begin = _Claims(len(rows)), 0
        for rule in self._rules:
            state = known[begin : begin + rule.fields]
            begin += rule.fields
            for fired in claims.of(list(rule.judge(columns, state))):
                yield Group(rule.name, kind, rows, fired)


class _Claims:
    """Which rows an earlier rule has fired on. A later rule may still fire on the other rows of the step."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._claimed: Flags | None = None

    def of(self, fired: Sequence[Fired]) -> list[Fired]:
        """What is left to a rule of what it fired on. Its rows are then claimed."""
        claimed = self._claimed
        left = [one if claimed is None else one.among(~claimed[one.rows]) for one in fired if len(one.rows)]
        left = [one for one in left if len(one.rows)]
        if left:
            self._claimed = np.zeros(self._rows, np.bool_) if claimed is None else claimed
            for one in left:
                self._claimed[one.rows] = True
        return left
