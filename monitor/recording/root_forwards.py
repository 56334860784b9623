"""The forwards of the model that are under way, by thread: to which of them the calls of modules belong."""

from __future__ import annotations

import sys
from threading import get_ident
from typing import Final, NamedTuple, final

from monitor.failures import Failures
from monitor.recording.step_clock import Clock

AMONG_THREADS: Final = (
    "A thread has called modules without the model, while other threads ran the model, in training and otherwise. It is not "
    "known to which of the two the calls belong, and they are not recorded."
)
BEYOND_STEP: Final = (
    "A thread was in a forward of the model when another thread ended the step. What it calls after that is not recorded."
)


class OpenRoot(NamedTuple):
    """A root forward that has begun.

    Attributes:
        tracked: Whether it is part of training.
        handled: The exception being handled when it began: a loop may retry in its ``except`` clause.
        step, micro_step: The position of training after it had begun.
    """

    tracked: bool
    handled: BaseException | None
    step: int
    micro_step: int


@final
class RootForwards:
    """The forwards of the root of one chunk that have begun and not ended.

    Args:
        by_thread: Whether each ends on the thread on which it began. Otherwise all threads count as one.
    """

    def __init__(self, clock: Clock, failures: Failures, *, by_thread: bool) -> None:
        self._clock, self._failures = clock, failures
        self._thread = get_ident if by_thread else _any_thread
        self._open: dict[int, list[OpenRoot]] = {}

    @property
    def mine(self) -> list[OpenRoot]:
        """Those of this thread, one within another."""
        found = self._open.get(self._thread())
        return self._open.setdefault(self._thread(), []) if found is None else found

    @property
    def train(self) -> bool:
        """Whether a call of a module by this thread belongs to training. Evaluations and the rehearsal of a pipeline stage do
        not. A thread without a forward of its own may work for those of other threads.
        """
        if mine := self._open.get(self._thread()):  # not by `mine`: each call of a module comes here
            root = mine[-1]
            return root.tracked and (root.step == self._clock.step or self.is_current(root))
        others = [self.is_current(calls[-1]) for calls in list(self._open.values()) if calls]
        if any(others) and not all(others):
            self._failures.warn("calls among threads", AMONG_THREADS)
        return all(others)

    def begin(self, *, tracked: bool, micro_step: int) -> None:
        """A forward begins on this thread."""
        self.mine.append(OpenRoot(tracked, sys.exc_info()[1], self._clock.step, micro_step))

    def is_current(self, root: OpenRoot) -> bool:
        """Whether a forward is part of the training of the step in progress."""
        if root.tracked and root.step != self._clock.step:
            self._failures.warn("forwards beyond their step", BEYOND_STEP)
            return False
        return root.tracked

    def end_step(self) -> None:
        """Forget the forwards of this thread, and of threads that have ended. Other threads may be in one now."""
        self._open.pop(self._thread(), None)
        if others := list(self._open):  # before the next line, which then has the threads that begin meanwhile
            living = sys._current_frames()
            for thread in others:
                if thread not in living:
                    self._open.pop(thread, None)


def _any_thread() -> int:
    return 0
