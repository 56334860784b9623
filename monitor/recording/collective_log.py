"""The communication log: every call site of the first step once, with its count."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple

from monitor.coordinator.output import write_whole

# --- Call sites: where the user's program issues communication.

INTERNAL: Final = frozenset({"torch", "mindspore", "monitor"})
"""Packages whose frames do not belong to a call site."""

MAX_SITES: Final = 8192
"""Maximum number of cached call sites. A site that is dropped from the cache is only examined again."""


@dataclass(frozen=True, slots=True)
class CallSite:
    """A call site: the user's frames on the call stack.

    Attributes:
        stack: ``file[line] function`` for each frame, innermost first; empty if the stack has no Python frame of the user,
            as on a thread of the autograd engine.
        wanted: Whether one of the patterns matches a ``file[line]`` of the stack.
    """

    stack: tuple[str, ...]
    wanted: bool


class CallSites:
    """Finds call sites, and caches them.

    Args:
        patterns: Regular expressions for ``file[line]``. Empty: every site is wanted.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = [re.compile(pattern) for pattern in patterns]
        self._sites: dict[tuple[tuple[CodeType, int], ...], CallSite] = {}

    @property
    def has_patterns(self) -> bool:
        """Whether there are patterns."""
        return bool(self._patterns)

    def at(self, frame: FrameType | None) -> CallSite:
        """The call site that ``frame`` belongs to."""
        frames = []
        while frame is not None:
            if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in INTERNAL:
                frames.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
        key = tuple(frames)
        site = self._sites.get(key)
        if site is None:
            if len(self._sites) >= MAX_SITES:
                self._sites.clear()
            site = self._sites[key] = self._described(key)
        return site

    def _described(self, frames: Sequence[tuple[CodeType, int]]) -> CallSite:
        lines = [f"{code.co_filename}[{line}]" for code, line in frames]
        stack = tuple(f"{where} {code.co_name}" for where, (code, _) in zip(lines, frames, strict=True))
        wanted = not self._patterns or any(pattern.search(where) for pattern in self._patterns for where in lines)
        return CallSite(stack, wanted)


LOG_FILE: Final = "communication_log.csv"
COLUMNS: Final = ("op", "group", "dtype", "shape", "calls", "stack")


class LoggedCall(NamedTuple):
    """A row of the log: calls with the same values are counted."""

    op: str
    group: str
    dtype: str
    shape: str
    stack: tuple[str, ...]


class CommunicationLog:
    """Counts calls by operator, group, dtype, shape and call site.

    Args:
        dtype_name: Returns the name of a dtype of the framework.
    """

    def __init__(self, dtype_name: Callable[[Any], str] = str) -> None:
        self._dtype_name = dtype_name
        self.counts: Counter[LoggedCall] = Counter()

    def add(self, op: str, group: str, tensors: Sequence[Any], site: CallSite) -> None:
        """Count one call."""
        dtypes = dict.fromkeys(self._dtype_name(one.dtype) for one in tensors)
        shapes = [str(list(one.shape)) for one in tensors]
        self.counts[LoggedCall(op, group, " ".join(dtypes), " ".join(shapes), site.stack)] += 1

    def write(self, directory: Path) -> Path:
        """Write the log atomically, with sites in the order of their first calls.

        Raises:
            OSError: The file cannot be written.
        """
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow(COLUMNS)
        for entry, calls in self.counts.items():
            rows.writerow([*entry[:4], calls, "\n".join(entry.stack)])
        path = directory / LOG_FILE
        write_whole(path, text.getvalue().encode())
        return path
