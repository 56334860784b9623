"""Trains while one of two formats does not work as it should; ``bad_sink.py HOW``. The format ``api`` is replaced by it."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from typing import Any

from small_run import SmallRun

import monitor.sinks
from monitor.formats import FORMATS
from monitor.stats.table import StepRows


class Raising:
    """Fails from the fifth to the eighth step, and when it is flushed and closed."""

    def __init__(self, _context: Any) -> None:
        pass

    def write(self, rows: StepRows) -> None:
        if 4 <= rows.step < 8:
            raise RuntimeError(f"step {rows.step} is not to my taste")

    def flush(self) -> None:
        raise RuntimeError("I do not flush")

    close = flush


class Exiting(Raising):
    """What ends a thread ends nothing of ours."""

    def write(self, rows: StepRows) -> None:
        if 4 <= rows.step < 8:
            sys.exit(f"step {rows.step} is not to my taste")


class Hanging:
    """Does not come back from the fifth step until it is let go."""

    hangs, resumed = threading.Event(), threading.Event()

    def __init__(self, _context: Any) -> None:
        pass

    def write(self, rows: StepRows) -> None:
        if rows.step == 4:
            self.hangs.set()
            self.resumed.wait()

    def flush(self) -> None: ...

    close = flush


def train_with_one_that_raises() -> None:
    SmallRun().train_to(12)


def train_with_one_that_hangs() -> None:
    run = SmallRun()
    run.train_to(5)
    if run.monitor is not None:
        Hanging.hangs.wait()
    run.train_to(40)


def train_with_one_that_hangs_for_a_while() -> None:
    run = SmallRun()
    run.train_to(5)
    if run.monitor is not None:
        Hanging.hangs.wait()
    run.train_to(40)
    Hanging.resumed.set()
    run.delivered()
    run.train_to(60)


HOW = {
    "raises": (Raising, train_with_one_that_raises),
    "exits": (Exiting, train_with_one_that_raises),
    "hangs": (Hanging, train_with_one_that_hangs),
    "hangs-for-a-while": (Hanging, train_with_one_that_hangs_for_a_while),
}
sink, train = HOW[sys.argv[1]]
monitor.sinks.FORMATS = {**FORMATS, "api": replace(FORMATS["api"], sink=f"__main__:{sink.__name__}")}
train()
