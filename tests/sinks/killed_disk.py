"""A process that is killed in place of any call that reaches the disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

CALLS = ("open", "pwrite", "pwritev", "ftruncate", "close", "replace", "utime", "unlink")


class Killed(BaseException):
    """The process is no more."""


class Disk:
    """What a process does to the disk, until it is killed in the midst of a call."""

    def __init__(self, calls: float) -> None:
        self.left = calls
        self.opened: set[int] = set()
        self._real = {name: getattr(os, name) for name in CALLS}

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            if self.left == -1 and name in ("pwrite", "pwritev"):  # a write may come half through
                file, given, offset = arguments
                text = bytes(given) if name == "pwrite" else b"".join(given)
                self._real["pwrite"](file, text[: (len(text) + 1) // 2], offset)
            raise Killed
        done = self._real[name](*arguments, **options)
        if name == "open":
            self.opened.add(done)
        elif name == "close":
            self.opened.discard(arguments[0])
        return done

    def close_all(self) -> None:
        for file in self.opened:
            self._real["close"](file)


@contextmanager
def killed_after(calls: float, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk(calls)
    with monkeypatch.context() as patch, suppress(Killed):
        for name in CALLS:
            patch.setattr(os, name, lambda *given, name=name, **options: disk.call(name, *given, **options))
        yield disk
    disk.close_all()
