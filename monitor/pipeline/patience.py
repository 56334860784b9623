"""How long training may be held up when the queue is full."""

from __future__ import annotations

from time import monotonic
from typing import Final

from monitor.failures import LOGGER, Failures

MOST_WARNINGS: Final = 10
"""Incidents that are spoken of one by one; later ones are only counted."""


class Patience:
    """A budget of waiting per incident, shared by the steps that meet the full queue one after the other.

    An incident begins when the queue is full and is over when most of the ring is free again. One free copy is not enough: it
    comes back for every step that the writer finishes, so a writer that is always slower than training would have the whole
    budget restored for each of them, and training would run at the writer's pace for ever.
    """

    def __init__(self, seconds: float, failures: Failures) -> None:
        self._seconds = seconds
        self._failures = failures
        self._incidents = 0
        self._began: float | None = None
        self._dropped = 0
        self.left = seconds

    def spend(self, seconds: float) -> None:
        """The queue was full, and ``seconds`` were waited for room."""
        if self._began is None:
            self._began = monotonic() - seconds
            self._incidents += 1
        self.left = max(self.left - seconds, 0.0)

    def drop(self, step: int) -> None:
        """There was no room for ``step`` in time."""
        self._dropped += 1
        if self._dropped == 1:
            self._warn(step)

    def restore(self) -> None:
        """The queue has room again: the incident, if there was one, is over."""
        if self._began is None:
            return
        if self._dropped and self._incidents <= MOST_WARNINGS:
            took = monotonic() - self._began
            LOGGER.info(
                "[rank %d] The writer caught up after %.1f s; %d steps dropped.", self._failures.rank, took, self._dropped
            )
        self._began, self._dropped, self.left = None, 0, self._seconds

    def _warn(self, step: int) -> None:
        number = min(self._incidents, MOST_WARNINGS + 1)
        cause = f"queue full, incident {number}" if number <= MOST_WARNINGS else "queue full, later incidents"
        self._failures.warn(
            cause,
            f"The writer is behind: the queue is full, and {self._seconds - self.left:.1f} s of waiting brought no room. "
            f"From step {step} on, steps are dropped without waiting until there is room; the manifest lists them. Record "
            "fewer tensors or fewer steps (targets, step_interval), raise queue_bytes, or write to a faster disk.",
        )
