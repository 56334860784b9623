"""The command ``trainermon``: every command of the package is a subcommand, which is imported when it runs."""

from __future__ import annotations

from importlib import import_module
from typing import Final, NamedTuple

import typer
from typer.core import TyperCommand

from monitor.cli_arguments import Version, command_app


class Listed(NamedTuple):
    """A command, without importing it."""

    module: str
    app: str
    summary: str
    """The first sentence of its help."""


COMMANDS: Final = {
    "merge": Listed("monitor.merge.cli", "app", "Merge what the ranks of a job recorded into one data set."),
    "rank-anomalies": Listed(
        "monitor.anomalies.ranking.cli", "app", "Order the events of all ranks, and find the first fault."
    ),
    "csv2tensorboard": Listed(
        "monitor.convert.cli", "tensorboard_app", "Convert what ranks recorded as CSV to TensorBoard curves."
    ),
    "csv2db": Listed("monitor.convert.cli", "database_app", "Convert what ranks recorded as CSV to an SQLite database."),
    "ctl": Listed("monitor.dynamic.cli", "app", "Show and change what a running job records."),
    "dump-recover": Listed("monitor.dump.cli", "app", "Complete the precision dump of a process that was killed."),
    "compare": Listed("monitor.compare.cli", "app", "Compare two precision dumps, or two monitored runs."),
}
"""By subcommand. ``trainermon NAME`` and the installed command ``monitor-NAME`` are the same."""


class Subcommand(TyperCommand):
    """Hands all its arguments on, ``--help`` included: the command that it stands for parses them."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Keep ``args`` as they are."""
        ctx.args = list(args)
        return ctx.args


app: Final = command_app()


@app.callback(no_args_is_help=True)
def trainermon(_version: Version = False) -> None:
    """Work with what monitored training runs record.

    Exit status, of every command: 0 done, and nothing is missing, different or wrong, 1 done, but something is, 2 not done.
    """


def _add(name: str, listed: Listed) -> None:
    @app.command(name, cls=Subcommand, help=listed.summary)
    def run(ctx: typer.Context) -> None:
        command: typer.Typer = getattr(import_module(listed.module), listed.app)
        command(ctx.args, prog_name=ctx.command_path)


for _name, _listed in COMMANDS.items():
    _add(_name, _listed)
