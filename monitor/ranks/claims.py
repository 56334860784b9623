"""A directory for one process alone, for as long as it lives: the system lets go of a claim with the process that holds it."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

LOCK_FILE: Final = ".lock"
NO_LOCKS_HERE: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What a file system answers that has no locks."""


class Claim:
    """Held until ``release``, or until the process ends, however it ends. A process forked from it holds nothing.

    Attributes:
        before_ns: When a process that held it before and was killed began to write, in the time of the file system; 0 if
            there was none.
    """

    def __init__(self, path: Path, lock: FileLock, before_ns: int) -> None:
        self.before_ns = before_ns
        self._path, self._lock = path, lock
        self._pid = os.getpid()
        self._released = False

    def begin(self) -> None:
        """From here on this process writes. Raises OSError."""
        os.utime(self._path)

    def release(self) -> None:
        """Let others have the directory. Any number of times; must not raise."""
        if os.getpid() == self._pid and not self._released:
            self._released = True
            with suppress(OSError):  # while it is held: whoever has opened it meanwhile finds it gone, and opens another
                self._path.unlink()
            with suppress(OSError):
                self._lock.release()


def claim(directory: Path) -> Claim | None:
    """Claim ``directory``, which must exist; None if another process, or another recording of this one, holds it.

    On a file system without locks nobody is kept out.

    Raises:
        OSError: the file of the lock cannot be made.
    """
    path = directory / LOCK_FILE
    before = _changed(path)
    # A lock that is a file would outlive its process.
    lock = FileLock(path, timeout=0, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        return None
    except OSError as error:
        if error.errno not in NO_LOCKS_HERE:
            raise
    if before:
        with suppress(OSError):  # some locks touch their file, and it is to tell of that process until ``begin``
            os.utime(path, ns=(before, before))
    return Claim(path, lock, before)


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
