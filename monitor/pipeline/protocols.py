"""Interfaces of the pipeline: a sealed copy of the table, the journal of each step's outcome, and watchers of steps."""

from __future__ import annotations

from typing import Protocol

from monitor.stats.rows import StepRows


class Sealed(Protocol):
    """A copy of the live table, made at the end of a step. Copies are reused: they are the slots of the ring."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the copy holds now. They may change with every step sealed into it, since the table grows."""

    @property
    def ready(self) -> bool:
        """True if ``rows`` will not wait. Does not wait itself."""

    def rows(self) -> StepRows:
        """The step in new columns, on the writer thread. May wait for the device. Never called after the copy was put back."""


class StepJournal(Protocol):
    """Records the outcome of each step: the rank's manifest.

    Called by one thread at a time, never by the training thread. It may raise: the error is reported once and stops nothing.
    """

    def written(self, rows: StepRows) -> None:
        """Every sink has the step."""

    def dropped(self, step: int, reason: str) -> None:
        """No sink has the step: the queue was full, or the step could not be read."""

    def lost(self, step: int, sink: str, reason: str) -> None:
        """One sink does not have the step."""

    def save(self) -> None:
        """Make all entries so far visible."""

    def close(self) -> None:
        """Save for the last time: the run has ended, and every sink has closed."""


class Watcher(Protocol):
    """Sees every readable step before the sinks do, such as the alert rules.

    Called by one thread at a time, never by the training thread. It may raise: the error is reported once and stops nothing.
    """

    def look(self, rows: StepRows) -> None:
        """Examine a step. The sinks wait until this returns."""

    def dropped(self, step: int, reason: str) -> None:
        """The step is lost and cannot be examined."""

    def save(self) -> None:
        """Make all findings so far visible."""

    def close(self) -> None:
        """Save for the last time: the run has ended, and no step is missing."""
