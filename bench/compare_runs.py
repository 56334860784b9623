"""What the comparison of two runs finds: changes planted in several layouts, and pairs that differ by rounding alone.

    python bench/compare_runs.py

A small Llama trains for real, recorded whole: in one process, compiled, and on two ranks under DistributedDataParallel, FSDP2,
tensor parallelism and a pipeline. Each run with a planted change is compared with the healthy run in one process, whose
micro-batches have their samples in another order. ``right``: the comparison names first what the catalogue expects;
``near``: another tensor of the same layer or kind in the same step, or a place that the catalogue explains; ``missed``:
anything else. Healthy pairs should be the same. Runs of several ranks are merged, and their merged sets are compared.

Faults from public threads (``--public``) are changes as well. Some need another healthy training, such as one with experts.

The exit status is 0 if no healthy pair differs, no change is missed, and nine in ten are right.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import combinations
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

import torch
import torch._dynamo
import torch._functorch.aot_autograd  # with this import, a compiled run need not import it again
from forks import record, run_all, said_in
from layouts import LAYOUTS
from planted import CHANGES, Change
from public_faults import FAULTS, GITHUB
from tables import Progress, aligned, save
from trained import Setting
from typer.testing import CliRunner

from monitor.compare.cli import app as compare_app
from monitor.merge.cli import app as merge_app

WEIGHTS = {"float32": 3e-5, "float64": 1e-12, "mixed": 1e-2}
"""By how much the final weights of two layouts may differ: root mean square, relative to that of the tensor."""

RIGHT = 0.9
"""The share of planted changes that must be found where they are expected."""

Item = TypeVar("Item")
Found = TypeVar("Found")

ALL_CHANGES = [*CHANGES, *FAULTS]

FIRST = re.compile(r"^first: step (\d+), ([^:]*): (\w+/)(?:\d+:)?([\w.:*]+?)(?:[:,]? |:?$)", re.MULTILINE)
EXPECTED_OF_A_MERGE = ("job", "ranks", "steps", "rows", "written", "notes")


@dataclass(frozen=True, slots=True)
class Pair:
    """Two healthy runs that differ by rounding."""

    left: Setting
    right: Setting

    @property
    def name(self) -> str:
        return f"{self.left.name} {self.right.name}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was found.

    Attributes:
        what: The change, or the pair.
        found: The step and the name that are found first, or what went wrong.
        verdict: ``right``, ``near`` or ``missed``; ``same`` or ``false alarm``; ``failed`` if there was nothing to compare.
        source: The address of the thread of a public fault.
    """

    what: str
    layout: str
    expected: str
    found: str
    verdict: str
    source: str = ""


@dataclass(frozen=True, slots=True)
class Bench:
    """Where runs are, below a directory: each is recorded once and compared as often as needed.

    Attributes:
        dtype: That of runs with a change.
    """

    base: Path
    dtype: str = "float32"

    def reference(self, change: Change) -> Setting:
        return Setting(dtype=self.dtype, tied=change.tied, variant=change.variant)

    def healthy(self, setting: Setting) -> Path:
        return self.base / "healthy" / setting.name

    def changed(self, change: Change) -> Path:
        return self.base / ("public" if change.source else "planted") / re.sub(r"\W+", "-", f"{change.layout} {change.name}")

    def record_healthy(self, setting: Setting) -> str:
        """Record and merge a run. Returns what went wrong, or nothing."""
        directory = self.healthy(setting)
        return record(setting, None, directory) or _in_a_process(lambda: _merge(directory), directory / "merge.log")

    def judge_weights(self, setting: Setting) -> str:
        """Compare final weights with those of one process. Returns what differs, or nothing."""
        own, reference = (self.healthy(each) for each in (setting, replace(setting, layout="single", permuted=False)))
        log = own / "weights.log"
        failed = _in_a_process(lambda: _same_weights(own, reference, WEIGHTS[setting.dtype]), log)
        return failed and log.read_text().strip().splitlines()[-1]

    def judge_change(self, number: int) -> Outcome:
        """Record a run with a change, and compare it with the healthy run in one process."""
        change = ALL_CHANGES[number]
        directory, setting = self.changed(change), replace(self.reference(change), layout=change.layout, permuted=True)
        outcome = partial(Outcome, change.name, change.layout, change.expected[0], source=change.source)
        failed = record(setting, change.plant, directory)
        if failed:
            return outcome(found=failed, verdict="failed")
        _in_a_process(lambda: _merge(directory), directory / "merge.log")
        said = self._compared(self.healthy(self.reference(change)), directory, setting.ranks > 1)
        found = first(said)
        return outcome(found=found or _shortened(said), verdict=_verdict(change, found))

    def judge_pair(self, pair: Pair) -> Outcome:
        left, right = self.healthy(pair.left), self.healthy(pair.right)
        moved = pair.left.layout == pair.right.layout and pair.left.data_ranks > 1  # ranks have other samples
        said = self._compared(left, right, max(pair.left.ranks, pair.right.ranks) > 1, *["--whole"] * moved)
        same = said.startswith("0\nthe same: ")
        return Outcome(pair.left.name, pair.right.name, "", "" if same else _shortened(said), "same" if same else "false alarm")

    def _compared(self, left: Path, right: Path, merged: bool, *options: str) -> str:
        """The exit status, and below it what the comparison says."""
        folder = "merged" if merged else "ranks"
        log = self.base / "compared" / f"{left.name} {right.name}.log"
        sides = [*options, str(left / folder), str(right / folder)]
        _in_a_process(lambda: _print(compare_app, *sides), log)
        return log.read_text()


