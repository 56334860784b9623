"""What the writer is asked to do, in the order in which it was asked."""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Final, Generic, Literal, TypeVar

from monitor.pipeline.delivery import Arranged
from monitor.pipeline.sealed import Sealed
from monitor.pipeline.ticket import Ticket

S = TypeVar("S", bound=Sealed)

APART_SECONDS: Final = 0.1
"""At least so much lies between two times that steps are taken out, unless there is a hurry. Steps that take longer are taken
out one by one, as they come. Shorter ones come together, which costs training a fraction of what each by itself would: a thread
that wakes for a moment finds its code and its data gone from the caches, and takes the interpreter away each time."""


@dataclass(frozen=True, slots=True)
class Submitted(Generic[S]):
    step: int
    sealed: S


@dataclass(frozen=True, slots=True)
class Rearranged:
    """What follows goes to other sinks and watchers."""

    arranged: Arranged


@dataclass(frozen=True, slots=True)
class Asked:
    """``drain``: everything submitted before was delivered. ``flush``: and is visible. ``close``: and nothing follows."""

    what: Literal["drain", "flush", "close"]
    ticket: Ticket


Request = Rearranged | Asked


class Inbox(Generic[S]):
    """Any thread puts in, one takes out. Requests stand in the same queue as steps, so that each covers exactly what was
    submitted before it.

    No lock is taken that a signal handler or a forked process could find held: ``SimpleQueue`` is reentrant.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[Submitted[S] | Request] = SimpleQueue()
        self._hurries: SimpleQueue[None] = SimpleQueue()
        self._behind: deque[Request] = deque()  # the request that ended a run of steps, taken out of the queue with them
        self._rest_until = 0.0

    def put(self, submitted: Submitted[S], *, hurry: bool = False) -> None:
        """A step; ``hurry`` if there is little room for others behind it."""
        self._queue.put(submitted)
        if hurry:
            self._hurry()

    def ask(self, request: Request) -> None:
        """Not to be waited for longer than what stands before it takes."""
        self._queue.put(request)
        self._hurry()

    def take(self, timeout: float | None) -> list[Submitted[S]] | Request | None:
        """All steps up to the next request, or that request; None if within ``timeout`` seconds there is neither."""
        if self._behind:
            return self._alone(self._behind.popleft())
        self._rest()
        try:
            first = self._queue.get(timeout=timeout)
        except Empty:
            return None
        return self._steps(first) if isinstance(first, Submitted) else self._alone(first)

    def take_what_is_there(self) -> list[Submitted[S] | Request]:
        """Everything, at once, for whoever takes over from a thread that is stuck."""
        left: list[Submitted[S] | Request] = []
        with contextlib.suppress(IndexError):
            left.append(self._behind.popleft())
        with contextlib.suppress(Empty):
            while True:
                left.append(self._queue.get_nowait())
        return left

    def _alone(self, request: Request) -> Request:
        """There is no rest after it: behind it another may stand, whose hurry was this one's."""
        self._rest_until = 0.0
        return request

    def _steps(self, first: Submitted[S]) -> list[Submitted[S]]:
        self._rest_until = monotonic() + APART_SECONDS
        steps = [first]
        with contextlib.suppress(Empty):
            while isinstance(message := self._queue.get_nowait(), Submitted):
                steps.append(message)
            self._behind.append(message)
        return steps

    def _rest(self) -> None:
        """One that nobody needed ends a rest early, and no more."""
        seconds = self._rest_until - monotonic()
        if seconds > 0:
            with contextlib.suppress(Empty):
                self._hurries.get(timeout=seconds)

    def _hurry(self) -> None:
        """Called after the message was put: a hurry that is still there wakes whoever then finds it."""
        if self._hurries.empty():
            self._hurries.put(None)
