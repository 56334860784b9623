"""What a million rows take in each format: bytes on disk, and seconds.

    python bench/formats.py

Rows as training makes them (gradients between 1e-12 and 1, extremes of single precision, six ops), written by the project's own
sinks, 100 steps to a record, from the first step until everything is visible. CPU time of the whole process; beside it the
wall time, which other work on the machine lengthens. In each round every format writes the same steps once, in an order that
changes. Medians over the rounds. The most memory that a format takes beyond that of the steps themselves is measured in a
process of its own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

# One thread to write: no library may add its own.
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

import numpy as np
from stepping import rotated
from tables import Progress, aligned, save
from writer import NDIGITS, OPS, training

from monitor.series import SeriesTable
from monitor.sinks import make_sink
from monitor.sinks.protocol import SinkContext
from monitor.stats.partials import M2, MAX, MIN, SUMSQ, KindRows
from monitor.stats.table import StepRows

FORMATS = ("csv", "hdf5", "parquet", "tensorboard")
STEPS_PER_RECORD = 100
MILLION = 1e6


@dataclass(frozen=True, slots=True)
class Cost:
    """What one format takes.

    Attributes:
        bytes: On disk, a row.
        cpu: Seconds of CPU time for a million rows.
        wall: Seconds of wall time for a million rows.
        memory: Bytes at the peak, beyond those before the first step.
    """

    format: str
    bytes: float
    cpu: float
    wall: float
    memory: int = 0


def main() -> None:
    options = parse_arguments()
    series, steps = gradients(options.rows, options.steps)
    if options.peak_of:
        print(peak(options.peak_of, series, steps))
        return
    costs = measured(series, steps, options.rounds)
    costs = [replace(cost, memory=peak_alone(cost.format, options.rows, options.steps)) for cost in costs]
    rows = sum(map(len, steps))
    print(f"{rows} rows of {len(OPS)} ops in {len(steps)} steps, Python {sys.version.split()[0]}:\n")
    print(table(costs))
    save(options.json, [asdict(cost) for cost in costs])


def gradients(rows: int, steps: int) -> tuple[SeriesTable, list[StepRows]]:
    """The rows of the benchmark of the writer, with what only some formats look at."""
    series, training_steps = training(rows, steps)
    rng = np.random.default_rng(1)
    for step in training_steps:
        for kind in step.kinds.values():
            complete(kind, rng)
    return series, training_steps


def complete(rows: KindRows, rng: np.random.Generator) -> None:
    """Extremes as single precision has them; sums of squares that are no multiples of each other."""
    columns = rows.partials.columns
    columns[MIN : MAX + 1] = columns[MIN : MAX + 1].astype(np.float32)
    columns[SUMSQ] *= rng.uniform(0.9, 1, len(rows))
    columns[M2] = columns[SUMSQ] * rng.uniform(0.9, 1, len(rows))


def measured(series: SeriesTable, steps: Sequence[StepRows], rounds: int) -> list[Cost]:
    found: dict[str, list[Cost]] = {name: [] for name in FORMATS}
    progress = Progress()
    for number in range(rounds + 1):
        for name in rotated(list(FORMATS), number):
            progress.show("writing", f"round {number} of {rounds}, {name}")
            cost = cost_of(name, series, steps)
            found[name] += [cost] if number else []  # the first round warms up
    progress.end()
    return [middle(name, costs) for name, costs in found.items()]


def cost_of(name: str, series: SeriesTable, steps: Sequence[StepRows]) -> Cost:
    with TemporaryDirectory() as directory:
        cpu, wall = time.process_time(), time.perf_counter()
        write_all(name, Path(directory), series, steps)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        size = sum(path.stat().st_size for path in Path(directory).iterdir())
    rows = sum(map(len, steps))
    return Cost(name, size / rows, cpu / rows * MILLION, wall / rows * MILLION)


def write_all(name: str, directory: Path, series: SeriesTable, steps: Sequence[StepRows]) -> None:
    sink = make_sink(name, SinkContext(directory, 0, series, NDIGITS, STEPS_PER_RECORD, eps=1e-8))
    for step in steps:
        sink.write(step)
    sink.close()


def peak(name: str, series: SeriesTable, steps: Sequence[StepRows]) -> int:
    """Bytes of memory at the peak of writing, beyond those before; of this process, so that only the first answer is right."""
    with TemporaryDirectory() as directory:
        write_all(name, Path(directory) / "warm", series, [])
        before = resident("VmRSS")
        write_all(name, Path(directory), series, steps)
    return max(resident("VmHWM") - before, 0)


def peak_alone(name: str, rows: int, steps: int) -> int:
    """The same, in a process of its own."""
    command = [sys.executable, __file__, "--peak-of", name, "--rows", str(rows), "--steps", str(steps)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def resident(field: str) -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith(f"{field}:"))


def middle(name: str, costs: Sequence[Cost]) -> Cost:
    return Cost(name, *(median(getattr(cost, field) for cost in costs) for field in ("bytes", "cpu", "wall")))


def table(costs: Sequence[Cost]) -> str:
    header = ("format", "bytes a row", "of csv", "CPU s a million", "rows/s", "wall s a million", "peak MB")
    base = next(cost.bytes for cost in costs if cost.format == "csv")
    return aligned(header, [cells(cost, base) for cost in costs])


def cells(cost: Cost, base: float) -> tuple[str, ...]:
    times = f"{cost.cpu:.2f}", f"{MILLION / cost.cpu:,.0f}", f"{cost.wall:.2f}"
    return (cost.format, f"{cost.bytes:.1f}", f"{cost.bytes / base:.0%}", *times, f"{cost.memory / MILLION:.0f}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000, help="rows a step")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    parser.add_argument("--peak-of", choices=FORMATS, help="print the bytes of memory that this format takes, and nothing else")
    return parser.parse_args()


if __name__ == "__main__":
    main()
