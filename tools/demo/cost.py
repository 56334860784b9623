"""What it cost to be monitored, measured within one run.

The configuration collects one step in ``interval``. A collected step also leaves work behind for the writer thread, which
then runs beside the step after it: to compare collected steps with all others would hide that. So the steps of each interval
are compared half by half. The first half holds the collected step and what trails it, the second half is undisturbed, and the
difference of two neighbouring halves is free of slow drift of the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

WARM_UP_INTERVALS = 2
"""Left out: the first steps meet cold caches and lay out the monitor's table."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Attributes:
    plain: Seconds of a step that was not collected, median.
    added: Seconds that a collected step adds, to itself and to the steps after it, median.
    samples: Collected steps that this rests on.
    """

    plain: float
    added: float
    samples: int

    @property
    def ratio(self) -> float:
        """A collected step over one that was not."""
        return 1 + self.added / self.plain


def measure(seconds: Sequence[float], interval: int) -> Cost | None:
    """The cost, from the duration of every step; ``None`` if there are too few steps to say.

    Args:
        seconds: One duration a step, from step 0 on, which was collected.
        interval: One step in this many was collected; an even number.
    """
    half = interval // 2
    starts = range(WARM_UP_INTERVALS * interval, len(seconds) - interval + 1, interval)
    if not starts:
        return None
    disturbed = [sum(seconds[start : start + half]) for start in starts]
    undisturbed = [sum(seconds[start + half : start + interval]) for start in starts]
    added = median(with_it - without for with_it, without in zip(disturbed, undisturbed, strict=True))
    return Cost(plain=median(undisturbed) / half, added=added, samples=len(starts))
