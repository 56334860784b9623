"""What a report takes: the builder on merged sets of several sizes, and the largest page in a browser.

    python bench/report.py --rows 1e6 1e7 1e8
    python bench/report.py --rows --page        # the page alone

A merged set has one kind with rows of 100 ranks and 100 series, in files of half a million rows, as a merge writes them. The
report is made by the command in a process of its own: CPU time (user and system), and the most memory that is resident. The
page has 1,000 ranks, 10,000 series and 100,000 steps in 2,000 columns of random cells. It is made by the project's own model,
and opened in a Chromium: its size, and the time until it is ready.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools" / "pictures"))

from browser import page, program
from monitor.merge.outputs import PER_RANK, write_table
from monitor.report.facts import Facts
from monitor.report.findings import BAD, Place, Verdict
from monitor.report.history import LEAST, NAN, Axis, KindHistory
from monitor.report.kind_reader import KindReader
from monitor.report.model import model_of
from monitor.report.page import page_of

RANKS, SERIES, STEPS_A_FILE = 100, 100, 50
KIND = "grad_unreduced"
NO_ENTRIES = {"count": 0, "listed": []}
LISTS = (
    *(
        "gaps",
        "dropped",
        "not_closed",
        "duplicate_steps",
        "replaced_steps",
        "joints",
        "set_aside",
        "disagreements",
        "incomplete",
    ),
    *("without_global", "not_combined", "unplaced", "not_compared"),
)


def told(ranks: int, steps: int, rows: int) -> dict[str, Any]:
    """The report of a merge in which nothing is missing."""
    ranges = {"count": steps, "ranges": [[0, steps - 1, 1]]}
    found = {"job_id": "1a2b3c4d" * 4, "world_size": ranks, "clean": True, "directories": [], "ranks": list(range(ranks))}
    found |= {"missing_ranks": [], "steps": ranges, "rows": {KIND: rows}, "tensors": {KIND: rows}, "notes": []}
    return found | {"skipped_steps": {"count": 0, "ranges": []}} | dict.fromkeys(LISTS, NO_ENTRIES)


def write_set(folder: Path, rows: int) -> None:
    """A merged set of about so many rows."""
    random = np.random.default_rng(0)
    steps = max(rows // (RANKS * SERIES), STEPS_A_FILE)
    (folder / "per_rank").mkdir(parents=True)
    for first in range(0, steps, STEPS_A_FILE):
        here = np.arange(first, min(first + STEPS_A_FILE, steps))
        step, rank, series = (one.ravel() for one in np.meshgrid(here, np.arange(RANKS), np.arange(SERIES), indexing="ij"))
        path = folder / "per_rank" / f"{KIND}_{here[0]}-{here[-1]}.parquet"
        write_table(_rows(step, rank, series, random.lognormal(0, 0.3, len(step))), path)
    (folder / "report.json").write_text(json.dumps(told(RANKS, steps, steps * RANKS * SERIES)))


def _rows(step: Any, rank: Any, series: Any, norm: Any) -> pa.Table:
    names = pa.DictionaryArray.from_arrays(pa.array(series, pa.int32()), [f"layers.{one}.weight" for one in range(SERIES)])
    known = {"kind": pa.array([KIND] * len(step)).dictionary_encode(), "rank": rank, "vpp_stage": rank * 0, "stage": rank * 0}
    known |= {"name": names, "global_name": names, "step": step, "call_id": series, "count": rank * 0 + 1024}
    columns = [pa.array(known[one.name]) if one.name in known else pa.nulls(len(step), one.type) for one in PER_RANK]
    ops = {"min": -norm, "max": norm, "mean": norm / 10, "norm": norm, "nans": norm * 0}
    return pa.table([*columns, *map(pa.array, ops.values())], names=[*PER_RANK.names, *ops])


@dataclass(frozen=True, slots=True)
class Measured:
    """CPU seconds and bytes."""

    cpu: float
    memory: int
    page: int


def build(folder: Path) -> Measured:
    """Make a report of a merged set, in a process of its own."""
    made = folder.parent / "report.html"
    command = [sys.executable, "-m", "monitor", "report", str(folder), "-o", str(made)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, _, usage = os.wait4(process.pid, 0)
    return Measured(usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, made.stat().st_size)


# --- The largest page.


class DrawnKind(KindReader):
    """A kind whose cells are drawn at random, in place of rows that are read."""

    def feed(
        self, history: KindHistory, steps: range | None = None, names: Sequence[str] | None = None, progress: Any = None
    ) -> None:
        del progress
        random = np.random.default_rng(1)
        ranks, series = len(self.source.ranks), len(self.series)
        chosen = list(range(series)) if names is None else [self.series.index((0, one)) for one in names]
        history.pair_series, history.pair_rank = np.tile(chosen, ranks), np.repeat(np.arange(ranks), len(chosen))
        pairs, columns = len(history.pair_series), 1 if steps is not None else history.grid.shape[1]
        history.grid = np.zeros((series, columns), np.uint8)
        history.cells = cells(random, (pairs, columns))
        history.deviations = np.zeros(pairs, np.float32)
        history.values = None if steps is not None else random.lognormal(0, 0.1, (pairs, columns)).astype(np.float32)


def cells(random: np.random.Generator, shape: tuple[int, int]) -> Any:
    """The greatest of 50 steps: about two standard deviations."""
    drawn = np.maximum(np.abs(random.standard_normal(shape, np.float32)), np.abs(random.standard_normal(shape, np.float32)))
    return (LEAST + np.minimum(drawn + 1.2, 3.9)).astype(np.uint8)


def large_page(ranks: int = 1000, series: int = 10_000, steps: int = 100_000) -> str:
    """The HTML of a page with one bad tensor."""

    class Source:
        """Stands in place of a merged set: the numbers of its ranks."""

    source: Any = Source()
    source.ranks = list(range(ranks))
    axis = Axis(np.arange(steps), 2000)
    reader = DrawnKind(
        source, KIND, "norm", ("norm",), [(0, f"layers.{one // 100}.m{one % 100}.weight") for one in range(series)]
    )
    history = KindHistory(axis, ranks)
    history.cells = history.values = None
    history.grid = cells(np.random.default_rng(0), (series, axis.bins))
    history.grid[series // 2 :, 1500:] = NAN
    facts = Facts(source, "synthetic", told(ranks, steps, 10**12), {}, None, "", axis, {KIND: reader}, {KIND: history})
    place = Place(75_000, ranks // 2, KIND, reader.series[series // 2][1])
    return page_of(model_of(facts, [], Verdict(BAD, "Half of the tensors are NaN.", "", place)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=float, nargs="*", default=[1e6, 1e7], help="of the merged sets")
    parser.add_argument("--page", action="store_true", help="make the largest page, too")
    options = parser.parse_args()
    with TemporaryDirectory(prefix="report-") as work:
        for number, rows in enumerate(options.rows):
            write_set(Path(work) / str(number) / "merged", int(rows))
            found = build(Path(work) / str(number) / "merged")
            each, memory, size = found.cpu / rows * 1e6, found.memory / 1e9, found.page / 1e6
            print(f"{rows:>13,.0f} rows: {found.cpu:6.1f} s CPU, {each:.2f} µs a row, {memory:.2f} GB, page {size:.1f} MB")
        if options.page:
            show_large(Path(work) / "large.html")


def show_large(path: Path) -> None:
    """Make the page, and open it where there is a browser."""
    began = time.process_time()
    path.write_text(large_page(), encoding="utf-8")
    size, memory = path.stat().st_size / 1e6, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    print(f"the largest page: {size:.1f} MB, made in {time.process_time() - began:.1f} s, {memory:.2f} GB")
    if program() is None:
        print("no Chromium is installed: it was not opened")
        return
    with page(1400, 1000) as opened:
        began = time.monotonic()
        opened.open(path.as_uri())
        own = opened.until("document.body.dataset.ready")
        print(f"opened in {time.monotonic() - began:.1f} s, {own} ms of them its own scripts")


if __name__ == "__main__":
    main()
