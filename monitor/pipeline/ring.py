"""The ring of reused sealed copies bounds the queue. The training thread takes copies; any thread puts them back."""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Final, Generic, TypeVar

from monitor.failures import LOGGER, Failures
from monitor.pipeline.dropped import BATCH_LIMIT_BYTES
from monitor.pipeline.protocols import Sealed

S = TypeVar("S", bound=Sealed)

MIN_COPIES: Final = 2
"""One copy is filled while the other is read, whatever their size."""


class Ring(Generic[S]):
    """The training thread takes copies; any thread puts them back.

    A copy grows to the size of the table when the next step is sealed into it, and a table never shrinks. So every copy counts
    with the largest size seen. When the table grows, copies that come back are discarded until the ring fits again.

    Takes no lock that a signal handler or a forked process could find held: ``SimpleQueue`` is reentrant.
    """

    def __init__(self, new_sealed: Callable[[], S], queue_bytes: int) -> None:
        self._new_sealed = new_sealed
        self._queue_bytes = queue_bytes
        self._largest = 1
        self._copies: list[S] = []
        self._free: SimpleQueue[S] = SimpleQueue()

    def __len__(self) -> int:
        return len(self._copies)

    @property
    def nbytes(self) -> int:
        return sum(sealed.nbytes for sealed in self._copies)

    @property
    def mostly_free(self) -> bool:
        return 2 * self._free.qsize() > len(self._copies)

    @property
    def may_batch(self) -> bool:
        """True if the writer may wait for more steps before it reads those taken."""
        taken, most = len(self._copies) - self._free.qsize(), self._most()
        return 2 * taken < most and taken * self._largest < BATCH_LIMIT_BYTES

    def take(self, seconds: float) -> S | None:
        """A free copy, else a new one if there is room, else the first that comes back within ``seconds``, else None."""
        deadline = monotonic() + seconds
        while True:
            if self._free.empty() and len(self._copies) < self._most():
                return self._make()
            sealed = self._next(deadline - monotonic())
            if sealed is None or len(self._copies) <= self._most():
                return sealed
            self._copies = [kept for kept in self._copies if kept is not sealed]

    def put_back(self, sealed: S) -> None:
        self._free.put(sealed)

    def _most(self) -> int:
        self._largest = max(self._largest, *(sealed.nbytes for sealed in self._copies), 0)
        return max(MIN_COPIES, self._queue_bytes // self._largest)

    def _make(self) -> S:
        sealed = self._new_sealed()
        self._copies.append(sealed)
        return sealed

    def _next(self, seconds: float) -> S | None:
        try:
            return self._free.get(timeout=max(seconds, 0.0))
        except Empty:
            return None


# --- How long a full queue may delay training.

MAX_WARNINGS: Final = 10
"""Incidents that get a warning each; later ones are only counted."""


class BackpressureBudget:
    """The seconds that training may wait for the writer per incident, shared by all steps that find the queue full.

    An incident begins when the queue is full and ends when most of the ring is free again. One free copy does not end it:
    every step that the writer finishes frees one. A writer that is always slower than training would then restore the whole
    budget with each step, and training would run at the writer's pace.
    """

    def __init__(self, seconds: float, failures: Failures) -> None:
        self._seconds = seconds
        self._failures = failures
        self._incidents = 0
        self._began: float | None = None
        self._dropped = 0
        self.left = seconds

    def spend(self, seconds: float) -> None:
        """Subtract ``seconds`` that training waited because the queue was full."""
        if self._began is None:
            self._began = monotonic() - seconds
            self._incidents += 1
        self.left = max(self.left - seconds, 0.0)

    def drop(self, step: int) -> None:
        """Count ``step`` as dropped; warn at the first one of an incident."""
        self._dropped += 1
        if self._dropped == 1:
            self._warn(step)

    def restore(self) -> None:
        """The queue has room again: end the incident, if there is one."""
        if self._began is None:
            return
        if self._dropped and self._incidents <= MAX_WARNINGS:
            took = monotonic() - self._began
            LOGGER.info(
                "[rank %d] The writer caught up after %.1f s; %d steps dropped.", self._failures.rank, took, self._dropped
            )
        self._began, self._dropped, self.left = None, 0, self._seconds

    def _warn(self, step: int) -> None:
        number = min(self._incidents, MAX_WARNINGS + 1)
        cause = f"queue full, incident {number}" if number <= MAX_WARNINGS else "queue full, later incidents"
        self._failures.warn(
            cause,
            f"The writer is too slow: training waited {self._seconds - self.left:.1f} s and the queue is still full. "
            f"From step {step} on, steps are dropped without waiting until the queue has room; the manifest lists them. Record "
            "fewer tensors or fewer steps (targets, step_interval), raise queue_bytes, or write to a faster disk.",
        )
