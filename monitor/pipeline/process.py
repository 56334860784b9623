"""The events that concern a process as a whole: its exit, its forks, its termination by signal."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable
from typing import Final, Protocol

from monitor.failures import Failures
from monitor.pipeline.forks import Forks
from monitor.pipeline.signals import Flushable, Termination


class Closable(Flushable, Protocol):
    def begin_close(self) -> None: ...

    def close(self) -> bool: ...


class Process:
    """Knows every live pipeline of this process, weakly, and takes no lock: signals and forks come at any moment."""

    def __init__(self) -> None:
        self._live: dict[int, weakref.ref[Closable]] = {}
        self._forks = Forks(self._in_forked_child)
        self._termination = Termination(self.live)
        self._watching = False
        self._at_end: list[Callable[[], None]] = []

    @property
    def forks(self) -> int:
        """How many forks lie between this process and the first one that loaded this module."""
        return self._forks.count

    def adopt(self, pipeline: Closable) -> None:
        self._watch()
        self.end_first()
        key = id(pipeline)
        self._live[key] = weakref.ref(pipeline, lambda _: self._live.pop(key, None))

    def forget(self, pipeline: Closable) -> None:
        self._live.pop(id(pipeline), None)
        if not self.live():
            self._termination.disarm()

    def live(self) -> list[Closable]:
        return [one for reference in list(self._live.values()) if (one := reference()) is not None]

    def watch_signals(self, failures: Failures) -> None:
        try:
            self._termination.arm()
        except Exception as error:
            failures.report("watching for SIGTERM", error, "A run that is terminated loses the record it had open.")

    def on_fork_child(self, callback: Callable[[], None]) -> None:
        self._watch()
        self._forks.tell(callback)

    def at_end(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` at exit, before pipelines are closed. Any number of times."""
        if callback not in self._at_end:
            self._at_end.append(callback)
        self.end_first()

    def end_first(self) -> None:
        """Be called at exit before whatever was loaded so far: h5py takes leave then, and nothing could be written after it."""
        atexit.unregister(self._end)
        atexit.register(self._end)

    def _end(self) -> None:
        try:
            for callback in self._at_end:
                callback()
        finally:
            self.close_all()

    def close_all(self) -> None:
        """At exit, before daemon threads die. All begin to close before the first is waited for."""
        live = self.live()
        for one in live:
            one.begin_close()
        for one in live:
            one.close()

    def _watch(self) -> None:
        if not self._watching:
            self._watching = True
            self._forks.watch()

    def _in_forked_child(self) -> None:
        self._live.clear()
        self._termination.forget()


PROCESS: Final = Process()
"""The only state of this package that belongs to no object of the user's: the operating system has one of each event."""


def on_fork_child(callback: Callable[[], None]) -> None:
    """Call the bound method ``callback`` in every process forked from this one, for as long as its object lives."""
    PROCESS.on_fork_child(callback)
