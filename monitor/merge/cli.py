"""The command ``monitor-merge``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress as Bar, ProgressColumn, TimeRemainingColumn

from monitor.cli import (
    Command,
    Directory,
    DirectoryOption,
    Job,
    TimeEnd,
    TimeStart,
    Version,
    Workers,
    interruptible,
    one_directory,
)
from monitor.coordinator.resume import Span, span_between
from monitor.merge import parts
from monitor.merge.execution import MergeError, NothingRecordedError, is_url, without_password
from monitor.merge.follow import FollowOptions, UnfinishedError, follow, how_to_go_on
from monitor.merge.merge import Progress, Wanted, merge
from monitor.merge.report import summary
from monitor.sinks.files import ALL_STEPS, StepSpan
from monitor.terminal import CLEAN, FLAWED, NOTHING, counted, say


class FormatName(StrEnum):
    """``monitor.merge.outputs.Format``, for the command line."""

    parquet = "parquet"
    hdf5 = "hdf5"
    csv = "csv"


app = Command()


@app.command()
def monitor_merge(
    directory: Directory = None,
    directory_option: DirectoryOption = None,
    output: Annotated[
        str | None,
        typer.Option("-o", "--output", metavar="OUTPUT", help="A new directory, or a URL.", show_default="DIR/merged"),
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
    part: Annotated[
        str | None, typer.Option(metavar="I/N", help="Do only part I of N, as in a task of an array. Parts count from 1.")
    ] = None,
    finish: Annotated[
        bool,
        typer.Option(
            "--finish", help="Make the data set from the finished parts. With --follow: merge what is there, and end."
        ),
    ] = False,
    following: Annotated[
        bool,
        typer.Option("--follow", help="Merge while the job runs. If it is interrupted, the same command continues."),
    ] = False,
    interval: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="With --follow: the time between two rounds.")
    ] = 30.0,
    patience: Annotated[
        float, typer.Option(min=1.0, metavar="SECONDS", help="With --follow: end after this time without news of any rank.")
    ] = 14_400.0,
    _version: Version = False,
) -> None:
    """Merge what the ranks of a job recorded into one data set.

    Exit status: 0 all is there and agrees, or the part is done, 1 something is missing or disagrees, or the job has no rows,
    2 nothing was merged.
    """
    base = one_directory(directory, directory_option)
    console = Console(stderr=True)
    try:
        _check_local(base)
        wanted = Wanted(
            base,
            output if output and is_url(output) else Path(output or base / "merged"),
            job,
            _span(time_start, time_end),
            [one.strip() for one in kinds.split(",")] if kinds else None,
            _steps(steps),
            format.value,
            workers,
            dask,
        )
        follows = FollowOptions(interval, patience, finish) if following else None
        told = _merged(wanted, part, finish, console) if follows is None else _followed(wanted, follows, part, console)
    except (NothingRecordedError, UnfinishedError) as error:
        say(console, str(error), style="yellow")
        raise typer.Exit(FLAWED) from error
    except (MergeError, OSError) as error:
        say(console, f"{'Nothing was merged' if part is None else 'This part is not done'}: {error}", style="red")
        raise typer.Exit(NOTHING) from error
    if told is not None:
        _print(told, without_password(str(wanted.output)), Console())
    raise typer.Exit(CLEAN if told is None or told["clean"] else FLAWED)


def _check_local(base: Path) -> None:
    if re.match(r"[a-z][a-z0-9+.-]*:/", str(base)) and not base.exists():
        raise MergeError(
            "DIR is a URL. The ranks' directories are read from a file system of this machine: only -o can be a URL."
        )


def _merged(wanted: Wanted, part: str | None, finish: bool, console: Console) -> Mapping[str, Any] | None:
    """The report; None if only a part was to be done."""
    if part is not None and finish:
        raise MergeError("--part and --finish are given together. Run every part, then the command with --finish.")
    with _bar(console, TimeRemainingColumn()) as progress:
        if finish:
            return parts.finish(wanted)
        if part is None:
            return parts.merge_to_url(wanted, progress) if is_url(wanted.output) else merge(wanted, progress).told()
        done = parts.merge_part(wanted, parts.Part.parse(part), progress)
    ranges = counted(done.all, "range of steps", "ranges of steps")
    say(console, f"Part {part} is done. It has {ranges}; {done.before} of them were done before.")
    return None


def _followed(wanted: Wanted, options: FollowOptions, part: str | None, console: Console) -> Mapping[str, Any]:
    """The report, when the job has ended."""
    if part is not None:
        raise MergeError("--part and --follow are given together. One process follows a job; it may have several --workers.")
    with interruptible(), _bar(console) as progress:
        try:
            return follow(wanted, options, lambda line: say(console, line), progress).told()
        except KeyboardInterrupt:
            say(console, f"Interrupted. The data set so far can be read.\n{how_to_go_on(wanted)}", style="yellow")
            raise


@contextmanager
def _bar(console: Console, *more: ProgressColumn) -> Iterator[Progress]:
    """A progress bar, and what moves it. It has no thread, so that workers can be copies of this process."""
    columns = BarColumn(), MofNCompleteColumn(), *more
    with Bar("merging", *columns, console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total, refresh=True)


def _print(told: Mapping[str, Any], output: str, console: Console) -> None:
    """A line each."""
    lines = list(summary(told))
    width = max(len(what) for what, _ in lines)
    before = ""
    for what, said in lines:
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
