"""``progress.json``: a rank's sign of life, which it renews every few seconds while it records.

The manifest is saved every 30 seconds, and only when a step was written. From this file a reader sees within seconds that a
rank has stopped, also between two collected steps. If only training hangs, the file is renewed and its step stays.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Annotated, Final, NamedTuple
from weakref import ref

from pydantic import Field

from monitor.coordinator.manifest_format import Natural, StrictRecord, content_of, known_version, parsed
from monitor.coordinator.output import write_whole
from monitor.failures import Failures

PROGRESS_FILE: Final = "progress.json"
PROGRESS_LIMIT: Final = 4096
"""Largest size in bytes."""

SCHEMA_VERSION: Final = 1
LEAST_SECONDS: Final = 2.0
"""Between two writes of a rank."""

MOST_WRITES: Final = 100
"""A second, of all ranks together: more would burden a shared file system."""

RATE_SECONDS: Final = 10.0
"""The time that a rate is about, if two steps have ended in it."""

LONGEST_WRITE_S: Final = 1.0
"""How long the end of a recording waits for a write."""

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
StepNumber = Annotated[int, Field(ge=-1)]


class ProgressRecord(StrictRecord):
    """What a rank says about itself.

    Attributes:
        job_id: As in the manifest. A file of another job was left by an earlier run that was killed.
        saved: When this was written, in seconds since 1970 by the clock of the rank's machine.
        every: Seconds between two writes.
        elapsed: Seconds since the first sign of life.
        step: The last step that training has ended, collected or not; -1: none.
        idle: Seconds since ``step`` changed, at most ``every`` less than the truth.
        rate: Steps a second over about the last ``RATE_SECONDS``; None until two steps have been seen to end.
        recorded: The last step that was written to files; -1: none.
        written, dropped: Numbers of steps, as in the manifest.
        failures: Number of failures of the monitor.
        writer_seconds: CPU time of the writer thread.
    """

    schema_version: int
    job_id: str
    saved: Seconds
    every: Seconds
    elapsed: Seconds
    step: StepNumber
    idle: Seconds
    rate: Seconds | None
    recorded: StepNumber
    written: Natural
    dropped: Natural
    failures: Natural
    writer_seconds: Seconds


def read_progress(directory: Path) -> ProgressRecord:
    """Read the ``progress.json`` of a rank's directory.

    Raises:
        ManifestError: the file is missing, or damaged, or of a later version.
    """
    path = directory / PROGRESS_FILE
    record = parsed(ProgressRecord, content_of(path, PROGRESS_LIMIT, "progress"), path)
    known_version(record.schema_version)
    return record


class RecordedCounts(NamedTuple):
    """The journal's numbers for a ``ProgressRecord``."""

    recorded: int
    written: int
    dropped: int
    failures: int
    writer_seconds: float


class StepRate:
    """How many steps end in a second, from looks at the number of the last one."""

    def __init__(self) -> None:
        self._changes: deque[tuple[float, int]] = deque(maxlen=128)  # when the number was seen to change, and to what

    def see(self, now: float, step: int) -> None:
        if not self._changes or step != self._changes[-1][1]:
            self._changes.append((now, step))
        while len(self._changes) > 2 and self._changes[1][0] < now - RATE_SECONDS:
            self._changes.popleft()

    @property
    def since(self) -> float:
        """When the number changed last."""
        return self._changes[-1][0]

    @property
    def rate(self) -> float | None:
        (began, first), (ended, last) = self._changes[0], self._changes[-1]
        return (last - first) / (ended - began) if ended > began and last >= first else None


class Pulse:
    """Writes the ``progress.json`` of a rank on a thread of its own.

    The writer thread may wait for the device or for a slow disk. While one rank is stopped, the writers of all others wait for
    collectives on their devices. A sign of life from the writer would let all ranks look stopped.

    Args:
        counts: Called on that thread. It must keep no model alive.
    """

    def __init__(
        self, directory: Path, job_id: str, world_size: int, counts: Callable[[], RecordedCounts], failures: Failures
    ) -> None:
        self._failures = failures
        self._path, self._job_id, self._counts = directory / PROGRESS_FILE, job_id, counts
        self._every = max(LEAST_SECONDS, world_size / MOST_WRITES)
        self._rate = StepRate()
        self._pid = os.getpid()
        self._stopped = Event()
        self._thread: Thread | None = None

    def start(self, step_in_progress: Callable[[], int]) -> None:
        """Begin to write, or ask another one from now on. Has no effect where no thread can be started.

        Args:
            step_in_progress: Asks training for the number of its step. Called on the thread, as ``counts`` is.
        """
        self._step_in_progress = step_in_progress
        if self._thread is None and os.getpid() == self._pid:
            self._began = time.monotonic()
            self._thread = Thread(
                target=_run, args=(ref(self), self._stopped, self._every, self._path), name="monitor-progress", daemon=True
            )
            with suppress(RuntimeError):
                self._thread.start()

    def stop(self) -> None:
        """Write no more."""
        self._stopped.set()

    def remove(self) -> None:
        """Remove the file after ``stop``: the manifest says that the run has ended. A disk that hangs is not waited for."""
        thread = self._thread
        if os.getpid() == self._pid and thread is not None and thread.ident is not None:
            thread.join(LONGEST_WRITE_S)
            with suppress(OSError):
                self._path.unlink()

    def beat(self) -> None:
        """Renew the file. If it cannot be written it becomes old, which says that something is wrong here. Does not raise."""
        self._failures.guarded("showing progress", self._write)()

    def _write(self) -> None:
        with suppress(OSError):
            if not self._stopped.is_set():
                write_whole(self._path, self._record().model_dump_json().encode() + b"\n")

    def _record(self) -> ProgressRecord:
        now, counts = time.monotonic(), self._counts()
        step = self._step_in_progress() - 1
        self._rate.see(now, step)
        return ProgressRecord(
            schema_version=SCHEMA_VERSION,
            job_id=self._job_id,
            saved=round(time.time(), 3),
            every=self._every,
            elapsed=round(now - self._began, 3),
            step=step,
            idle=round(now - self._rate.since, 3),
            rate=self._rate.rate,
            **counts._asdict(),
        )


def _run(reference: ref[Pulse], stopped: Event, every: float, path: Path) -> None:
    """Write again and again, until stopped, or until the recording was freed without an end. Then the file is removed."""
    while (pulse := reference()) is not None:
        pulse.beat()
        del pulse
        if stopped.wait(every):
            return
    with suppress(OSError):
        path.unlink()
