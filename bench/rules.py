"""What alert rules cost the writer.

    python bench/rules.py

Rows as training makes them, every value within a percent of what it was the step before, delivered as the writer thread does:
read from a sealed copy, looked at by the rules or not, written by a sink, entered in the manifest. As `csv` (a step to a file)
and as `hdf5` (a million rows). Of each step both writers take their turn, and who begins changes. CPU time of the thread; of
the rules' share of it the median over the steps after a warm-up; they never fire. Then every row is NaN: what the rules take
for a step of which every row is an event, with alerts said and event files written.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory

# One thread to write: no library may add its own.
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

import numpy as np
from formats import gradients
from stepping import rotated
from tables import Progress, aligned, save
from writer import NDIGITS, OPS

from monitor.anomalies.listeners import Alerts, EventFiles
from monitor.anomalies.rules import RULES
from monitor.anomalies.scanner import FindingListener, Scanner
from monitor.coordinator.manifest import Manifest, RankFacts
from monitor.coordinator.output import JobIdentity
from monitor.failures import LOGGER, Failures
from monitor.pipeline.delivery import Delivery
from monitor.series import NO_MICRO_STEP, SeriesTable
from monitor.sinks import make_sink
from monitor.sinks.protocol import SinkContext
from monitor.stats.partials import MAX, MIN, NANS, SUM, SUMSQ, WRITES, Floats, Partials
from monitor.stats.table import SealedTable, StatsTable, StepRows

STEPS_PER_RECORD = {"csv": 1, "hdf5": 100}
FACTS = RankFacts(JobIdentity("job", "Dec03_21-34-40"), 0, 1, {}, {}, {}, "", ())
THRESHOLD = 0.5
VARIANTS = 4
"""Different steps, which come again and again."""

WARM_UP = 110
"""Steps that the rules see first: the weight of a new value in a running mean settles after a hundred."""


class Numbers:
    """Memory of a page, and of its sealed copies, that holds what it is given."""

    ready = True

    def __init__(self, numbers: Floats) -> None:
        self.numbers = numbers
        self.nbytes = numbers.nbytes

    def new_copy(self) -> Numbers:
        return Numbers(self.numbers)

    def address(self, row: int) -> int:
        del row
        return 0

    def clear(self) -> None: ...

    def take(self, rows: int) -> None: ...

    def rows(self) -> Floats:
        return self.numbers


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one format, seconds of CPU time a step.

    Attributes:
        alone: Of a writer without rules.
        more: What the rules take in one that has them, the median over the steps.
    """

    format: str
    alone: float
    more: float


@dataclass(frozen=True, slots=True)
class Flood:
    """Seconds of CPU time of steps in which everything is NaN: of the first, the median of the next ten, of the last ten."""

    first: float
    next: float
    later: float


def main() -> None:
    options = parse_arguments()
    series, [step] = gradients(options.rows, 1)
    variants = sealed_steps(series, step)
    progress = Progress()
    costs = [measured(name, series, variants, options.steps, progress) for name in STEPS_PER_RECORD]
    flood = flooded(series, step, options.steps)
    progress.end()
    print(f"{options.rows} rows a step, {options.steps} steps, no event:\n")
    print(table(costs))
    print(f"\n{options.rows} events a step:\n")
    print(aligned(("first step, ms", "next ten", "later"), [[f"{1e3 * one:.1f}" for one in asdict(flood).values()]], names=0))
    save(options.json, {"costs": [asdict(cost) for cost in costs], "flood": asdict(flood)})


def sealed_steps(series: SeriesTable, step: StepRows) -> list[SealedTable]:
    """Copies of the step, sealed, with every row scaled by its own factor within a percent of 1."""
    table, rng = StatsTable(series), np.random.default_rng(0)
    numbers = np.concatenate([rows.partials.columns.T for rows in step.kinds.values()])
    page = table.add_page(Numbers(numbers), len(numbers))
    slots = [table.allot(page, one, [NO_MICRO_STEP]) for one in series]
    layout = table.layout_of(step.layouts[0].shape, "torch.float32")
    found = []
    for _ in range(VARIANTS):
        page.memory = Numbers(scaled(numbers, rng))
        for slot in slots:
            table.note(slot.row, layout)
        found.append(SealedTable(ops=OPS))
        table.seal(found[-1])
    return found


