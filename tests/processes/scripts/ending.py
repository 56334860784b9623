"""Trains for some steps and ends in the middle of the next one; ``ending.py HOW [STEPS]``."""

from __future__ import annotations

import os
import signal
import sys

from small_run import SmallRun


def end(run: SmallRun, how: str) -> None:
    if how == "raise":
        raise ArithmeticError("the loss is not what it should be")
    if how == "exit":
        sys.exit(3)
    if how == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    if how == "close" and run.monitor is not None:
        run.monitor.close()
        run.monitor.close()


def main(how: str, steps: str = "10") -> None:
    run = SmallRun()
    run.train_to(int(steps))
    run.forward()
    end(run, how)


main(*sys.argv[1:])
