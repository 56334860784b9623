"""Records of a step, one a line with its checksum in front, so that what was written before a process was killed can be told
from the line that it was writing.
"""

from __future__ import annotations

import fcntl
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any, Final

from monitor.dump.safe_files import opened

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
