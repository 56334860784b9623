"""How many rows a second become CSV, and what that costs a thread that computes beside it.

    python bench/writer.py

Rows as training makes them (gradients between 1e-12 and 1, six ops, six decimals), written by the sink and, beside it, by the
two ways that come to mind: ``csv.writer`` and an f-string a row. In each round every way writes the same steps to the same disk
once, in an order that changes: first alone, in CPU time, then on a thread beside one that multiplies matrices, which gives the
rate at which that one still gets its work done. Medians over the rounds.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
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
from monitor.stats.partials import COUNT, MAX, MIN, SMALLS, SUM, SUMSQ, Partials
from monitor.stats.rows import KindRows, StepRows

OPS = ("min", "max", "mean", "norm", "zeros", "nans")
NDIGITS = 6
KINDS = ("grad_unreduced", "grad_reduced")
ELEMENTS = 4096
MATRIX = 192

Way = Callable[[Path, SeriesTable, Sequence[StepRows]], None]


def with_sink(directory: Path, series: SeriesTable, steps: Sequence[StepRows]) -> None:
    """The project's own way."""
    sink = CsvSink(SinkContext(directory, 0, series, NDIGITS, step_count_per_record=1))
    for rows in steps:
        sink.write(rows)
    sink.close()


def with_csv_writer(directory: Path, series: SeriesTable, steps: Sequence[StepRows]) -> None:
    """The standard library's writer; numbers rounded by Python."""
    for name, step, rows in files(steps):
        with (directory / name).open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("vpp_stage", "name", "step", *OPS))
            for number, *values, nans in columns(rows):
                one = series[number]
                writer.writerow((one.vpp_stage, one.name, step, *(f"{x:.6e}" for x in values), int(nans)))


def with_f_strings(directory: Path, series: SeriesTable, steps: Sequence[StepRows]) -> None:
    """A string a row, all of them joined; names are trusted to need no quotes."""
    for name, step, rows in files(steps):
        lines = [f"vpp_stage,name,step,{','.join(OPS)}"]
        for number, a, b, c, d, e, nans in columns(rows):
            one = series[number]
            lines.append(f"{one.vpp_stage},{one.name},{step},{a:.6e},{b:.6e},{c:.6e},{d:.6e},{e:.6e},{int(nans)}")
        (directory / name).write_text("\n".join(lines) + "\n")


WAYS: dict[str, Way] = {"monitor": with_sink, "f-strings": with_f_strings, "csv.writer": with_csv_writer}


def files(steps: Sequence[StepRows]) -> Iterator[tuple[str, int, KindRows]]:
    for rows in steps:
        for kind, of_kind in rows.kinds.items():
            yield f"{kind}_{rows.step}-{rows.step}.csv", rows.step, of_kind


def columns(rows: KindRows) -> Iterator[tuple[float, ...]]:
    """Series and ops of each row, as Python numbers."""
    return zip(rows.series.tolist(), *(derive(op, rows.partials)[0].tolist() for op in OPS), strict=True)


@dataclass(frozen=True, slots=True)
class Cost:
    """What one way costs.

    Attributes:
        rate: Rows a second of CPU time, alone.
        beside: Rows a second of wall time while another thread computes.
        slowdown: By what factor that other thread is slower for it.
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
    return series, [StepRows(step, OPS, dict(kinds(rng, len(series))), []) for step in range(steps)]


def kinds(rng: np.random.Generator, rows: int) -> Iterator[tuple[str, KindRows]]:
    each = rows // len(KINDS)
    for number, kind in enumerate(KINDS):
        index = np.arange(number * each, (number + 1) * each)
        whole_step, no_layout = np.full(each, NO_MICRO_STEP), np.zeros(each, dtype=np.int64)
        yield kind, KindRows(index, whole_step, np.arange(each), no_layout, gradients(rng, each))


def gradients(rng: np.random.Generator, rows: int) -> Partials:
    """Partials of gradients with magnitudes from 1e-12 to 1, a third of them with elements that count as zero."""
    magnitude = 10 ** rng.uniform(-12, 0, rows)
    columns = np.zeros((12, rows))
    columns[COUNT] = ELEMENTS
    columns[MIN], columns[MAX] = -magnitude * rng.uniform(0.5, 1, rows), magnitude
    columns[SUM] = magnitude * rng.normal(0, 20, rows)
    columns[SUMSQ] = magnitude**2 * ELEMENTS / 9
    columns[SMALLS] = np.where(rng.random(rows) < 0.3, rng.integers(0, ELEMENTS, rows), 0)
    return Partials(columns)


def measured(directory: Path, series: SeriesTable, steps: Sequence[StepRows], rounds: int) -> list[Cost]:
    rows = sum(map(len, steps))
    found: dict[str, list[Cost]] = {way: [] for way in WAYS}
    progress = Progress()
    for number in range(rounds + 1):
        progress.show("writing", f"round {number} of {rounds}")
        for way in rotated(list(WAYS), number):
            cost = Cost(
                way, rows / cpu_seconds(WAYS[way], directory, series, steps), *beside(WAYS[way], directory, series, steps)
            )
            found[way] += [cost] if number else []  # the first round warms up
    progress.end()
    return [middle(way, costs) for way, costs in found.items()]


def cpu_seconds(way: Way, directory: Path, series: SeriesTable, steps: Sequence[StepRows]) -> float:
    with emptied(directory):
        begun = time.process_time()
        way(directory, series, steps)
        return time.process_time() - begun


def beside(way: Way, directory: Path, series: SeriesTable, steps: Sequence[StepRows]) -> tuple[float, float]:
    """Rows a second beside a thread that computes, and the slowdown of that thread."""
    undisturbed = products_a_second(lambda begun: time.perf_counter() < begun + 0.1)
    with emptied(directory):
        writer = threading.Thread(target=way, args=(directory, series, steps))
        begun = time.perf_counter()
        writer.start()
        disturbed = products_a_second(lambda _: writer.is_alive())
        return sum(map(len, steps)) / (time.perf_counter() - begun), undisturbed / disturbed


def products_a_second(going_on: Callable[[float], bool]) -> float:
    """How many matrix products this thread computes a second, as long as ``going_on(begun)``."""
    a = np.ones((MATRIX, MATRIX), dtype=np.float32)
    done, begun = 0, time.perf_counter()
    while going_on(begun):
        a @ a
        done += 1
    return done / (time.perf_counter() - begun)


@contextmanager
def emptied(directory: Path) -> Iterator[None]:
    """Remove what was written to ``directory``."""
    try:
        yield
    finally:
        for path in directory.iterdir():
            path.unlink()


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
