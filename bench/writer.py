"""How many rows a second become CSV, and what that costs a thread that computes beside it.

    python bench/writer.py

Rows as training makes them (gradients between 1e-12 and 1, six ops, six decimals), written by the sink and, beside it, by the
two ways that come to mind: ``csv.writer`` and an f-string a row. In each round every way writes the same steps to the same disk
once, in an order that changes: first alone, in CPU time; then beside a thread that multiplies matrices, as training does, which
is slowed down as far as the writing keeps the interpreter from it. That is held against a thread that compresses, for which
no interpreter is needed. Medians over the rounds.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

# One thread to compute and one to write: no library may add its own.
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

import numpy as np
from stepping import rotated
from tables import Progress, aligned, save

from monitor.series import NO_MICRO_STEP, Series, SeriesTable
from monitor.sinks.csv import CsvSink
from monitor.sinks.protocol import SinkContext
from monitor.stats.ops import derive
from monitor.stats.partials import COLUMNS, COUNT, MAX, MIN, SMALLS, SUM, SUMSQ, KindRows, Partials, TensorLayout
from monitor.stats.table import StepRows

OPS = ("min", "max", "mean", "norm", "zeros", "nans")
NDIGITS = 6
KINDS = ("grad_unreduced", "grad_reduced")
ELEMENTS = 4096
MATRIX = 192

Write = Callable[[StepRows], None]
Way = Callable[[Path, SeriesTable], Write]


def with_sink(directory: Path, series: SeriesTable) -> Write:
    """The project's own way."""
    return CsvSink(SinkContext(directory, 0, series, NDIGITS, step_count_per_record=1, eps=1e-8)).write


