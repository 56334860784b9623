"""A file in the making: hidden, growing by whole steps, given its name when it is complete."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


class Part:
    """The hidden file ``.{name}.part``, which begins with ``text``.

    Every method but ``forget`` and ``discard`` may raise OSError. What was kept before stays as it was; a part that could not
    be begun is gone.
    """

    def __init__(self, directory: Path, name: str, text: bytes) -> None:
        self.path = directory / f".{name}.part"
        self._kept = self._end = 0
        self._file: int | None = _opened(self.path)
        try:
            self.write(text)
        except OSError:
            self.discard()
            raise

    @property
    def released(self) -> bool:
        return self._file is None

    def gone(self) -> bool:
        """Whether somebody has removed it, or its directory."""
        try:
            self.path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:  # out of reach for now
            return False
        return False

    def write(self, text: bytes | memoryview) -> None:
        """Add ``text``, for the time being. The operating system has it on return."""
        if self._file is None:
            raise ValueError(f"{self.path} was released")
        rest = memoryview(text)
        while rest:
            written = os.pwrite(self._file, rest, self._end)
            self._end += written
            rest = rest[written:]

    def keep(self) -> None:
        """What was written stays."""
        self._kept = self._end

    def forget(self) -> None:
        """Take back what was written since the last ``keep``."""
        self._end = self._kept
        if self._file is not None:
            with suppress(OSError):  # it is overwritten, or cut off in ``release``
                os.ftruncate(self._file, self._kept)

    def release(self) -> None:
        """Let go of the file, which then holds what was kept and nothing else."""
        if self._file is None:
            return
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
            self.path.unlink()


def _opened(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o666)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, flags, 0o666)
