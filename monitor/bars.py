"""Progress bars of commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress as Bars, TaskID, TextColumn

Progress = Callable[[str, int, int], None]
"""Told what is done, how many parts of it, and of how many."""


def silent(_what: str, _done: int, _total: int) -> None:
    """Nothing is shown."""


@contextmanager
def bars(*, quiet: bool = False) -> Iterator[Progress]:
    """Show a bar for each thing that is done, on standard error. They vanish at the end.

    Args:
        quiet: Show nothing, as where standard error is not a terminal.
    """
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield silent
        return
    columns = (TextColumn("{task.description:<16}"), BarColumn(), MofNCompleteColumn())
    with Bars(*columns, console=console, transient=True) as shown:
        tasks: dict[str, TaskID] = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = shown.add_task(what, total=total)
            shown.update(tasks[what], completed=done, total=total)

        yield progress
