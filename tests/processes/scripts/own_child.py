"""Trains in a child that multiprocessing forks, which ends without anybody closing its monitor; ``own_child.py HOW``."""

from __future__ import annotations

import multiprocessing
import sys

from small_run import SmallRun


def train(how: str) -> None:
    run = SmallRun()
    run.train_to(10)
    run.forward()
    if how == "raise":
        raise ArithmeticError
    if how == "exit":
        sys.exit(3)


process = multiprocessing.get_context("fork").Process(target=train, args=sys.argv[1:])
process.start()
process.join()
sys.exit(process.exitcode)
