"""The alarm: says that a rule has fired, to whoever then looks closer."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from monitor.anomalies.findings import Findings


class Alarm:
    """A listener of the scanner.

    Args:
        ring: Called for every step in which a rule fired, on the writer thread. Must not wait.
    """

    def __init__(self, ring: weakref.WeakMethod[Callable[[], object]]) -> None:
        self._ring = ring

    def judged(self, findings: Findings) -> None:
        """See ``Listener``."""
        if findings.groups and (ring := self._ring()) is not None:
            ring()

    def not_judged(self, step: int, reason: str) -> None:
        """Of a step that nobody saw there is nothing to say."""

    def save(self) -> None:
        """There is nothing to keep."""

    def close(self) -> None:
        """Nor then."""
