"""The thread that turns what was caught into records and files, behind a queue that holds so many bytes and no more.

A dump drops nothing: when the queue is full the training thread waits.
"""

from __future__ import annotations

import io
import json
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from monitor.coordinator.output import write_whole
from monitor.dump.files import Records
from monitor.dump.values import Leaf, checksum, derive_all, leaves
from monitor.failures import EarlierFailure, Failures

# --- Tensors in files of numpy, those of types that numpy lacks included.
#
# Such a tensor is stored as the integers that its bits spell, in a structured dtype of one field that has the name of
# the type: ``[('bfloat16', '<u2')]``. Any numpy reads that, and ``load_tensor`` knows what the bits mean.

Array = NDArray[Any]


class Format(NamedTuple):
    """A floating-point type of eight bits or fewer: a sign, an exponent, a mantissa.

    Attributes:
        exponent: Its bits; likewise of ``mantissa``.
        special: What stands for no finite number: ``ieee`` (the greatest exponent: Inf and NaN), ``fn`` (all ones: NaN),
            ``fnuz`` (minus zero: NaN).
    """

    exponent: int
    mantissa: int
    bias: int
    special: str


FORMATS: Final = {
    "float8_e4m3fn": Format(4, 3, 7, "fn"),
    "float8_e5m2": Format(5, 2, 15, "ieee"),
    "float8_e4m3fnuz": Format(4, 3, 8, "fnuz"),
    "float8_e5m2fnuz": Format(5, 2, 16, "fnuz"),
}


def save_tensor(path: Path, array: Array, dtype: str | None = None) -> None:
    """Write a file that is seen complete or not at all.

    Args:
        dtype: The name of a type that numpy lacks; ``array`` then holds unsigned integers, the bits of its elements.

    Raises:
        OSError: It cannot be written.
    """
    if dtype is not None:
        array = np.ascontiguousarray(array).view([(dtype, array.dtype.newbyteorder("<"))]).reshape(array.shape)
    content = io.BytesIO()
    np.save(content, array, allow_pickle=False)
    write_whole(path, content.getbuffer())  # type: ignore[arg-type]


def load_tensor(path: str | os.PathLike[str]) -> Array:
    """What a dump has stored of a tensor: the array itself, or, of a type that numpy lacks, the same numbers in a wider one.

    bfloat16 and the types of eight bits become float32, complex32 becomes complex64; not one of their numbers changes.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no file of numpy's, or of a type that nobody here knows.
    """
    stored: Array = np.load(path, allow_pickle=False)
    if stored.dtype.names is None:
        return stored
    dtype = stored.dtype.names[0]
    if dtype not in (*_WIDENED, *FORMATS):
        raise ValueError(f"{os.fspath(path)} holds elements of type {dtype}, which is not known")
    bits = stored[dtype]
    return _table(dtype)[bits] if dtype in FORMATS else _WIDENED[dtype](bits)


def bits_of(path: str | os.PathLike[str]) -> tuple[Array, str | None]:
    """What stands in a file as it stands there: an array, and the name of its type where numpy lacks that."""
    stored: Array = np.load(path, allow_pickle=False)
    return (stored, None) if stored.dtype.names is None else (stored[stored.dtype.names[0]], stored.dtype.names[0])


def _from_bfloat16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _from_complex32(bits: Array) -> Array:
    parts = np.ascontiguousarray(bits).view(np.float16).astype(np.float32)
    return parts.view(np.complex64).reshape(bits.shape)


def _from_powers(bits: Array) -> Array:
    """The type of scales: an exponent and nothing else."""
    numbers = np.ldexp(1.0, bits.astype(np.int32) - 127)
    return np.where(bits == 0xFF, np.nan, numbers).astype(np.float32)


_WIDENED: Final[dict[str, Callable[[Array], Array]]] = {
    "bfloat16": _from_bfloat16,
    "complex32": _from_complex32,
    "float8_e8m0fnu": _from_powers,
}


@cache
def _table(dtype: str) -> Array:
    """Every number of the type, by its bits, in float32."""
    return np.array([_number(bits, FORMATS[dtype]) for bits in range(256)], dtype=np.float32)


def _number(bits: int, of: Format) -> float:
    sign = -1.0 if bits >> 7 else 1.0
    exponent, mantissa = bits >> of.mantissa & (1 << of.exponent) - 1, bits & (1 << of.mantissa) - 1
    if (of.special == "fnuz" and bits == 0x80) or (of.special == "fn" and bits & 0x7F == 0x7F):
        return float("nan")
    if of.special == "ieee" and exponent == (1 << of.exponent) - 1:
        return float("nan") if mantissa else sign * float("inf")
    if exponent == 0:
        return float(sign * np.ldexp(mantissa, 1 - of.bias - of.mantissa))
    return float(sign * np.ldexp(mantissa + (1 << of.mantissa), exponent - of.bias - of.mantissa))


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
                self._failures.defer_error(failure)
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
