"""What three questions about a recorded run cost.

    python bench/query.py
    python bench/query.py --rows 26000000 --readers ours "ours, again" duckdb-parquet

The questions: the curve of one tensor over all steps and ranks, the 20 largest gradients of a step, and how far ranks differ
in a step. The files are those of ``bench/merge.py``, merged into each format. Every reader answers every question in turn,
for some rounds, in a process of its own: some libraries return memory to the system, and others would have to ask for it again.
The figures are CPU time of all threads, medians of the rounds; only the first answers load libraries. "ours" opens the run
anew for each question; "ours, again" asks a run that has answered a question before.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

# One thread to compute: no library may add its own.
os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "POLARS_MAX_THREADS"), "1")

import pyarrow as pa
from merge import KINDS, SHARDED, Job, record, size
from tables import Progress, aligned, save

from monitor import open_run, read_hdf5, read_merged
from monitor.merge.merge import Wanted, merge
from monitor.query.opened import OpenedRun

CURVE, LARGEST, SPREAD = QUESTIONS = ("one tensor, all steps", "largest of a step", "spread of a step")
NAME = "module.model.layers.0.self_attn.q_proj.3.weight"
TOP = 20


@dataclass(frozen=True, slots=True)
class Answered:
    """What a reader took for a question.

    Attributes:
        cpu: Seconds, the median of the rounds.
        rows: Of the answer.
    """

    reader: str
    question: str
    cpu: float
    rows: int


@dataclass(frozen=True, slots=True)
class Files:
    """Where the files are: of the ranks, and merged into each format.

    Attributes:
        step: That two of the questions are about.
    """

    ranks: Path
    sets: dict[str, Path]
    step: int

    def merged(self, format: str) -> str:  # noqa: A002
        """The pattern of the files of ranks' gradients in a merged set."""
        return str(self.sets[format] / "per_rank" / f"{SHARDED}_*")


Answer = Callable[[str], int]
"""Answers a question, and says how many rows the answer has."""


def ours(run: Callable[[], OpenedRun], step: int) -> Answer:
    def answer(question: str) -> int:
        opened = run()
        if question == CURVE:
            return opened.rows(SHARDED, name=NAME, columns=["step", "rank", "norm"]).num_rows
        rows = opened.rows(SHARDED, steps=step, columns=["name", "norm"])
        return largest(rows) if question == LARGEST else spread(rows)

    return answer


def largest(rows: pa.Table) -> int:
    return rows.sort_by([("norm", "descending")]).slice(0, TOP).num_rows


def spread(rows: pa.Table) -> int:
    return rows.group_by("name").aggregate([("norm", "min"), ("norm", "max")]).num_rows


def whole_files(read: Callable[[Path], pa.Table], files: list[Path], step: int) -> Answer:
    """With a reader of whole files."""

    def answer(question: str) -> int:
        rows = pa.concat_tables(map(read, files))
        if question == CURVE:
            return rows.filter(pa.compute.field("name").cast(pa.string()) == NAME).num_rows
        rows = rows.filter(pa.compute.field("step") == step)
        return largest(rows) if question == LARGEST else spread(rows.unify_dictionaries())

    return answer


def duckdb_on(scan: str, step: int) -> Answer:
    import duckdb

    queries = {
        CURVE: f"select step, rank, norm from {scan} where name = '{NAME}' order by step, rank",
        LARGEST: f"select name, norm from {scan} where step = {step} order by norm desc limit {TOP}",
        SPREAD: f"select name, min(norm), max(norm) from {scan} where step = {step} group by name",
    }

    def answer(question: str) -> int:
        with duckdb.connect(config={"threads": 1}) as connection:
            return len(connection.execute(queries[question]).fetchall())

    return answer


def polars_on(pattern: str, step: int) -> Answer:
    import polars as pl

    def answer(question: str) -> int:
        rows = pl.scan_csv(pattern, infer_schema_length=None)
        if question == CURVE:
            return rows.filter(pl.col("name") == NAME).select("step", "rank", "norm").collect().height
        rows = rows.filter(pl.col("step") == step)
        if question == LARGEST:
            return rows.select("name", "norm").sort("norm", descending=True).head(TOP).collect().height
        return rows.group_by("name").agg(pl.min("norm"), pl.max("norm").alias("most")).collect().height

    return answer


