"""Going on in a directory that another process has written to: each format puts its own files in order and says which steps
they hold; here that is asked of all formats, and told as one.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Protocol

from monitor.sinks.files import StepRange


@dataclass(slots=True)
class RecoveredFiles:
    """What a format has put in order.

    Attributes:
        ranges: Steps whose files have changed lately, or of which something was left in the making.
        cut: Steps that were cut off. Visible files may have them of an earlier run.
        aside: Files that were set aside, under their new names.
    """

    ranges: set[StepRange] = field(default_factory=set)
    cut: set[int] = field(default_factory=set)
    aside: list[Path] = field(default_factory=list)


class CrashRecovery(Protocol):
    """What a format does with the files of an earlier process. A module each."""

    def recover(self, directory: Path, newest: int, saved_ns: int, begun_ns: int) -> RecoveredFiles:
        """Make visible what a process that was killed left in ``directory``, as far as its steps are whole.

        Args:
            newest: The last step that is known to have been written; -1: none is.
            saved_ns: When that was known, in the time of the file system. Files that have changed since are looked into.
            begun_ns: When that process began to write here. Files that have not changed since are from before.

        Raises:
            OSError: something could not be read or written. What was left is still there, hidden or visible.
        """
        ...

    def held(self, directory: Path, steps: StepRange) -> set[int]:
        """The steps of which there are rows in visible files: all of those in ``steps``, and some near them."""
        ...


@dataclass(frozen=True, slots=True)
class RecoverySummary:
    """What a directory holds.

    Attributes:
        ranges: Steps that files tell more of than what was known.
        held: By format, the steps in these ranges that visible files hold.
        cut: Steps that were cut off, and that no visible file holds.
        aside: Files that were set aside, under their new names.
    """

    ranges: Collection[StepRange]
    held: Mapping[str, Collection[int]]
    cut: Collection[int]
    aside: Collection[Path]


def recover_all(
    directory: Path,
    recoveries: Mapping[str, CrashRecovery],
    asked: Collection[str],
    first: int,
    newest: int,
    saved_ns: int,
    begun_ns: int,
) -> RecoverySummary:
    """Recover the files of all formats, and look for the steps in some.

    Args:
        recoveries: By format.
        asked: The formats that the last process is known to have written.
        first: Its first step. Those before it are known.
        newest, saved_ns, begun_ns: As in ``CrashRecovery.recover``.

    Raises:
        OSError: something could not be read or written.
    """
    recovered = {name: one.recover(directory, newest, saved_ns, begun_ns) for name, one in recoveries.items()}
    known = [name for name in recovered if name in asked]
    touched = {steps for name in known for steps in recovered[name].ranges if steps.last >= first}
    ranges = {StepRange(max(steps.first, first), steps.last) for steps in touched}
    all_of_them = StepRange(min((one.first for one in ranges), default=0), max((one.last for one in ranges), default=-1))
    held = {name: recoveries[name].held(directory, all_of_them) for name in known}
    cut = {step for name in known for step in recovered[name].cut if step >= first}.difference(*held.values())
    return RecoverySummary(ranges, held, cut, [path for one in recovered.values() for path in one.aside])


def changed(path: Path) -> int:
    """When, in nanoseconds; 0 if it is gone."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def is_regular(path: Path) -> bool:
    """Whether it is a file, and neither a link to one nor a pipe, which would be waited for."""
    return stat.S_ISREG(os.lstat(path).st_mode)


def checked(path: Path) -> Path:
    """Raises ``OSError`` for what is no regular file."""
    if not is_regular(path):
        raise OSError(errno.EISDIR if path.is_dir() else errno.EINVAL, "this is no regular file", str(path))
    return path


def rename_damaged(path: Path) -> Path:
    """A file in the making, from now on visible, and called nothing that a reader of shards would take up."""
    name = path.name.removeprefix(".").removesuffix(".part")
    names = (f"{name}.damaged{f'.{copy}' if copy > 1 else ''}" for copy in count(1))
    target = next(target for name in names if not os.path.lexists(target := path.with_name(name)))
    os.rename(path, target)
    return target
