"""``trainermon dump-recover``: completes dumps that killed processes have left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import typer
from rich.console import Console

from monitor.cli import Command, DirectoryOption, Version, one_directory
from monitor.coordinator.output import remove_drafts
from monitor.dump.files import DATA, FILE, OtherDumpError, damage_found, finish, is_being_written, is_directory
from monitor.terminal import CLEAN, FLAWED, NOTHING, counted, say


class RecoveryResult(NamedTuple):
    """The result for one rank's step.

    Attributes:
        entries: The number of entries in the completed files; None if the step was left as it is.
        reason: Why the step was left as it is.
        damaged: The number of damaged lines in the records. If there are any, the records were kept.
    """

    directory: Path
    entries: int | None
    reason: str = ""
    damaged: int = 0


def recover(directory: Path) -> Iterator[RecoveryResult]:
    """Complete every unfinished step below ``directory``. Links are not followed."""
    for records in sorted(directory.rglob(FILE)):
        yield _recover_one(records)


def _recover_one(records: Path) -> RecoveryResult:
    directory = records.parent
    try:
        if is_being_written(records):
            return RecoveryResult(directory, None, "a process is still writing to it")
        for place in (directory, directory / DATA):
            if is_directory(place):
                remove_drafts(place)
        entries, damaged = finish(directory, check=True)
        return RecoveryResult(directory, entries, damaged=damaged)
    except (OSError, OtherDumpError) as error:
        return RecoveryResult(directory, None, str(error))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, MemoryError) as error:
        return RecoveryResult(directory, None, f"it holds content that no dump writes: {error!r}")


# --- The command.

COMPLETE: Final = ("dump.json", "debug.json")
"""A completed dump has one of these files."""

app: Final = Command()


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
            say(Console(), f"{counted(one.entries, 'entry', 'entries')} in {one.directory}")
            if one.damaged:
                failed = True
                say(errors, f"incomplete: {damage_found(one.damaged, one.directory)}", style="yellow")
    if not found and not any(True for name in COMPLETE for _ in base.rglob(name)):
        say(errors, f"Not looked at: {base} holds no precision dump.", style="yellow")
        raise typer.Exit(FLAWED)
    if not found:
        say(Console(), "nothing is left to recover")
    raise typer.Exit(FLAWED if failed else CLEAN)
