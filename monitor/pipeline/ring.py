"""The bound of the queue: a ring of sealed copies, reused, whose memory stays within a number of bytes."""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Final, Generic, TypeVar

from monitor.pipeline.sealed import Sealed

S = TypeVar("S", bound=Sealed)

FEWEST: Final = 2
"""One copy is filled while the other is read, whatever their size."""

GATHERED_BYTES: Final = 4 << 20
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
    def roomy(self) -> bool:
        """Whether what was taken may wait for more."""
        taken, most = len(self._copies) - self._free.qsize(), self._most()
        return 2 * taken < most and taken * self._largest < GATHERED_BYTES

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
        return max(FEWEST, self._queue_bytes // self._largest)

    def _make(self) -> S:
        sealed = self._new_sealed()
        self._copies.append(sealed)
        return sealed

    def _next(self, seconds: float) -> S | None:
        try:
            return self._free.get(timeout=max(seconds, 0.0))
        except Empty:
            return None
