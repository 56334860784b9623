"""``monitor-dump-recover``: dumps of processes that were killed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from monitor.cli_arguments import DirectoryOption, Version, command_app, one_directory
from monitor.dump.assembly import damage_found
from monitor.dump.recovery import recover
from monitor.terminal import say

CLEAN, FLAWED, NOTHING = 0, 1, 2
"""Exit statuses: every dump is complete; one could not be completed, has lost records, or is not there; no such directory."""

COMPLETE: Final = ("dump.json", "debug.json")
"""Of which a dump that was completed has one."""

app: Final = command_app()


@app.command()
def monitor_dump_recover(
    directory: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="A dump_path, or a directory in it.", show_default=False)
    ] = None,
    directory_option: DirectoryOption = None,
    _version: Version = False,
) -> None:
    """Complete the precision dump of a process that was killed.

    The records that the process left become dump.json and the files beside it.

    Exit status: 0 everything is complete now, 1 something could not be completed, records were damaged, or there is no dump,
    2 there is no such directory.
    """
    base = one_directory(directory, directory_option)
    errors = Console(stderr=True)
    if not base.is_dir():
        say(errors, f"{base} is not a directory. Name a dump_path.", style="red")
        raise typer.Exit(NOTHING)
    failed = False
    found = False
    for one in recover(base):
        found = True
        if one.entries is None:
            failed = True
            say(errors, f"left as it is: {one.directory}: {one.reason}", style="yellow")
        else:
            say(Console(), f"{one.entries:,} entries in {one.directory}")
            if one.damaged:
                failed = True
                say(errors, f"incomplete: {damage_found(one.damaged, one.directory)}", style="yellow")
    if not found and not any(True for name in COMPLETE for _ in base.rglob(name)):
        say(errors, f"Not looked at: {base} holds no precision dump.", style="yellow")
        raise typer.Exit(FLAWED)
    if not found:
        say(Console(), "nothing is left to recover")
    raise typer.Exit(FLAWED if failed else CLEAN)
