"""The files of a dumped step, and the thread that writes them: records, one a line with a checksum, tensors, and JSON files.

The checksums tell complete lines from the line that a killed process was writing.
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import math
import os
import stat
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from monitor.coordinator.output import write_whole
from monitor.dump.config import LEVELS
from monitor.dump.values import TensorLeaf, checksum, derive_all, leaves
from monitor.failures import EarlierFailure, Failures
from monitor.terminal import counted

# --- Open files safely in a directory that others may have written to: regular files of bounded size, no links.

LARGEST_FILE: Final = 1 << 34
"""Bytes of a step's records, at most. An entry takes a few hundred bytes."""


def opened(path: Path, most: int = LARGEST_FILE) -> BufferedReader:
    """Open a regular file for reading, not a link. Never blocks, as a pipe would.

    Raises:
        OSError: The path is no regular file, is larger than ``most`` bytes, or cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "this is not a regular file", str(path))
        if found.st_size > most:
            raise OSError(errno.EFBIG, f"this is larger than {most} bytes", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def is_directory(path: Path) -> bool:
    """Whether the path is a directory, and not a link to one."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


FILE: Final = ".dump.records"
"""The file of records, beside the assembled files. It exists while a step is recorded, and after a process was killed."""

LONGEST: Final = 1 << 26
"""Bytes of a record, at most: a longer line is damaged."""

Record = dict[str, Any]


class Records:
    """Appends records to a file, which survives the process. A lock on the file shows that a process still writes to it.

    Raises:
        OSError: The file cannot be created; ``BlockingIOError`` if another process writes to it.
    """

    def __init__(self, path: Path) -> None:
        # Unbuffered: a forked process would write the contents of a buffer once more.
        self._file: FileIO = open(path, "ab", buffering=0)  # noqa: SIM115
        self._pending: list[bytes] = []
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise
        except OSError:
            pass  # some file systems have no locks

    def append(self, record: str) -> None:
        """Add a record, a JSON text. ``flush`` writes it to the file."""
        self._pending.append(f"{zlib.crc32(record.encode()):08x} {record}\n".encode())

    def flush(self) -> None:
        """Write the pending records. Raises ``OSError`` if the disk is full; complete lines stay readable, also later ones."""
        content, self._pending = memoryview(b"".join(self._pending)), []
        whole = os.fstat(self._file.fileno()).st_size
        try:
            while content:
                content = content[self._file.write(content) :]
        except OSError:
            os.ftruncate(self._file.fileno(), whole)
            raise

    def close(self) -> None:
        self._file.close()


