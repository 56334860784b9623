"""Trains while children are forked from it that end in one way or another; ``forking.py WAY CHILD``."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable

from small_run import SmallRun


def exits(_run: SmallRun) -> None:
    sys.exit(5)


def exits_at_once(_run: SmallRun) -> None:
    os._exit(5)


def raises(_run: SmallRun) -> None:
    raise ArithmeticError("in the child")


def closes(run: SmallRun) -> None:
    if run.monitor is not None:
        run.monitor.close()
    sys.exit(5)


def trains(run: SmallRun) -> None:
    """With the model, the optimizer and the monitor that it has inherited."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    for _ in range(3):
        run.step()
        run.delivered()
    sys.exit(5)


def forked_by_os(run: SmallRun, child: Callable[[SmallRun], None]) -> int:
    """Its exit status. In the middle of a step, and while the parent's writer is busy."""
    pid = os.fork()
    if pid == 0:
        child(run)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def forked_by_multiprocessing(run: SmallRun, child: Callable[[SmallRun], None]) -> int:
    process = multiprocessing.get_context("fork").Process(target=child, args=(run,))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


CHILDREN = {"exits": exits, "exits-at-once": exits_at_once, "raises": raises, "closes": closes, "trains": trains}
WAYS = {"os": forked_by_os, "multiprocessing": forked_by_multiprocessing}


def main(way: str, child: str) -> None:
    run = SmallRun()
    parent = os.getpid()
    while run.ended < 12:
        loss = run.forward()
        if run.ended % 4 == 2:
            status = WAYS[way](run, CHILDREN[child])
            assert os.getpid() == parent
            print(f"child {status}", flush=True)
        run.finish(loss)


main(*sys.argv[1:])
