"""Steps that never reached the writer: counted where they are dropped, told to the journal by whoever writes."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable


class Gap:
    """Steps dropped for one reason, evenly spaced, so that a writer that hangs for a day costs a few bytes."""

    def __init__(self, step: int, reason: str) -> None:
        self.reason = reason
        self.steps = range(step, step + 1)
        self.told = 0

    def reach(self, step: int, reason: str) -> bool:
        """Take in ``step`` if it continues the gap."""
        first, last = self.steps[0], self.steps[-1]
        stride = self.steps.step if len(self.steps) > 1 else step - first
        if reason != self.reason or stride < 1 or step != last + stride:
            return False
        self.steps = range(first, step + 1, stride)
        return True

    def tell(self, dropped: Callable[[int, str], None]) -> None:
        for step in self.steps[self.told :]:
            dropped(step, self.reason)
            self.told += 1


class Gaps:
    """One thread drops, another tells, neither ever waits for the other.

    Only the last gap grows, and only the training thread replaces its ``steps``; a gap that is not the last never changes.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._gaps: deque[Gap] = deque()

    def add(self, step: int, reason: str) -> None:
        """On the training thread."""
        self.counts[reason] += 1
        if not self._gaps or not self._gaps[-1].reach(step, reason):
            self._gaps.append(Gap(step, reason))

    def tell(self, dropped: Callable[[int, str], None]) -> None:
        """Tell what is new since the last time. One caller at a time."""
        while self._gaps:
            final = len(self._gaps) > 1
            self._gaps[0].tell(dropped)
            if not final:
                return
            self._gaps.popleft()

    @property
    def untold(self) -> bool:
        gaps = self._gaps
        return len(gaps) > 1 or (len(gaps) == 1 and gaps[0].told < len(gaps[0].steps))
