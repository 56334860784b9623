"""Where training and agreement meet: the boundary between two steps.

The training thread says which step it is about to begin and reads one number, the *gate*: the first step that needs a second
look, because a switch is due or because this rank has promised not to begin it undecided. The other side moves the gate. Both
sides write before they read, so that of a promise made while training moves on at least one of them learns.
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

from monitor.dynamic.proposals import FROM_START, C, Switch

# --- How often a rank asks the store, how far ahead it promises, and how long it may wait.

ASKED_PER_SECOND: Final = 2_000
"""Questions a second that the store of a job should have to answer for our sake, whatever the number of ranks. For one that is
served by native code.
"""


@dataclass(frozen=True, slots=True)
class Pace:
    """Times in seconds.

    Attributes:
        idle: Between two questions while nothing is being agreed on.
        open: The same while something is.
        waiting: The same while training waits.
        patience: How long training waits for a decision before its rank calls the proposal off.
        bound: How long it waits in all, the answer of the store included. Longer no rank waits for one proposal.
    """

    idle: float
    open: float
    waiting: float
    patience: float
    bound: float

    @classmethod
    def alone(cls) -> Pace:
        """Where nobody has to be asked."""
        return cls(0.0, 0.0, 0.0, patience=1.0, bound=2.0)

    @classmethod
    def of(cls, world: int, asked_per_second: float = ASKED_PER_SECOND) -> Pace:
        """For a job of ``world`` ranks, and a store that may be asked so often by all of them together."""
        least = world / asked_per_second
        idle = max(1.0, least)
        return cls(idle, max(0.05, least), max(0.01, least), patience=2 * idle, bound=4 * idle)


class Horizon:
    """How many steps ahead of training a promise should lie, so that it is usually settled before training gets there.

    Until it is, every other rank has to find the proposal and this one the decision. Counted in steps of training as it has
    been going, seen from outside: training itself measures nothing.
    """

    def __init__(self, pace: Pace) -> None:
        self._ahead_s = 1.5 * (pace.idle + pace.open)
        self._seen: deque[tuple[float, int]] = deque(maxlen=16)

    def saw(self, now: float, step: int) -> None:
        """Training was in ``step`` at ``now`` (seconds)."""
        self._seen.append((now, step))

    def steps(self) -> int:
        """At least 1. While training has not been seen to step, little: better to wait once than to begin late."""
        return max(1, math.ceil(self._ahead_s * self._steps_per_second()))

    def _steps_per_second(self) -> float:
        """The faster of the latest speed and the one over all that is remembered."""
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
"""A process that was stopped and resumed finds that a moment has taken minutes. They do not count as waiting: nobody looked for
the decision meanwhile.
"""


class Boundary(Generic[C]):
    """Of one rank. ``begin`` is the training thread's; the rest is for the other side, except where it says so.

    Args:
        first_step: The first step that training will begin.
        wake: Called when training has to wait. Must not wait itself.

    Attributes:
        step: The step that training has announced last: it is about to begin it, or has.
        gate: See above.
        promised: The first step that this rank has promised not to begin undecided; None: no promise is open.
        undecided_since: The step at which waiting was given up, as long as the decision is not known; else None.
        called_off: Training has waited long enough: the proposal is to be aborted.
        waiting: Training waits now.
    """

    def __init__(self, first_step: int, pace: Pace, wake: Callable[[], None]) -> None:
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
        # Held for moments, never while a store is asked. A signal handler may find its own thread in here.
        self._lock = RLock()

    def begin(self, step: int) -> list[Switch[C]]:
        """About to begin ``step``, which is after all before: what is due, in order; the last one holds from here on.

        Waits for a decision where one was promised to be there, at most ``Pace.bound``.
        """
        self.step = step
        if step < self.gate:
            return []
        self._wait_for_decision(step)
        return self.due(step)

    def undecided(self, step: int) -> bool:
        """Training thread: whether ``step`` was promised not to begin yet."""
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
        """Training thread: the switches that are due at ``step``; several where this rank has learned of them late."""
        with self._lock:
            past = [one for one in self._to_come if one.from_step <= step]
            self._to_come = self._to_come[len(past) :]
            self._origin = past[-1].origin if past else self._origin
            self._move_gate()
        return past

    def expects(self, origin: str) -> bool:
        """Any thread: whether what holds came from ``origin``, or something of it is to come."""
        with self._lock:
            return self._origin == origin or any(one.origin == origin for one in self._to_come)

    def ahead(self, steps: int) -> int:
        """The step so many from here, or later: not before the latest that was agreed on, which it may replace."""
        return max(self.step + steps, self._latest)

    def promise(self, step: int) -> None:
        """Promise not to begin ``step`` undecided. It stands once ``kept`` has said so."""
        with self._lock:
            self._promise(step)

    def kept(self, promised: int) -> bool:
        """Whether training had not begun ``promised`` when the gate was set there, and so will find it."""
        return self.step < promised

    def decide(self, switches: Sequence[Switch[C]] = ()) -> None:
        """The open proposal was decided: these come, in place of all later ones; none if it was aborted."""
        with self._lock:
            self.called_off = False
            self.undecided_since = None
            if switches:
                self._latest = switches[0].from_step
                self._to_come = [one for one in self._to_come if one.from_step < self._latest] + list(switches)
            # Last: training reads the gate without the lock, and is never to find it beyond a switch that is known.
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
    """Sleep, and return how long that was, as far as it counts."""
    before = time.monotonic()
    time.sleep(seconds)
    return min(time.monotonic() - before, MOST_OF_A_SLICE_S)
