"""When a job that a test waits for is taken to hang: not when it is slow, only when it stops working."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

IDLE_S = 120.0
"""For how long the processes of a job that hangs have done nothing."""

IDLE_SHARE = 0.01
"""Of a processor: what threads that only wait may use of it."""

LONGEST_S = 1200.0
"""A job that is still busy after as many seconds loops for ever."""


def ends(has_ended: Callable[[], bool], processes: Callable[[], Iterable[int]], idle_s: float = IDLE_S) -> bool:
    """Wait for the end of a job. Returns False if the job hangs.

    Args:
        has_ended: Is asked every few milliseconds.
        processes: The ids of the job's processes: one that waits for another one that works does not hang.
    """
    last, used = time.monotonic() + LONGEST_S, processor_s(processes())
    while not until(has_ended, idle_s):
        before, used = used, processor_s(processes())
        if abs(used - before) < IDLE_SHARE * idle_s or time.monotonic() > last:
            return False
    return True


def processor_s(processes: Iterable[int]) -> float:
    """The processor time that processes have used so far, in seconds; of one that has ended, none."""
    ticks = 0
    for pid in processes:
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])  # utime and stime
    return ticks / os.sysconf("SC_CLK_TCK")


def until(condition: Callable[[], object], seconds: float) -> bool:
    """Whether ``condition`` came true in time."""
    deadline = time.monotonic() + seconds
    while not (came := bool(condition())) and time.monotonic() < deadline:
        time.sleep(0.005)
    return came
