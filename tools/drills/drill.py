"""Drill the monitor: trains small models while everything goes wrong that can, and checks what is left.

    python tools/drills/drill.py                     an hour
    python tools/drills/drill.py --minutes 5         five minutes: each drill at least once
    python tools/drills/drill.py --seed 7            other cases
    python tools/drills/drill.py --only "disk full"  one drill

Each case trains a model without the monitor and with it, with a fault: losses must be the same in every bit, every visible file
whole, each row that of a healthy run, each missing step named by the manifest, and a merge must say so with its exit status.
A job that a fault ends is started again and continues its recording. Commands read damaged files: none may hang, abort or print
a traceback.

At the end there is a table of the drills, and the exit status is 1 if one was not passed. What a failed case has left is kept.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from cases import Drill, Ground, Outcome, all_drills
from running import Preload

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
from tables import Progress, aligned
from verdicts import DrillError

LONG = 10
"""Minutes of a run that includes drills of which one case suffices."""


@dataclass(slots=True)
class Record:
    """The cases of a drill so far.

    Attributes:
        failed: What was wrong, of each failed case.
        skipped: Why the drill was not run.
    """

    cases: int = 0
    outcome: Outcome = field(default_factory=Outcome)
    failed: list[str] = field(default_factory=list)
    skipped: str = ""

    def add(self, outcome: Outcome) -> None:
        self.cases += 1
        self.outcome.trained += outcome.trained
        self.outcome.named += outcome.named
        self.outcome.kills += outcome.kills


def main() -> int:
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in the background of a shell: the jobs would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    options = parse_arguments()
    base = Path(tempfile.mkdtemp(prefix="drills-"))
    drills = [one for one in all_drills() if not options.only or one.name in options.only]
    records = {one.name: Record() for one in drills}
    ground = Ground(base, Preload(base))
    able = [one for one in drills if not _skipped(one, ground, options, records)]
    try:
        run_cases(able, records, ground, options)
    finally:
        failed = any(one.failed for one in records.values())
        print(table(records))
        for name, one in records.items():
            for said in one.failed:
                print(f"\n{name}: {said}")
        if not failed:
            shutil.rmtree(base)
    return int(failed or any(one.skipped and options.strict for one in records.values()))


def run_cases(drills: Sequence[Drill], records: dict[str, Record], ground: Ground, options: argparse.Namespace) -> None:
    """Run cases side by side until the time is over; each drill at least once."""
    deadline = time.monotonic() + 60 * options.minutes
    drawn = order(drills, options.seed)
    running: dict[Future[Outcome], tuple[Drill, Path]] = {}
    began = 0

    def begins() -> bool:
        return bool(drills) and (time.monotonic() < deadline or began < options.least * len(drills))

    progress = Progress()
    with ThreadPoolExecutor(options.beside) as pool:
        while running or begins():
            more = begins()
            while more and len(running) < options.beside:
                drill, seed = next(drawn)
                place = ground.directory / f"case{began}"
                place.mkdir()
                began += 1
                running[pool.submit(drill.run, ground, place, random.Random(seed), options.ranks)] = drill, place
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                drill, place = running.pop(future)
                _finish(drill.name, records[drill.name], future, place)
                if not options.quiet:
                    progress.show("drills", how_far(records, deadline))
    progress.end()


def order(drills: Sequence[Drill], seed: int) -> Iterator[tuple[Drill, int]]:
    """All drills in a drawn order, over and over, each time with a seed of its own."""
    drawn, every = random.Random(seed), list(drills)
    while every:
        for drill in drawn.sample(every, len(every)):
            yield drill, drawn.randrange(2**30)
        every = [drill for drill in every if not drill.once]


def _finish(name: str, record: Record, future: Future[Outcome], place: Path) -> None:
    try:
        record.add(future.result())
        shutil.rmtree(place, ignore_errors=True)
    except Exception as error:
        record.cases += 1
        said = str(error) if isinstance(error, DrillError) else traceback.format_exc()  # a mistake of the drill
        record.failed.append(f"{said} (kept: {place})")
        print(f"\nfailed: {name}: {record.failed[-1][:300]}", file=sys.stderr, flush=True)


def _skipped(drill: Drill, ground: Ground, options: argparse.Namespace, records: dict[str, Record]) -> bool:
    reason = ""
    if drill.needs_preload and ground.preload.library is None:
        reason = "needs a C compiler, on Linux"
    if drill.several_ranks and max(options.ranks) < 2:
        reason = "needs several ranks"
    if drill.once and options.minutes < LONG:
        reason = f"only in runs of {LONG} minutes"
    records[drill.name].skipped = reason
    return bool(reason)


def how_far(records: dict[str, Record], deadline: float) -> str:
    cases, failed = (sum(counts) for counts in zip(*((one.cases, len(one.failed)) for one in records.values()), strict=True))
    left = max(0.0, deadline - time.monotonic()) / 60
    return f"{cases} cases, {failed} failed, {left:.0f} min left"


def table(records: dict[str, Record]) -> str:
    header = ("drill", "cases", "passed", "steps", "named missing", "killed")
    body = [(name, *map(str, row_of(one))) for name, one in records.items()]
    return f"\n{aligned(header, body)}\n"


def row_of(one: Record) -> tuple[object, ...]:
    did = one.outcome
    return one.skipped or one.cases, one.cases - len(one.failed), did.trained, did.named, did.kills


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no new case after this time (60)")
    parser.add_argument("--least", type=int, default=1, help="cases of each drill, at least (1)")
    parser.add_argument("--seed", type=int, default=0, help="draws the cases (0)")
    parser.add_argument("--only", nargs="+", metavar="DRILL", help="names of drills")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4], help="numbers of ranks (1 2 4)")
    parser.add_argument("--beside", type=int, default=len(os.sched_getaffinity(0)), help="cases at a time")
    parser.add_argument("--strict", action="store_true", help="a drill that is skipped is a failure")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
