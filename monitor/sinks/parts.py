"""A file in the making: hidden, growing by whole steps, given its name when it is complete."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from monitor.sinks.growing import GrowingFile, opened

UNFINISHED: Final = 0x80
"""Set in the first byte of a step until the step is whole. No line of ours begins with such a byte, so whoever finds the file
of a process that was killed sees where the whole steps end."""


class Part(GrowingFile):
    """The hidden file ``.{name}.part`` (``shard_names.part_name``).

    A step is written in two phases, so that it can be told of all parts whether it was finished: ``write`` of every part,
    then ``finish`` of every part.
    """

    def __init__(
        self, path: str | Path, file: int, kept: int = 0, end: int = 0, first: bytes = b"", *, new: bool = False
    ) -> None:
        super().__init__(path, file, kept, end, new=new)
        self._first = first

    @classmethod
    def begin(cls, path: str, text: bytes, rows: bytes | memoryview = b"") -> Part:
        """A new one, which begins with ``text`` and ``rows``. One that could not be begun is gone."""
        part = cls(path, opened(path, os.O_CREAT | os.O_TRUNC), new=True)
        try:
            part.write(text, rows)
        except OSError:
            part.discard()
            raise
        return part

    @classmethod
    def left_behind(cls, path: Path, kept: int, end: int, first: bytes) -> Part:
        """The part of a process that ended: ``kept`` bytes of whole steps, and a step that begins with ``first`` and ends at
        ``end``.
        """
        return cls(path, opened(path), kept, end, first)

    def write(self, content: bytes | memoryview, more: bytes | memoryview = b"") -> None:
        """Add ``content``, and ``more`` behind it, for the time being. The operating system has them on return."""
        first, rest = memoryview(content), memoryview(more)
        if first and self._end == self._kept:
            self._first = bytes(first[:1])
            written = os.pwritev(self._open_file(), [bytes([self._first[0] | UNFINISHED]), first[1:], rest], self._end)
            self._end += written
            if written == len(first) + len(rest):
                return
            first, rest = first[written:], rest[max(written - len(first), 0) :]
        super().write(first)
        super().write(rest)

    def finish(self) -> None:
        """The step is whole, here and in every other part. Taken back by ``forget`` nonetheless."""
        if self._end > self._kept:
            os.pwrite(self._open_file(), self._first, self._kept)
