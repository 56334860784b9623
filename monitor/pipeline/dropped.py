"""Steps that never reached the writer."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Final

BATCH_LIMIT_BYTES: Final = 4 << 20
"""Most bytes of a batch of copies that are read together. Larger batches gain nothing."""


# --- Steps that never reached the writer. The training thread counts them; the writer reports them to the journal.


class DroppedRange:
    """Evenly spaced steps dropped for one reason. So the steps dropped while a writer hangs for a day take a few bytes."""

    def __init__(self, step: int, reason: str) -> None:
        self.reason = reason
        self.steps = range(step, step + 1)
        self.reported = 0

    def reach(self, step: int, reason: str) -> bool:
        """Extend the range by ``step``. False if ``step`` does not continue it."""
        first, last = self.steps[0], self.steps[-1]
        stride = self.steps.step if len(self.steps) > 1 else step - first
        if reason != self.reason or stride < 1 or step != last + stride:
            return False
        self.steps = range(first, step + 1, stride)
        return True

    def report(self, dropped: Callable[[int, str], None]) -> None:
        for step in self.steps[self.reported :]:
            dropped(step, self.reason)
            self.reported += 1


class DroppedSteps:
    """Ranges of dropped steps. One thread adds steps, another reports them, and neither waits for the other.

    Only the last range grows, and only the training thread replaces its ``steps``; earlier ranges never change.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._ranges: deque[DroppedRange] = deque()

    def add(self, step: int, reason: str) -> None:
        """Count a dropped step. Called on the training thread."""
        self.counts[reason] += 1
        if not self._ranges or not self._ranges[-1].reach(step, reason):
            self._ranges.append(DroppedRange(step, reason))

    def report(self, dropped: Callable[[int, str], None]) -> None:
        """Report the steps that are new since the last call. One caller at a time."""
        while self._ranges:
            final = len(self._ranges) > 1
            self._ranges[0].report(dropped)
            if not final:
                return
            self._ranges.popleft()

    @property
    def unreported(self) -> bool:
        ranges = self._ranges
        return len(ranges) > 1 or (len(ranges) == 1 and ranges[0].reported < len(ranges[0].steps))
