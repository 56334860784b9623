"""The command ``monitor-query``."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final

import pyarrow as pa
import typer
from rich.console import Console

from monitor.cli import Command, Job, Version
from monitor.query.opened import OpenedRun, open_run
from monitor.terminal import CLEAN, FLAWED, NOTHING, counted, in_json, plain, say

MOST_SHOWN: Final = 100
"""Rows of a table for a terminal."""

MOST_SAID: Final = 20
"""Lines about what is missing."""

MOST_NOTES: Final = 5

app: Final = Command()


@app.command()
def monitor_query(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="The directory that contains the ranks' directories, or a merged set.")
    ],
    query: Annotated[
        str | None, typer.Argument(metavar="QUERY", help="A query in SQL. Its tables are the kinds.", show_default=False)
    ] = None,
    job: Job = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the answer as CSV.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON, a list of rows.")] = False,
    _version: Version = False,
) -> None:
    """Answer a query about what a job recorded.

    Without a query, it lists the kinds, steps and ranks of the run, and examples of queries.

    \b
      trainermon query monitor_output "select step, rank, norm from grad_reduced where name = '0.weight'"

    Exit status: 0 the query was answered, 1 it was answered, but something is missing, or there are no rows, 2 it was not
    answered.
    """
    errors = Console(stderr=True)
    try:
        if as_csv and as_json:
            raise ValueError("--csv and --json exclude each other. Give one.")
        opened = open_run(run, job=job)
        if query is None:
            _list(opened, Console())
        else:
            _print(opened.sql(query), as_csv, as_json)
        missing = opened.missing
    except (ValueError, OSError) as error:
        say(errors, f"Nothing was answered: {error}", style="red")
        raise typer.Exit(NOTHING) from error
    for one in missing[:MOST_SAID]:
        say(errors, one, style="yellow")
    if len(missing) > MOST_SAID:
        say(errors, f"and {len(missing) - MOST_SAID} more", style="yellow")
    raise typer.Exit(FLAWED if missing or not opened.kinds else CLEAN)


# --- Without a query: what there is.

EXAMPLES: Final = (
    ("the curve of one tensor", "select step, rank, norm from {kind} where name = '…' order by step, rank"),
    ("the largest of a step", "select name, norm from global_{kind} where step = {step} order by norm desc limit 20"),
    ("what differs between ranks", "select name, min(norm), max(norm) from {spread} where step = {step} group by name"),
)


def _list(opened: OpenedRun, console: Console) -> None:
    kinds, steps = opened.kinds, opened.steps
    say(console, f"ranks  {_ranges(opened.ranks)}")
    if not kinds:
        say(console, "The run has no rows.")
        return
    width = max(map(len, kinds))
    say(console, "kinds")
    for kind in kinds:
        say(console, f"  {kind:<{width}}  {_steps(steps.get(kind, []))}")
    say(console, "tables")
    say(console, "  KIND and per_rank_KIND: rows of ranks. global_KIND: rows of whole tensors.")
    for note in opened.notes[:MOST_NOTES]:
        say(console, f"note  {note}")
    say(console, "examples")
    kind, spread = (
        next((one for one in known if one in kinds), kinds[0])
        for known in (("grad_reduced", "actv"), ("grad_unreduced", "actv", "grad_reduced"))  # every rank writes the first two
    )
    step = max((one[-1] for one in steps.get(kind, [])), default=0)
    for what, text in EXAMPLES:
        say(console, f"  {what}:\n    {text.format(kind=kind, spread=spread, step=step)}")


def _steps(ranges: Sequence[range]) -> str:
    shown = [f"{one[0]}" if len(one) == 1 else f"{one[0]} to {one[-1]}" + _by(one.step) for one in ranges[:5]]
    count = sum(map(len, ranges))
    more = f" and {len(ranges) - 5} more" if len(ranges) > 5 else ""
    return f"{counted(count, 'step')}: {', '.join(shown)}{more}" if count else "no steps"


def _by(interval: int) -> str:
    return f" by {interval}" if interval > 1 else ""


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in short: 0 to 63, 65."""
    found: list[list[int]] = []
    for one in numbers:
        if found and found[-1][1] == one - 1:
            found[-1][1] = one
        else:
            found.append([one, one])
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in found[:20])


# --- Answers. Names come from the recorded program, so a terminal never gets them unescaped.


def _print(answer: pa.Table, as_csv: bool, as_json: bool) -> None:
    if as_json:
        _print_json(answer)
    elif as_csv:
        rows = csv.writer(sys.stdout, lineterminator="\n")
        escaped = plain if sys.stdout.isatty() else str
        rows.writerow(map(escaped, answer.column_names))
        rows.writerows([escaped(_full(value)) for value in row] for row in _rows(answer))
    else:
        _print_table(answer, Console())


def _print_json(answer: pa.Table) -> None:
    """A line for each row. JSON has no NaN and no infinity: these are the texts of CSV."""
    names = answer.column_names
    if twice := [one for place, one in enumerate(names) if one in names[:place]]:
        raise ValueError(f"the answer has several columns {twice[0]!r}. Name them apart: select … as …")
    before = "[\n"
    for row in _rows(answer):
        values = map(in_json, row)
        typer.echo(before + json.dumps(dict(zip(answer.column_names, values, strict=True)), default=str), nl=False)
        before = ",\n"
    typer.echo("\n]" if answer.num_rows else "[]")


def _print_table(answer: pa.Table, console: Console) -> None:
    """Columns of equal width, numbers to the right."""
    lines = [answer.column_names, *([_short(value) for value in row] for row in _rows(answer.slice(0, MOST_SHOWN)))]
    lines = [[plain(cell) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    numeric = [pa.types.is_integer(one.type) or pa.types.is_floating(one.type) for one in answer.schema]
    for line in lines:
        cells = [f"{cell:>{w}}" if right else f"{cell:<{w}}" for cell, w, right in zip(line, widths, numeric, strict=True)]
        say(console, "  ".join(cells).rstrip())
    if answer.num_rows > MOST_SHOWN:
        say(console, f"and {counted(answer.num_rows - MOST_SHOWN, 'more row')}: --csv and --json print all")


def _rows(answer: pa.Table) -> Iterator[tuple[Any, ...]]:
    for batch in answer.to_batches(max_chunksize=10_000):
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else _full(value)


def _full(value: Any) -> str:
    return "" if value is None else str(value)
