"""Rows to judge, made from real tensors, and what rules say of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1] / "sinks"))

from sink_rows import Measured, Rank

from monitor.anomalies.rules import RULES
from monitor.anomalies.scanner import Scanner, StepFindings, earliest
from monitor.coordinator.manifest import RankFacts
from monitor.coordinator.output import JobIdentity
from monitor.stats.table import StepRows

NAN, INF = float("nan"), float("inf")
Tensor = Sequence[float]


class Event(NamedTuple):
    """What a rule fired on, spelled out."""

    kind: str
    name: str
    micro_step: int
    rule: str
    op: str
    value: float
    mean: float | None


class Watched:
    """A rank under rules, and what they say of each of its steps.

    Attributes:
        findings: Of the steps so far.
    """

    def __init__(self, *rules: tuple[str, float | None], listeners: Sequence[Any] = ()) -> None:
        self.rank = Rank(Path())
        self.findings: list[StepFindings] = []
        made = [RULES[name]() if threshold is None else RULES[name](threshold=threshold) for name, threshold in rules]
        self.scanner = Scanner(made, self.rank.series, [self, *listeners])
        self._step = 0

    def judged(self, findings: StepFindings) -> None:
        self.findings.append(findings)

    def not_judged(self, step: int, reason: str) -> None: ...

    def save(self) -> None: ...

    def close(self) -> None: ...

    def look(self, rows: StepRows) -> list[Event]:
        """What fires, in call order."""
        self.scanner.look(rows)
        found = earliest(self.findings[-1].groups, 10**6, self.rank.series)
        assert len(found) == len(self.findings[-1])
        return [self._spelled(one) for one in found]

    def step(self, kinds: Mapping[str, Sequence[Measured]] | None = None, **tensors: Tensor) -> list[Event]:
        """What fires on the next step: of ``actv`` with these tensors, unless all kinds are named."""
        named = {"actv": [Measured(name, values) for name, values in tensors.items()]} if kinds is None else kinds
        self._step += 1
        return self.look(self.rank.step(self._step, {kind: rows for kind, rows in named.items() if rows}))

    def _spelled(self, one: Any) -> Event:
        series = self.rank.series[one.series]
        signal = one.signal
        return Event(series.kind, series.name, one.micro_step, signal.rule, signal.op, signal.value, signal.mean)


def said(events: Sequence[Event]) -> list[tuple[str, str, str]]:
    """Name, rule and statistic of each."""
    return [(one.name, one.rule, one.op) for one in events]


def facts(rank: int = 0, recording: int = 0, **groups: Sequence[int]) -> RankFacts:
    return RankFacts(JobIdentity("job", "Dec03_21-34-40"), rank, 8, groups, {}, {}, "", (), recording=recording)


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found
