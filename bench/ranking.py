"""What it takes to rank the events of many ranks.

    python bench/ranking.py

The files are those of a job of pipelines side by side, whose ranks ran 1F1B and hold parts of each parameter: manifests and
series files by the project's own writer, of which no two are alike, and files of events. The command itself ranks them, in a
process of its own with its workers: wall and CPU time from the start of the interpreter to the end, and the most memory that
all of these processes have resident together.

- ``flood``: everything is NaN, on every rank, from the first forward on, for some steps; of each the first events are kept.
- ``sparse``: events here and there, in a hundred steps.
- ``few ranks``: a flood of as many events on 64 of the ranks alone: as many as a rank keeps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from merge import watched
from tables import Progress, aligned, save

from monitor.anomalies.events import EVENTS_FOLDER, Event, ScanSummary, Signal, events_file, judged_file, message
from monitor.coordinator.manifest import Manifest, RankFacts
from monitor.coordinator.manifest_format import StepRanges, StepsRecord
from monitor.coordinator.output import JobIdentity, RankDirectory
from monitor.coordinator.series_file import Edge, Flow, Pass
from monitor.failures import Failures
from monitor.series import NO_MICRO_STEP, Placement, Series, SeriesTable, Shard
from monitor.stats.partials import COLUMNS, KindRows, Partials, TensorLayout
from monitor.stats.table import StepRows

IDENTITY = JobIdentity("1a2b3c4d" * 4, "Dec03_21-34-40")
MODULES = ("norm_1", "attn", "attn.qkv", "attn.out", "norm_2", "mlp", "mlp.fc_1", "mlp.act", "mlp.fc_2")
WEIGHTS = ("norm_1", "attn.qkv", "attn.out", "norm_2", "mlp.fc_1", "mlp.fc_2")
AT_THE_STEP = ("grad_reduced", "param_origin", "exp_avg", "param_updated")
SHAPES = ("flood", "sparse", "few ranks")
SPARSE_STEPS = 100
FEW = 64

COMMAND = "from monitor.anomalies.ranking.cli import app; app()"
EVENTS_FOUND = (1,)
"""The command's exit status where there are events."""

Row = tuple[str, str, int]
"""Kind, name and micro-step."""


@dataclass(frozen=True, slots=True)
class Job:
    """Attributes:
    events: In all.
    steps: Of a flood.
    """

    ranks: int
    events: int
    stages: int
    layers: int
    micro_steps: int
    steps: int


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of wall and of CPU time; bytes at the peak."""

    shape: str
    job: Job
    wall: float
    cpu: float
    memory: int


def main() -> None:
    options = parse_arguments()
    progress, costs = Progress(), []
    for shape in options.shapes:
        job = Job(options.ranks, options.events, options.stages, options.layers, options.micro_steps, options.steps)
        with TemporaryDirectory(dir=options.directory) as base:
            progress.show("recording", shape)
            record(job, shape, Path(base))
            progress.show("ranking", shape)
            folder = str(Path(base) / EVENTS_FOLDER)
            costs.append(Cost(shape, job, *watched([sys.executable, "-c", COMMAND, "-d", folder], {}, EVENTS_FOUND)))
    progress.end()
    print(table(costs))
    save(options.json, {"costs": [asdict(cost) for cost in costs]})


def record(job: Job, shape: str, base: Path) -> None:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        list(pool.map(partial(record_rank, job, shape, base), range(job.ranks), chunksize=16))


def record_rank(job: Job, shape: str, base: Path, rank: int) -> None:
    """Write all files of one rank."""
    first = rank - rank % job.stages
    groups = {"pp": range(first, first + job.stages), "dp": range(rank % job.stages, job.ranks, job.stages)}
    passes = one_forward_one_backward(rank - first, job.stages, job.micro_steps)
    name = str(RankDirectory(IDENTITY.timestamp, rank, f"{rank:08x}"))
    facts = RankFacts(IDENTITY, rank, job.ranks, groups, {}, {}, "", ["hdf5"])
    write_manifest(job, base / name, facts, passes)
    chosen = list(events(job, shape, rank, list(rows(job, passes))))
    folder = base / EVENTS_FOLDER / f"rank{rank}"
    folder.mkdir(parents=True)
    entries = {}
    for step, call_id, (kind, series, micro_step) in chosen:
        tag = Series(kind, 0, series).tag(rank, micro_step)
        said = message(Signal("AnomalyNan", "nans", 1.0), tag, step)
        place = {"rank": rank, "step": step, "micro_step": micro_step, "pp_stage": rank - first, "vpp_stage": 0}
        event = Event(**place, call_id=call_id, tag_name=tag, message=said, group_mates=tuple(groups["pp"]))
        entries[event.key] = event.model_dump(mode="json")
    (folder / events_file(0)).write_text(json.dumps(entries))
    (folder / judged_file(0)).write_text(judged(rank, name, len(entries)).model_dump_json())


def judged(rank: int, directory: str, count: int) -> ScanSummary:
    steps = StepsRecord.of(StepRanges(range(SPARSE_STEPS + 100)))
    about = {"job_id": IDENTITY.job_id, "rank": rank, "directory": directory, "recording": 0, "host": f"node{rank // 8}"}
    return ScanSummary(schema_version=1, **about, events=count, not_kept={}, steps=steps, not_judged={}, closed=True)


def write_manifest(job: Job, directory: Path, facts: RankFacts, passes: Sequence[Pass]) -> None:
    series = SeriesTable()
    for kind, name, _ in rows(job, passes):
        one = Series(kind, 0, name)
        series.index_of(one)
        if kind in AT_THE_STEP:
            series.place(one, Placement(shard=Shard(tuple(facts.groups["dp"]), (1024,), (facts.rank,))))
    manifest = Manifest(directory, facts, series, Failures(facts.rank))
    manifest.flows(Flow(tuple(edges(series)), tuple(passes)))
    index = np.arange(len(series))
    whole = KindRows(index, index * 0, index, index * 0, Partials(np.zeros((len(COLUMNS), len(index)))))
    manifest.written(StepRows(0, ("norm",), {"actv": whole}, [TensorLayout((2,), "torch.float32")]))
    manifest.close()


def edges(series: SeriesTable) -> Iterator[Edge]:
    """Each input is the output before it; gradients come back the same way. Outputs of containers are their last child's."""
    every = list(series)
    for target, (before, one) in enumerate(itertools.pairwise(every), start=1):
        if one.kind == "actv" and ".input" in one.name and before.kind == "actv":
            yield Edge(target - 1, target)
        if one.kind == "actv_grad" and ".output" in one.name and before.kind == "actv_grad":
            yield Edge(target - 1, target)