# --- What is done in processes of their own: threads of Arrow do not survive the forks that ranks are.


def _in_a_process(work: Callable[[], None], log: Path) -> str:
    """Returns how it failed, or nothing."""

    def logged() -> None:
        said_in(log)
        work()

    log.parent.mkdir(parents=True, exist_ok=True)
    return run_all([get_context("fork").Process(target=logged)])


def _print(app: object, *arguments: str) -> None:
    outcome = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "300"})  # type: ignore[arg-type]
    print(f"{outcome.exit_code}\n{outcome.output}", flush=True)


def _merge(directory: Path) -> None:
    _print(merge_app, str(directory / "ranks"), "-o", str(directory / "merged"))


def _same_weights(own: Path, reference: Path, bound: float) -> None:
    expected = torch.load(reference / "weights0.pt")
    for path in sorted(own.glob("weights*.pt")):
        for name, weight in torch.load(path).items():
            difference = float((weight - expected[name]).norm() / expected[name].norm())
            if difference > bound:
                print(f"{name} differs by {difference:.2g}")
                sys.exit(1)


# --- What is read from what was printed.


def first(said: str) -> str:
    """Step, kind and name that are found first, or nothing."""
    found = FIRST.search(said)
    return f"{found[1]} {found[3]}{found[4]}" if found else ""


def _shortened(said: str) -> str:
    lines = [line for line in said.splitlines()[1:] if line.strip()]
    begin = next((line for line in lines if line.startswith("first: ")), "; ".join(lines[:2]))
    return begin[:160]


def _verdict(change: Change, found: str) -> str:
    if found in change.expected:
        return "right"
    return "near" if found in change.near or any(_is_near(found, one) for one in change.expected) else "missed"


def _is_near(found: str, expected: str) -> bool:
    """Whether it is the same step, and the same layer or kind."""
    places = [re.match(r"(\d+) (\w+)/((?:layers\.\d+)?)", one) for one in (found, expected)]
    if None in places:
        return False
    steps, kinds, layers = zip(*(place.groups() for place in places if place is not None), strict=True)
    return bool(steps[0] == steps[1] and (kinds[0] == kinds[1] or layers[0] == layers[1]))


def oddities(directory: Path) -> Iterator[str]:
    """Warnings of a run, and what its merge says besides the usual."""
    for log in sorted(directory.glob("rank*.log")):
        yield from (f"{log.stem}: {line}" for line in log.read_text().splitlines() if "WARNING" in line or "Error" in line)
    if (directory / "merge.log").exists():
        status, *lines = (directory / "merge.log").read_text().splitlines()
        yield from (f"merge: {line}" for line in lines if line.strip() and not line.startswith((*EXPECTED_OF_A_MERGE, " ")))
        if status != "0":
            yield f"merge: exit status {status}"


# --- Healthy pairs.


def healthy_pairs() -> list[Pair]:
    """Layouts, dtypes, seeds, orders of samples, numbers of micro-batches and variants of the training."""
    pairs = [
        Pair(Setting(left, dtype), Setting(right, dtype))
        for dtype in ("float32", "mixed")
        for left, right in combinations(LAYOUTS, 2)
    ]
    several = [layout for layout in LAYOUTS if layout not in ("single", "compiled")]
    pairs += [Pair(Setting(dtype="float64"), Setting(layout, "float64")) for layout in several]
    pairs += [Pair(Setting(seed=1), Setting(layout, seed=1, permuted=True)) for layout in ("single", *several)]
    pairs += [Pair(Setting(layout), Setting(layout, permuted=True)) for layout in ("single", *several)]
    pairs += [
        Pair(Setting(parts=parts), Setting(layout, parts=parts))
        for layout in ("ddp", "tp", "pp")
        for parts in (1, 4)
        if (layout, parts) != ("pp", 1)
    ]
    varied = dict.fromkeys((fault.variant, fault.layout) for fault in FAULTS if fault.variant)
    pairs += [Pair(Setting(variant=one), Setting(layout, permuted=True, variant=one)) for one, layout in varied]
    return pairs


# --- The program.


def main() -> int:
    options = parse_arguments()
    if options.keep is not None:
        options.keep.mkdir(parents=True)
        return run(Bench(options.keep.resolve(), options.dtype), options)
    with TemporaryDirectory() as directory:
        return run(Bench(Path(directory), options.dtype), options)


