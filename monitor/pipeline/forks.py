"""What a forked child must not inherit, and how it is kept from it."""

from __future__ import annotations

import os
import signal
import weakref
from collections.abc import Callable
from threading import get_ident
from types import MethodType

from monitor.failures import LOGGER

Callback = Callable[[], None]
Weakly = Callable[[], Callback | None]


class Forks:
    """Counts the forks that lie between this process and the first one, and tells those who asked in each child.

    SIGTERM is held back from just before a fork until the child has taken down what it inherited: until then a signal sent to
    the child would be written into the descriptor that it shares with its parent, and wake the parent.
    """

    def __init__(self, in_child: Callback) -> None:
        self.count = 0
        self._first = in_child
        self._in_child: list[Weakly] = []
        self._masks: dict[int, set[signal.Signals | int]] = {}

    def watch(self) -> None:
        """From now on. Cannot be undone: once a process."""
        os.register_at_fork(before=self._before, after_in_parent=self._after, after_in_child=self._after_in_child)

    def tell(self, callback: Callback) -> None:
        """Call the bound method ``callback`` in every child for as long as its object lives."""
        reference: Weakly = weakref.WeakMethod(callback) if isinstance(callback, MethodType) else weakref.ref(callback)
        self._in_child = [*(known for known in self._in_child if known() is not None), reference]

    def _before(self) -> None:
        self._masks[get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def _after(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._masks.pop(get_ident()))

    def _after_in_child(self) -> None:
        self.count += 1
        try:
            self._first()
        finally:
            self._after()
            self._masks.clear()
        for reference in self._in_child:
            if (callback := reference()) is not None:
                _call(callback)


def _call(callback: Callback) -> None:
    try:
        callback()
    except Exception:
        LOGGER.warning("%r failed in a forked process, which goes on.", callback, exc_info=True)
