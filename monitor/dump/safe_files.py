"""Opening what lies in a directory that anybody may have written to: regular files of bounded size, no links."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Final

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
