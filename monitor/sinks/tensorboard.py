"""The ``tensorboard`` format: an event file that grows by a step at a time."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Iterator
from itertools import chain, count
from pathlib import Path
from typing import Final

from tensorboard.compat.proto.event_pb2 import Event, SessionLog

from monitor.sinks.growing import GrowingFile, opened
from monitor.sinks.heatmaps import Heatmaps
from monitor.sinks.protocol import SinkContext
from monitor.sinks.records import record
from monitor.sinks.scalars import Scalars, summary_field
from monitor.sinks.tensorboard_histograms import Histograms
from monitor.stats.rows import StepRows

FORMAT_VERSION: Final = "brain.Event:2"

MOST_BYTES: Final = 8 << 20
"""Of an event. A step of very many rows is several events of one step."""


class TensorBoardSink:
    """Writes ``events.out.tfevents.…`` into the rank's directory: of each step a scalar for each value and a histogram for each
    row that has one, and now and then pictures of how histograms have changed.

    A step is in the file whole or not at all, and can be read at once. Of a step that is written again TensorBoard shows the
    new one, and none of those after it that were there before.

    Raises:
        OSError: from every method, if the disk, the directory or the number of open files does not allow what was asked. The
            file then holds whole steps, and the next step can be written as soon as the cause has passed.
    """

    def __init__(self, context: SinkContext) -> None:
        self._scalars = Scalars(context.series, context.rank)
        self._histograms = Histograms(context.series, context.rank)
        self._heatmaps = Heatmaps(context.series, context.rank)
        self._file = EventFile(lambda: new_path(context.directory))

    def write(self, rows: StepRows) -> None:
        """Add one step. What was not measured, and what single precision cannot hold, leaves no scalar."""
        values = chain(self._scalars.of(rows), self._histograms.of(rows), self._heatmaps.of(rows))
        self._file.write(rows.step, values, time.time())
        self._heatmaps.keep()

    def flush(self) -> None:
        """Nothing to do: what was taken in is visible."""

    def close(self) -> None:
        """Bring the pictures up to date and let go of the file."""
        try:
            self._file.add(self._heatmaps.rest(), time.time())
            self._heatmaps.keep()
        finally:
            self._file.close()


class EventFile:
    """A file of events that holds whole steps. It is made when there is a first one.

    Args:
        new_path: Where, of a file that is not there yet.

    Raises:
        OSError: from every method, as from those of ``TensorBoardSink``.
    """

    def __init__(self, new_path: Callable[[], Path]) -> None:
        self._new_path = new_path
        self._file: GrowingFile | None = None
        self._last: int | None = None

    def write(self, step: int, values: Iterator[memoryview], wall_time: float) -> None:
        """Add one step.

        Args:
            values: Fields ``value`` of a summary, as ``scalar_values`` spells them.
            wall_time: Seconds since 1970.
        """
        file = self._open_file()
        self._append(file, chain(self._heads(step, wall_time), _events(step, values, wall_time)))
        self._last = step

    def add(self, values: Iterator[memoryview], wall_time: float) -> None:
        """Add to the step that was written last. Nothing happens where no file is open, or somebody has removed it."""
        if self._file is not None and self._last is not None and not self._file.gone():
            self._append(self._file, _events(self._last, values, wall_time))

    def close(self) -> None:
        """Let go of the file."""
        file, self._file = self._file, None
        if file is not None:
            file.release()

    def _append(self, file: GrowingFile, events: Iterator[bytes]) -> None:
        try:
            for event in events:
                file.write(record(event))
        except BaseException:
            self._forget(file)
            raise
        file.keep()

    def _heads(self, step: int, wall_time: float) -> Iterator[bytes]:
        if self._last is None:
            yield Event(wall_time=wall_time, file_version=FORMAT_VERSION).SerializeToString()
        if self._last is None or step <= self._last:
            begun = SessionLog(status=SessionLog.START)
            yield Event(wall_time=wall_time, step=step, session_log=begun).SerializeToString()

    def _open_file(self) -> GrowingFile:
        if self._file is not None and self._file.gone():
            directory = Path(self._file.path).parent
            self._drop(self._file)
            raise FileNotFoundError(errno.ENOENT, "removed while it was being written", str(directory))
        if self._file is None:
            path = self._new_path()
            self._file, self._last = GrowingFile(path, opened(path, os.O_CREAT | os.O_EXCL)), None
        return self._file

    def _forget(self, file: GrowingFile) -> None:
        if self._last is None:
            self._drop(file)
        else:
            file.forget()

    def _drop(self, file: GrowingFile) -> None:
        file.discard()
        self._file = None


def new_path(directory: Path) -> Path:
    """TensorBoard reads the files of a directory in the order of their names, so these begin with the time."""
    stem = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
    paths = (directory / f"{stem}.{number}" for number in count())
    return next(path for path in paths if not os.path.lexists(path))


def _events(step: int, values: Iterator[memoryview], wall_time: float) -> Iterator[bytes]:
    head = Event(wall_time=wall_time, step=step).SerializeToString()
    for some in _gathered(values):
        yield head + summary_field(some)


def _gathered(values: Iterator[memoryview]) -> Iterator[list[memoryview]]:
    """In lists of at most ``MOST_BYTES``, or of one."""
    gathered: list[memoryview] = []
    for some in values:
        if gathered and sum(map(len, gathered)) + len(some) > MOST_BYTES:
            yield gathered
            gathered = []
        gathered.append(some)
    if gathered:
        yield gathered
