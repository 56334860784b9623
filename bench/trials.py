"""One model under one configuration: the time that monitors take in it, and the memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models import Workload
from pyarrow.parquet import read_metadata
from stepping import UNMONITORED, Worker, step_round

CLOCKS = ("cpu", "thread", "wall")
"""The process with all its threads; the training thread alone; the clock on the wall."""

WARM_UP_ROUNDS = 3
"""Left out: the first rounds meet cold caches and lay out tables."""

MEMORY_STEPS = 5
"""From the second step on there are moments to read; a few more, so that buffers that take turns have all been used."""

EXACT_PEAKS = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""For processes whose memory is measured. Left to itself the allocator keeps part of what was freed, and where addresses happen
to fall moves the peaks of equal runs apart by 50 MB. With this a tensor goes back to the system when it is freed: a peak is
what was alive at once, and equal runs agree to 0.1 MB. It slows down, so time is measured without."""

BEFORE = "before"
"""The name of the monitor that is an earlier version of the project."""

Replies = dict[str, dict[str, Any]]
"""A reply for each process, by the name of its monitor."""


@dataclass(frozen=True, slots=True)
class Times:
    """What the timed processes had to say; seconds by ``CLOCKS``.

    Attributes:
        rounds: One reply a round; the last contains the flush.
        ready: First replies.
        flush: The last replies: seconds of waiting until everything was written, and the peak of memory.
        rows: Rows that each has written, over all rounds and the warm-up.
    """

    rounds: list[Replies]
    ready: Replies
    flush: Replies
    rows: dict[str, int]


@dataclass(frozen=True, slots=True)
class Peaks:
    """The most memory that processes had resident under ``EXACT_PEAKS``, in bytes.

    Attributes:
        monitored: By the name of the monitor, the unmonitored process among them.
        imports: Trained unmonitored, with the libraries of that monitor imported.
    """

    monitored: dict[str, int]
    imports: dict[str, int]


@dataclass(frozen=True, slots=True)
class Trial:
    """One model under one configuration.

    Attributes:
        config: The monitors' JSON file.
        pythons: The interpreter of each monitor.
        directory: Where processes write.
        progress: Told what is going on.
        before: A checkout of an earlier version of the project; None where it is not measured.
    """

    workload: Workload
    config: Path
    pythons: Mapping[str, str]
    directory: Path
    progress: Callable[[str], None]
    before: Path | None = None

    def times(self, rounds: int) -> Times:
        """Let all processes step in turn, for ``rounds`` rounds after the warm-up."""
        with ExitStack() as stack:
            workers = self._all(stack, "time", {})
            ready = {name: worker.receive() for name, worker in workers.items()}
            replies = []
            for number in range(WARM_UP_ROUNDS + rounds):
                self.progress(f"round {number + 1} of {WARM_UP_ROUNDS + rounds}")
                replies.append(step_round(workers, number, self.workload.steps_a_turn))
            flush = {name: worker.ask(finish=True) for name, worker in workers.items()}
        for name, reply in flush.items():
            for clock in CLOCKS:
                replies[-1][name][clock] += reply[clock]
        rows = {name: count_rows(worker.output) for name, worker in workers.items()}
        return Times(replies[WARM_UP_ROUNDS:], ready, flush, rows)

    def peaks(self) -> Peaks:
        """Measure memory, in processes of their own."""
        self.progress("memory")
        with ExitStack() as stack:
            ends = self._finish(self._all(stack, "memory", EXACT_PEAKS), {})
        self.progress("memory of the imports")
        imported = {name: _difference(ends[name]["modules"], ends[UNMONITORED]["modules"]) for name in self.pythons}
        with ExitStack() as stack:
            workers = {name: self._start(stack, "imports", name, UNMONITORED, EXACT_PEAKS) for name in self.pythons}
            imports = self._finish(workers, imported)
        return Peaks({name: end["peak"] for name, end in ends.items()}, {name: end["peak"] for name, end in imports.items()})

    def _all(self, stack: ExitStack, purpose: str, environment: Mapping[str, str]) -> dict[str, Worker]:
        names = (UNMONITORED, *self.pythons)
        return {name: self._start(stack, purpose, name, name, environment) for name in names}

    def _start(self, stack: ExitStack, purpose: str, name: str, monitor: str, environment: Mapping[str, str]) -> Worker:
        python, directory = self.pythons.get(name, sys.executable), self.directory / purpose / name
        if name == BEFORE and self.before is not None:
            environment = {**environment, "PYTHONPATH": str(self.before.resolve())}
        return stack.enter_context(Worker(python, self.workload.name, self.config, directory, monitor, environment))

    def _finish(self, workers: Mapping[str, Worker], imports: Mapping[str, list[str]]) -> Replies:
        """Let each process import what it should, train for some steps and end. Returns the last replies."""
        for worker in workers.values():
            worker.receive()
        for name, modules in imports.items():
            workers[name].ask(modules=modules)
        for worker in workers.values():
            worker.ask(step=MEMORY_STEPS)
        return {name: worker.ask(finish=True) for name, worker in workers.items()}


def _difference(modules: Iterable[str], known: Iterable[str]) -> list[str]:
    """Those of ``modules`` that are not known, in the order in which they were imported."""
    seen = set(known)
    return [name for name in modules if name not in seen]


def count_rows(directory: Path) -> int:
    """Rows in all CSV files, headers aside, and Parquet files below ``directory``."""
    total = sum(read_metadata(path).num_rows for path in directory.rglob("*.parquet"))
    for path in directory.rglob("*.csv"):
        with path.open("rb") as lines:
            total += sum(1 for _ in lines) - 1
    return total
