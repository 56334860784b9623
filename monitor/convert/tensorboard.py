"""CSV to TensorBoard: the curves that the format ``tensorboard`` would have written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Final

import pyarrow as pa
from pyarrow.compute import call_function  # type: ignore[attr-defined]

from monitor.convert import conversion
from monitor.merge.discovery import SetAside
from monitor.merge.execution import draft_of, engine, run_in_order
from monitor.sinks.tensorboard import BLOCK_ROWS, EventFile, scalar_values
from monitor.stats.ops import TEXT_OPS

ENDING: Final = "csv2tensorboard_by_step"


@dataclass(frozen=True, slots=True)
class EventTask:
    """A course, and the directory for its file of events."""

    course: conversion.Course
    directory: Path


def csv2tensorboard_by_step(
    monitor_path: str | PathLike[str],
    time_start: str | None = None,
    time_end: str | None = None,
    process_num: int = 1,
    data_type_list: Sequence[str] | None = None,
    output_dirpath: str | PathLike[str] | None = None,
    job: str | None = None,
) -> conversion.Converted:
    """Write the CSV files of a job as files of events, ``rank{rank}/{kind}/events.out.tfevents.…``, over steps.

    The tags are those of the format ``tensorboard``. The output appears whole or not at all, and is the same for any number of
    processes.

    Args:
        monitor_path: The directory that the ranks' directories lie in.
        time_start: Only directories from this timestamp on (``Dec03_21-34-40``); None: from the first.
        time_end: Only directories up to this timestamp, itself included; None: to the last. Where it lies before
            ``time_start``, New Year lies between them.
        process_num: How many processes do the work.
        data_type_list: Only these kinds; None: all.
        output_dirpath: A directory that is not there yet, or is empty; None: ``{time}_csv2tensorboard_by_step`` in
            ``monitor_path``.
        job: Beginning of the job's id, where there are several in that range of time.

    Returns:
        What was written, and the files that were set aside, which are also logged.

    Raises:
        ConversionError: nothing was converted, because of what the message says.
        OSError: the disk does not allow it.
    """
    request = conversion.Request.of(
        monitor_path, time_start, time_end, process_num, data_type_list, output_dirpath, job, ENDING
    )
    return to_events(request).log()


def to_events(request: conversion.Request) -> conversion.Converted:
    """As ``csv2tensorboard_by_step``, and logs nothing."""
    with conversion.plainly():
        courses, aside = conversion.courses_of(request)
        gathered = conversion.Gathered(aside)
        with draft_of(request.output, "conversion", "another output directory") as draft:
            draft.mkdir()
            tasks = [EventTask(one, draft / f"rank{one.rank}" / one.kind) for one in courses]
            with engine(min(request.workers, len(tasks) or 1)) as (executor, workers), conversion.bar() as shown:
                results = run_in_order(executor, workers, write_course, tasks)
                for task, (rows, torn) in zip(tasks, shown.track(results, len(tasks), description="converting"), strict=True):
                    gathered.add(task.course.rank, rows, torn)
            return gathered.converted(request, request.output)


def write_course(task: EventTask) -> tuple[int, list[SetAside]]:
    """Write one file. Returns how many rows are in it, and the files that have none to give.

    Raises:
        OSError: it cannot be written.
    """
    place = f"/rank{task.course.rank}/{task.course.kind}"
    written = 0
    aside: list[SetAside] = []
    with closing(EventFile(lambda: task.directory / _file_name(task.course))) as file:
        for record in task.course.records:
            rows, torn = conversion.read_record(record)
            aside += torn
            for step, measured in conversion.steps_of(rows):
                file.write(step, _values(measured, place), _time_of(record))
            written += len(rows)
    return written, aside


def _file_name(course: conversion.Course) -> str:
    """Found by TensorBoard, and the same whenever and wherever it is made."""
    return f"events.out.tfevents.{int(_time_of(course.records[0])):010d}.rank{course.rank}.{course.kind}"


def _time_of(record: conversion.Record) -> float:
    """When its rows were written: about when they were measured, which they do not say."""
    return max(shard.path.stat().st_mtime for _, shard in record.files)


def _values(rows: pa.Table, place: str) -> Iterator[memoryview]:
    """The scalars of one step, an op at a time. What was not measured leaves none."""
    for block in _blocks(rows):
        tags = _tags(block, place)
        for op in conversion.ops_of(block):
            if op not in TEXT_OPS:
                yield scalar_values(tags, op, *conversion.numbers_of(block[op]))


def _blocks(rows: pa.Table) -> Iterator[pa.Table]:
    return (rows.slice(start, BLOCK_ROWS) for start in range(0, len(rows), BLOCK_ROWS))


def _tags(rows: pa.Table, place: str) -> pa.BinaryArray:
    """Of each row: ``Series.tag``."""
    nothing = pa.scalar("", type=pa.string())
    micro_step = call_function("binary_join_element_wise", [":", rows["micro_step"].cast(pa.string()), nothing])
    parts = [rows["vpp_stage"].cast(pa.string()), ":", rows["name"], call_function("coalesce", [micro_step, nothing]), place]
    return call_function("binary_join_element_wise", [*parts, nothing]).combine_chunks().cast(pa.binary())
