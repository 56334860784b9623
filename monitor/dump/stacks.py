"""The Python stacks that calls come from. A program has few: each is spelled once, and a number afterwards."""

from __future__ import annotations

import itertools
import linecache
import sys
from types import CodeType, FrameType

from monitor.recording.module_info import MACHINERY, MAX_FRAMES

_Key = tuple[tuple[CodeType, int], ...]


class Stacks:
    """The stacks of a step."""

    def __init__(self) -> None:
        self._numbers: dict[_Key, int] = {}
        self._unused = itertools.count()

    def here(self) -> tuple[int, list[str] | None]:
        """The number of the stack that leads here, and where it is new its frames, innermost first."""
        key = _frames(sys._getframe(1))
        number = self._numbers.get(key)
        if number is not None:
            return number, None
        number = self._numbers[key] = next(self._unused)  # two threads that meet here have one each
        return number, [_spelled(code, line) for code, line in key]


def _frames(frame: FrameType | None) -> _Key:
    """Those of the user's program and of libraries, without ours and the machinery that calls modules."""
    found: list[tuple[CodeType, int]] = []
    while frame is not None and len(found) < MAX_FRAMES:
        if not str(frame.f_globals.get("__name__", "")).startswith(MACHINERY):
            found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


def _spelled(code: CodeType, line: int) -> str:
    return f"File {code.co_filename}, line {line}, in {code.co_name}, \n {linecache.getline(code.co_filename, line).strip()}"
