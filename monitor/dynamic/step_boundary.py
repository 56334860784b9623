"""The boundary between two steps, where the training thread and the consensus thread meet.

The training thread announces the step that it is about to begin and reads one number, the *gate*: the first step that needs a
closer look, because a switch is due or because this rank has promised not to begin it undecided. The consensus thread moves
the gate. Both threads write before they read: if a promise is made while training steps, at least one of them notices.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import Final, Generic

from monitor.coordinator.job_store import ASKED_PER_SECOND
from monitor.dynamic.proposals import FROM_START, C, Switch

# --- Polling intervals, the lookahead of promises, and timeouts.


@dataclass(frozen=True, slots=True)
class PollingIntervals:
    """Times in seconds.

    Attributes:
        idle: Between two requests while no proposal is open.
        open: The same while a proposal is open.
        waiting: The same while training waits.
        patience: How long training waits for a decision before its rank aborts the proposal.
        bound: Timeout of the whole wait for one proposal, the store's answer included.
        file: Between two looks at the configuration file.
    """

    idle: float
    open: float
    waiting: float
    patience: float
    bound: float
    file: float = 1.0

    @classmethod
    def alone(cls) -> PollingIntervals:
        """For a single process."""
        return cls(0.0, 0.0, 0.0, patience=1.0, bound=2.0)

    @classmethod
    def of(cls, world: int, asked_per_second: float = ASKED_PER_SECOND) -> PollingIntervals:
        """For a job of ``world`` ranks, which together may send the store so many requests a second."""
        least = world / asked_per_second
        idle = max(1.0, least)
        return cls(idle, max(0.05, least), max(0.01, least), patience=2 * idle, bound=4 * idle)


class StepLookahead:
    """How many steps ahead of training a promise should lie, so that it is usually decided before training gets there.

    By then every other rank has to find the proposal, and this rank the decision. The consensus thread observes the speed of
    training; the training thread measures nothing.
    """

    def __init__(self, pace: PollingIntervals) -> None:
        self._ahead_s = 1.5 * (pace.idle + pace.open)
        self._seen: deque[tuple[float, int]] = deque(maxlen=16)

    def saw(self, now: float, step: int) -> None:
        """Training was in ``step`` at ``now`` (seconds)."""
        self._seen.append((now, step))

    def steps(self) -> int:
        """At least 1, and 1 before training was seen to step: better to wait once than to begin late."""
        return max(1, math.ceil(self._ahead_s * self._steps_per_second()))

    def _steps_per_second(self) -> float:
        """The faster of the latest speed and the speed over all remembered observations."""
        if len(self._seen) < 2:
            return 0.0
        last = self._seen[-1]
        return max(_speed(self._seen[0], last), _speed(self._seen[-2], last))


def _speed(one: tuple[float, int], other: tuple[float, int]) -> float:
    seconds = other[0] - one[0]
    return max(0, other[1] - one[1]) / seconds if seconds > 0 else 0.0


NEVER: Final = sys.maxsize
SLICE_S: Final = 0.002
MOST_OF_A_SLICE_S: Final = 0.1
"""The most that one sleep counts. After a process was stopped and resumed, a sleep seems to have taken minutes. They do not
count as waiting: no thread looked for the decision meanwhile.
"""


class StepBoundary(Generic[C]):
    """The step boundary of one rank. The training thread calls ``begin``, and methods marked so; others call the rest.

    Args:
        first_step: The first step that training will begin.
        wake: Called when training has to wait. Must not wait itself.

    Attributes:
        first_step: See the arguments.
        lookahead: How many steps ahead of training a promise should lie.
        step: The last step that training announced: it is about to begin, or has begun.
        gate: See the module.
        promised: The first step that this rank has promised not to begin undecided; None: no promise is open.
        undecided_since: The step at which the wait timed out, as long as the decision is not known; else None.
        called_off: Training has waited ``patience``: the proposal is to be aborted.
        waiting: Whether training waits now.
    """

    def __init__(self, first_step: int, pace: PollingIntervals, wake: Callable[[], None]) -> None:
        self.first_step = first_step
        self.lookahead = StepLookahead(pace)
        self.step = first_step - 1
        self.gate = NEVER
        self.promised: int | None = None
        self.undecided_since: int | None = None
        self.called_off = False
        self.waiting = False
        self._pace = pace
        self._wake = wake
        self._to_come: list[Switch[C]] = []
        self._origin = FROM_START
        self._latest = first_step - 1
        # Held briefly, never during a request. Reentrant: a signal handler may interrupt its own thread in here.
        self._lock = RLock()

    def begin(self, step: int) -> list[Switch[C]]:
        """Announce ``step`` and return the switches that are due, in order; the last one is in force from here on.

        Steps ascend. Waits for a decision if a promise is open, at most ``PollingIntervals.bound`` seconds.
        """
        self.step = step
        if step < self.gate:
            return []
        self._wait_for_decision(step)
        return self.due(step)

    def undecided(self, step: int) -> bool:
        """Training thread: whether a promise forbids beginning ``step`` yet."""
        promised = self.promised
        return promised is not None and step >= promised

    def call_off(self, step: int) -> None:
        """Training thread: have the proposal aborted, unless it has been decided."""
        with self._lock:
            self.called_off = self.undecided(step)
        self._wake()

    def give_up(self, step: int) -> None:
        """Training thread: begin ``step`` undecided, since the store does not answer."""
        with self._lock:
            if self.undecided(step):
                self.undecided_since = step
                self._promise(None)

    def due(self, step: int) -> list[Switch[C]]:
        """Training thread: the switches that are due at ``step``; several if this rank learned of them late."""
        with self._lock:
            past = [one for one in self._to_come if one.from_step <= step]
            self._to_come = self._to_come[len(past) :]
            self._origin = past[-1].origin if past else self._origin
            self._move_gate()
        return past

    def expects(self, origin: str) -> bool:
        """Any thread: whether the configuration in force, or a coming switch, came from ``origin``."""
        with self._lock:
            return self._origin == origin or any(one.origin == origin for one in self._to_come)

    def ahead(self) -> int:
        """The step to promise: as far ahead as ``lookahead`` says, but not before the latest agreed step."""
        return max(self.step + self.lookahead.steps(), self._latest)

    def promise(self, step: int) -> None:
        """Promise not to begin ``step`` undecided. The promise is valid once ``kept`` returns True."""
        with self._lock:
            self._promise(step)

    def kept(self, promised: int) -> bool:
        """Whether training had not begun ``promised`` when the gate was set, and so will stop there."""
        return self.step < promised

    def decide(self, switches: Sequence[Switch[C]] = ()) -> None:
        """The open proposal was decided. ``switches`` replace all later ones; empty if it was aborted."""
        with self._lock:
            self.called_off = False
            self.undecided_since = None
            if switches:
                self._latest = switches[0].from_step
                self._to_come = [one for one in self._to_come if one.from_step < self._latest] + list(switches)
            # Last: training reads the gate without the lock, and must never find it beyond a known switch.
            self._promise(None)

    def _wait_for_decision(self, step: int) -> None:
        waited = 0.0
        try:
            while self.undecided(step):
                if waited == 0.0:
                    self.waiting = True
                    self._wake()
                elif waited >= self._pace.bound:
                    self.give_up(step)
                elif waited >= self._pace.patience and not self.called_off:
                    self.call_off(step)
                waited += _slept(SLICE_S)
        finally:
            self.waiting = False

    def _promise(self, step: int | None) -> None:
        self.promised = step
        self._move_gate()

    def _move_gate(self) -> None:
        next_switch = self._to_come[0].from_step if self._to_come else NEVER
        self.gate = next_switch if self.promised is None else min(next_switch, self.promised)


def _slept(seconds: float) -> float:
    """Sleep, and return the duration, at most ``MOST_OF_A_SLICE_S``."""
    before = time.monotonic()
    time.sleep(seconds)
    return min(time.monotonic() - before, MOST_OF_A_SLICE_S)
