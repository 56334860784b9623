"""The bound of the queue: a ring of sealed copies, reused, whose memory stays within a number of bytes."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Final, Generic, TypeVar

from monitor.failures import LOGGER, Failures
from monitor.pipeline.protocols import Sealed

S = TypeVar("S", bound=Sealed)

MIN_COPIES: Final = 2
"""One copy is filled while the other is read, whatever their size."""

BATCH_LIMIT_BYTES: Final = 4 << 20
"""Copies that wait to be read together hold no more: beyond that nothing is gained."""


class Ring(Generic[S]):
    """The training thread takes copies, any thread puts them back.

    A copy takes on the size of the table when the next step is sealed into it, and a table only grows. So all copies are
    counted at the largest size seen: a table that grows makes the ring shorter, copy by copy as they come back.

    No lock is taken that a signal handler or a forked process could find held: ``SimpleQueue`` is reentrant.
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
        """Whether what was taken may wait for more."""
        taken, most = len(self._copies) - self._free.qsize(), self._most()
        return 2 * taken < most and taken * self._largest < BATCH_LIMIT_BYTES

    def take(self, seconds: float) -> S | None:
        """A free copy, or a new one while there is room for it, or the first that comes back within ``seconds``."""
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


# --- How long training may be held up when the queue is full.

MAX_WARNINGS: Final = 10
"""Incidents that are spoken of one by one; later ones are only counted."""


class BackpressureBudget:
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
            f"The writer is behind: the queue is full, and {self._seconds - self.left:.1f} s of waiting brought no room. "
            f"From step {step} on, steps are dropped without waiting until there is room; the manifest lists them. Record "
            "fewer tensors or fewer steps (targets, step_interval), raise queue_bytes, or write to a faster disk.",
        )


# --- Steps that never reached the writer: counted where they are dropped, told to the journal by whoever writes.


class DroppedRange:
    """Steps dropped for one reason, evenly spaced, so that a writer that hangs for a day costs a few bytes."""

    def __init__(self, step: int, reason: str) -> None:
        self.reason = reason
        self.steps = range(step, step + 1)
        self.told = 0

    def reach(self, step: int, reason: str) -> bool:
        """Take in ``step`` if it continues the gap."""
        first, last = self.steps[0], self.steps[-1]
        stride = self.steps.step if len(self.steps) > 1 else step - first
        if reason != self.reason or stride < 1 or step != last + stride:
            return False
        self.steps = range(first, step + 1, stride)
        return True

    def tell(self, dropped: Callable[[int, str], None]) -> None:
        for step in self.steps[self.told :]:
            dropped(step, self.reason)
            self.told += 1


class DroppedSteps:
    """One thread drops, another tells, neither ever waits for the other.

    Only the last gap grows, and only the training thread replaces its ``steps``; a gap that is not the last never changes.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._dropped_steps: deque[DroppedRange] = deque()

    def add(self, step: int, reason: str) -> None:
        """On the training thread."""
        self.counts[reason] += 1
        if not self._dropped_steps or not self._dropped_steps[-1].reach(step, reason):
            self._dropped_steps.append(DroppedRange(step, reason))

    def tell(self, dropped: Callable[[int, str], None]) -> None:
        """Tell what is new since the last time. One caller at a time."""
        while self._dropped_steps:
            final = len(self._dropped_steps) > 1
            self._dropped_steps[0].tell(dropped)
            if not final:
                return
            self._dropped_steps.popleft()

    @property
    def unreported(self) -> bool:
        gaps = self._dropped_steps
        return len(gaps) > 1 or (len(gaps) == 1 and gaps[0].told < len(gaps[0].steps))
