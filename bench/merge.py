"""What it takes to merge the files of many ranks.

    python bench/merge.py

The files are those of a job of which every rank holds a part of each gradient and has activations of its own, recorded by the
project's own sinks and manifests, 100 steps to a record. They are merged by the command itself, in a process of its own with
its workers: rows a second of wall time and of CPU time (user and system, of all processes, from the start of the interpreter to
the end), and the most memory that all of these processes have resident together at a time, looked at a hundred times a second;
what several of them share counts as often as they are. Beside it what people do without: the files of all ranks put together
and written as one file of Parquet, with polars, and with pandas where that is installed. From Parquet polars sorts them by
kind, name, step and rank, from CSV it does not. The merge and what it is held against take turns; the figures are medians over
the rounds, and ratios are medians of the ratios of each round.

First the same number of rows from more and more ranks, then the same ranks for more and more steps.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

# One thread to compute: no library may add its own.
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

import numpy as np
from formats import complete
from stepping import rotated
from tables import Progress, aligned, save
from writer import ELEMENTS, NDIGITS, OPS, gradients

from monitor.coordinator.manifest import Manifest, RankFacts
from monitor.coordinator.output import JobIdentity, RankDirectory
from monitor.failures import Failures
from monitor.series import NO_MICRO_STEP, Placement, Series, SeriesTable, Shard
from monitor.sinks import make_sink
from monitor.sinks.protocol import SinkContext
from monitor.stats.partials import KindRows, TensorLayout
from monitor.stats.table import StepRows

SHARDED, OWN = "grad_reduced", "actv"
KINDS = (SHARDED, OWN)
STEPS_PER_RECORD = 100
IDENTITY = JobIdentity("1a2b3c4d" * 4, "Dec03_21-34-40")

MERGE = "from monitor.merge.cli import app; app()"
CONCAT = {
    ("polars", "csv"): """
import sys, glob, polars as pl
files = sorted(glob.glob(sys.argv[1] + "/*-rank*/*.csv"))
pl.concat([pl.read_csv(path) for path in files], how="diagonal").write_parquet(sys.argv[2])
""",
    ("polars", "parquet"): """
import sys, glob, polars as pl
files = sorted(glob.glob(sys.argv[1] + "/*-rank*/*.parquet"))
pl.scan_parquet(files).sort("kind", "name", "step", "rank").sink_parquet(sys.argv[2])
""",
    ("pandas", "csv"): """
