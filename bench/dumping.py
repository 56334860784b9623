"""A training step with a precision dump against one without, in turn, in one process, whatever the framework."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from models import WORKLOADS
from tables import Progress, aligned, save

from monitor.dump.debugger import Debugger

WARM_UP = 2


class Training(NamedTuple):
    """A model and the two halves of its step: forward and backward, and the update. Each waits for what it has computed."""

    model: Any
    gradients: Callable[[], None]
    update: Callable[[], None]


def main(
    doc: str, training_of: Callable[[str], Training], debugger: type[Debugger], compute_on: Callable[[int], object]
) -> None:
    """Measure what the command line asks for, and print it.

    Args:
        training_of: Makes one of ``WORKLOADS``, by its name.
        compute_on: Has the framework compute with so many threads, or on so many cores.
    """
    asked = _asked(doc)
    compute_on(asked.threads)
    progress = Progress()
    progress.show(f"{asked.workload}, {asked.level}, {asked.task}")
    with tempfile.TemporaryDirectory() as directory:
        dump = debugger(dump_path=directory, level=asked.level, task=asked.task)
        found = _measured(training_of(asked.workload), dump, asked.rounds)
        dump.close()
    progress.end()
    times = [f"{1000 * found[name]:.1f}" for name in ("plain", "step", "whole")]
    ratios = [f"{found[name]:.2f}" for name in ("ratio", "ratio_with_files")]
    header = ["workload", "level", "task", "step ms", "dumped ms", "with files ms", "ratio", "ratio with files"]
    print(aligned(header, [[asked.workload, asked.level, asked.task, *times, *ratios]], names=3))
    save(asked.json, found)


def _measured(training: Training, debugger: Debugger, rounds: int) -> dict[str, float]:
    """Median seconds of a step without a dump, and with one of its forward and backward, the making of the files apart."""
    plain, caught, whole = [], [], []
    for _ in range(WARM_UP + rounds):
        plain.append(_seconds(training.gradients) + _seconds(training.update))
        step = _seconds(lambda: debugger.start(training.model)) + _seconds(training.gradients)
        files = _seconds(debugger.stop)
        step += _seconds(training.update)
        files += _seconds(debugger.step)
        caught.append(step)
        whole.append(step + files)
    medians = {name: median(one[WARM_UP:]) for name, one in (("plain", plain), ("step", caught), ("whole", whole))}
    return {**medians, "ratio": medians["step"] / medians["plain"], "ratio_with_files": medians["whole"] / medians["plain"]}


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _asked(doc: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--workload", choices=list(WORKLOADS), default="gpt")
    parser.add_argument("--level", choices=["L0", "L1", "mix"], default="L1")
    parser.add_argument("--task", choices=["statistics", "tensor"], default="statistics")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    return parser.parse_args()
