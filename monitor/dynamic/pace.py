"""How often a rank asks the store, how far ahead it promises, and how long it may wait."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

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
