"""The command ``trainermon run``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from monitor.attaching import HEALTH, configured
from monitor.cli import Command, Version
from monitor.config.loading import ConfigError, load_config
from monitor.launching.imports import CONFIG_VARIABLE

app = Command()


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND...", help="The command, with its arguments.")],
    config: Annotated[
        str, typer.Option(metavar="FILE|PRESET", help="A configuration, or the name of one that comes with the monitor.")
    ] = HEALTH,
    _version: Version = False,
) -> None:
    """Monitor a command without a change of its code.

    The monitor attaches to the model of each optimizer of PyTorch or MindSpore after its first step, in every process that the
    command starts. Rows begin with the second step, or with the third if a step has more micro-batches than the first one had
    backwards. If it is not clear which model an optimizer trains, training continues without the monitor,
    with a warning.

      trainermon run torchrun --nproc-per-node 8 train.py --steps 1000

      trainermon run --config first-fault python train.py

    Exit status: 0 the command ended with 0, 1 or another number is that of the command, 2 also if it was not started.
    """
    path = Path(config).expanduser()
    try:
        if path.is_file():
            load_config(path)
            config = str(path.absolute())
        else:
            configured(config, {})
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    site = str(Path(__file__).parent / "site")
    given = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one and one != site]
    environment = {**os.environ, CONFIG_VARIABLE: config, "PYTHONPATH": os.pathsep.join([site, *given])}
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        typer.echo(f"{command[0]} cannot be started: {error.strerror}", err=True)
        raise typer.Exit(2) from None


if __name__ == "__main__":
    app()
