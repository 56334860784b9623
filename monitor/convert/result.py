"""What came of a conversion, the way there, and what went wrong on it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from monitor.convert.request import ConversionError, NothingRecordedError, Request
from monitor.coordinator.manifest_format import StepsRecord
from monitor.failures import LOGGER
from monitor.merge.atomic_output import MergeError
from monitor.merge.discovery import RankRun, SetAside, discover, runs_of
from monitor.merge.merge import missing_ranks

# --- What was not recorded, as far as the manifests of the ranks know.

SHOWN: Final = 10
"""Ranks; more are counted."""


def absent_from(request: Request) -> Iterator[str]:
    """A sentence for ranks that left no directory, and for the steps that a rank dropped."""
    try:
        found = discover(request.base, request.span)
    except MergeError:
        return
    jobs = [one for one in found.job_ids() if one.startswith(request.job or "")]
    runs = runs_of(found, jobs[0]) if len(jobs) == 1 else ()
    if runs and (missing := missing_ranks(runs)):
        shown = ", ".join(map(str, missing[:SHOWN])) + (f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else "")
        yield f"no directory of rank {shown}, of {runs[0].manifest.world_size} ranks"
    for run in runs:
        for reason, steps in _dropped(run):
            yield f"rank {run.rank}: {steps.count:,} steps are missing: {reason}"


def _dropped(run: RankRun) -> Iterator[tuple[str, StepsRecord]]:
    yield from run.manifest.dropped.items()
    yield from run.manifest.lost.get("csv", {}).items()


MOST_SAID: Final = 20
"""Files set aside that are named one by one."""

_NO_GUARD: Final = (
    "a process that did the work has died. In a script of your own the call has to stand under "
    "`if __name__ == '__main__':`, for each process reads the script; otherwise memory may have run out: try fewer processes."
)


@dataclass(frozen=True, slots=True)
class Converted:
    """What was written.

    Attributes:
        output: The directory of the files, or the file.
        rows: How many of the ranks' rows are in it.
        ranks: Those that rows are of.
        set_aside: Files and directories that are torn, unfinished or not ours.
        absent: What the manifests say is missing, a sentence each: ranks, and steps that were dropped.
    """

    output: Path
    rows: int
    ranks: tuple[int, ...]
    set_aside: tuple[SetAside, ...]
    absent: tuple[str, ...] = ()

    def log(self) -> Converted:
        """Name what was set aside, and what is missing."""
        for one in self.set_aside[:MOST_SAID]:
            LOGGER.warning("%s was not converted: %s", one.path, one.reason)
        if len(self.set_aside) > MOST_SAID:
            LOGGER.warning("%d more were not converted.", len(self.set_aside) - MOST_SAID)
        for absent in self.absent[:MOST_SAID]:
            LOGGER.warning("%s", absent)
        return self


@dataclass
class Gathered:
    """Grows while the work is done.

    Attributes:
        rows: Written so far.
    """

    set_aside: list[SetAside]
    rows: int = 0
    ranks: set[int] = field(default_factory=set)

    def add(self, rank: int, rows: int, set_aside: Iterable[SetAside]) -> None:
        self.set_aside += set_aside
        self.rows += rows
        if rows:
            self.ranks.add(rank)

    def converted(self, request: Request, output: Path) -> Converted:
        """What there is to say in the end.

        Raises:
            ConversionError: nothing was written.
        """
        aside = sorted(set(self.set_aside), key=lambda one: (one.path, one.reason))
        if not self.rows:
            nothing = ConversionError if aside or request.kinds else NothingRecordedError
            raise nothing(_nothing(request, aside))
        return Converted(output, self.rows, tuple(sorted(self.ranks)), tuple(aside), tuple(absent_from(request)))


def _nothing(request: Request, aside: Sequence[SetAside]) -> str:
    what = (
        f"{request.base} has no CSV rows of {' or '.join(request.kinds)}"
        if request.kinds
        else f"{request.base} has no CSV rows"
    )
    return f"{what}. Set aside: {aside[0].path}: {aside[0].reason} ({len(aside)} in all)" if aside else what


@contextmanager
def plainly() -> Iterator[None]:
    """What goes wrong within is said as a ``ConversionError``; what the operating system does not allow as an ``OSError``."""
    try:
        yield
    except MergeError as error:
        dead = isinstance(error.__cause__, BrokenProcessPool)
        raise ConversionError(_NO_GUARD if dead else str(error)) from error
    except sqlite3.Error as error:
        raise ConversionError(f"the database cannot be written: {error}") from error


@contextmanager
def bar() -> Iterator[Progress]:
    """Shows in a terminal how far the work is."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress
