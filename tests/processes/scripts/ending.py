"""Trains for ten steps and ends in the way that is asked for; ``ending.py HOW [STEPS]``."""

from __future__ import annotations

import os
import signal
import sys

from small_run import SmallRun

how, steps = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 10


def end() -> None:
    if how == "raise":
        raise ArithmeticError("the loss is not what it should be")
    if how == "exit":
        sys.exit(3)
    if how == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)


run = SmallRun()
run.train_to(steps)
loss = run.forward()
end()
if how == "close" and run.monitor is not None:
    run.monitor.close()
    run.monitor.close()
print("trained", flush=True)
