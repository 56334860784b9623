"""The command ``trainermon``: every command of the package is a subcommand, which is imported when it runs."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, NamedTuple

import typer
from typer.core import TyperCommand

import monitor

# --- What commands are.


class Command(typer.Typer):
    """A command. Its help is plain text, the same in a log and in a terminal."""

    is_process: ClassVar[bool] = False
    """Whether this process runs a command and nothing else: one was called with the arguments of the process."""

    def __init__(self) -> None:
        super().__init__(add_completion=False, rich_markup_mode=None)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Run it, and end the process.

        Args:
            args: None, or a list of the command's arguments. Without it they are those of the process.
        """
        Command.is_process |= not args
        if Command.is_process and "pyarrow" in sys.modules:  # most commands work with Arrow
            from monitor.sinks.arrow import do_without_pandas

            do_without_pandas()
        return super().__call__(*args, **options)


# --- Arguments that the commands share, so that they have the same meaning and help in all commands.


@contextmanager
def interruptible() -> Iterator[None]:
    """End as after Ctrl-C if the process is terminated: temporary files are removed."""
    if threading.current_thread() is not threading.main_thread():  # no other may set handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"trainermon {monitor.__version__}")
        raise typer.Exit


Directory = Annotated[
    Path | None,
    typer.Argument(metavar="DIR", help="The directory that contains the ranks' directories.", show_default=False),
]
DirectoryOption = Annotated[Path | None, typer.Option("-d", "--directory", metavar="DIR", help="The same as the argument DIR.")]
Job = Annotated[
    str | None, typer.Option(metavar="ID", help="The id of the job, or its beginning, if the directory contains several jobs.")
]
TimeStart = Annotated[
    str | None, typer.Option(metavar="TIME", help="Only directories from this timestamp on, as in Dec03_21-34-40.")
]
TimeEnd = Annotated[str | None, typer.Option(metavar="TIME", help="Only directories up to this timestamp, inclusive.")]
Tolerances = Annotated[
    Path | None,
    typer.Option("--tolerances", metavar="FILE", help="Allowed differences by kind and tensor: a file of compare --calibrate."),
]
Whole = Annotated[
    bool | None,
    typer.Option(
        "--whole/--ranks",
        help="Compare whole tensors, or rank by rank [default: whole tensors if the layouts differ].",
        show_default=False,
    ),
]
Workers = Annotated[int, typer.Option(min=1, help="The number of processes.")]
Version = Annotated[bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")]


def one_directory(argument: Path | None, option: Path | None) -> Path:
    """The directory of a command, given as an argument or with ``-d``.

    Raises:
        typer.BadParameter: It is given twice, or not at all.
    """
    if argument is not None and option is not None:
        raise typer.BadParameter(f"the directory is given twice: {argument}, and -d {option}. Give one.", param_hint="DIR")
    directory = argument if argument is not None else option
    if directory is None:
        raise typer.BadParameter("no directory is given. Give it as an argument, or with -d.", param_hint="DIR")
    return directory


class CommandEntry(NamedTuple):
    """Where to import a command from."""

    module: str
    app: str
    summary: str
    """The first sentence of its help."""


COMMANDS: Final = {
    "run": CommandEntry("monitor.launching.cli", "app", "Monitor a command without a change of its code."),
    "merge": CommandEntry("monitor.merge.cli", "app", "Merge what the ranks of a job recorded into one data set."),
    "report": CommandEntry("monitor.report.cli", "app", "Say whether a run is healthy, and what broke first."),
    "top": CommandEntry("monitor.top.cli", "app", "Show a running job: ranks, loss, unusual tensors, alerts."),
    "query": CommandEntry("monitor.query.cli", "app", "Answer a query about what a job recorded."),
    "precision": CommandEntry("monitor.precision.cli", "app", "Say which layers are safe in FP8, and in which format."),
    "rank-anomalies": CommandEntry(
        "monitor.anomalies.ranking.cli", "app", "Order the events of all ranks, and find the first fault."
    ),
    "convert": CommandEntry("monitor.convert.cli", "app", "Convert a run to TensorBoard curves or an SQLite database."),
    "csv2tensorboard": CommandEntry("monitor.convert.cli", "tensorboard_app", "Convert a run to TensorBoard curves."),
    "csv2db": CommandEntry("monitor.convert.cli", "database_app", "Convert a run to an SQLite database."),
    "ctl": CommandEntry("monitor.dynamic.cli", "app", "Show and change what a running job records."),
    "dump-recover": CommandEntry("monitor.dump.cli", "app", "Complete the precision dump of a process that was killed."),
    "compare": CommandEntry("monitor.compare.cli", "app", "Compare two precision dumps, or two monitored runs."),
}
"""By subcommand. ``trainermon NAME`` and the installed command ``monitor-NAME`` are the same."""


class Subcommand(TyperCommand):
    """Passes all arguments, including ``--help``, to the imported command."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Keep ``args`` as they are."""
        ctx.args = list(args)
        return ctx.args


app: Final = Command()


@app.callback(no_args_is_help=True)
def trainermon(_version: Version = False) -> None:
    """Work with what monitored training runs record.

    Exit status, of every command: 0 done, and nothing is missing, different or wrong, 1 done, but something is, 2 not done.
    """


def _add(name: str, listed: CommandEntry) -> None:
    @app.command(name, cls=Subcommand, help=listed.summary)
    def run(ctx: typer.Context) -> None:
        command: typer.Typer = getattr(import_module(listed.module), listed.app)
        command(ctx.args, prog_name=ctx.command_path)


for _name, _listed in COMMANDS.items():
    _add(_name, _listed)
