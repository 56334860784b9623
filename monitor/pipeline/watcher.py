"""Who looks at steps before any sink has them: the alert rules."""

from __future__ import annotations

from typing import Protocol

from monitor.stats.rows import StepRows


class Watcher(Protocol):
    """Looks at every step that could be read.

    Called by one thread at a time, never by the training thread. Raising is allowed: it is reported once and stops nothing.
    """

    def look(self, rows: StepRows) -> None:
        """Look at a step. It delays the sinks for as long as it takes."""

    def dropped(self, step: int, reason: str) -> None:
        """The step is lost, and is not looked at."""

    def save(self) -> None:
        """Make what was found so far visible."""

    def close(self) -> None:
        """Save for the last time: the run has ended, and no step is missing."""
