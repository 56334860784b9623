"""Small real parts around a pipeline: sealed copies, sinks and a journal whose files the tests read back."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import hanging
import numpy as np

from monitor.failures import Failures
from monitor.pipeline.pipeline import Pipeline, PipelineLimits
from monitor.stats.partials import COLUMNS, KindRows, Partials, TensorLayout
from monitor.stats.table import StepRows

ROOT = Path(__file__).parents[2]
COPY_BYTES = 1000
ALWAYS = threading.Event()
ALWAYS.set()


def rows_of(step: int) -> StepRows:
    column = np.zeros(1, np.int64)
    rows = KindRows(column, column, column, column, Partials(np.zeros((len(COLUMNS), 1))))
    return StepRows(step, ("norm",), {"actv": rows}, [TensorLayout((1,), "float32")])


class Copy:
    """A sealed copy that holds nothing but its step. ``readable`` takes the place of the device's event."""

    def __init__(self, nbytes: int = COPY_BYTES) -> None:
        self.nbytes = nbytes
        self.step: int | None = None
        self.readable = ALWAYS

    @property
    def ready(self) -> bool:
        return self.readable.is_set()

    def rows(self) -> StepRows:
        self.readable.wait()
        assert self.step is not None
        return rows_of(self.step)

    def finish(self) -> None:
        """It waits for nothing but its event."""


class RecordSink:
    """Appends each record of ``steps_per_record`` steps to a file; an open record becomes visible when flushed."""

    def __init__(self, path: Path, steps_per_record: int = 1) -> None:
        self.path = path
        self._open: list[int] = []
        self._most = steps_per_record
        self.closed = False

    def write(self, rows: StepRows) -> None:
        self._open.append(rows.step)
        if len(self._open) == self._most:
            self.flush()

    def flush(self) -> None:
        lines = "".join(f"{step}\n" for step in self._open)
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(descriptor, lines.encode())
        os.close(descriptor)
        self._open.clear()

    def close(self) -> None:
        self.flush()
        self.closed = True


class HangingSink:
    """Does not return from the write of step ``hangs_at`` until it is released."""

    def __init__(self, hangs_at: int = 0) -> None:
        self.hangs_at = hangs_at
        self.hanging = threading.Event()
        self.release = threading.Event()
        self.steps: list[int] = []

    def write(self, rows: StepRows) -> None:
        if rows.step == self.hangs_at:
            self.hanging.set()
            self.release.wait()
        self.steps.append(rows.step)

    def flush(self) -> None: ...

    def close(self) -> None: ...


class FillingDisk(RecordSink):
    """A record sink whose disk is full while ``full`` is true."""

    full = False

    def write(self, rows: StepRows) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(rows)


class FileJournal:
    """What it was given, in a file that is replaced as a whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[str, list[Any]] = {"written": [], "dropped": [], "lost": []}
        self.threads: set[str] = set()
        self.closed = False

    def written(self, rows: StepRows) -> None:
        self._tell("written", rows.step)

    def dropped(self, step: int, reason: str) -> None:
        self._tell("dropped", [step, reason])

    def lost(self, step: int, sink: str, reason: str) -> None:
        self._tell("lost", [step, sink, reason])

    def save(self) -> None:
        aside = self.path.with_suffix(".tmp")
        aside.write_text(json.dumps(self.entries))
        aside.replace(self.path)

    def close(self) -> None:
        self.save()
        self.closed = True

    def _tell(self, what: str, entry: Any) -> None:
        self.threads.add(threading.current_thread().name)
        self.entries[what].append(entry)


class Onlooker:
    """A watcher that calls ``sees`` with each step, and keeps what it was given."""

    def __init__(self, sees: Callable[[StepRows], object] = lambda _: None) -> None:
        self._sees = sees
        self.told: list[Any] = []

    def look(self, rows: StepRows) -> None:
        self.told.append(rows.step)
        self._sees(rows)

    def dropped(self, step: int, reason: str) -> None:
        self.told.append((step, reason))

    def save(self) -> None:
        self.told.append("save")

    def close(self) -> None:
        self.told.append("close")


def pipeline_of(
    sinks: Mapping[str, Any],
    journal: FileJournal,
    *,
    failures: Failures | None = None,
    new_sealed: Callable[[], Copy] = Copy,
    copies: int = 2,
    watchers: Mapping[str, Any] = MappingProxyType({}),
    **bounds: Any,
) -> Pipeline[Copy]:
    bounds = {"queue_wait_seconds": 5.0, "close_seconds": 20.0, "signal_seconds": 10.0, **bounds}
    limits = PipelineLimits(queue_bytes=copies * COPY_BYTES, **bounds)
    return Pipeline(sinks, journal, failures or Failures(), new_sealed, limits, watchers=watchers)


def pipeline_in(directory: Path, steps_per_record: int = 1, **bounds: Any) -> Pipeline[Copy]:
    """With one sink and a journal in ``directory``."""
    sink = RecordSink(directory / "steps.txt", steps_per_record)
    return pipeline_of({"record": sink}, FileJournal(directory / "manifest.json"), **bounds)


def record(pipeline: Pipeline[Copy], step: int, readable: threading.Event = ALWAYS) -> bool:
    """What the training thread does at the end of a step; whether the step was taken in.

    Args:
        readable: Set when the device has finished the step.
    """
    sealed = pipeline.reserve(step)
    if sealed is None:
        return False
    sealed.step, sealed.readable = step, readable
    pipeline.submit(sealed)
    return True


def steps_in(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


def journal_in(path: Path) -> dict[str, list[Any]]:
    entries: dict[str, list[Any]] = json.loads(path.read_text())
    return entries


def until(condition: Callable[[], Any], seconds: float = 60.0) -> bool:
    """Whether ``condition`` came true in time."""
    return hanging.until(condition, seconds)


class Program:
    """A process of its own that runs ``code`` with these parts at hand, ``directory`` for its files, and ends with the test."""

    def __init__(self, directory: Path, code: str) -> None:
        self.directory = directory
        begin = f"from pipeline_parts import *\nimport os, signal, sys, threading, time\ndirectory = Path({str(directory)!r})\n"
        path = os.pathsep.join([str(ROOT), *map(str, Path(__file__).parents[:2]), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, "-c", begin + textwrap.dedent(code)],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def lines(self) -> Iterator[str]:
        assert self.process.stdout is not None
        return (line.strip() for line in self.process.stdout)

    def wait_for(self, said: str) -> None:
        for line in self.lines():
            if line == said:
                return
        raise AssertionError(f"the program ended with {self.process.wait()} before it said {said!r}")

    def end(self, seconds: float = 60.0) -> tuple[int, str]:
        """Exit status and what it said."""
        said, _ = self.process.communicate(timeout=seconds)
        return self.process.returncode, said
