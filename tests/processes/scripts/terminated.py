"""Trains until it is terminated, or as its own handler decides; ``terminated.py HOW``."""

from __future__ import annotations

import signal
import sys
from types import FrameType

import torch
from small_run import SmallRun


class Terminated:
    """Handlers of the user's."""

    def __init__(self) -> None:
        self.received = False

    def saves(self, _number: int, _frame: FrameType | None) -> None:
        torch.save(run.model.state_dict(), "/dev/null")
        self.received = True

    def exits(self, _number: int, _frame: FrameType | None) -> None:
        raise SystemExit(3)


terminated = Terminated()
how = sys.argv[1]
if how in ("saves", "exits"):
    signal.signal(signal.SIGTERM, getattr(terminated, how))
run = SmallRun()
run.train_to(1)
if how == "exits-late":
    signal.signal(signal.SIGTERM, terminated.exits)
run.train_to(22)
print("training", flush=True)
while not terminated.received and run.ended < 100_000:
    run.step()
for _ in range(22):
    run.step()
