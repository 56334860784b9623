"""What being monitored costs: a GPT trained with no monitor, with mindstudio-probe and with this project, side by side.

    python bench/overhead.py --peer-python .venv-peer/bin/python

Each of the three is a process of its own with one thread, and they step in turn. A round's CPU time of a monitored process is
divided by that of the unmonitored one in the same round, and the median over the rounds is reported: what disturbs the machine
disturbs all three. CPU time is the whole process's, its writer thread and the time between its turns included. The last step
also waits until everything is written.

Memory is the peak of a process above that of the unmonitored one. A fourth process trains unmonitored too, after importing
every module that the monitored one had imported: it tells what the libraries take from what the monitor takes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from models import WORKLOADS, Workload
from stepping import Worker, WorkerFailed, step_round
from tables import aligned, end_progress, report_progress, save

OPS = ["min", "max", "mean", "norm", "zeros", "nans"]
GRADIENTS = {"wg_distribution": True}
WEIGHTS = {"param_distribution": True}
MOMENTS = {"mv_distribution": True}
ACTIVATIONS = {"xy_distribution": True, "all_xy": True}
CONFIGS = {
    "gradients": GRADIENTS,
    "weights": WEIGHTS,
    "moments": MOMENTS,
    "activations": ACTIVATIONS,
    "everything": GRADIENTS | WEIGHTS | MOMENTS | ACTIVATIONS,
}
PEER_PYTHON = Path(__file__).resolve().parents[1] / ".venv-peer" / "bin" / "python"
WARM_UP_ROUNDS = 3
UNMONITORED = "unmonitored"
TITLES = {"ours": "monitor", "peer": "mindstudio-probe"}
HEADER = (
    "model", "recorded", "by", "rows a step", "CPU time ×", "quartiles", "in all ×", "wall time ×", "flush ms", "memory MB",
    "imports MB", "beyond imports MB",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cost:
    """What one monitor costs in one configuration.

    Attributes:
        rows: Rows written a step.
        cpu: Ratios of CPU time to the unmonitored process, one a round, the flush being part of the last.
        cpu_in_all: CPU time of all rounds over that of the unmonitored process: where rare and dear steps show.
        wall: Ratios of wall time, likewise one a round.
        flush: Milliseconds of wall time that the wait at the end took.
        memory: Peak above that of the unmonitored process, megabytes.
        imports: The part of it that importing the libraries takes.
    """

    model: str
    recorded: str
    by: str
    rows: float
    cpu: list[float]
    cpu_in_all: float
    wall: list[float]
    flush: float
    memory: float
    imports: float

    def cells(self) -> list[str]:
        low, _, high = quantiles(self.cpu, n=4, method="inclusive")
        return [
            self.model, self.recorded, TITLES[self.by], f"{self.rows:.0f}", f"{median(self.cpu):.3f}", f"{low:.3f} to {high:.3f}",
            f"{self.cpu_in_all:.3f}", f"{median(self.wall):.3f}", f"{self.flush:.1f}", f"{self.memory:.0f}", f"{self.imports:.0f}",
            f"{self.memory - self.imports:.0f}",
        ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Trial:
    """One model under one configuration, monitored and not.

    Attributes:
        pythons: The interpreter of each monitor.
        directory: An empty one, for everything that is written.
    """

    workload: Workload
    recorded: str
    rounds: int
    pythons: dict[str, str]
    directory: Path

    def run(self) -> tuple[list[Cost], dict[str, Any]]:
        """Returns what each monitor costs, and figures of the unmonitored process."""
        (self.directory / "config.json").write_text(
            json.dumps({"targets": {}, "format": "csv", "ops": OPS, **CONFIGS[self.recorded]})
        )
        with ExitStack() as stack:
            workers = {UNMONITORED: stack.enter_context(self._worker(sys.executable))}
            workers |= {name: stack.enter_context(self._worker(python, name)) for name, python in self.pythons.items()}
            ready = {name: worker.receive() for name, worker in workers.items()}
            rounds = self._rounds(workers)
            ends = {name: worker.ask(finish=True) for name, worker in workers.items()}
            written = {name: count_rows(worker.output) for name, worker in workers.items()}
        for name, end in ends.items():
            rounds[-1][name]["cpu"] += end["cpu"]
            rounds[-1][name]["wall"] += end["wall"]
        return [self._cost(name, rounds, ends, written[name]) for name in self.pythons], self._plain(ready, rounds, ends)

    def _worker(self, python: str, monitor: str | None = None, name: str | None = None) -> Worker:
        directory = self.directory / (name or monitor or UNMONITORED)
        return Worker(python, self.workload.name, self.directory / "config.json", directory, monitor)

    def _rounds(self, workers: dict[str, Worker]) -> list[dict[str, Any]]:
        """The replies of each round after the first few, which meet cold caches and lay out tables."""
        rounds = []
        for number in range(WARM_UP_ROUNDS + self.rounds):
            report_progress(f"{self.workload.name}, {self.recorded}: round {number + 1} of {WARM_UP_ROUNDS + self.rounds}")
            rounds.append(step_round(workers, number, self.workload.steps_a_turn))
        return rounds[WARM_UP_ROUNDS:]

    def _cost(self, name: str, rounds: list[dict[str, Any]], ends: dict[str, Any], rows: int) -> Cost:
        plain, monitored = ends[UNMONITORED], ends[name]
        imports = self._peak_after_imports(name, set(monitored["modules"]) - set(plain["modules"]), monitored["modules"])
        return Cost(
            model=self.workload.name,
            recorded=self.recorded,
            by=name,
            rows=rows / ((WARM_UP_ROUNDS + self.rounds) * self.workload.steps_a_turn),
            cpu=[each[name]["cpu"] / each[UNMONITORED]["cpu"] for each in rounds],
            cpu_in_all=sum(each[name]["cpu"] for each in rounds) / sum(each[UNMONITORED]["cpu"] for each in rounds),
            wall=[each[name]["wall"] / each[UNMONITORED]["wall"] for each in rounds],
            flush=1e3 * monitored["wall"],
            memory=(monitored["peak"] - plain["peak"]) / 1e6,
            imports=(imports - plain["peak"]) / 1e6,
        )
