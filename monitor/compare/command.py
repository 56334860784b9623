"""``monitor-compare``: where two runs part."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from monitor.cli_arguments import Version, command_app
from monitor.compare import dumps, runs
from monitor.compare.errors import ComparisonError
from monitor.compare.findings import Compared
from monitor.compare.report import EVERY, described, largest, table, write_csv
from monitor.terminal import say

SAME, DIFFERENT, NOTHING = 0, 1, 2
"""Exit statuses: all is the same; something differs, or there was no tensor to compare; nothing was compared."""

app: Final = command_app()


@app.command()
def monitor_compare(
    left: Annotated[Path, typer.Argument(metavar="A", help="A dump_path, a rank's step in it, or the output of a run.")],
    right: Annotated[Path, typer.Argument(metavar="B", help="The directory to compare it with.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write every difference to this CSV file.")
    ] = None,
    tolerance: Annotated[float, typer.Option(min=0.0, help="Relative differences up to this are not reported.")] = 0.0,
    _version: Version = False,
) -> None:
    """Compare two precision dumps, or two monitored runs.

    Of runs it compares what they recorded as CSV. It shows the first tensor in execution order that differs, and the largest
    differences.

    Exit status: 0 they are the same, 1 they differ, or there is no tensor to compare, 2 nothing was compared.
    """
    try:
        found = within(compare(left, right), tolerance)
        if output is not None:
            write_csv(output, found)
    except (ComparisonError, OSError) as error:
        say(Console(stderr=True), f"Nothing was compared: {error}", style="red")
        raise typer.Exit(NOTHING) from error
    _show(found)
    raise typer.Exit(DIFFERENT if found.findings or found.is_empty else SAME)


def compare(left: Path, right: Path) -> Compared:
    """Dumps as dumps, and anything else as runs.

    Raises:
        ComparisonError: There is nothing that could be compared.
    """
    kinds = [dumps.is_dump(side) for side in (left, right)]
    if any(kinds):
        return dumps.compare(left, right)
    return runs.compare(left, right)


def within(compared: Compared, tolerance: float) -> Compared:
    """Without the differences that are no larger. One that is no number is larger than any."""
    kept = [one for one in compared.findings if one.difference is None or one.difference.size > tolerance or not tolerance]
    return replace(compared, findings=kept)


def _show(found: Compared) -> None:
    console = Console()
    if found.is_empty:
        say(console, "Not looked at: there is no tensor that both sides have in the same step.")
        return
    if not found.findings:
        say(console, f"the same: {found.tensors:,} tensors")
        return
    say(console, f"{len(found.findings):,} differences among {found.tensors:,} tensors")
    say(console, f"first: {described(found.findings[0])}", style="bold")
    if worst := largest(found)[:EVERY]:
        console.print(table("largest", worst))
