"""The files of a dumped step: records, one a line with a checksum, and the JSON files that are assembled from them.

The checksums tell complete lines from the line that a killed process was writing.
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
from monitor.dump.config import LEVELS

# --- Open files safely in a directory that others may have written to: regular files of bounded size, no links.

MOST_BYTES: Final = 1 << 34
"""Bytes of a step's records, at most. An entry takes a few hundred bytes."""


def opened(path: Path, most: int = MOST_BYTES) -> BufferedReader:
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
    lost = f"{damaged:,} damaged lines were skipped: at least as many records are lost"
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
