"""What the demo does last: it makes one data set of what its ranks wrote, and shows the rows of it that say most."""

from __future__ import annotations

import math
import os
import socket
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from monitor import read_merged
from monitor.merge.discovery import RankRun, discover, runs_of
from monitor.merge.execution import MergeError
from monitor.merge.merge import Wanted, merge
from monitor.merge.report import Report

Row = dict[str, Any]

OWN, AVERAGED = "grad_unreduced", "grad_reduced"
LARGEST = 3
"""Tensors in the table."""


def runs_of_this_job(base: Path, earlier: set[Path]) -> tuple[RankRun, ...]:
    """The directories of the job that this process is a rank of, by rank. Other jobs may lie beside it, or run there now.

    Args:
        earlier: Directories that were in ``base`` before this job began.

    Raises:
        SystemExit: This process has recorded nothing.
    """
    found = discover(base)
    here = socket.gethostname(), os.getpid()
    for job, runs in found.jobs.items():
        if any((one.manifest.host, one.manifest.pid) == here and one.directory not in earlier for one in runs):
            return runs_of(found, job)
    raise SystemExit("Nothing was recorded. The monitor has said why in a warning above.")


def merge_and_show(console: Console, runs: Sequence[RankRun]) -> Path:
    """Merge ``runs`` into a new directory beside theirs and print its largest gradients. Returns the directory.

    Raises:
        SystemExit: It cannot be merged.
    """
    known = runs[0].manifest
    base = runs[0].directory.parent
    output = base / f"merged-{known.timestamp}-{known.job_id[:8]}"
    try:
        report = _merged(console, Wanted(base, output, job=known.job_id, format="csv"))
    except (MergeError, OSError) as error:
        raise SystemExit(f"Nothing was merged: {error}") from error
    console.print(_said(report, output), highlight=False, markup=False, soft_wrap=True)
    own, averaged = (_rows(output, kind) for kind in (OWN, AVERAGED))
    last = pc.max(averaged["step"]).as_py()
    now = _at(averaged, last)
    largest = sorted(now, key=_size, reverse=True)[:LARGEST]
    console.print(Padding(_table(largest, _at(own, last)), (1, 0)))
    first = pc.min(averaged["step"]).as_py()
    console.print(seen(_at(averaged, first), now, _at(own, last)), highlight=False, markup=False)
    return output


def _merged(console: Console, wanted: Wanted) -> Report:
    columns = TextColumn("merging "), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("merging", total=None)
        return merge(wanted, lambda done, total: progress.update(task, completed=done, total=total))


def _said(report: Report, output: Path) -> str:
    rows, tensors = sum(report.rows.values()), sum(report.tensors.values())
    ranks = len({run.rank for run in report.runs})
    lines = [
        f"Merged into {output}",
        f"{rows:,} rows of {ranks} ranks became {tensors:,}: what the ranks hold alike is there once.",
        f"The command for it is  trainermon merge {output.parent} --job {report.job[:8]}",
    ]
    if not report.clean:
        lines.append("Something is missing or disagrees: report.json says what.")
    return "\n".join(lines)


def _rows(output: Path, kind: str) -> pa.Table:
    return pa.concat_tables(read_merged(path) for path in sorted((output / "global").glob(f"{kind}_[0-9]*")))


def _at(rows: pa.Table, step: int) -> list[Row]:
    return rows.filter(pc.field("step") == step).to_pylist()


def _size(row: Row) -> float:
    """A NaN comes before everything else."""
    return math.inf if math.isnan(row["norm"]) else row["norm"]


def _table(largest: Sequence[Row], own: Sequence[Row]) -> Table:
    """Each tensor on each rank and averaged. Its name has a line of its own, so that 80 columns are enough."""
    before = defaultdict(list)
    for row in own:
        before[row["name"]].append(row)
    title = f"Global table: the {len(largest)} largest gradients of step {largest[0]['step']}"
    table = Table("name, kind", title=title, box=SIMPLE, padding=0, show_edge=False)
    for column in ("step", "ranks", "norm", "min", "max", "mean", "nans"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in largest:
        table.add_row(escape(row["name"]))
        for one in [*before[row["name"]], row]:
            table.add_row(f"  {one['kind']}", str(one["step"]), one["ranks"], *_numbers(one))
    return table


def _numbers(row: Row) -> list[str]:
    norm, *rest = (row[op] for op in ("norm", "min", "max", "mean"))
    return [f"{norm:.3g}", *(f"{value:.2g}" for value in rest), f"{row['nans']:.0f}"]


def seen(first: Sequence[Row], now: Sequence[Row], own: Sequence[Row]) -> str:
    """In words, what the gradients of a step show.

    Args:
        first: Those of the first step, averaged.
        now: Those of the step in question, averaged.
        own: The same before they were averaged, of all ranks.
    """
    step, began = now[0]["step"], first[0]["step"]
    before = f", after {_norm(first):.3g} at step {began}" if began != step else ""
    return (
        f"At step {step} the norm of the whole model's gradient is {_norm(now):.3g}{before}{_share_of_the_largest(now)}. "
        f"Before the average it was {_alone(own)}: what the ranks' batches do not agree on cancels out. "
        f"{_with_nans([*own, *now])}"
    )


def _share_of_the_largest(rows: Sequence[Row]) -> str:
    largest, whole = max(rows, key=_size), _norm(rows)
    known = math.isfinite(whole) and whole > 0
    return f"; {largest['name']} makes {(largest['norm'] / whole) ** 2:.0%} of its square" if known else ""


def _alone(own: Sequence[Row]) -> str:
    by_rank = defaultdict(list)
    for row in own:
        by_rank[row["ranks"]].append(row)
    return " and ".join(f"{_norm(rows):.3g} on rank {rank}" for rank, rows in by_rank.items())


def _with_nans(rows: Sequence[Row]) -> str:
    names = [row["name"] for row in rows if row["nans"]]
    return f"NaN stands in {len(names)} of {len(rows)} rows, first {names[0]}." if names else "No gradient holds a NaN."


def _norm(rows: Sequence[Row]) -> float:
    """Of all tensors together."""
    return math.sqrt(sum(row["norm"] ** 2 for row in rows))
