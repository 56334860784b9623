"""The thread that turns what was caught into records and files, behind a queue that holds so many bytes and no more.

A dump drops nothing: when the queue is full the training thread waits.
"""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from monitor.dump.measured import Leaf, checksum, derive_all
from monitor.dump.records import Records
from monitor.dump.storage import save_tensor
from monitor.dump.values import leaves
from monitor.failures import EarlierFailure, Failures

MOST_BYTES: Final = 1 << 29
MOST_ENTRIES: Final = 4096
BATCH: Final = 256
"""Entries that are worth waking for: their statistics are derived together, as columns."""

GATHERED_SECONDS: Final = 0.2
"""What fewer wait for at most. Whatever this thread does in Python holds up the other: so it is done seldom, and at once."""

IDLE_SECONDS: Final = 2.0
"""The thread ends when nothing has come for so long."""

ADVICE: Final = "What was to be written is missing from the dump."

DATA: Final = "dump_tensor_data"


@dataclass(slots=True)
class Entry:
    """One record to be.

    Attributes:
        records: Where it goes.
        directory: Of the rank's step.
        content: What the record holds; its ``content`` is a tree with leaves.
    """

    records: Records
    directory: Path
    content: dict[str, Any]
    leaves: list[Leaf] = field(default_factory=list)
    nbytes: int = 0

    def __post_init__(self) -> None:
        self.leaves = list(leaves(self.content.get("content")))
        self.nbytes = sum(leaf.copy.nbytes for leaf in self.leaves if leaf.copy is not None)


@dataclass(slots=True)
class _Running:
    """A thread that writes.

    Attributes:
        closing: It is to end when nothing is left.
    """

    thread: threading.Thread | None = None
    closing: bool = False


class Writer:
    """One thread, which runs while there is something to write: a debugger that nobody needs any more leaves none behind."""

    def __init__(self, failures: Failures) -> None:
        self._failures = failures
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._queue: deque[Entry] = deque()
        self._changed = threading.Condition()
        self._bytes = 0
        self._unwritten = 0
        self._hurry = False
        self._running: _Running | None = None

    def _begin_in_a_fork(self) -> None:
        """A process that was forked has no such thread, and perhaps a lock that nobody opens; the entries are the parent's."""
        if self._pid != os.getpid():
            self._begin()

    def put(self, entry: Entry) -> None:
        """Hand an entry over. Waits while there is no room: for one that is larger than all room, until it is alone."""
        self._begin_in_a_fork()
        with self._changed:
            self._start()
            while (self._bytes and (self._bytes + entry.nbytes > MOST_BYTES)) or self._unwritten >= MOST_ENTRIES:
                self._changed.wait()
            self._queue.append(entry)
            self._bytes += entry.nbytes
            self._unwritten += 1
            if len(self._queue) == BATCH or entry.nbytes:
                self._changed.notify_all()

    def drain(self) -> None:
        """Wait until everything that was handed over is in its file. Whatever comes after begins another thread."""
        self._begin_in_a_fork()
        with self._changed:
            self._hurry = True
            self._changed.notify_all()
            while self._unwritten:
                self._changed.wait()
            self._hurry = False
        self.close()

    def close(self) -> None:
        """Write what is left, and end the thread."""
        self._begin_in_a_fork()
        with self._changed:
            running, self._running = self._running, None
            if running is not None:
                running.closing = True
            self._changed.notify_all()
        if running is not None and running.thread is not None:
            running.thread.join()

    def _start(self) -> None:
        if self._running is None:
            self._running = running = _Running()
            running.thread = threading.Thread(target=self._run, args=(running,), name="monitor-dump-writer", daemon=True)
            running.thread.start()

    def _run(self, running: _Running) -> None:
        while batch := self._taken(running):
            try:
                self._write(batch)
            except EarlierFailure as failure:
                self._failures.owe(failure)
            except Exception as error:
                self._failures.report("writing a dump", error, ADVICE)
            with self._changed:
                self._bytes -= sum(entry.nbytes for entry in batch)
                self._unwritten -= len(batch)
                self._changed.notify_all()

    def _taken(self, running: _Running) -> list[Entry]:
        with self._changed:
            idle = 0
            while not running.closing and not (self._queue and (self._hurry or self._bytes or len(self._queue) >= BATCH)):
                if self._changed.wait(GATHERED_SECONDS):
                    continue
                idle += 1
                if self._queue:
                    break
                if idle * GATHERED_SECONDS >= IDLE_SECONDS:
                    self._running = None  # before the lock is let go of, so that the next entry begins another
                    break
            return [self._queue.popleft() for _ in range(min(len(self._queue), BATCH))]

    def _write(self, batch: list[Entry]) -> None:
        derive_all([leaf for entry in batch for leaf in entry.leaves])
        for entry in batch:
            try:
                self._write_one(entry)
            except Exception as error:
                self._failures.report("writing an entry of a dump", error, ADVICE, of=str(entry.content.get("entry")))
        for records in {id(entry.records): entry.records for entry in batch}.values():
            records.flush()

    def _write_one(self, entry: Entry) -> None:
        for leaf in entry.leaves:
            if leaf.copy is not None:
                self._keep(leaf, entry.directory)
        entry.records.append(json.dumps(entry.content, default=_told))

    def _keep(self, leaf: Leaf, directory: Path) -> None:
        """Store a tensor's elements, or their checksum. Without them it has no file."""
        assert leaf.copy is not None
        file, leaf.file = leaf.file, None
        copy, leaf.copy = leaf.copy, None
        array = copy.array()
        if file is None:
            leaf.checksum = checksum(array)
            return
        save_tensor(directory / DATA / file, array, copy.dtype)
        leaf.file = file


def _told(leaf: object) -> dict[str, Any]:
    assert isinstance(leaf, Leaf), leaf
    return leaf.told()
