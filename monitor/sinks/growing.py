"""A file that grows by whole steps, whatever the disk does in between."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


class GrowingFile:
    """Written at its end only; what was written stays once it is kept.

    Every method but ``forget`` and ``discard`` may raise OSError. What was kept before stays as it was.

    Args:
        file: Its descriptor, which this object owns.
        kept: How many bytes of it stay.
        end: Where the next ones go.
        new: Whether there is nothing in it.
    """

    def __init__(self, path: str | Path, file: int, kept: int = 0, end: int = 0, *, new: bool = False) -> None:
        self.path = os.fspath(path)
        self._file: int | None = file
        self._kept, self._end = kept, end
        self._may_be_longer = not new

    @property
    def released(self) -> bool:
        return self._file is None

    @property
    def size(self) -> int:
        """Bytes that were kept."""
        return self._kept

    def gone(self) -> bool:
        """Whether somebody has removed it, or its directory."""
        try:
            os.lstat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:  # out of reach for now
            return False
        return False

    def write(self, content: bytes | memoryview) -> None:
        """Add ``content``, for the time being. The operating system has it on return."""
        rest = memoryview(content)
        while rest:
            written = os.pwrite(self._open_file(), rest, self._end)
            self._end += written
            rest = rest[written:]

    def keep(self) -> None:
        """What was written stays."""
        self._kept = self._end

    def forget(self) -> None:
        """Take back what was written since the last ``keep``."""
        self._end = self._kept
        if self._file is not None:
            try:
                os.ftruncate(self._file, self._kept)
            except OSError:  # it is overwritten, or cut off in ``release``
                self._may_be_longer = True

    def release(self) -> None:
        """Let go of the file, which then holds what was kept and nothing else."""
        if self._file is None:
            return
        if self._may_be_longer or self._end > self._kept:
            os.ftruncate(self._file, self._kept)
        file, self._file = self._file, None
        try:
            os.close(file)
        except OSError:  # a network file system may say only now that it lost what it had taken
            self.discard()
            raise

    def discard(self) -> None:
        """Let go of the file and remove it, as far as that can be done."""
        file, self._file = self._file, None
        with suppress(OSError):
            if file is not None:
                os.close(file)
        with suppress(OSError):
            os.unlink(self.path)

    def _open_file(self) -> int:
        if self._file is None:
            raise ValueError(f"{self.path} was released")
        return self._file


def opened(path: str | Path, how: int = 0) -> int:
    """A descriptor to read and write the file with. Its directory is made if it is missing.

    Args:
        how: Flags of ``os.open`` in addition: ``os.O_CREAT`` and others.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | how
    try:
        return os.open(path, flags, 0o666)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return os.open(path, flags, 0o666)