def scaled(numbers: Floats, rng: np.random.Generator) -> Floats:
    numbers, factors = numbers.copy(), rng.uniform(0.99, 1.01, len(numbers))
    numbers[:, WRITES] = 1
    for column, power in ((MIN, 1), (MAX, 1), (SUM, 1), (SUMSQ, 2)):
        numbers[:, column] *= factors**power
    return numbers


def scanner_of(listeners: Sequence[FindingListener], series: SeriesTable) -> Scanner:
    return Scanner([RULES["AnomalyNan"](), RULES["AnomalyTurbulence"](threshold=THRESHOLD)], series, listeners)


class Timed:
    """A scanner, and the CPU seconds of each of its looks: the difference of two writers is ten times as noisy."""

    def __init__(self, scanner: Scanner) -> None:
        self._scanner = scanner
        self.took: list[float] = []

    def look(self, rows: StepRows) -> None:
        self.took.append(seconds(partial(self._scanner.look, rows)))

    def dropped(self, step: int, reason: str) -> None:
        self._scanner.dropped(step, reason)

    def save(self) -> None:
        self._scanner.save()

    def close(self) -> None:
        self._scanner.close()


def measured(name: str, series: SeriesTable, variants: Sequence[SealedTable], steps: int, progress: Progress) -> Cost:
    with TemporaryDirectory() as directory:
        scanner = scanner_of([], series)
        for number in range(WARM_UP):
            scanner.look(variants[number % VARIANTS].rows())
        writers = {
            "without": writer_of(name, Path(directory) / "without", series, None),
            "with": writer_of(name, Path(directory) / "with", series, timed := Timed(scanner)),
        }
        took: dict[str, list[float]] = {one: [] for one in writers}
        for number in range(steps):
            progress.show(name, f"step {number} of {steps}")
            sealed = variants[number % VARIANTS]
            sealed.step = number
            for one in rotated(list(writers), number):
                took[one].append(seconds(partial(writers[one].steps, [(number, sealed)])))
        ends = seconds(writers["without"].close) / steps  # a record may be written at its end
        writers["with"].close()
    return Cost(name, fmean(took["without"]) + ends, median(timed.took))


def writer_of(name: str, directory: Path, series: SeriesTable, scanner: Timed | None) -> Delivery[SealedTable]:
    directory.mkdir()
    failures = Failures()
    return Delivery(
        {name: make_sink(name, SinkContext(directory, 0, series, NDIGITS, STEPS_PER_RECORD[name], eps=1e-8))},
        Manifest(directory, FACTS, series, failures),
        failures,
        lambda _: None,
        watchers={} if scanner is None else {"rules": scanner},
        save_seconds=30.0,
    )


def seconds(work: Callable[[], object]) -> float:
    begun = time.thread_time()
    work()
    return time.thread_time() - begun


def flooded(series: SeriesTable, step: StepRows, steps: int) -> Flood:
    LOGGER.setLevel(logging.CRITICAL)
    with TemporaryDirectory() as directory:
        scanner = scanner_of([Alerts(0, series), EventFiles(Path(directory), "rank", FACTS, series, Failures())], series)
        scanner.look(step)
        spoiled = replace(step, kinds={kind: replace(rows, partials=nan(rows.partials)) for kind, rows in step.kinds.items()})
        each = [seconds(partial(scanner.look, replace(spoiled, step=n))) for n in range(1, steps + 1)]
        scanner.close()
    return Flood(each[0], median(each[1:11]), median(each[-10:]))


def nan(partials: Partials) -> Partials:
    columns = partials.columns.copy()
    columns[NANS] = 1
    return Partials(columns)


def table(costs: Sequence[Cost]) -> str:
    header = ("format", "writer, ms a step", "rules, ms", "rules, share")
    return aligned(
        header, [(c.format, f"{1e3 * c.alone:.1f}", f"{1e3 * c.more:.2f}", f"{c.more / c.alone:.1%}") for c in costs]
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000, help="rows a step")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    return parser.parse_args()


if __name__ == "__main__":
    main()
