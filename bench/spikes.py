"""What the report says about spikes of the loss: planted ones, of which the cause is known, and healthy trainings.

    python bench/spikes.py

A small GPT on real text and an MLP train for real, in one process or on two ranks under DistributedDataParallel. In forty of
them something is planted: a bad batch, a learning rate, a layer's weights, moments, the data of one rank, the device of one
rank. ``right``: the report names the cause and its step, and the rank, tensor or batch where there is one; ``near``: the
cause alone; ``cannot tell``: the report says so; ``wrong``: another cause, and ``wrong, certain`` if it says ``because``.

Twenty are healthy, with warm-up, restarts, schedules and other batch sizes: nothing should be said. Some spikes are recorded
once more with little: then no wrong cause may be certain, and with the loss alone the report must say what to record.

The exit status is 0 if 36 of 40 are right, no wrong cause is certain, and nothing is said of a healthy training.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

from forks import run_all, said_in
from spiking import Case, healthy, little, planted, record
from tables import Progress, aligned, save
from typer.testing import CliRunner

from monitor.report.cli import app

RIGHT = 0.9
"""The share of planted spikes of which the cause must be right."""


@dataclass(frozen=True)
class Outcome:
    """What the report says of a training.

    Attributes:
        part: ``planted``, ``little`` or ``healthy``.
    """

    name: str
    part: str
    verdict: str
    says: str


PARTS: dict[str, Callable[[int], Iterator[Case]]] = {"planted": planted, "little": little, "healthy": healthy}


def judged(part: str, case: Case, base: Path) -> Outcome:
    """Train, and read the report. Both are in processes of their own: threads of Arrow survive no fork."""
    directory = base / part / case.directory
    failed = record(case, directory) or run_all([get_context("fork").Process(target=_report, args=(directory,))])
    if failed:
        return Outcome(case.name, part, "failed", failed)
    said = json.loads((directory / "said.json").read_text())
    first = next(iter(said["spikes"]), None)
    says = first["says"] if first else next(one["says"] for one in said["checks"] if one["name"] == "Spikes")
    return Outcome(case.name, part, _verdict(part, case, first), says)


def _report(directory: Path) -> None:
    said_in(directory / "report.log")
    done = CliRunner().invoke(app, [str(directory / "ranks"), "--json"])
    (directory / "said.json").write_text(done.stdout)


def _verdict(part: str, case: Case, first: dict[str, Any] | None) -> str:
    if first is None:
        return "silent" if part == "healthy" else "missed"
    if part == "healthy":
        return "false alarm"
    if first["certainty"] == "cannot tell":
        return "cannot tell" if first["record"] or part == "planted" else "no advice"
    if first["cause"] != case.cause:
        return "wrong, certain" if first["certainty"] == "because" else "wrong"
    rank, name = case.where
    place = first["place"]
    named = place.get("name", "").endswith(name) or name.format(at=case.at) in first["says"]
    return "right" if place["step"] == case.at and rank in (None, place.get("rank")) and named else "near"


def main() -> int:
    options = parse_arguments()
    chosen = [part for part in PARTS if getattr(options, part)] or list(PARTS)
    only = re.compile(options.only)
    cases = [(part, case) for part in chosen for case in PARTS[part](options.seed) if only.search(case.name)]
    if options.keep is not None:
        options.keep.mkdir(parents=True)
        found = all_of(cases, options.keep.resolve(), options)
    else:
        with TemporaryDirectory() as directory:
            found = all_of(cases, Path(directory), options)
    rows = [[one.name, one.part, one.verdict, one.says] for one in found]
    print(f"{aligned(('training', 'part', '', 'the report says'), rows, 4)}\n")
    for part in chosen:
        print(f"{part}: {', '.join(f'{count} {verdict}' for verdict, count in sorted(counted(found, part).items()))}")
    save(options.json, [asdict(one) for one in found])
    return int(not holds(found))


def all_of(cases: Sequence[tuple[str, Case]], base: Path, options: argparse.Namespace) -> list[Outcome]:
    progress = Progress()
    with ProcessPoolExecutor(options.workers, get_context("fork")) as pool:
        futures = [pool.submit(_named, part, case.name, options.seed, base) for part, case in cases]
        for done, _ in enumerate(as_completed(futures), 1):
            progress.show("trainings", f"{done} of {len(cases)}")
        progress.end()
        return [future.result() for future in futures]


def _named(part: str, name: str, seed: int, base: Path) -> Outcome:
    """A case is found by its name: its functions cannot be sent to another process."""
    return judged(part, next(case for case in PARTS[part](seed) if case.name == name), base)


def counted(found: Sequence[Outcome], part: str) -> Counter[str]:
    return Counter(one.verdict for one in found if one.part == part)


def holds(found: Sequence[Outcome]) -> bool:
    """Whether the outcomes are good enough."""
    of = {part: counted(found, part) for part in PARTS}
    told = of["planted"]["right"] >= RIGHT * of["planted"].total()
    honest = not any(of[part][bad] for part in PARTS for bad in ("wrong, certain", "failed", "missed", "no advice"))
    with_the_loss = [one.verdict for one in found if one.part == "little" and one.name.endswith(" loss")]
    return told and honest and set(with_the_loss) <= {"cannot tell"} and not of["healthy"]["false alarm"]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="PATTERN", help="only trainings whose names match")
    for part in PARTS:
        parser.add_argument(f"--{part}", action="store_true", help=f"only these trainings: {part}")
    parser.add_argument("--seed", type=int, default=0, help="other weights, data and steps (0)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="a new directory, where all runs and outputs remain")
    parser.add_argument("--workers", type=int, default=2, help="trainings at a time (2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write all findings")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
