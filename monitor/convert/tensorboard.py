"""A run to TensorBoard: the curves that the format ``tensorboard`` would have written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final

import pyarrow as pa
from pyarrow.compute import call_function  # type: ignore[attr-defined]

from monitor.convert import conversion
from monitor.merge.discovery import SetAside
from monitor.merge.execution import draft_of, engine, run_in_order
from monitor.query.batches import Batch, numbers_in, ops_in, runs_in
from monitor.sinks.tensorboard import BLOCK_ROWS, EventFile, scalar_values
from monitor.stats.ops import TEXT_OPS

ENDING: Final = "csv2tensorboard_by_step"


BATCH_ROWS: Final = 20_000
"""What a process holds at a time, about, unless a single file has more."""


@dataclass(frozen=True, slots=True)
class EventTask:
    """All batches of a kind on some ranks, and the directory for their files of events."""

    batches: tuple[Batch, ...]
    directory: Path


def csv2tensorboard_by_step(
    monitor_path: conversion.AnyPath,
    time_start: str | None = None,
    time_end: str | None = None,
    process_num: int = 1,
    data_type_list: Sequence[str] | None = None,
    output_dirpath: conversion.AnyPath | None = None,
    job: str | None = None,
) -> conversion.Converted:
    """Write the rows of a run as files of events, ``rank{rank}/{kind}/events.out.tfevents.…``, over steps.

    The tags are those of the format ``tensorboard``. The output appears whole or not at all, and is the same for any number of
    processes.

    Args:
        monitor_path: The directory that the ranks' directories lie in, or a merged set.
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
    asked = (time_start, time_end, process_num, data_type_list, output_dirpath, job)
    return to_events(conversion.Conversion.of(monitor_path, *asked, ENDING)).log()


def to_events(made: conversion.Conversion) -> conversion.Converted:
    """Convert as ``csv2tensorboard_by_step`` does, without logging."""
    with conversion.plainly():
        courses = groupby(made.batches(BATCH_ROWS), key=lambda one: (one.kind, one.ranks))
        with draft_of(made.output, "conversion", "another output directory") as draft:
            draft.mkdir()
            tasks = [EventTask(tuple(some), draft) for _, some in courses]
            with engine(min(made.workers, len(tasks) or 1)) as (executor, workers), conversion.bar() as shown:
                results = run_in_order(executor, workers, write_course, tasks)
                for rows, torn in shown.track(results, len(tasks), description="converting"):
                    made.add(rows, torn)
            return made.converted(made.output)


def write_course(task: EventTask) -> tuple[dict[int, int], list[SetAside]]:
    """Write a file for each rank. Returns how many rows are in each, and the files that have none to give.

    Raises:
        OSError: a file cannot be written.
    """
    written: dict[int, int] = {}
    aside: list[SetAside] = []
    files: dict[int, EventFile] = {}
    with ExitStack() as opened:
        for batch in task.batches:
            (rows, torn), time_of = batch.read(), batch.times()
            aside += torn
            for rank, of_rank in runs_in(rows, "rank"):
                place = f"/rank{rank}/{batch.kind}"
                if rank not in files:
                    file = _event_file(task.directory, rank, batch.kind, time_of(of_rank["step"][0].as_py()))
                    files[rank] = opened.enter_context(closing(file))
                for step, measured in runs_in(of_rank, "step"):
                    files[rank].write(step, _values(measured, place), time_of(step))
                written[rank] = written.get(rank, 0) + len(of_rank)
    return written, aside


def _event_file(directory: Path, rank: int, kind: str, begun: float) -> EventFile:
    """Found by TensorBoard, and the same whenever and wherever it is made."""
    name = f"events.out.tfevents.{int(begun):010d}.rank{rank}.{kind}"
    return EventFile(lambda: directory / f"rank{rank}" / kind / name)


def _values(rows: pa.Table, place: str) -> Iterator[memoryview]:
    """The scalars of one step, an op at a time. What was not measured leaves none."""
    for start in range(0, len(rows), BLOCK_ROWS):
        block = rows.slice(start, BLOCK_ROWS)
        tags = _tags(block, place)
        for op in ops_in(block):
            if op not in TEXT_OPS:
                yield scalar_values(tags, op, *numbers_in(block[op]))


def _tags(rows: pa.Table, place: str) -> pa.BinaryArray:
    """The tag of each row (``Series.tag``)."""
    nothing = pa.scalar("", type=pa.string())
    micro_step = call_function("binary_join_element_wise", [":", rows["micro_step"].cast(pa.string()), nothing])
    parts = [rows["vpp_stage"].cast(pa.string()), ":", rows["name"], call_function("coalesce", [micro_step, nothing]), place]
    return call_function("binary_join_element_wise", [*parts, nothing]).combine_chunks().cast(pa.binary())