def rows(job: Job, passes: Sequence[Pass]) -> Iterator[Row]:
    """In the order of a step."""
    sides = list(_sides(job))
    for one in passes:
        kind = "actv" if one.forward else "actv_grad"
        yield from ((kind, name, one.micro_step) for name in (sides if one.forward else reversed(sides)))
    parameters = [f"layers.{layer}.{name}.weight" for layer in range(job.layers) for name in WEIGHTS]
    for kind in ("grad_unreduced", *AT_THE_STEP):
        yield from ((kind, name, NO_MICRO_STEP) for name in parameters)


def _sides(job: Job) -> Iterator[str]:
    yield ".input"
    for layer in range(job.layers):
        yield f"layers.{layer}.input"
        for name in MODULES:
            yield f"layers.{layer}.{name}.input"
            yield f"layers.{layer}.{name}.output"
        yield f"layers.{layer}.output"
    yield ".output"


def events(job: Job, shape: str, rank: int, every: Sequence[Row]) -> Iterator[tuple[int, int, Row]]:
    """Step, call and row of what fires on a rank."""
    firing = min(job.ranks, FEW) if shape == "few ranks" else job.ranks
    share = job.events // firing if rank < firing else 0
    if shape == "sparse":
        draw = random.Random(rank)
        chosen = draw.sample(range(SPARSE_STEPS * len(every)), share)
        yield from ((one // len(every), one % len(every), every[one % len(every)]) for one in sorted(chosen))
        return
    of_each = -(-share // max(job.steps, -(-share // len(every))))
    yield from ((one // of_each, one % of_each, every[one % of_each]) for one in range(share))


def one_forward_one_backward(stage: int, stages: int, micro_steps: int) -> list[Pass]:
    forward, backward = ([Pass(way, 0, m) for m in range(micro_steps)] for way in (True, False))
    ahead = min(stages - stage - 1, micro_steps)
    steady = [one for pair in zip(forward[ahead:], backward, strict=False) for one in pair]
    return forward[:ahead] + steady + backward[micro_steps - ahead :]


def table(costs: Sequence[Cost]) -> str:
    header = ("events", "ranks", "count", "wall s", "CPU s", "events/s", "peak MB")
    return aligned(header, [cells(cost) for cost in costs])


def cells(cost: Cost) -> tuple[str, ...]:
    job = cost.job
    times = f"{cost.wall:.1f}", f"{cost.cpu:.1f}", f"{job.events / cost.wall:,.0f}"
    return cost.shape, f"{job.ranks:,}", f"{job.events:,}", *times, f"{cost.memory / 1e6:,.0f}"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4, help="of each stage")
    parser.add_argument("--micro-steps", type=int, default=16)
    parser.add_argument("--steps", type=int, default=4, help="of a flood")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--directory", type=Path, help="for the files, some 500 MB")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    return parser.parse_args()


if __name__ == "__main__":
    main()