def readers(files: Files) -> Iterator[tuple[str, str, Callable[[], Answer]]]:
    """Each with the format that it reads, and how to make it."""
    step = files.step
    yield "ours", "parquet", lambda: ours(lambda: open_run(files.sets["parquet"]), step)
    yield "ours, again", "parquet", lambda: again(files.sets["parquet"], step)
    yield "ours on ranks", "", lambda: ours(lambda: open_run(files.ranks), step)
    yield "read_merged", "hdf5", lambda: whole_files(read_merged, paths(files.merged("hdf5")), step)
    yield "read_hdf5", "", lambda: whole_files(of_rank, sorted(files.ranks.glob("*/metrics_*.h5")), step)
    if find_spec("duckdb"):
        yield "duckdb-parquet", "parquet", lambda: duckdb_on(f"read_parquet('{files.merged('parquet')}')", step)
        yield "duckdb-csv", "csv", lambda: duckdb_on(f"read_csv('{files.merged('csv')}')", step)
    if find_spec("polars"):
        yield "polars-csv", "csv", lambda: polars_on(files.merged("csv"), step)


def again(path: Path, step: int) -> Answer:
    run = open_run(path)
    run.rows(SHARDED, steps=step)
    return ours(lambda: run, step)


def of_rank(path: Path) -> pa.Table:
    return read_hdf5(path, kinds=[SHARDED], ops=["norm"])


def paths(pattern: str) -> list[Path]:
    return sorted(Path(pattern).parent.glob(Path(pattern).name))


ANSWERS: list[Answer] = []
"""Of the reader, in its process."""


def begin(reader: str, files: Files) -> None:
    ANSWERS.extend(make() for name, _, make in readers(files) if name == reader)


def timed(question: str) -> tuple[float, int]:
    """Seconds of CPU time, and rows of the answer."""
    begun = time.process_time()
    rows = ANSWERS[0](question)
    return time.process_time() - begun, rows


def measured(names: Sequence[str], files: Files, rounds: int, progress: Progress) -> list[Answered]:
    """Every reader answers every question in each round."""
    found: dict[tuple[str, str], list[tuple[float, int]]] = {}
    with ExitStack() as stack:
        executor = partial(ProcessPoolExecutor, 1, get_context("spawn"), begin)
        processes = {name: stack.enter_context(executor((name, files))) for name in names}
        for number in range(rounds):
            for question in QUESTIONS:
                for name, process in processes.items():
                    progress.show("asking", f"round {number + 1} of {rounds}: {name}, {question}")
                    answered = process.submit(timed, question).result()
                    found.setdefault((name, question), []).append(answered)
    return [Answered(*key, median(cpu for cpu, _ in each), each[0][1]) for key, each in found.items()]


def main() -> None:
    options = parse_arguments()
    progress = Progress()
    job = Job(options.ranks, max(4, options.rows // (options.ranks * len(KINDS) * options.steps)), options.steps)
    with TemporaryDirectory(dir=options.directory) as directory:
        files = Files(Path(directory) / "ranks", {}, options.steps // 2)
        chosen = [one for one in readers(files) if not options.readers or one[0] in options.readers]
        progress.show("recording")
        record(job, "hdf5", files.ranks, options.workers)
        for format in dict.fromkeys(needed for _, needed, _ in chosen if needed):  # noqa: A001
            progress.show(f"merging into {format}")
            files.sets[format] = Path(directory) / format
            merge(Wanted(files.ranks, files.sets[format], kinds=[SHARDED], format=format, workers=options.workers))
        sizes = {name: size(path) for name, path in {"ranks, hdf5": files.ranks, **files.sets}.items()}
        found = measured([name for name, _, _ in chosen], files, options.rounds, progress)
    progress.end()
    print(f"{job.ranks * job.series * job.steps:,} rows of {SHARDED}, Python {sys.version.split()[0]}. CPU milliseconds:\n")
    print(table(found))
    print("\nMB: " + ", ".join(f"{name} {number / 1e6:,.1f}" for name, number in sizes.items()))
    save(options.json, {"answers": [asdict(one) for one in found], "sizes": sizes})


def table(found: list[Answered]) -> str:
    cpu = {(one.reader, one.question): f"{1e3 * one.cpu:,.1f}" for one in found}
    names = dict.fromkeys(one.reader for one in found)
    return aligned(("reader", *QUESTIONS), [(name, *(cpu[name, question] for question in QUESTIONS)) for name in names])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=5_200_000, help="of all kinds; the questions are about half of them")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--readers", nargs="+", help="only these")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a few rows, once")
    parser.add_argument("--directory", type=Path, help="for the files")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.ranks, options.steps, options.rounds = 4 * 2 * 10 * 8, 4, 8, 1
    return options


if __name__ == "__main__":
    main()
