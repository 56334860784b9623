"""Alerts: log one line per event, limited in number, and call the alarm that starts a closer look."""

from __future__ import annotations

import shlex
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import Final

from monitor.anomalies.events import message
from monitor.anomalies.scanner import FindingGroup, RuleFinding, StepFindings, earliest, time_of
from monitor.failures import LOGGER
from monitor.series import SeriesTable
from monitor.terminal import plain

RANKING: Final = "trainermon rank-anomalies"
"""The command that orders the events of all ranks."""

LINES: Final = 10
WINDOW_S: Final = 60.0
"""Within this time, at most ``LINES`` lines of each cause (a rule and a statistic) are shown, the earliest of each step. The
first line names the ranking command.
"""


@dataclass(slots=True)
class _Cause:
    """The lines of a cause in the current window.

    Attributes:
        begun: When the window began.
        left: Lines that may still be logged in it.
        silent: Number of events that were not logged, in the steps from ``first`` to ``last``.
    """

    begun: float
    left: int = LINES
    silent: int = 0
    first: int = 0
    last: int = 0

    def hide(self, step: int, count: int) -> None:
        self.first, self.last = (self.first if self.silent else step), step
        self.silent += count


class Alerts:
    """Logs what the rules found, through the monitor's logger.

    Args:
        where: The directory of this rank's event files; None if events are not written.
    """

    def __init__(
        self, rank: int, series: SeriesTable, where: Path | None = None, clock: Callable[[], float] = monotonic
    ) -> None:
        self._rank, self._series, self._clock = rank, series, clock
        self._see = f" See {where}" if where else ""
        self._ranking = _ranking(where)
        self._causes: dict[tuple[str, str], _Cause] = {}

    def judged(self, findings: StepFindings) -> None:
        """See ``FindingListener``."""
        by_cause: dict[tuple[str, str], list[FindingGroup]] = defaultdict(list)
        for group in findings.groups:
            by_cause[group.cause].append(group)
        begun = [cause for cause in by_cause if cause not in self._causes or self._past(self._causes[cause])]
        shown = {cause: self._shown(cause, groups) for cause, groups in by_cause.items()}
        firsts = {id(shown[cause][0]) for cause in begun}
        for finding in sorted(chain.from_iterable(shown.values()), key=partial(time_of, series=self._series)):
            self._say(self._line(findings.step, finding) + (self._ranking if id(finding) in firsts else ""))
        for cause, groups in by_cause.items():
            self._rest(cause, findings.step, sum(map(len, groups)) - len(shown[cause]), said=bool(shown[cause]))

    def not_judged(self, step: int, reason: str) -> None:
        """Do nothing: the manifest lists these steps, and some cause a warning elsewhere."""

    def save(self) -> None:
        """Log how many events were not shown, for windows that have ended."""
        for name, cause in self._causes.items():
            if self._past(cause):
                self._report_hidden(name, cause)

    def close(self) -> None:
        """Log how many events were not shown."""
        for name, cause in self._causes.items():
            self._report_hidden(name, cause)

    def _shown(self, name: tuple[str, str], groups: list[FindingGroup]) -> list[RuleFinding]:
        """The findings of a cause that may be logged now."""
        cause = self._causes.get(name)
        if cause is None or self._past(cause):
            if cause is not None:
                self._report_hidden(name, cause)
            cause = self._causes[name] = _Cause(self._clock())
        shown = earliest(groups, cause.left, self._series)
        cause.left -= len(shown)
        return shown

    def _rest(self, name: tuple[str, str], step: int, count: int, *, said: bool) -> None:
        """Log the number of hidden events: at once in the step that uses up the lines, later ones when the window ends."""
        if count and said:
            self._say(f"… and {count:,} more of {_cause_text(name)} in step {step}, not shown.{self._see}")
        elif count:
            self._causes[name].hide(step, count)

    def _report_hidden(self, name: tuple[str, str], cause: _Cause) -> None:
        if cause.silent:
            steps = f"step {cause.first}" if cause.first == cause.last else f"steps {cause.first} to {cause.last}"
            self._say(f"{cause.silent:,} more of {_cause_text(name)} in {steps}, not shown.{self._see}")
            cause.silent = 0

    def _past(self, cause: _Cause) -> bool:
        return self._clock() - cause.begun >= WINDOW_S

    def _line(self, step: int, finding: RuleFinding) -> str:
        return message(finding.signal, self._series[finding.series].tag(self._rank, finding.micro_step), step)

    def _say(self, line: str) -> None:
        LOGGER.warning("[rank %d] %s", self._rank, plain(line))


def _ranking(where: Path | None) -> str:
    """How to find the first tensor and rank. Most alerts concern values that another tensor or rank passed on."""
    if where is None:
        return (
            ' It may come from another tensor or rank: set "dump": true in "alert"; trainermon rank-anomalies finds the first.'
        )
    return f" It may come from another tensor or rank. To find the first: {RANKING} {shlex.quote(str(where.parent))}"


def _cause_text(cause: tuple[str, str]) -> str:
    rule, op = cause
    return f"{rule} ({op})"


# --- The alarm: reports to a callback that a rule has fired.


class Alarm:
    """A listener of the scanner.

    Args:
        ring: Called for every step in which a rule fired, on the writer thread. Must not wait.
    """

    def __init__(self, ring: weakref.WeakMethod[Callable[[], object]]) -> None:
        self._ring = ring

    def judged(self, findings: StepFindings) -> None:
        """See ``FindingListener``."""
        if findings.groups and (ring := self._ring()) is not None:
            ring()

    def not_judged(self, step: int, reason: str) -> None:
        """Do nothing: no rule saw the step."""

    def save(self) -> None:
        """Do nothing: the alarm keeps no state."""

    def close(self) -> None:
        """Do nothing."""
