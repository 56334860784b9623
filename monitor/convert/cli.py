"""The commands ``monitor-convert``, and ``monitor-csv2tensorboard`` and ``monitor-csv2db``, which fix its target."""

from __future__ import annotations

import inspect
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from monitor import cli
from monitor.convert import sqlite, tensorboard
from monitor.convert.conversion import Conversion, ConversionError, NothingRecordedError
from monitor.query.batches import SHOWN_KINDS
from monitor.terminal import CLEAN, FLAWED, NOTHING, counted, say


class Target(StrEnum):
    """What to convert a run to."""

    tensorboard = "tensorboard"
    sqlite = "sqlite"


Run = Annotated[
    Path | None,
    typer.Argument(
        metavar="DIR", help="The directory that contains the ranks' directories, or a merged set.", show_default=False
    ),
]
To = Annotated[Target | None, typer.Option(help="TensorBoard curves, or an SQLite database.", show_default=False)]
Output = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        metavar="OUTPUT",
        help="A directory; for curves a new or empty one.",
        show_default=f"DIR/{{time}}_{tensorboard.ENDING} or DIR/{{time}}_{sqlite.ENDING}",
    ),
]
Kinds = Annotated[str | None, typer.Option(help=f"Only these kinds, separated by commas: {', '.join(SHOWN_KINDS)}.")]
StepPartition = Annotated[int, typer.Option(min=1, help="The number of steps in a table of the database.")]

app = cli.Command()
tensorboard_app = cli.Command()
database_app = cli.Command()


@app.command()
def monitor_convert(
    to: To = None,
    directory: Run = None,
    directory_option: cli.DirectoryOption = None,
    output: Output = None,
    time_start: cli.TimeStart = None,
    time_end: cli.TimeEnd = None,
    kinds: Kinds = None,
    job: cli.Job = None,
    workers: cli.Workers = 1,
    step_partition: StepPartition = 500,
    _version: cli.Version = False,
) -> None:
    """Convert a run to TensorBoard curves or an SQLite database.

    It reads the directories of ranks, or a merged set, in any format. To look at the result:

    \b
      tensorboard --logdir OUTPUT
      sqlite3 OUTPUT/monitor_metrics.db "SELECT step, norm FROM grad_reduced WHERE name = '0.weight' AND rank = 0"

    Exit status: 0 all was converted, 1 files were set aside, ranks or steps are missing, or there are no rows, 2 nothing was
    converted.
    """
    base, asked = cli.one_directory(directory, directory_option), [one.strip() for one in kinds.split(",")] if kinds else None
    if to is None:
        raise typer.BadParameter(f"no target is given. Give one: {', '.join(Target)}.", param_hint="--to")
    ending = tensorboard.ENDING if to == Target.tensorboard else sqlite.ENDING
    errors = Console(stderr=True)
    try:
        made = Conversion.of(base, time_start, time_end, workers, asked, output, job, ending)
        done = tensorboard.to_events(made) if to == Target.tensorboard else sqlite.to_database(made, step_partition)
    except NothingRecordedError as error:
        say(errors, f"Nothing was converted and not looked at: {error}", style="yellow")
        raise typer.Exit(FLAWED) from error
    except (ConversionError, OSError) as error:
        say(errors, f"Nothing was converted: {error}", style="red")
        raise typer.Exit(NOTHING) from error
    for line in done.said():
        say(errors, line)
    ranks = counted(len(done.ranks), "rank")
    say(Console(), f"{counted(done.rows, 'row')} of {ranks} written to {done.output}")
    raise typer.Exit(FLAWED if done.set_aside or done.absent else CLEAN)


def _fix(command: typer.Typer, to: Target, summary: str, other: str, without: tuple[str, ...] = ("to",)) -> None:
    """Make a command that converts to one target, and lacks the options of the other, and the example, which begins with
    ``other``.
    """

    def convert(**given: Any) -> None:
        monitor_convert(to, **given)

    of = inspect.signature(monitor_convert, eval_str=True)
    kept = [one for one in of.parameters.values() if one.name not in without]
    lines = [line for line in _DOC.replace(_DOC.partition("\n")[0], summary).splitlines() if not line.strip().startswith(other)]
    named = {"__signature__": of.replace(parameters=kept), "__annotations__": monitor_convert.__annotations__}
    for name, value in (*named.items(), ("__doc__", "\n".join(lines))):
        setattr(convert, name, value)
    command.command()(convert)


_DOC = str(monitor_convert.__doc__)

_fix(tensorboard_app, Target.tensorboard, "Convert a run to TensorBoard curves.", "sqlite3", ("to", "step_partition"))
_fix(database_app, Target.sqlite, "Convert a run to an SQLite database.", "tensorboard")