def is_being_written(path: Path) -> bool:
    """Whether a process still writes to the file. Raises ``OSError`` if it is no regular file or cannot be opened."""
    with opened(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


@dataclass(slots=True)
class Damage:
    """Counts lines that could not be read.

    Attributes:
        lines: Damaged lines. Each may have held several records, since a newline may be among the damaged bytes.
    """

    lines: int = 0


def read(path: Path, damage: Damage) -> Iterator[Record]:
    """Yield the intact records of a file. Damaged lines are skipped, and counted in ``damage``.

    A killed process leaves an incomplete line at the end of the file, which does not count as damage.

    Raises:
        OSError: The path is no regular file, or cannot be read.
    """
    with opened(path) as file:
        while line := file.readline(LONGEST):
            checksum, _, record = line.rstrip(b"\n").partition(b" ")
            if not line.endswith(b"\n"):
                damage.lines += not _is_torn(line, file)
            elif checksum == f"{zlib.crc32(record):08x}".encode():
                yield json.loads(record)
            else:
                damage.lines += 1


def _is_torn(line: bytes, file: BufferedReader) -> bool:
    """Whether an unterminated line is one that a killed process was writing. Reads to the end of the line.

    A record has no zero byte. Zeros are a part of the file that never reached the disk, and may have been many records.
    """
    whole = len(line) < LONGEST
    while len(line) == LONGEST and not line.endswith(b"\n"):
        line = file.readline(LONGEST)
    return whole and b"\0" not in line


# --- Assemble ``dump.json``, ``stack.json``, ``construct.json`` and ``debug.json`` from a step's records, each atomically.

HEADER: Final = "header"
STACK: Final = "frames"
ENTRY: Final = "entry"


MAIN: Final = ("dump.json", "debug.json")
"""The files that hold entries; each complete dump has one of them."""

LARGEST: Final = 1 << 32
"""Bytes of such a file that is read back, at most."""


class OtherDumpError(Exception):
    """A directory holds entries that its records lack."""


class AssembledDump(NamedTuple):
    """The result of assembling a step's records.

    Attributes:
        entries: The number of entries in the files.
        damaged: The number of damaged lines. Each has held one or more records that the files lack.
    """

    entries: int
    damaged: int


def assemble(directory: Path, *, check: bool = False) -> AssembledDump:
    """Write the files of a rank's step. They replace those of an earlier segment of the step.

    Args:
        check: Whether to look for files that were assembled from other records.

    Raises:
        OtherDumpError: There are such files. They are not changed.
        OSError: The records cannot be read, or a file cannot be written.
    """
    header: Mapping[str, Any] = {}
    frames: dict[int, list[str]] = {}
    entries: list[Record] = []
    damage = Damage()
    for record in read(directory / FILE, damage):
        if HEADER in record:
            header = record[HEADER]
        elif STACK in record:
            frames[record["stack"]] = record[STACK]
        else:
            entries.append(record)
    # A backward's record is written when its last gradient has arrived, or when no more are expected.
    entries.sort(key=lambda entry: entry["at"])
    files = _files(header, entries, frames)
    if check:
        _check_earlier(directory, files)
    for name, content in files.items():
        write_whole(directory / name, _json_text(content).encode())
    return AssembledDump(len(entries), damage.lines)


def finish(directory: Path, *, check: bool = False) -> AssembledDump:
    """``assemble``, then remove the records. They are kept if a part of them could not be read."""
    assembled = assemble(directory, check=check)
    if not assembled.damaged:
        (directory / FILE).unlink()
    return assembled


def damage_found(damaged: int, directory: Path) -> str:
    """The message for records that could not be read."""
    lost = f"{counted(damaged, 'damaged line was', 'damaged lines were')} skipped: at least as many records are lost"
    return f"{lost}. {directory / FILE} was kept: remove it to accept the dump without them."


def _check_earlier(directory: Path, files: Mapping[str, Any]) -> None:
    """Refuse to lose an entry that an existing file has."""
    for name in MAIN:
        if not os.path.lexists(directory / name):
            continue
        with opened(directory / name, most=LARGEST) as file:
            earlier = json.load(file)["data"]
        entries = files.get(name, {"data": {}})["data"]
        if any(called not in entries or json.dumps(entries[called]) != json.dumps(one) for called, one in earlier.items()):
            raise OtherDumpError(f"{name} has entries that the killed process did not record: the file was not changed")


def _files(header: Mapping[str, Any], entries: Iterable[Record], frames: Mapping[int, list[str]]) -> dict[str, Any]:
    data = {entry[ENTRY]: entry["content"] for entry in entries}
    level = LEVELS.get(header.get("level", ""), LEVELS["mix"])
    if level.file != "dump.json":
        return {level.file: {**header, "data": data}}
    return {
        level.file: {**header, "data": data},
        "stack.json": _stacks(entries, frames),
        "construct.json": {entry[ENTRY]: entry["parent"] for entry in entries} if level.sources else {},
    }


def _json_text(content: Mapping[str, Any]) -> str:
    """JSON with one line for each entry: indented, a step of a large model would have a million lines."""
    lines = []
    for key, value in content.items():
        below = isinstance(value, dict) and key == "data"
        lines.append(f"{json.dumps(key)}: {_json_text(value) if below else json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}" if lines else "{}"


def _stacks(entries: Iterable[Record], frames: Mapping[int, list[str]]) -> dict[str, Any]:
    """Each stack, with the names of the entries that share it."""
    names: dict[int, list[str]] = {}
    for entry in entries:
        if entry["stack"] is not None:
            names.setdefault(entry["stack"], []).append(entry[ENTRY])
    return {str(number): [called, frames.get(stack, [])] for number, (stack, called) in enumerate(names.items())}


# --- Tensors in files of numpy, including types that numpy lacks.
#
# Such a tensor is stored as integers with the same bits, in a structured dtype of one field with the type's name:
# ``[('bfloat16', '<u2')]``. Any numpy can read the file, and ``load_tensor`` knows the meaning of the bits.

Array = NDArray[Any]


class FloatFormat(NamedTuple):
    """A floating-point type of eight bits or fewer: a sign, an exponent, a mantissa.

    Attributes:
        exponent: The number of its bits; likewise ``mantissa``.
        special: The encoding of non-finite numbers: ``ieee`` (the greatest exponent: Inf and NaN), ``fn`` (all ones: NaN),
            ``fnuz`` (minus zero: NaN).
    """

    exponent: int
    mantissa: int
    bias: int
    special: str


FORMATS: Final = {
    "float8_e4m3fn": FloatFormat(4, 3, 7, "fn"),
    "float8_e5m2": FloatFormat(5, 2, 15, "ieee"),
    "float8_e4m3fnuz": FloatFormat(4, 3, 8, "fnuz"),
    "float8_e5m2fnuz": FloatFormat(5, 2, 16, "fnuz"),
}


def save_tensor(path: Path, array: Array, dtype: str | None = None) -> None:
    """Write a file atomically.

    Args:
        dtype: The name of a type that numpy lacks; ``array`` then holds the bits of its elements as unsigned integers.

    Raises:
        OSError: The file cannot be written.
    """
    if dtype is not None:
        array = np.ascontiguousarray(array).view([(dtype, array.dtype.newbyteorder("<"))]).reshape(array.shape)
    content = io.BytesIO()
    np.save(content, array, allow_pickle=False)
    write_whole(path, content.getbuffer())  # type: ignore[arg-type]


def load_tensor(path: str | os.PathLike[str]) -> Array:
    """Read a tensor that a dump has stored. A type that numpy lacks becomes a wider type with the same numbers.

    bfloat16 and the types of eight bits become float32, complex32 becomes complex64. No number changes.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is damaged, is not numpy's, or its type is unknown.
    """
    bits, dtype = bits_of(path)
    if dtype is None:
        return bits
    if dtype not in _BITS or bits.dtype != _BITS[dtype]:
        raise ValueError(f"{os.fspath(path)} holds elements of the unknown type {dtype} in {bits.dtype}")
    return _table(dtype)[bits] if dtype in FORMATS else _WIDENED[dtype](bits)


def bits_of(path: str | os.PathLike[str]) -> tuple[Array, str | None]:
    """The stored array without conversion, and the name of its type if numpy lacks it. Raises as ``load_tensor`` does."""
    stored = _stored(path)
    dtype = stored.dtype.names[0] if stored.dtype.names else None
    bits = stored if dtype is None else stored[dtype]
    if bits.dtype.kind not in _NUMBERS:
        raise ValueError(f"{os.fspath(path)} holds {bits.dtype}, which is not a type of numbers")
    return bits, dtype


def _stored(path: str | os.PathLike[str]) -> Array:
    """Read an array. The size is checked first, because numpy allocates what a header claims before it reads the elements.

    Dumps have headers of version 1, of 64 KiB at most. Those of other versions may claim a length of 4 GiB.
    """
    with open(path, "rb") as file:
        try:
            if _NPY.read_magic(file) != (1, 0):
                raise ValueError("it is not of version 1.0")
            shape, _, dtype = _NPY.read_array_header_1_0(file)
        except Exception as error:  # numpy evaluates the header as Python, which may fail in any way
            raise ValueError(f"{os.fspath(path)} has no header of numpy: {error!r}") from error
        expected, size = file.tell() + math.prod(shape) * dtype.itemsize, os.fstat(file.fileno()).st_size
        if expected != size:
            raise ValueError(f"{os.fspath(path)} has {size} bytes, and its header says {expected}")
        file.seek(0)
        stored: Array = _NPY.read_array(file, allow_pickle=False)
        return stored


def _from_bfloat16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _from_complex32(bits: Array) -> Array:
    parts = np.ascontiguousarray(bits).view(np.float16).astype(np.float32)
    return parts.view(np.complex64).reshape(bits.shape)


def _from_powers(bits: Array) -> Array:
    """The type of scales, which has an exponent and nothing else."""
    numbers = np.ldexp(1.0, bits.astype(np.int32) - 127)
    return np.where(bits == 0xFF, np.nan, numbers).astype(np.float32)


_WIDENED: Final[dict[str, Callable[[Array], Array]]] = {
    "bfloat16": _from_bfloat16,
    "complex32": _from_complex32,
    "float8_e8m0fnu": _from_powers,
}

_BITS: Final = {**dict.fromkeys((*FORMATS, "float8_e8m0fnu"), np.uint8), "bfloat16": np.uint16, "complex32": np.uint32}
"""The integers that hold the elements of these types."""

_NUMBERS: Final = "biufc"
"""Kinds of numpy's dtypes."""

_NPY: Final[Any] = np.lib.format  # numpy 1 has no types for it


@cache
def _table(dtype: str) -> Array:
    """All numbers of the type in float32, indexed by their bits."""
    return np.array([_number(bits, FORMATS[dtype]) for bits in range(256)], dtype=np.float32)


def _number(bits: int, of: FloatFormat) -> float:
    sign = -1.0 if bits >> 7 else 1.0
    exponent, mantissa = bits >> of.mantissa & (1 << of.exponent) - 1, bits & (1 << of.mantissa) - 1
    if (of.special == "fnuz" and bits == 0x80) or (of.special == "fn" and bits & 0x7F == 0x7F):
        return float("nan")
    if of.special == "ieee" and exponent == (1 << of.exponent) - 1:
        return float("nan") if mantissa else sign * float("inf")
    if exponent == 0:
        return float(sign * np.ldexp(mantissa, 1 - of.bias - of.mantissa))
    return float(sign * np.ldexp(mantissa + (1 << of.mantissa), exponent - of.bias - of.mantissa))


# --- The writer thread, which turns entries into records and tensor files.
#
# Its queue is bounded in bytes. A dump drops nothing: when the queue is full, the training thread waits.

MOST_BYTES: Final = 1 << 29
MOST_ENTRIES: Final = 4096
BATCH: Final = 256
"""Entries that wake the thread. Their statistics are computed together, as columns."""

GATHERED_SECONDS: Final = 0.2
"""A smaller batch waits this long at most. The thread's Python work blocks the training thread, so it works in batches."""

IDLE_SECONDS: Final = 2.0
"""The thread ends when no entry has arrived for this long."""

ADVICE: Final = "The affected entries are missing from the dump."

DATA: Final = "dump_tensor_data"


@dataclass(slots=True)
class DumpEntry:
    """An entry that is to be written.

    Attributes:
        records: The records to which it is appended.
        directory: The directory of the rank's step.
        content: The record; its ``content`` is a tree with leaves.
    """

    records: Records
    directory: Path
    content: dict[str, Any]
    leaves: list[TensorLeaf] = field(default_factory=list)
    nbytes: int = 0

    def __post_init__(self) -> None:
        self.leaves = list(leaves(self.content.get("content")))
        self.nbytes = sum(leaf.copy.nbytes for leaf in self.leaves if leaf.copy is not None)


@dataclass(slots=True)
class _WriterThread:
    """A thread that writes.

    Attributes:
        closing: The thread ends when nothing is left.
    """

    thread: threading.Thread | None = None
    closing: bool = False


class DumpWriter:
    """Runs one thread while there is something to write, so that an unused debugger leaves no thread behind."""

    def __init__(self, failures: Failures) -> None:
        self._failures = failures
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._queue: deque[DumpEntry] = deque()
        self._changed = threading.Condition()
        self._bytes = 0
        self._unwritten = 0
        self._urgent = False
        self._running: _WriterThread | None = None

    def _begin_in_a_fork(self) -> None:
        """In a forked process: start anew. It has no thread, locks may be held, and the entries are the parent's."""
        if self._pid != os.getpid():
            self._begin()

    def put(self, entry: DumpEntry) -> None:
        """Queue an entry. Waits while the queue is full; an entry larger than the limit waits until the queue is empty."""
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
        """Wait until all queued entries are in their files. Later entries start another thread."""
        self._begin_in_a_fork()
        with self._changed:
            self._urgent = True
            self._changed.notify_all()
            while self._unwritten:
                self._changed.wait()
            self._urgent = False
        self.close()

    def close(self) -> None:
        """Write the queued entries, and end the thread."""
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
            self._running = running = _WriterThread()
            running.thread = threading.Thread(target=self._run, args=(running,), name="monitor-dump-writer", daemon=True)
            running.thread.start()

    def _run(self, running: _WriterThread) -> None:
        while batch := self._next_batch(running):
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

    def _next_batch(self, running: _WriterThread) -> list[DumpEntry]:
        with self._changed:
            idle = 0
            while not running.closing and not (self._queue and (self._urgent or self._bytes or len(self._queue) >= BATCH)):
                if self._changed.wait(GATHERED_SECONDS):
                    continue
                idle += 1
                if self._queue:
                    break
                if idle * GATHERED_SECONDS >= IDLE_SECONDS:
                    self._running = None  # before the lock is released, so that the next entry starts another thread
                    break
            return [self._queue.popleft() for _ in range(min(len(self._queue), BATCH))]

    def _write(self, batch: list[DumpEntry]) -> None:
        derive_all([leaf for entry in batch for leaf in entry.leaves])
        for entry in batch:
            try:
                self._write_one(entry)
            except Exception as error:
                self._failures.report("writing an entry of a dump", error, ADVICE, of=str(entry.content.get("entry")))
        for records in {id(entry.records): entry.records for entry in batch}.values():
            records.flush()

    def _write_one(self, entry: DumpEntry) -> None:
        for leaf in entry.leaves:
            if leaf.copy is not None:
                self._store_elements(leaf, entry.directory)
        entry.records.append(json.dumps(entry.content, default=_as_json))

    def _store_elements(self, leaf: TensorLeaf, directory: Path) -> None:
        """Store a tensor's elements, or compute their checksum if they have no file."""
        assert leaf.copy is not None
        file, leaf.file = leaf.file, None
        copy, leaf.copy = leaf.copy, None
        array = copy.array()
        if file is None:
            leaf.checksum = checksum(array)
            return
        save_tensor(directory / DATA / file, array, copy.dtype)
        leaf.file = file


def _as_json(leaf: object) -> dict[str, Any]:
    assert isinstance(leaf, TensorLeaf), leaf
    return leaf.as_json()
