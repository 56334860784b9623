"""Records of a step, one a line with its checksum in front, so that what was written before a process was killed can be told
from the line that it was writing.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any, Final, NamedTuple

from monitor.coordinator.output import write_whole

# --- Opening what lies in a directory that anybody may have written to: regular files of bounded size, no links.

MOST_BYTES: Final = 1 << 34
"""Of the records of a step: an entry takes a few hundred bytes."""


def opened(path: Path, most: int = MOST_BYTES) -> BufferedReader:
    """Open a regular file to read it, no link to one. Never waits for a writer, as a pipe would.

    Raises:
        OSError: It is no regular file, it is larger than ``most`` bytes, or it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "this is no regular file", str(path))
        if found.st_size > most:
            raise OSError(errno.EFBIG, f"this is larger than {most} bytes", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def is_directory(path: Path) -> bool:
    """Whether it is a directory, and no link to one."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


FILE: Final = ".dump.records"
"""Beside the files that are made of it. It is there while a step is recorded, and after a process was killed."""

LONGEST: Final = 1 << 26
"""Bytes of a record, at most: a longer line is damage."""

Record = dict[str, Any]


class Records:
    """Appends to a file. What was appended survives the process; that it is still written to shows in a lock on it.

    Raises:
        OSError: The file cannot be made; ``BlockingIOError`` if another process writes to it.
    """

    def __init__(self, path: Path) -> None:
        # Without a buffer of the file's own, which a process that was forked would write once more.
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
        """Add a record, a JSON text. It is in the file after ``flush``."""
        self._pending.append(f"{zlib.crc32(record.encode()):08x} {record}\n".encode())

    def flush(self) -> None:
        """Raises ``OSError`` where there is no room. What was whole before stays so, and what comes later can be read."""
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


def is_written(path: Path) -> bool:
    """Whether a process is still at it. Raises ``OSError`` where it is no regular file or cannot be opened."""
    with opened(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


@dataclass(slots=True)
class Damage:
    """What could not be read.

    Attributes:
        lines: Damaged lines. Each has held one record or more: a newline may be among what was damaged.
    """

    lines: int = 0


def read(path: Path, damage: Damage) -> Iterator[Record]:
    """The records of a file that are whole. Damaged lines are skipped, and counted in ``damage``.

    A process that is killed leaves the beginning of a line at the end of the file. This is not damage.

    Raises:
        OSError: It is no regular file, or cannot be read.
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
    """Whether a line without an end is what a killed process was writing. Reads on to the end of the line.

    A record has no zero byte. Zeros are a part of the file that never came to the disk, and may have been many records.
    """
    whole = len(line) < LONGEST
    while len(line) == LONGEST and not line.endswith(b"\n"):
        line = file.readline(LONGEST)
    return whole and b"\0" not in line


# --- ``dump.json``, ``stack.json``, ``construct.json`` and ``debug.json``, made of a step's records. Each appears whole.

HEADER: Final = "header"
STACK: Final = "frames"
ENTRY: Final = "entry"


MAIN: Final = ("dump.json", "debug.json")
"""The files that hold entries; one of them is in each complete dump."""

LARGEST: Final = 1 << 32
"""Bytes of such a file that is read back."""


class OtherDumpError(Exception):
    """A directory holds entries that its records do not."""


class Assembled(NamedTuple):
    """What became of a step's records.

    Attributes:
        entries: How many the files have.
        damaged: Lines of the records that could not be read, each a record or more that the files lack.
    """

    entries: int
    damaged: int


def assemble(directory: Path, *, check: bool = False) -> Assembled:
    """Make the files of a rank's step, replacing those of an earlier segment of the step.

    Args:
        check: Whether files may be there that were made of other records.

    Raises:
        OtherDumpError: There are such files. They stay.
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
    # Gradients of a call arrive one by one, and its record is written when the last of them has, or none is to be expected.
    entries.sort(key=lambda entry: entry["at"])
    files = _files(header, entries, frames)
    if check:
        _check_earlier(directory, files)
    for name, content in files.items():
        write_whole(directory / name, _spelled(content).encode())
    return Assembled(len(entries), damage.lines)


def finish(directory: Path, *, check: bool = False) -> Assembled:
    """``assemble``, and remove the records. They stay if some of them could not be read."""
    assembled = assemble(directory, check=check)
    if not assembled.damaged:
        (directory / FILE).unlink()
    return assembled


def damage_found(damaged: int, directory: Path) -> str:
    """What to say where records could not be read."""
    lost = f"{damaged:,} damaged lines were skipped: at least as many records are lost"
    return f"{lost}. {directory / FILE} was kept: remove it to accept the dump as it is."


def _check_earlier(directory: Path, files: Mapping[str, Any]) -> None:
    """That no entry is lost which a file has now."""
    for name in MAIN:
        if not os.path.lexists(directory / name):
            continue
        with opened(directory / name, most=LARGEST) as file:
            earlier = json.load(file)["data"]
        entries = files.get(name, {"data": {}})["data"]
        if any(called not in entries or json.dumps(entries[called]) != json.dumps(one) for called, one in earlier.items()):
            raise OtherDumpError(f"{name} has entries that were not recorded by the process that was killed: it stays")


def _files(header: Mapping[str, Any], entries: Iterable[Record], frames: Mapping[int, list[str]]) -> dict[str, Any]:
    data = {entry[ENTRY]: entry["content"] for entry in entries}
    if header.get("level") == "debug":
        return {"debug.json": {**header, "data": data}}
    return {
        "dump.json": {**header, "data": data},
        "stack.json": _stacks(entries, frames),
        "construct.json": {entry[ENTRY]: entry["parent"] for entry in entries} if header.get("level") != "L1" else {},
    }


def _spelled(content: Mapping[str, Any]) -> str:
    """JSON with a line for each entry: spread out over more, a step of a large model is a million lines."""
    lines = []
    for key, value in content.items():
        below = isinstance(value, dict) and key == "data"
        lines.append(f"{json.dumps(key)}: {_spelled(value) if below else json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}" if lines else "{}"


def _stacks(entries: Iterable[Record], frames: Mapping[int, list[str]]) -> dict[str, Any]:
    """The names that share a stack, and the stack."""
    names: dict[int, list[str]] = {}
    for entry in entries:
        if entry["stack"] is not None:
            names.setdefault(entry["stack"], []).append(entry[ENTRY])
    return {str(number): [called, frames.get(stack, [])] for number, (stack, called) in enumerate(names.items())}