def with_csv_writer(directory: Path, series: SeriesTable) -> Write:
    """The standard library's writer; numbers rounded by Python."""

    def write(step: StepRows) -> None:
        for kind, rows in step.kinds.items():
            with file_of(directory, kind, step).open("w", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(("vpp_stage", "name", "step", *OPS))
                for number, *values, nans in columns(rows):
                    one = series[number]
                    writer.writerow((one.vpp_stage, one.name, step.step, *(f"{x:.6e}" for x in values), int(nans)))

    return write


def with_f_strings(directory: Path, series: SeriesTable) -> Write:
    """A string a row, all of them joined; names are trusted to need no quotes."""

    def write(step: StepRows) -> None:
        for kind, rows in step.kinds.items():
            lines = [f"vpp_stage,name,step,{','.join(OPS)}"]
            for number, a, b, c, d, e, nans in columns(rows):
                one = series[number]
                lines.append(f"{one.vpp_stage},{one.name},{step.step},{a:.6e},{b:.6e},{c:.6e},{d:.6e},{e:.6e},{int(nans)}")
            file_of(directory, kind, step).write_text("\n".join(lines) + "\n")

    return write


WAYS: dict[str, Way] = {"monitor": with_sink, "f-strings": with_f_strings, "csv.writer": with_csv_writer}


def file_of(directory: Path, kind: str, step: StepRows) -> Path:
    return directory / f"{kind}_{step.step}-{step.step}.csv"


def columns(rows: KindRows) -> Iterator[tuple[float, ...]]:
    """Series and ops of each row, as Python numbers."""
    return zip(rows.series.tolist(), *(derive(op, rows.partials)[0].tolist() for op in OPS), strict=True)


@dataclass(frozen=True, slots=True)
class Cost:
    """What one way costs.

    Attributes:
        rate: Rows a second of CPU time, alone.
        beside: Rows a second of wall time while another thread computes.
        slowdown: By what factor that thread is slower than beside work without the interpreter.
    """

    way: str
    rate: float
    beside: float
    slowdown: float


def main() -> None:
    options = parse_arguments()
    series, steps = training(options.rows, options.steps)
    with TemporaryDirectory() as directory:
        costs = measured(Path(directory), series, steps, options.rounds)
    rows = sum(map(len, steps))
    print(f"{rows} rows of {len(OPS)} ops in {len(steps)} steps, {NDIGITS} decimals, Python {sys.version.split()[0]}:\n")
    print(table(costs))
    save(options.json, [asdict(cost) for cost in costs])


def training(rows: int, steps: int) -> tuple[SeriesTable, list[StepRows]]:
    """Steps as the pipeline hands them on, ``rows`` rows in each."""
    rng = np.random.default_rng(0)
    series = SeriesTable(
        Series(kind, 0, f"module.model.layers.{i // 10}.self_attn.q_proj.{i % 10}.weight")
        for kind in KINDS
        for i in range(rows // len(KINDS))
    )
    layouts = [TensorLayout((ELEMENTS,), "torch.float32")]
    return series, [StepRows(step, OPS, dict(kinds(rng, len(series))), layouts) for step in range(steps)]


def kinds(rng: np.random.Generator, rows: int) -> Iterator[tuple[str, KindRows]]:
    each = rows // len(KINDS)
    for number, kind in enumerate(KINDS):
        index = np.arange(number * each, (number + 1) * each)
        whole_step, no_layout = np.full(each, NO_MICRO_STEP), np.zeros(each, dtype=np.int64)
        yield kind, KindRows(index, whole_step, np.arange(each), no_layout, gradients(rng, each))


def gradients(rng: np.random.Generator, rows: int) -> Partials:
    """Partials of gradients with magnitudes from 1e-12 to 1, a third of them with elements that count as zero."""
    magnitude = 10 ** rng.uniform(-12, 0, rows)
    columns = np.zeros((len(COLUMNS), rows))
    columns[COUNT] = ELEMENTS
    columns[MIN], columns[MAX] = -magnitude * rng.uniform(0.5, 1, rows), magnitude
    columns[SUM] = magnitude * rng.normal(0, 20, rows)
    columns[SUMSQ] = magnitude**2 * ELEMENTS / 9
    columns[SMALLS] = np.where(rng.random(rows) < 0.3, rng.integers(0, ELEMENTS, rows), 0)
    return Partials(columns)


def measured(directory: Path, series: SeriesTable, steps: Sequence[StepRows], rounds: int) -> list[Cost]:
    ways = {name: way(directory, series) for name, way in WAYS.items()}
    found: dict[str, list[Cost]] = {name: [] for name in ways}
    progress = Progress()
    for number in range(rounds + 1):
        for name in rotated(list(ways), number):
            progress.show("writing", f"round {number} of {rounds}, {name}")
            cost = cost_of(name, partial(write_all, directory, ways[name], steps), sum(map(len, steps)))
            found[name] += [cost] if number else []  # the first round warms up
    progress.end()
    return [middle(name, costs) for name, costs in found.items()]


def write_all(directory: Path, write: Write, steps: Sequence[StepRows]) -> None:
    """Write the steps, and remove what was written."""
    for step in steps:
        write(step)
    for path in directory.iterdir():
        path.unlink()


def cost_of(name: str, write: Callable[[], None], rows: int) -> Cost:
    begun = time.process_time()
    write()
    alone = time.process_time() - begun
    quiet, _ = beside(compress_for_a_while)
    disturbed, seconds = beside(write)
    return Cost(name, rows / alone, rows / seconds, quiet / disturbed)


def compress_for_a_while() -> None:
    """What disturbs the other thread in nothing but what it shares of the machine: work that needs no interpreter."""
    zlib.compress(os.urandom(3_000_000))


def beside(work: Callable[[], None]) -> tuple[float, float]:
    """How many matrix products a second this thread computes while another one works, and how many seconds that takes."""
    a = np.ones((MATRIX, MATRIX), dtype=np.float32)
    other = threading.Thread(target=work)
    done, begun = 0, time.perf_counter()
    other.start()
    while not done or other.is_alive():
        a @ a
        done += 1
    seconds = time.perf_counter() - begun
    return done / seconds, seconds


def middle(way: str, costs: Sequence[Cost]) -> Cost:
    return Cost(way, *(median(getattr(cost, field) for cost in costs) for field in ("rate", "beside", "slowdown")))


def table(costs: Sequence[Cost]) -> str:
    header = ("written by", "rows/s", "over csv.writer", "rows/s beside", "slowdown beside")
    base = next(cost.rate for cost in costs if cost.way == "csv.writer")
    rows = [(c.way, f"{c.rate:,.0f}", f"{c.rate / base:.1f}", f"{c.beside:,.0f}", f"{c.slowdown:.2f}") for c in costs]
    return aligned(header, rows)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=20_000, help="rows a step")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    return parser.parse_args()


if __name__ == "__main__":
    main()
