"""What all conversions have in common: their arguments, their results, and what was not recorded."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from os import PathLike
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from monitor.coordinator.manifest_format import StepsRecord
from monitor.coordinator.output import timestamp_of
from monitor.coordinator.resume import Span, span_between
from monitor.failures import LOGGER
from monitor.merge.discovery import RankRun, SetAside, discover, runs_of
from monitor.merge.execution import MergeError
from monitor.merge.merge import missing_ranks
from monitor.series import KINDS, shown_kind

# --- What stops a conversion.


class ConversionError(ValueError):
    """Nothing was converted. The message says what is wrong, and what to change."""


class NothingRecordedError(ConversionError):
    """The ranks' directories can be read, and hold no CSV rows."""


DATA_TYPES: Final = tuple(dict.fromkeys(map(shown_kind, KINDS)))
"""What files are called after."""


@dataclass(frozen=True, slots=True)
class Request:
    """What to convert, by how many processes.

    Attributes:
        base: The directory that the ranks' directories lie in.
        span: Timestamps of directories, the first and the last; None: all.
        job: Beginning of a job's id; None where there is only one.
        kinds: In the order of ``DATA_TYPES``; None: all.
        output: A directory, which need not be there.
    """

    base: Path
    span: Span | None
    job: str | None
    kinds: tuple[str, ...] | None
    workers: int
    output: Path

    @classmethod
    def of(
        cls,
        monitor_path: str | PathLike[str],
        time_start: str | None,
        time_end: str | None,
        process_num: int,
        data_type_list: Sequence[str] | None,
        output_dirpath: str | PathLike[str] | None,
        job: str | None,
        ending: str,
    ) -> Request:
        """The arguments as users give them.

        Args:
            ending: Of the name of the directory to write where ``output_dirpath`` is not given; the time stands before it.

        Raises:
            ConversionError: one of them cannot be what was meant.
        """
        base = Path(monitor_path).expanduser()
        output = (
            base / f"{timestamp_of(datetime.now())}_{ending}" if output_dirpath is None else Path(output_dirpath).expanduser()
        )
        span, kinds = _span(time_start, time_end), _kinds(data_type_list)
        return cls(base, span, job, kinds, natural("process_num", process_num), output)


def natural(name: str, value: int) -> int:
    """``value``, where it is an integer from 1 on.

    Raises:
        ConversionError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConversionError(f"{name} is {value!r}. Give an integer from 1 on.")
    return value


def _span(start: str | None, end: str | None) -> Span | None:
    for name, value in (("time_start", start), ("time_end", end)):
        if value is not None and not isinstance(value, str):
            raise ConversionError(f"{name} is {value!r}. Give a timestamp like 'Dec03_21-34-40', or None.")
    try:
        return span_between(start, end)
    except ValueError as error:
        raise ConversionError(str(error)) from error


def _kinds(asked: Sequence[str] | None) -> tuple[str, ...] | None:
    if not asked:
        return None
    if isinstance(asked, str):
        raise ConversionError(f"data_type_list is the text {asked!r}. Give a list: [{asked!r}].")
    if unknown := [one for one in asked if one not in DATA_TYPES]:
        raise ConversionError(f"there is no data type {unknown[0]!r}. There are {', '.join(DATA_TYPES)}.")
    return tuple(kind for kind in DATA_TYPES if kind in asked)


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
