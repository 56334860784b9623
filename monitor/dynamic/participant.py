"""Runs the consensus protocol: in a daemon thread (several ranks) or inline (single process)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event, Lock, Thread
from typing import Any, Final, Protocol

from monitor.coordinator.store.protocol import LocalStore
from monitor.dynamic.consensus import ConsensusProtocol, ConsensusStore, own_connection, run_routine
from monitor.dynamic.step_boundary import ASKED_PER_SECOND, PollingIntervals, StepBoundary
from monitor.failures import LOGGER, Failures

LONGEST_PAUSE_S: Final = 300.0
SAY_AFTER_S: Final = 30.0
"""How long an error may last before it is reported: ranks do not start or end at the same moment."""

JOIN_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class JobConnection:
    """How a rank reaches the others.

    Attributes:
        store: The process group's store; None for a single process.
        prefix: Prefix of the monitor's keys, the run's job id. No other run or recording may use it.
        alive: Whether the process group still exists. Once it does not, the store is not used any more and is released.
        asked_per_second: How many requests a second all ranks together may send to the store.
        intervals: For tests. None: they follow from the number of ranks.
    """

    rank: int = 0
    world: int = 1
    store: Any = None
    prefix: str = ""
    alive: Callable[[], bool] = lambda: True
    asked_per_second: float = ASKED_PER_SECOND
    intervals: PollingIntervals | None = None

    @property
    def pace(self) -> PollingIntervals:
        """``intervals``, or those that suit the number of ranks."""
        if self.intervals is not None:
            return self.intervals
        return PollingIntervals.alone() if self.store is None else PollingIntervals.of(self.world, self.asked_per_second)


class Participant(Protocol):
    """Runs one rank's part of the consensus protocol."""

    def start(self, timeout_s: float) -> bool:
        """Begin. Returns whether the ranks agreed within ``timeout_s`` on what training begins with."""

    def wake(self) -> None:
        """There is a pending proposal. Never waits for a store that other ranks use."""

    def stop(self) -> None:
        """End within about a second; a store call that hangs is abandoned."""

    def retire(self) -> None:
        """End after the next turn. Takes no lock."""


class SingleProcess:
    """A process without other ranks: a proposal is agreed on at once, on the thread that proposes."""

    def __init__(self, agreement: ConsensusProtocol[Any]) -> None:
        self._agreement = agreement
        self._store = LocalStore()
        self._lock = Lock()

    def start(self, timeout_s: float) -> bool:  # noqa: ARG002
        self.wake()
        return True

    def wake(self) -> None:
        with self._lock:
            run_routine(self._agreement.poll(), self._store, "")

    def stop(self) -> None: ...

    def retire(self) -> None: ...


class StoreParticipant:
    """A daemon thread that talks to the store over a connection of its own. Every wait for it has a timeout."""

    def __init__(
        self,
        agreement: ConsensusProtocol[Any],
        boundary: StepBoundary[Any],
        job: JobConnection,
        failures: Failures,
    ) -> None:
        self._agreement, self._boundary, self._pace = agreement, boundary, job.pace
        self._prefix, self._alive, self._failures = job.prefix, job.alive, failures
        self._job_store: Any = job.store
        self._connection: ConsensusStore | None = None
        self._failing_since: float | None = None
        self._held_up_since: float | None = None
        self._pause_s = job.pace.idle
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
            self._connection = self._job_store = None  # a FileStore's file is deleted with its last reference

    def _turn(self) -> None:
        self._boundary.lookahead.saw(time.monotonic(), self._boundary.step)
        try:
            run_routine(self._agreement.poll(), self._connected(), self._prefix)
        except Exception as error:
            self._failed(error)
        else:
            self._failing_since = None
            self._pause_s = self._pace.idle
            self._joined.set()
            self._warn_of_missing_ranks()

    def _connected(self) -> ConsensusStore:
        """The first connection is made from the job's store; a lost one is replaced from the connection before."""
        if self._connection is None:
            self._connection = own_connection(self._job_store)
            self._job_store = self._connection  # a reference would keep training's store alive
        return self._connection

    def _failed(self, error: Exception) -> None:
        """Retry with increasing pauses. The store's process may only have ended a little earlier than this one."""
        now = time.monotonic()
        self._connection = None
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        if self._failing_since is None:
            self._failing_since = now
        if (now - self._failing_since >= SAY_AFTER_S or self._agreement.open) and self._alive():
            advice = "This rank keeps its configuration until it can reach the store again."
            self._failures.report("asking the job's store", error, advice)

    def _warn_of_missing_ranks(self) -> None:
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
            run_routine(self._agreement.leave(), self._connection, self._prefix)
        except Exception as error:
            LOGGER.debug("the store was gone before this rank: %r", error)
