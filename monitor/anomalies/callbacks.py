"""Alerts for the training program's own code: kept by the writer thread, taken by the training thread."""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from monitor.anomalies.events import message
from monitor.anomalies.scanner import StepFindings, earliest
from monitor.series import NO_MICRO_STEP, SeriesTable

MOST_OF_A_STEP: Final = 100
MOST: Final = 10_000


class AlertEvent(NamedTuple):
    """One statistic of one tensor on which an alert rule fired.

    Attributes:
        kind: Kind of the row, such as ``grad_reduced``.
        name: Name of the tensor.
        micro_step: None if the row belongs to the step as a whole.
        op: Name of the statistic.
        value: Its value; NaN if it has none.
        message: The line that the log shows.
    """

    rank: int
    step: int
    kind: str
    name: str
    micro_step: int | None
    rule: str
    op: str
    value: float
    message: str


class AlertQueue:
    """Keeps the first alerts of each step until they are taken (``FindingListener``)."""

    def __init__(self, rank: int, series: SeriesTable) -> None:
        self._rank, self._series = rank, series
        self._events: deque[AlertEvent] = deque(maxlen=MOST)

    def take(self) -> list[AlertEvent]:
        """The alerts since the last call, in order of time within each step. Any thread; does not wait."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def judged(self, findings: StepFindings) -> None:
        """See ``FindingListener``."""
        for found in earliest(findings.groups, MOST_OF_A_STEP, self._series) if findings.groups else ():
            series, signal = self._series[found.series], found.signal
            said = message(signal, series.tag(self._rank, found.micro_step), findings.step)
            micro_step = None if found.micro_step == NO_MICRO_STEP else found.micro_step
            self._events.append(
                AlertEvent(
                    self._rank, findings.step, series.kind, series.name, micro_step, signal.rule, signal.op, signal.value, said
                )
            )

    def not_judged(self, step: int, reason: str) -> None:
        """Do nothing: no rule saw the step."""

    def save(self) -> None:
        """Do nothing: nothing is written."""

    def close(self) -> None:
        """Do nothing."""
