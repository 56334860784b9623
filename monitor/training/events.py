"""Training metrics in TensorBoard: scalars and texts in a file of events that grows."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Final

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text import metadata
from tensorboard.util.tensor_util import make_tensor_proto

from monitor.sinks.files import GrowingFile, opened
from monitor.sinks.tensorboard import FORMAT_VERSION, new_path, record
from monitor.sinks.text_cache import encodable
from monitor.training.scalars import Scalar

AGAINST_SAMPLES: Final = "-vs-samples"


class EventWriter:
    """Writes ``events.out.tfevents.…`` into a directory, which is made with the first event. Every run has a file of its own.

    Not marked as a restart: TensorBoard would take that for steps and samples alike, and hide what was shown against samples.

    Args:
        directory: Of the rank.
        queue_size: How many events are held before they are written.

    Raises:
        OSError: from every method, if the disk does not allow what was asked. Events that could not be written are lost, those
            in the file stay whole, and the next ones are tried.
    """

    def __init__(self, directory: Path, queue_size: int) -> None:
        self._directory = directory
        self._queue_size = queue_size
        self._held: list[bytes] = []
        self._file: GrowingFile | None = None

    def scalars(self, scalars: Sequence[Scalar]) -> None:
        """Add numbers, each against its step and, where it says so, against samples."""
        now = time.time()
        against = [(one.samples, one.tag + AGAINST_SAMPLES, one.value) for one in scalars if one.samples is not None]
        steps = [(one.x, one.tag, one.value) for one in scalars]
        for x, group in groupby(sorted(steps + against, key=_x), key=_x):
            summary = Summary()
            for _, tag, value in group:
                summary.value.add(tag=encodable(tag), simple_value=value)
            self._hold(Event(wall_time=now, step=x, summary=summary))

    def texts(self, texts: Mapping[str, str]) -> None:
        """Add texts, which belong to no step."""
        described = metadata.create_summary_metadata(display_name=None, description=None)
        for tag, text in texts.items():
            summary = Summary()
            tensor = make_tensor_proto([encodable(text)])
            summary.value.add(tag=encodable(tag), metadata=described, tensor=tensor)
            self._hold(Event(wall_time=time.time(), step=0, summary=summary))

    def flush(self) -> None:
        """Write what is held."""
        held, self._held = self._held, []
        if not held:
            return
        file = self._open_file()
        try:
            for event in held:
                file.write(record(event))
        except BaseException:
            file.forget()
            raise
        file.keep()

    def close(self) -> None:
        """Write what is held and let go of the file."""
        try:
            self.flush()
        finally:
            file, self._file = self._file, None
            if file is not None:
                file.release()

    def _hold(self, event: Event) -> None:
        self._held.append(event.SerializeToString())
        if len(self._held) > self._queue_size:
            self.flush()

    def _open_file(self) -> GrowingFile:
        if self._file is None or self._file.gone():
            path = new_path(self._directory)
            self._file = GrowingFile(path, opened(path, os.O_CREAT | os.O_EXCL))
            self._file.write(record(Event(wall_time=time.time(), file_version=FORMAT_VERSION).SerializeToString()))
        return self._file


def _x(one: tuple[int, str, float]) -> int:
    return one[0]
