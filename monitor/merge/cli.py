"""The command ``monitor-merge``."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from monitor.cli import Directory, DirectoryOption, Job, TimeEnd, TimeStart, Version, Workers, command_app, one_directory
from monitor.coordinator.resume import Span, span_between
from monitor.merge.execution import MergeError, NothingRecordedError
from monitor.merge.merge import Wanted, merge
from monitor.merge.report import Report, summary
from monitor.sinks.files import ALL_STEPS, StepSpan
from monitor.terminal import CLEAN, FLAWED, NOTHING, say


class FormatName(StrEnum):
    """``monitor.merge.outputs.Format``, for the command line."""

    parquet = "parquet"
    hdf5 = "hdf5"
    csv = "csv"


app = command_app()


@app.command()
def monitor_merge(
    directory: Directory = None,
    directory_option: DirectoryOption = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="OUTPUT", help="A new directory.", show_default="DIR/merged")
    ] = None,
    job: Job = None,
    time_start: TimeStart = None,
    time_end: TimeEnd = None,
    kinds: Annotated[str | None, typer.Option(help="Only these kinds, separated by commas.")] = None,
    steps: Annotated[
        str | None, typer.Option(metavar="A:B", help="Only the steps from A to B, inclusive. A or B may be left out.")
    ] = None,
    format: Annotated[FormatName, typer.Option(help="The format of the files to write.")] = FormatName.parquet,  # noqa: A002
    workers: Workers = 1,
    dask: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Merge on the Dask cluster that has this scheduler.")
    ] = None,
    _version: Version = False,
) -> None:
    """Merge what the ranks of a job recorded into one data set.

    Exit status: 0 all is there and agrees, 1 something is missing or disagrees, or the job has no rows, 2 nothing was merged.
    """
    base = one_directory(directory, directory_option)
    console = Console(stderr=True)
    try:
        wanted = Wanted(
            base,
            output or base / "merged",
            job,
            _span(time_start, time_end),
            [one.strip() for one in kinds.split(",")] if kinds else None,
            _steps(steps),
            format.value,
            workers,
            dask,
        )
        report = _shown(wanted, console)
    except NothingRecordedError as error:
        say(console, str(error), style="yellow")
        raise typer.Exit(FLAWED) from error
    except (MergeError, OSError) as error:
        say(console, f"Nothing was merged: {error}", style="red")
        raise typer.Exit(NOTHING) from error
    _print(report, wanted.output, Console())
    raise typer.Exit(CLEAN if report.clean else FLAWED)


def _shown(wanted: Wanted, console: Console) -> Report:
    columns = ("merging", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        return merge(wanted, lambda done, total: bar.update(task, completed=done, total=total))


def _print(report: Report, output: Path, console: Console) -> None:
    """A line each."""
    told = list(summary(report.told()))
    width = max(len(what) for what, _ in told)
    before = ""
    for what, said in told:
        say(console, f"{'' if what == before else what:<{width}}  {said}")
        before = what
    say(console, f"written to {output}")


def _steps(spelled: str | None) -> StepSpan:
    match = re.fullmatch(r"(\d{0,18}):(\d{0,18})", spelled or ":")
    if match is None:
        raise MergeError(f"--steps is {spelled!r}. Write the first and the last step, as in 100:200.")
    steps = StepSpan(int(match[1] or ALL_STEPS.first), int(match[2] or ALL_STEPS.last))
    if steps.first > steps.last:
        raise MergeError(f"--steps {spelled} ends before it begins")
    return steps


def _span(start: str | None, end: str | None) -> Span | None:
    try:
        return span_between(start, end)
    except ValueError as error:
        raise MergeError(str(error)) from error
