"""The commands ``monitor-csv2tensorboard`` and ``monitor-csv2db``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from monitor.cli import Directory, DirectoryOption, Job, TimeEnd, TimeStart, Version, Workers, command_app, one_directory
from monitor.convert import sqlite, tensorboard
from monitor.convert.conversion import DATA_TYPES, MOST_SAID, ConversionError, Converted, NothingRecordedError, Request
from monitor.terminal import say

CLEAN, FLAWED, NOTHING = 0, 1, 2
"""Exit statuses: all was converted; something is missing or was set aside, or there was no row; nothing was converted."""

Kinds = Annotated[str | None, typer.Option(help=f"Only these kinds, separated by commas: {', '.join(DATA_TYPES)}.")]

tensorboard_app = command_app()
database_app = command_app()


@tensorboard_app.command()
def monitor_csv2tensorboard(
    directory: Directory = None,
    directory_option: DirectoryOption = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="OUTPUT",
            help="A directory, new or empty.",
            show_default=f"DIR/{{time}}_{tensorboard.ENDING}",
        ),
    ] = None,
    time_start: TimeStart = None,
    time_end: TimeEnd = None,
    kinds: Kinds = None,
    job: Job = None,
    workers: Workers = 1,
    _version: Version = False,
) -> None:
    """Convert what ranks recorded as CSV to TensorBoard curves.

    Each op of each tensor becomes a curve over steps. To show the curves:

    \b
      tensorboard --logdir OUTPUT

    Exit status: 0 all was converted, 1 files were set aside, ranks or steps are missing, or there are no rows, 2 nothing was
    converted.
    """
    asked, base = _listed(kinds), one_directory(directory, directory_option)
    _run(lambda: tensorboard.to_events(Request.of(base, time_start, time_end, workers, asked, output, job, tensorboard.ENDING)))


@database_app.command()
def monitor_csv2db(
    directory: Directory = None,
    directory_option: DirectoryOption = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="OUTPUT", help="A directory.", show_default=f"DIR/{{time}}_{sqlite.ENDING}"),
    ] = None,
    time_start: TimeStart = None,
    time_end: TimeEnd = None,
    kinds: Kinds = None,
    job: Job = None,
    workers: Workers = 1,
    step_partition: Annotated[int, typer.Option(min=1, help="The number of steps in a table.")] = 500,
    _version: Version = False,
) -> None:
    """Convert what ranks recorded as CSV to an SQLite database.

    To read it:

    \b
      sqlite3 OUTPUT/monitor_metrics.db "SELECT step, norm FROM grad_reduced WHERE name = '0.weight' AND rank = 0"

    Exit status: 0 all was converted, 1 files were set aside, ranks or steps are missing, or there are no rows, 2 nothing was
    converted.
    """
    asked, base = _listed(kinds), one_directory(directory, directory_option)
    _run(
        lambda: sqlite.to_database(
            Request.of(base, time_start, time_end, workers, asked, output, job, sqlite.ENDING), step_partition
        )
    )


def _listed(kinds: str | None) -> list[str] | None:
    return [one.strip() for one in kinds.split(",")] if kinds else None


def _run(convert: Callable[[], Converted]) -> NoReturn:
    errors = Console(stderr=True)
    try:
        converted = convert()
    except NothingRecordedError as error:
        say(errors, f"Nothing was converted and not looked at: {error}", style="yellow")
        raise typer.Exit(FLAWED) from error
    except (ConversionError, OSError) as error:
        say(errors, f"Nothing was converted: {error}", style="red")
        raise typer.Exit(NOTHING) from error
    for one in converted.set_aside[:MOST_SAID]:
        say(errors, f"set aside: {one.path}: {one.reason}")
    if len(converted.set_aside) > MOST_SAID:
        say(errors, f"set aside: {len(converted.set_aside) - MOST_SAID} more")
    for absent in converted.absent[:MOST_SAID]:
        say(errors, f"missing: {absent}")
    if len(converted.absent) > MOST_SAID:
        say(errors, f"missing: {len(converted.absent) - MOST_SAID} more")
    ranks = "1 rank" if len(converted.ranks) == 1 else f"{len(converted.ranks)} ranks"
    say(Console(), f"{converted.rows:,} rows of {ranks} written to {converted.output}")
    raise typer.Exit(FLAWED if converted.set_aside or converted.absent else CLEAN)
