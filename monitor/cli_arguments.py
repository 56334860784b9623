"""Arguments that the commands share, so that the same argument means and says the same in all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import monitor


def command_app() -> typer.Typer:
    """An empty command. Its help is plain text: the same in a log and in a terminal, whatever characters an example has."""
    return typer.Typer(add_completion=False, rich_markup_mode=None)


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
Workers = Annotated[int, typer.Option(min=1, help="The number of processes.")]
Version = Annotated[bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")]


def one_directory(argument: Path | None, option: Path | None) -> Path:
    """The directory of a command, which is given either as an argument or with ``-d``.

    Raises:
        typer.BadParameter: It is given twice, or not at all.
    """
    if argument is not None and option is not None:
        raise typer.BadParameter(f"the directory is given twice: {argument}, and -d {option}. Give one.", param_hint="DIR")
    directory = argument if argument is not None else option
    if directory is None:
        raise typer.BadParameter("no directory is given. Give it as an argument, or with -d.", param_hint="DIR")
    return directory
