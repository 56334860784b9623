"""What it costs to be able to start, stop and reconfigure at any time, while nothing changes.

    python bench/dynamic.py

Two figures for a process alone and for a rank of a job of two, over TCP as training has it: what the training thread pays at
each step, the loop itself taken off (median over the rounds), and the CPU time that the threads beside it take of a second.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist
from tables import aligned, save

from monitor.config import load_config
from monitor.coordinator.manifest_format import ConfigurationRecord
from monitor.dynamic import Controller, JobConnection
from monitor.failures import Failures


class NoJournal:
    def configured(self, record: ConfigurationRecord) -> None: ...

    def undecided(self, since: int | None) -> None: ...


@dataclass(frozen=True)
class Cost:
    """Of one process.

    Attributes:
        step_us: Microseconds of the training thread, a step.
        beside_ms: Milliseconds of CPU time of the other threads, a second.
    """

    process: str
    step_us: float
    beside_ms: float


def stepping(control: Controller | None, steps: int) -> float:
    """Microseconds a step, with or without asking."""
    begun = time.perf_counter()
    if control is None:
        for _step in range(steps):
            pass
    else:
        for step in range(steps):
            control.begin(step)
    return (time.perf_counter() - begun) / steps * 1e6


def beside(seconds: float) -> float:
    """Milliseconds of CPU time of the process a second, while this thread sleeps."""
    cpu, begun = time.process_time(), time.perf_counter()
    time.sleep(seconds)
    return (time.process_time() - cpu) / (time.perf_counter() - begun) * 1e3


def cost(process: str, job: JobConnection, path: Path, options: argparse.Namespace) -> Cost:
    control = Controller(str(path), load_config(path), job, Failures())
    with closing(control):
        control.start(NoJournal())
        rounds = [stepping(control, options.steps) - stepping(None, options.steps) for _ in range(options.rounds)]
        return Cost(process, median(rounds), beside(options.seconds))


def costs(options: argparse.Namespace) -> list[Cost]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "config.json")
        path.write_text('{"dynamic_on": true}')
        server = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
        other: Any = Controller(str(path), load_config(path), JobConnection(1, 2, server, "job/"), Failures())
        with closing(other):
            other.start(NoJournal())
            return [
                cost("alone", JobConnection(), path, options),
                cost("rank 0 of 2", JobConnection(0, 2, server, "job/"), path, options),
            ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="for which the threads beside are measured")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    found = costs(options)
    rows = [[each.process, f"{each.step_us:.3f}", f"{each.beside_ms:.2f}"] for each in found]
    print(aligned(("process", "µs a step", "CPU ms a second beside"), rows))
    save(options.json, [asdict(each) for each in found])


if __name__ == "__main__":
    main()
