"""What a recorded row costs the host: microseconds a row, on tensors so small that reading them is nothing.

    python bench/host_cost.py
    python bench/host_cost.py --before ../earlier    # a checkout of an earlier version, with its C parts built

A GPT of width 8 trains on four tokens. As in ``overhead.py`` each process has one thread, and monitored and unmonitored ones
step in turn. The difference of their CPU time, divided by the rows that were written, is the cost of a row: of the training
thread alone, and of the whole process with its writer. The median over the rounds is reported.

- ``kinds``: each kind alone, in eager and in compiled code.
- ``parts``: activations and their gradients, with more and more of the work switched on. Rows are those of all the work.
- ``rows``: the cost of a step against its rows, in milliseconds: it should be a straight line through 0.
- ``call``: one call of ``Recorder.record``, with parts left out, in nanoseconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from models import Workload, tiny_tensors
from overhead import ACTIVATIONS, CONFIGS, OPS, TITLES, at_least_two, machine
from stepping import UNMONITORED, WorkerError
from tables import Progress, aligned, save
from trials import WARM_UP_ROUNDS, Times, Trial

NEVER: dict[str, Any] = {"start_step": 1_000_000_000}
KINDS = ("gradients", "weights", "moments", "activations", "everything")
PARTS = {
    "hooks that return at once: no step is collected": ACTIVATIONS | NEVER,
    "activations": ACTIVATIONS | {"forward_only": True},
    "gradients of activations": ACTIVATIONS | {"backward_only": True},
    "both": ACTIVATIONS,
}
LADDER = ((2, 1), (8, 1), (16, 2), (32, 4), (48, 8), (96, 8))
"""Layers and micro-steps: 100 to 30,000 rows of activations and their gradients."""

LAYERS = 16
CALLS = 20_000


@dataclass(frozen=True, slots=True)
class RowCost:
    """What rows cost in one trial.

    Attributes:
        rows: Rows a step.
        plain: CPU milliseconds of a step without a monitor.
        thread, process: Microseconds a row, one a round.
    """

    name: str
    mode: str
    by: str
    rows: float
    plain: float
    thread: list[float]
    process: list[float]


def main() -> int:
    options = parse_arguments()
    progress = Progress()
    results: dict[str, Any] = {"machine": machine()}
    try:
        with tempfile.TemporaryDirectory(prefix="host-cost-") as directory:
            for table in options.tables:
                results[table] = TABLES[table](Measuring(options, Path(directory), progress))
    except WorkerError as failure:
        print(f"\n{failure}", file=sys.stderr)
        return 1
    progress.end()
    save(options.json, results)
    return 0


@dataclass(frozen=True, slots=True)
class Measuring:
    """Runs the trials of a table."""

    options: argparse.Namespace
    directory: Path
    progress: Progress

    def cost(self, name: str, workload: Workload, config: Mapping[str, Any], rows: float | None = None) -> Iterator[RowCost]:
        """The cost by each version. ``rows``: rows a step, if fewer are written than the work is for."""
        place = Path(tempfile.mkdtemp(dir=self.directory))
        path = place / "config.json"
        path.write_text(json.dumps({"targets": {}, "format": "csv", "ops": OPS, **config}))
        pythons = {"ours": sys.executable} | ({"before": sys.executable} if self.options.before else {})
        show = partial(self.progress.show, f"{name}, {workload.name}")
        times = Trial(workload, path, pythons, place, show, self.options.before).times(self.options.rounds)
        mode = "compiled" if workload.compiled else "eager"
        for by in pythons:
            yield row_cost(name, mode, by, workload, times, rows)


def row_cost(name: str, mode: str, by: str, workload: Workload, times: Times, rows: float | None) -> RowCost:
    steps = workload.steps_a_turn
    found = times.rows[by] / (steps * (WARM_UP_ROUNDS + len(times.rounds))) if rows is None else rows

    def column(clock: str) -> list[float]:
        return [1e6 * (one[by][clock] - one[UNMONITORED][clock]) / (steps * found) for one in times.rounds]

    plain = median(one[UNMONITORED]["cpu"] for one in times.rounds)
    return RowCost(name, mode, by, found, 1e3 * plain / steps, column("thread"), column("cpu"))


def kinds(measuring: Measuring) -> list[dict[str, Any]]:
    """Each kind alone, eager and compiled."""
    options = measuring.options
    workloads = [tiny_tensors(options.layers, compiled=compiled) for compiled in options.modes]
    found = [one for work in workloads for name in KINDS for one in measuring.cost(name, work, CONFIGS[name])]
    return say("recorded", found)


def parts(measuring: Measuring) -> list[dict[str, Any]]:
    """Activations and their gradients, with more and more of the work switched on."""
    work = tiny_tensors(measuring.options.layers)
    whole = list(measuring.cost("both", work, ACTIVATIONS))
    found = [
        one for name, config in PARTS.items() if name != "both" for one in measuring.cost(name, work, config, whole[0].rows)
    ]
    return say("work", found + whole)


def rows(measuring: Measuring) -> list[dict[str, Any]]:
    """The cost of a step against its rows."""
    found = [one for layers, micro in LADDER for one in measuring.cost("activations", tiny_tensors(layers, micro), ACTIVATIONS)]
    body = [
        [TITLES[one.by], f"{one.rows:.0f}", f"{median(one.thread) * one.rows / 1e3:.2f}", f"{median(one.thread):.1f}"]
        for one in found
    ]
    print(f"\n{aligned(['by', 'rows a step', 'thread ms a step', 'thread us a row'], body)}\n")
    return [asdict(one) for one in found]


def say(title: str, costs: list[RowCost]) -> list[dict[str, Any]]:
    header = [title, "code", "by", "rows a step", "plain ms", "thread us", "quartiles", "process us"]
    body = [
        [
            *(one.name, one.mode, TITLES[one.by], f"{one.rows:.0f}", f"{one.plain:.2f}", f"{median(one.thread):.1f}"),
            "{:.1f} to {:.1f}".format(*quantiles(one.thread, n=4, method="inclusive")[::2]),
            f"{median(one.process):.1f}",
        ]
        for one in costs
    ]
    print(f"\n{aligned(header, body, names=3)}\n")
    return [asdict(one) for one in costs]


def call(measuring: Measuring) -> list[dict[str, Any]]:
    """One call of ``Recorder.record``: as it is, of a tensor that was read before, and what its parts take alone."""
    import torch

    from monitor.pytorch.tensor_reader import TorchTensorReader
    from monitor.recording.recorder import RecordedSeries
    from monitor.series import Series, SeriesTable
    from monitor.stats.host.array_kernel import FLOAT32, native_kernel

    measuring.progress.show("one call")
    torch.set_num_threads(1)
    reader, x, fresh = TorchTensorReader(SeriesTable(), 1e-8), torch.randn(512), torch.randn(CALLS, 512).unbind()
    watched, again = (RecordedSeries(Series("actv", 0, name)) for name in ("one", "other"))
    reader.record(watched, x)
    kernel, row = native_kernel(1e-8), reader.rows.table.pages[0].memory.rows_now()  # type: ignore[attr-defined]
    nanoseconds = {
        "record 512 elements": min_of(lambda: [reader.record(watched, one) for one in fresh]),
        "record a tensor that was read under another name": min_of(lambda: [reader.record(again, x) for _ in fresh]),
        "a new gradient: without a look for other names": min_of(
            lambda: [reader.record(watched, x, aliases=False) for _ in fresh]
        ),
        "the version of a tensor": min_of(lambda: [x._version for _ in fresh]),
    }
    if kernel is not None:
        reduce, address = kernel.of(FLOAT32), x.data_ptr()
        nanoseconds["the kernel alone"] = min_of(lambda: [reduce(address, 512, row, 0) for _ in fresh])
    print(f"\n{aligned(['call', 'ns'], [[name, f'{taken:.0f}'] for name, taken in nanoseconds.items()])}\n")
    return [nanoseconds]


def min_of(run: Callable[[], object], times: int = 7) -> float:
    """Nanoseconds of one of ``CALLS`` calls, the least of some runs."""

    def once() -> float:
        start = time.thread_time()
        run()
        return time.thread_time() - start

    return 1e9 * min(once() for _ in range(times)) / CALLS


TABLES: dict[str, Callable[[Measuring], list[dict[str, Any]]]] = {"kinds": kinds, "parts": parts, "rows": rows, "call": call}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", nargs="+", choices=TABLES, metavar="TABLE", help=", ".join(TABLES))
    parser.add_argument("--layers", type=int, default=LAYERS, help=f"of the model in kinds and parts ({LAYERS})")
    parser.add_argument("--eager", action="store_true", help="leave out compiled code")
    parser.add_argument("--rounds", type=at_least_two, default=9, help="counted after the warm-up (9)")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="an earlier version of the project, measured beside")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write all figures")
    parser.add_argument("--quick", action="store_true", help="see that it runs: one layer, 2 rounds, two tables")
    options = parser.parse_args()
    options.modes = (False,) if options.eager else (False, True)
    options.tables = options.tables or (["parts", "call"] if options.quick else list(TABLES))
    if options.quick:
        options.layers, options.rounds, options.modes = 1, 2, (False,)
    return options


if __name__ == "__main__":
    sys.exit(main())
