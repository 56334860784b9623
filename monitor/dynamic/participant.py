"""Who carries an agreement out: a thread beside training where there are other ranks, whoever wishes where there are none."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event, Lock, Thread
from typing import Any, Final, Protocol

from monitor.coordinator.store.protocol import LocalStore
from monitor.dynamic.consensus import Agreement, Store, own_connection, talk
from monitor.dynamic.step_boundary import ASKED_PER_SECOND, Boundary, Horizon, Pace
from monitor.failures import LOGGER, Failures

LONGEST_PAUSE_S: Final = 300.0
SAY_AFTER_S: Final = 30.0
"""How long something may be amiss before it is said: ranks neither start nor end in the same moment."""

JOIN_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Job:
    """How a rank reaches the others.

    Attributes:
        store: The process group's store; None for a process of its own.
        prefix: Of our keys. No other run may have it, and no other recording of this one: the run's job id.
        alive: Whether the process group still stands. Once it does not, the store is left alone and let go of.
        asked_per_second: How often all ranks together may ask the store.
    """

    rank: int = 0
    world: int = 1
    store: Any = None
    prefix: str = ""
    alive: Callable[[], bool] = lambda: True
    asked_per_second: float = ASKED_PER_SECOND


class Agreeing(Protocol):
    """Carries out one rank's part of an agreement."""

    def start(self, timeout_s: float) -> bool:
        """Begin; whether it was settled within ``timeout_s`` what training begins with."""

    def wake(self) -> None:
        """There is a wish. Never waits for a store of other ranks."""

    def stop(self) -> None:
        """End, within about a second; a call of the store that hangs is left behind."""

    def retire(self) -> None:
        """End after the next turn. Takes no lock."""


class Alone:
    """A process without others: what is wished for is agreed on at once, by whoever wishes."""

    def __init__(self, agreement: Agreement[Any]) -> None:
        self._agreement = agreement
        self._store = LocalStore()
        self._lock = Lock()

    def start(self, timeout_s: float) -> bool:  # noqa: ARG002
        self.wake()
        return True

    def wake(self) -> None:
        with self._lock:
            talk(self._agreement.poll(), self._store, "")

    def stop(self) -> None: ...

    def retire(self) -> None: ...


class AmongOthers:
    """A daemon thread that talks to the store over a connection of its own. Nobody ever waits for it without a bound."""

    def __init__(
        self, agreement: Agreement[Any], boundary: Boundary[Any], horizon: Horizon, pace: Pace, job: Job, failures: Failures
    ) -> None:
        self._agreement, self._boundary, self._horizon, self._pace = agreement, boundary, horizon, pace
        self._prefix, self._alive, self._failures = job.prefix, job.alive, failures
        self._job_store: Any = job.store
        self._connection: Store | None = None
        self._failing_since: float | None = None
        self._held_up_since: float | None = None
        self._pause_s = pace.idle
        self._wake, self._joined, self._stopped = Event(), Event(), Event()
        self._retired = False
        self._thread = Thread(target=self._run, name="monitor-agreement", daemon=True)

    def start(self, timeout_s: float) -> bool:
        self._thread.start()
        return self._joined.wait(timeout_s)

    def wake(self) -> None:
        self._wake.set()

    def stop(self) -> None:
        self._stopped.set()
        self._wake.set()
        self._thread.join(JOIN_S)

    def retire(self) -> None:
        self._retired = True

    def _run(self) -> None:
        try:
            while not (self._stopped.is_set() or self._retired) and self._alive():
                self._turn()
                self._wake.wait(self._pause())
                self._wake.clear()
            self._leave()
        except Exception as error:
            self._failures.report("agreeing with the other ranks", error, "This rank keeps its configuration.")
        finally:
            self._connection = self._job_store = None  # a FileStore's file goes with the last who holds it

    def _turn(self) -> None:
        self._horizon.saw(time.monotonic(), self._boundary.step)
        try:
            talk(self._agreement.poll(), self._connected(), self._prefix)
        except Exception as error:
            self._failed(error)
        else:
            self._failing_since = None
            self._pause_s = self._pace.idle
            self._joined.set()
            self._say_who_is_missing()

    def _connected(self) -> Store:
        """The job's own store is asked for a connection once; a lost one is replaced by asking that."""
        if self._connection is None:
            self._connection = own_connection(self._job_store)
            self._job_store = self._connection  # training's would be kept alive by us
        return self._connection

    def _failed(self, error: Exception) -> None:
        """Try again, less and less often. The other side may only be ending a little earlier than this one."""
        now = time.monotonic()
        self._connection = None
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        if self._failing_since is None:
            self._failing_since = now
        if (now - self._failing_since >= SAY_AFTER_S or self._agreement.open) and self._alive():
            advice = "This rank keeps its configuration until it can ask the others again."
            self._failures.report("asking the job's store", error, advice)

    def _say_who_is_missing(self) -> None:
        now = time.monotonic()
        if self._agreement.missing <= 0:
            self._held_up_since = None
        elif self._held_up_since is None:
            self._held_up_since = now
        elif now - self._held_up_since >= SAY_AFTER_S:
            said = f"A change of the configuration waits: {self._agreement.missing} ranks have not called set_monitor yet."
            self._failures.warn("ranks missing", said)

    def _pause(self) -> float:
        if self._failing_since is not None:
            return self._pause_s
        if self._boundary.waiting:
            return self._pace.waiting
        return self._pace.open if self._agreement.open else self._pace.idle

    def _leave(self) -> None:
        if self._connection is None or not self._alive():
            return
        try:
            talk(self._agreement.leave(), self._connection, self._prefix)
        except Exception as error:
            LOGGER.debug("the store was gone before this rank: %r", error)
