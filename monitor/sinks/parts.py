"""A file in the making: hidden, growing by whole steps, given its name when it is complete."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from monitor.sinks.growing import GrowingFile, opened
from monitor.sinks.shard_names import part_name

UNFINISHED: Final = 0x80
"""Set in the first byte of a step until the step is whole. No line of ours begins with such a byte, so whoever finds the file
of a process that was killed sees where the whole steps end."""


class Part(GrowingFile):
    """The hidden file ``.{name}.part``.

    A step is written in two phases, so that it can be told of all parts whether it was finished: ``write`` of every part,
    then ``finish`` of every part.
    """

    def __init__(self, path: Path, file: int, kept: int = 0, end: int = 0, first: bytes = b"") -> None:
        super().__init__(path, file, kept, end)
        self._first = first

    @classmethod
    def begin(cls, directory: Path, name: str, text: bytes) -> Part:
        """A new one, which begins with ``text``. One that could not be begun is gone."""
        path = directory / part_name(name)
        part = cls(path, opened(path, os.O_CREAT | os.O_TRUNC))
        try:
            part.write(text)
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

    def write(self, content: bytes | memoryview) -> None:
        """Add ``content``, for the time being. The operating system has it on return."""
        rest = memoryview(content)
        if rest and self._end == self._kept:
            self._first = bytes(rest[:1])
            super().write(bytes([self._first[0] | UNFINISHED]))
            rest = rest[1:]
        super().write(rest)

    def finish(self) -> None:
        """The step is whole, here and in every other part. Taken back by ``forget`` nonetheless."""
        if self._end > self._kept:
            os.pwrite(self._open_file(), self._first, self._kept)
