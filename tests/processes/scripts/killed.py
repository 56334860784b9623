"""Trains up to a number of steps, tells up to which of them the recording must be there, and waits; ``killed.py STEPS``."""

from __future__ import annotations

import sys
import time

from small_run import SmallRun

run = SmallRun()
steps = int(sys.argv[1])
while run.ended < steps:
    run.train_to(min(run.ended + 4, steps))
    run.delivered()
    print(f"delivered {run.ended}", flush=True)
if sys.argv[2:] == ["wait"]:
    time.sleep(600)
