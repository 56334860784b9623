"""What the pipeline moves and whom it tells: a sealed copy of the table, and the journal of what became of each step."""

from __future__ import annotations

from typing import Protocol

from monitor.stats.rows import StepRows


class Sealed(Protocol):
    """One copy of the live table, made at the end of a step. Copies are reused: they are the slots of the ring."""

    @property
    def nbytes(self) -> int:
        """Memory it holds now. It may change whenever a step is sealed into it, since the table grows."""

    @property
    def ready(self) -> bool:
        """Whether ``rows`` is sure not to wait. Does not wait itself."""

    def rows(self) -> StepRows:
        """The step as columns of their own, on the writer thread. May wait for the device. Never called once given back."""


class StepJournal(Protocol):
    """What became of each step: the rank's manifest.

    Called by one thread at a time, never by the training thread. Raising is allowed: it is reported once and stops nothing.
    """

    def written(self, rows: StepRows) -> None:
        """Every sink has taken in the step."""

    def dropped(self, step: int, reason: str) -> None:
        """No sink has the step: there was no room for it, or it could not be read."""

    def lost(self, step: int, sink: str, reason: str) -> None:
        """One sink does not have the step."""

    def save(self) -> None:
        """Make what was told so far visible."""

    def close(self) -> None:
        """Save for the last time: the run has ended, and every sink has closed."""


# --- Who looks at steps before any sink has them: the alert rules.


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