def run(bench: Bench, options: argparse.Namespace) -> int:
    pairs, numbers = chosen(options)
    settings = [each for pair in pairs for each in (pair.left, pair.right)]
    settings += [bench.reference(ALL_CHANGES[at]) for at in numbers]
    settings += [replace(each, layout="single", permuted=False) for each in settings]
    settings = list(dict.fromkeys(settings))
    progress = Progress()
    failed = all_of("healthy runs", bench.record_healthy, settings, options.workers, progress)
    differ = all_of("weights", bench.judge_weights, settings, options.workers, progress)
    changed = all_of("planted changes", bench.judge_change, numbers, options.workers, progress)
    healthy = all_of("healthy pairs", bench.judge_pair, pairs, options.workers, progress)
    progress.end()
    for setting, *wrong in zip(settings, failed, differ, strict=True):
        for one in (*filter(None, wrong), *oddities(bench.healthy(setting))):
            print(f"{setting.name}: {one}")
    planted, public = ([one for one in changed if bool(one.source) is is_public] for is_public in (False, True))
    print_tables(planted, public, healthy)
    parts = {"planted": planted, "public": public, "healthy": healthy}
    save(options.json, {part: [asdict(one) for one in found] for part, found in parts.items()})
    return int(any(failed) or any(differ) or not holds(changed, healthy))


def chosen(options: argparse.Namespace) -> tuple[list[Pair], list[int]]:
    """The healthy pairs and the numbers of the changes that the options choose. Without options these are all."""
    everything = not (options.healthy or options.planted or options.public)
    pairs = healthy_pairs() if options.healthy or everything else []
    numbers = list(range(len(CHANGES))) if options.planted or everything else []
    numbers += range(len(CHANGES), len(ALL_CHANGES)) if options.public or everything else []
    names = {number: f"{ALL_CHANGES[number].layout} {ALL_CHANGES[number].name}" for number in numbers}
    only = re.compile(options.only)
    return [pair for pair in pairs if only.search(pair.name)], [number for number in numbers if only.search(names[number])]


def all_of(stage: str, work: Callable[[Item], Found], items: Sequence[Item], workers: int, progress: Progress) -> list[Found]:
    """Do the work for each, a few at a time, in forks of this process."""
    with ProcessPoolExecutor(workers, get_context("fork")) as pool:
        futures = [pool.submit(work, item) for item in items]
        for done, _ in enumerate(as_completed(futures), 1):
            progress.show(stage, f"{done} of {len(items)}")
        return [future.result() for future in futures]


def print_tables(planted: Sequence[Outcome], public: Sequence[Outcome], healthy: Sequence[Outcome]) -> None:
    if planted:
        rows = [[one.what, one.layout, one.expected, one.found, one.verdict] for one in planted]
        print(f"\n{aligned(('change', 'layout', 'expected', 'found first', ''), rows, 5)}\n")
        print(", ".join(f"{number} {verdict}" for verdict, number in counted(planted).items()))
    if public:
        rows = [[one.what, thread(one.source), one.layout, one.expected, one.found, one.verdict] for one in public]
        print(f"\n{aligned(('fault', 'thread', 'layout', 'expected', 'found first', ''), rows, 6)}\n")
        print(", ".join(f"{number} {verdict}" for verdict, number in counted(public).items()))
    if healthy:
        rows = [[one.what, one.layout, one.verdict, one.found] for one in healthy]
        print(f"\n{aligned(('one', 'other', '', 'found first'), rows, 4)}\n")
        print(", ".join(f"{number} {verdict}" for verdict, number in counted(healthy).items()))


def thread(address: str) -> str:
    """Its name, such as ``owner/repo#7``."""
    return re.sub(r"/(pull|issues)/", "#", address.removeprefix(GITHUB))


def counted(outcomes: Sequence[Outcome]) -> dict[str, int]:
    verdicts = [one.verdict for one in outcomes]
    return {verdict: verdicts.count(verdict) for verdict in sorted(set(verdicts))}


def holds(changed: Sequence[Outcome], healthy: Sequence[Outcome]) -> bool:
    right, alarms = counted(changed).get("right", 0), counted(healthy).get("false alarm", 0)
    found = all(one.verdict in ("right", "near") for one in changed)
    return found and right >= RIGHT * len(changed) and not alarms


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="PATTERN", help="only changes and pairs whose names match")
    parser.add_argument("--healthy", action="store_true", help="only healthy pairs")
    parser.add_argument("--planted", action="store_true", help="only planted changes")
    parser.add_argument("--public", action="store_true", help="only faults from public threads")
    parser.add_argument(
        "--dtype", default="float32", choices=WEIGHTS, help="of runs with a change, whose catalogue is that of float32"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="a new directory, where all runs and outputs remain")
    parser.add_argument("--workers", type=int, default=2, help="runs or comparisons at a time (2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write all findings")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