import sys, glob, pandas as pd
files = sorted(glob.glob(sys.argv[1] + "/*-rank*/*.csv"))
pd.concat([pd.read_csv(path) for path in files]).to_parquet(sys.argv[2])
""",
}
"""What people do without, by the format that it reads: it keeps rows apart, combines nothing and needs memory for all."""


@dataclass(frozen=True, slots=True)
class Job:
    """How large a job is; ``series`` is how many of each kind a rank has."""

    ranks: int
    series: int
    steps: int

    @property
    def rows(self) -> int:
        return self.ranks * self.series * len(KINDS) * self.steps


@dataclass(frozen=True, slots=True)
class Cost:
    """What a merge takes.

    Attributes:
        by: ``monitor`` or what it is held against.
        source: Format of the files that were read.
        wall: Seconds.
        cpu: Seconds, of all processes.
        memory: Bytes, of all processes, at the peak.
        sizes: Bytes that were read, and bytes that were written.
        times: Wall time and CPU time of ``monitor`` as multiples of these; None of itself.
    """

    job: Job
    by: str
    source: str
    wall: float
    cpu: float
    memory: int
    sizes: tuple[int, int]
    times: tuple[float, float] | None = None


def main() -> None:
    options = parse_arguments()
    progress = Progress()
    costs = [list(measured(jobs, options, progress)) for jobs in (by_ranks(options), by_steps(options))]
    progress.end()
    print(f"{options.workers} workers, Python {sys.version.split()[0]}.")
    for title, each in zip(("The same rows from more ranks", "More steps of the same ranks"), costs, strict=True):
        if each:
            print(f"\n{title}:\n\n{table(each)}")
    save(options.json, [asdict(cost) for each in costs for cost in each])


def by_ranks(options: argparse.Namespace) -> list[Job]:
    each = options.rows // (len(KINDS) * options.steps)
    return [Job(ranks, max(1, each // ranks), options.steps) for ranks in options.ranks]


def by_steps(options: argparse.Namespace) -> list[Job]:
    """The longest of these jobs has as many rows as each of the others."""
    series = options.rows // (len(KINDS) * max(options.lengths, default=1) * options.ranks[0])
    return [Job(options.ranks[0], max(1, series), steps) for steps in options.lengths]


def measured(jobs: Sequence[Job], options: argparse.Namespace, progress: Progress) -> Iterator[Cost]:
    for job in jobs:
        for source in options.formats:
            with TemporaryDirectory(dir=options.directory) as directory:
                base = Path(directory) / "ranks"
                progress.show("recording", f"{job.ranks} ranks, {job.steps} steps, {source}")
                record(job, source, base, options.workers)
                every = ("monitor", *(by for by in options.beside if (by, source) in CONCAT))
                found: dict[str, list[Cost]] = {by: [] for by in every}
                for number in range(options.rounds):
                    progress.show("merging", f"{job.ranks} ranks, {job.steps} steps, {source}, round {number + 1}")
                    for by in rotated(every, number):
                        found[by].append(merged(job, by, source, base, Path(directory) / by, options))
                yield from (over_rounds(found["monitor"], found[by]) for by in every)


def over_rounds(monitor: Sequence[Cost], other: Sequence[Cost]) -> Cost:
    """Medians of what was measured in several rounds; the ratios are those of each round."""
    wall, cpu, memory = (median(getattr(one, name) for one in other) for name in ("wall", "cpu", "memory"))
    times = [(ours.wall / one.wall, ours.cpu / one.cpu) for ours, one in zip(monitor, other, strict=True)]
    ratios = None if other is monitor else (median(one for one, _ in times), median(one for _, one in times))
    return replace(other[0], wall=wall, cpu=cpu, memory=int(memory), times=ratios)


def record(job: Job, source: str, base: Path, processes: int) -> None:
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        list(pool.map(partial(record_rank, job, source, base), range(job.ranks)))


def record_rank(job: Job, source: str, base: Path, rank: int) -> None:
    """Write the files of one rank."""
    directory = base / str(RankDirectory(IDENTITY.timestamp, rank, f"{rank:08x}"))
    directory.mkdir(parents=True)
    series = SeriesTable()
    indices = {kind: named(series, kind, job, rank) for kind in KINDS}
    facts = RankFacts(IDENTITY, rank, job.ranks, {"dp": range(job.ranks)}, {}, {"ndigits": NDIGITS}, "", [source])
    manifest = Manifest(directory, facts, series, Failures(rank))
    sink = make_sink(source, SinkContext(directory, rank, series, NDIGITS, STEPS_PER_RECORD, eps=1e-8))
    rng, layouts = np.random.default_rng(rank), [TensorLayout((ELEMENTS,), "torch.float32")]
    for step in range(job.steps):
        rows = StepRows(step, OPS, {kind: measurements(rng, index) for kind, index in indices.items()}, layouts)
        sink.write(rows)
        manifest.written(rows)
    sink.close()
    manifest.close()


def named(series: SeriesTable, kind: str, job: Job, rank: int) -> np.ndarray:
    """The numbers of the series of a kind; of parts it is said what they are parts of."""
    every = [Series(kind, 0, f"module.model.layers.{i // 10}.self_attn.q_proj.{i % 10}.weight") for i in range(job.series)]
    if kind == SHARDED:
        part = Shard(tuple(range(job.ranks)), (ELEMENTS * job.ranks,), (ELEMENTS * rank,))
        for one in every:
            series.place(one, Placement(shard=part))
    return np.array([series.index_of(one) for one in every])


def measurements(rng: np.random.Generator, series: np.ndarray) -> KindRows:
    rows = len(series)
    whole_step, one_layout = np.full(rows, NO_MICRO_STEP), np.zeros(rows, dtype=np.int64)
    made = KindRows(series, whole_step, np.arange(rows), one_layout, gradients(rng, rows))
    complete(made, rng)
    return made


def merged(job: Job, by: str, source: str, base: Path, output: Path, options: argparse.Namespace) -> Cost:
    """Merge once, and remove the result."""
    if by == "monitor":
        command = ["-c", MERGE, str(base), "-o", str(output), "--workers", str(options.workers), "--format", options.output]
    else:
        command = ["-c", CONCAT[by, source], str(base), str(output)]
    wall, cpu, memory = watched([sys.executable, *command], {"POLARS_MAX_THREADS": str(options.workers)})
    cost = Cost(job, by, source, wall, cpu, memory, (size(base), size(output)))
    shutil.rmtree(output) if output.is_dir() else output.unlink()
    return cost


def watched(command: Sequence[str], environment: dict[str, str], done: Collection[int] = (0,)) -> tuple[float, float, int]:
    """Seconds, seconds of CPU time, and bytes at the peak, of a command and of all processes that it starts.

    Args:
        done: The exit statuses of a command that has done its work.
    """
    begun, before = time.perf_counter(), os.times()
    peak = 0
    with subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            peak = max(peak, sum(map(resident, family(process.pid))))
            time.sleep(0.01)
    wall, after = time.perf_counter() - begun, os.times()
    if process.returncode not in done:
        raise subprocess.CalledProcessError(process.returncode, command)
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return wall, cpu, peak


def family(pid: int) -> Iterator[int]:
    """A process and all that come from it."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # gone meanwhile
            for child in children.read_text().split():
                yield from family(int(child))


def resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # gone meanwhile
        return 0


def size(path: Path) -> int:
    return sum(one.stat().st_size for one in ([path] if path.is_file() else path.rglob("*")) if one.is_file())


def table(costs: Sequence[Cost]) -> str:
    header = (
        "by",
        "from",
        "ranks",
        "steps",
        "rows",
        "wall s",
        "rows/s",
        "CPU µs a row",
        "peak MB",
        "read MB",
        "written MB",
        "monitor ×",
        "CPU ×",
    )
    return aligned(header, [cells(cost) for cost in costs], names=2)


def cells(cost: Cost) -> tuple[str, ...]:
    job = cost.job
    sizes = (f"{number / 1e6:,.0f}" for number in (cost.memory, *cost.sizes))
    times = f"{cost.wall:.1f}", f"{job.rows / cost.wall:,.0f}", f"{cost.cpu / job.rows * 1e6:.2f}"
    ratios = ("", "") if cost.times is None else (f"{each:.2f}" for each in cost.times)
    return (cost.by, cost.source, str(job.ranks), str(job.steps), f"{job.rows:,}", *times, *sizes, *ratios)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--lengths", type=int, nargs="*", default=[50, 100, 200, 400], help="steps of the second table")
    parser.add_argument(
        "--formats", nargs="+", choices=("hdf5", "csv", "parquet"), default=["parquet", "hdf5", "csv"], help="of the ranks"
    )
    parser.add_argument("--output", choices=("parquet", "hdf5", "csv"), default="parquet", help="format to write")
    parser.add_argument("--workers", type=int, default=2)
    beside = [name for name in dict.fromkeys(name for name, _ in CONCAT) if find_spec(name)]
    parser.add_argument("--beside", nargs="*", choices=beside, default=beside, help="what to hold it against")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="for the files, some 4 GB")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    return parser.parse_args()


if __name__ == "__main__":
    main()
