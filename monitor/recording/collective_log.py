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

# --- Where in the user's program communication was issued.

INTERNAL: Final = frozenset({"torch", "mindspore", "monitor"})
"""Packages whose frames say nothing about where a call comes from."""

MAX_SITES: Final = 8192
"""Call sites remembered. Forgetting one costs a second look at it, no more."""


@dataclass(frozen=True, slots=True)
class CallSite:
    """One place that calls, with those that call it.

    Attributes:
        stack: ``file[line] function`` for each frame, innermost first; empty where no Python of the user's is on the stack,
            as on a thread of the autograd engine.
        wanted: Whether one of the patterns finds a ``file[line]`` of it.
    """

    stack: tuple[str, ...]
    wanted: bool


class CallSites:
    """Recognises call sites; each is looked at once.

    Args:
        patterns: Regular expressions on ``file[line]``. None: every site is wanted.
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
    """What is logged once."""

    op: str
    group: str
    dtype: str
    shape: str
    stack: tuple[str, ...]


class CommunicationLog:
    """Counts calls by operator, group, dtype, shape and call site.

    Args:
        dtype_name: Spells a dtype of the framework.
    """

    def __init__(self, dtype_name: Callable[[Any], str] = str) -> None:
        self._dtype_name = dtype_name
        self.counts: Counter[LoggedCall] = Counter()

    def add(self, op: str, group: str, tensors: Sequence[Any], site: CallSite) -> None:
        """One call."""
        dtypes, shapes = (
            dict.fromkeys(self._dtype_name(one.dtype) for one in tensors),
            [str(list(one.shape)) for one in tensors],
        )
        self.counts[LoggedCall(op, group, " ".join(dtypes), " ".join(shapes), site.stack)] += 1

    def write(self, directory: Path) -> Path:
        """Write it, the sites in the order in which they first called. The file appears whole.

        Raises:
            OSError: It cannot be written.
        """
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow(COLUMNS)
        for entry, calls in self.counts.items():
            rows.writerow([*entry[:4], calls, "\n".join(entry.stack)])
        path = directory / LOG_FILE
        write_whole(path, text.getvalue().encode())
        return path
