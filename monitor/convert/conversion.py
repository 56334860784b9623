"""What all conversions have in common: their arguments, the rows that they convert, and what was not recorded."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from os import PathLike
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from monitor.coordinator.output import timestamp_of
from monitor.coordinator.resume import Span, span_between
from monitor.failures import LOGGER
from monitor.merge.discovery import SetAside
from monitor.merge.execution import MergeError
from monitor.query.batches import SHOWN_KINDS, Batch, batches, kinds_in
from monitor.query.opened import missing_in, open_source
from monitor.query.sources import QueryError, RunSource

AnyPath = str | PathLike[str]

# --- What stops a conversion.


class ConversionError(ValueError):
    """Nothing was converted. The message says what is wrong, and what to change."""


class NothingRecordedError(ConversionError):
    """The run can be read, and has no rows of ranks."""


# --- Arguments as users give them.


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
    if unknown := [one for one in asked if one not in SHOWN_KINDS]:
        raise ConversionError(f"there is no data type {unknown[0]!r}. There are {', '.join(SHOWN_KINDS)}.")
    return tuple(kind for kind in SHOWN_KINDS if kind in asked)


# --- The rows, and what is missing.

MOST_SAID: Final = 20
"""Files set aside that are named one by one."""

_NO_GUARD: Final = (
    "a worker process has died. In a script of your own, put the call under `if __name__ == '__main__':`, because each worker "
    "process reads the script. If it is there, memory may have run out: try fewer processes."
)


@dataclass(frozen=True, slots=True)
class Converted:
    """The result of a conversion.

    Attributes:
        output: The directory of the files, or the file.
        rows: How many of the ranks' rows are in it.
        ranks: Those that rows are of.
        set_aside: Files and directories that are torn, unfinished or not ours.
        absent: What manifests, or the report of a merge, say is missing, a sentence each.
    """

    output: Path
    rows: int
    ranks: tuple[int, ...]
    set_aside: tuple[SetAside, ...]
    absent: tuple[str, ...] = ()

    def log(self) -> Converted:
        """Name what was set aside, and what is missing."""
        for line in self.said():
            LOGGER.warning("%s", line)
        return self

    def said(self) -> Iterator[str]:
        """What was set aside, and what is missing, a line each."""
        for what, lines in (("set aside: ", [f"{one.path}: {one.reason}" for one in self.set_aside]), ("", self.absent)):
            yield from (f"{what}{line}" for line in lines[:MOST_SAID])
            if len(lines) > MOST_SAID:
                yield f"{what}{len(lines) - MOST_SAID} more"


@dataclass
class Conversion:
    """A run, what to convert of it, and what became of that so far.

    Attributes:
        kinds: As files show them; None: all.
        workers: Processes.
        output: A directory, which need not be there.
        rows: Written so far, by rank.
    """

    base: Path
    source: RunSource
    kinds: tuple[str, ...] | None
    workers: int
    output: Path
    rows: Counter[int] = field(default_factory=Counter)
    set_aside: list[SetAside] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        monitor_path: AnyPath,
        time_start: str | None,
        time_end: str | None,
        process_num: int,
        data_type_list: Sequence[str] | None,
        output_dirpath: AnyPath | None,
        job: str | None,
        ending: str,
    ) -> Conversion:
        """Open a run.

        Args:
            ending: Of the name of the directory to write where ``output_dirpath`` is not given; the time stands before it.

        Raises:
            ConversionError: an argument cannot be what was meant, or there is nothing to open.
        """
        base, workers = Path(monitor_path).expanduser(), natural("process_num", process_num)
        output = base / f"{timestamp_of(datetime.now())}_{ending}" if output_dirpath is None else Path(output_dirpath)
        span, kinds = _span(time_start, time_end), _kinds(data_type_list)
        with plainly():
            return cls(base, open_source(base, job, span), kinds, workers, output.expanduser())

    def batches(self, rows: int) -> list[Batch]:
        """All that is asked for, by kind.

        Args:
            rows: Of a batch, about.
        """
        asked = [kind for kind in kinds_in(self.source) if self.kinds is None or kind in self.kinds]
        return [batch for kind in asked for batch in batches(self.source, kind, rows)]

    def add(self, rows: Mapping[int, int], set_aside: Iterable[SetAside]) -> None:
        """Take in what a task has written, and the files that had nothing to give it."""
        self.rows.update(rows)
        self.set_aside += set_aside

    def converted(self, output: Path) -> Converted:
        """The result of the conversion, with what is missing.

        Raises:
            ConversionError: nothing was written.
        """
        aside = sorted({*self.source.set_aside, *self.set_aside}, key=lambda one: (one.path, one.reason))
        if not self.rows.total():
            kinds = f" of {' or '.join(self.kinds)}" if self.kinds else ""
            more = f". Set aside: {aside[0].path}: {aside[0].reason} ({len(aside)} in all)" if aside else ""
            nothing = ConversionError if aside or kinds else NothingRecordedError
            raise nothing(f"{self.base} has no rows{kinds}{more}")
        told = self.source.told()
        absent = missing_in({**told, "set_aside": _NONE} if aside else told)
        return Converted(output, self.rows.total(), tuple(sorted(+self.rows)), tuple(aside), tuple(absent))


_NONE: Final = {"count": 0, "listed": []}


@contextmanager
def plainly() -> Iterator[None]:
    """A block whose errors are raised as ``ConversionError``, and those of the operating system as ``OSError``."""
    try:
        yield
    except (MergeError, QueryError) as error:
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
