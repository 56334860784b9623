"""CSV to SQLite: all rows of a job in tables by kind and range of steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Final

from monitor.convert.cells import CellTask, prepare
from monitor.convert.outcome import Converted, Gathered, bar, plainly
from monitor.convert.recorded import Course, Record, courses_of
from monitor.convert.request import Request, natural
from monitor.convert.tables import MetricTables
from monitor.merge.atomic_output import draft_of
from monitor.merge.executors import engine, run_in_order

ENDING: Final = "csv2db"
DATABASE: Final = "monitor_metrics.db"

BATCH_ROWS: Final = 100_000
"""What a process reads before it hands it on, about; unless a single record has more."""


@dataclass(frozen=True, slots=True)
class CSV2DBConfig:
    """What ``csv2db`` is to convert.

    Attributes:
        monitor_path: The directory that the ranks' directories lie in.
        time_start: Only directories from this timestamp on (``Dec03_21-34-40``); None: from the first.
        time_end: Only directories up to this timestamp, itself included; None: to the last. Where it lies before
            ``time_start``, New Year lies between them.
        process_num: How many processes read. One writes.
        data_type_list: Only these kinds; None: all.
        step_partition: Steps that share a table.
        output_dirpath: Directory of the database; None: ``{time}_csv2db`` in ``monitor_path``.
        job: Beginning of the job's id, where there are several in that range of time.
    """

    monitor_path: str | PathLike[str]
    time_start: str | None = None
    time_end: str | None = None
    process_num: int = 1
    data_type_list: Sequence[str] | None = None
    step_partition: int = 500
    output_dirpath: str | PathLike[str] | None = None
    job: str | None = None


def csv2db(config: CSV2DBConfig) -> Converted:
    """Write the CSV files of a job as a database, ``monitor_metrics.db``. ``docs/converting.md`` describes its tables.

    It appears whole or not at all, and is the same, byte for byte, for any number of processes.

    Returns:
        What was written, and the files that were set aside, which are also logged.

    Raises:
        ConversionError: nothing was converted, because of what the message says.
        OSError: the disk does not allow it.
    """
    return to_database(*checked(config)).log()


def checked(config: CSV2DBConfig) -> tuple[Request, int]:
    """What to convert, and how many steps share a table.

    Raises:
        ConversionError: a field cannot be what was meant.
    """
    request = Request.of(
        config.monitor_path,
        config.time_start,
        config.time_end,
        config.process_num,
        config.data_type_list,
        config.output_dirpath,
        config.job,
        ENDING,
    )
    return request, natural("step_partition", config.step_partition)


def to_database(request: Request, step_partition: int) -> Converted:
    """As ``csv2db``, and logs nothing."""
    with plainly():
        courses, aside = courses_of(request)
        gathered = Gathered(aside)
        tasks = [task for course in courses for task in _tasks(course)]
        with _draft(request.output) as draft, bar() as shown:
            processes = min(request.workers, len(tasks) or 1)
            with MetricTables(draft, step_partition) as tables, engine(processes) as (executor, workers):
                results = run_in_order(executor, workers, prepare, tasks)
                for cells in shown.track(results, len(tasks), description="converting"):
                    gathered.add(cells.rank, tables.insert(cells), cells.set_aside)
                for index in shown.track(tables.indices(), description="indexing"):
                    tables.make(index)
            return gathered.converted(request, request.output / DATABASE)


def _tasks(course: Course) -> Iterator[CellTask]:
    """Its records in lots of about ``BATCH_ROWS``."""
    lot: list[Record] = []
    rows = 0
    for record in course.records:
        if lot and rows + record.rows > BATCH_ROWS:
            yield CellTask(course.kind, course.rank, tuple(lot))
            lot, rows = [], 0
        lot.append(record)
        rows += record.rows
    yield CellTask(course.kind, course.rank, tuple(lot))


@contextmanager
def _draft(directory: Path) -> Iterator[Path]:
    """The path to write the database at. It joins what is in ``directory``, or appears with it."""
    other = "another output directory"
    if directory.is_dir():
        with draft_of(directory / DATABASE, "conversion", other) as draft:
            yield draft
    else:
        with draft_of(directory, "conversion", other) as draft:
            draft.mkdir()
            yield draft / DATABASE
