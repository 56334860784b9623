"""Recovers a rank's directory after a crash: asks each format to recover its files, and joins the results."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Protocol

from monitor.sinks.files import StepSpan


@dataclass(slots=True)
class RecoveredFiles:
    """What the recovery of one format changed.

    Attributes:
        ranges: Steps whose files have changed since the last save, or that had an unfinished file.
        cut: Unfinished steps that were cut off. Visible files may hold the same steps of an earlier run.
        aside: Damaged files, under their new names.
    """

    ranges: set[StepSpan] = field(default_factory=set)
    cut: set[int] = field(default_factory=set)
    aside: list[Path] = field(default_factory=list)


class CrashRecovery(Protocol):
    """How a format recovers the files of an earlier process. Each format has a module with these functions."""

    def recover(self, directory: Path, newest: int, saved_ns: int, begun_ns: int) -> RecoveredFiles:
        """Make the whole steps visible that a killed process left in ``directory``.

        Args:
            newest: The last step known to be written; -1 if none is.
            saved_ns: When ``newest`` was saved, in the time of the file system. Files that changed later are read.
            begun_ns: When that process began to write here. Files that have not changed since are older than the process.

        Raises:
            OSError: a file could not be read or written. What the process left is still there, hidden or visible.
        """
        ...

    def held(self, directory: Path, steps: StepSpan) -> set[int]:
        """The steps in ``steps``, and some near them, that have rows in visible files."""
        ...


@dataclass(frozen=True, slots=True)
class RecoverySummary:
    """What a directory holds after the recovery.

    Attributes:
        ranges: Steps of which files hold more than the manifest says.
        held: By format, the steps in these ranges that visible files hold.
        cut: Steps that were cut off and are in no visible file.
        aside: Damaged files, under their new names.
    """

    ranges: Collection[StepSpan]
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
    """Recover the files of all formats, and find the steps in the files of the formats ``asked``.

    Args:
        recoveries: By format.
        asked: The formats that the last process wrote, as far as known.
        first: The first step of that process. Earlier steps are known.
        newest, saved_ns, begun_ns: As in ``CrashRecovery.recover``.

    Raises:
        OSError: a file could not be read or written.
    """
    recovered = {name: one.recover(directory, newest, saved_ns, begun_ns) for name, one in recoveries.items()}
    known = [name for name in recovered if name in asked]
    touched = {steps for name in known for steps in recovered[name].ranges if steps.last >= first}
    ranges = {StepSpan(max(steps.first, first), steps.last) for steps in touched}
    all_of_them = StepSpan(min((one.first for one in ranges), default=0), max((one.last for one in ranges), default=-1))
    held = {name: recoveries[name].held(directory, all_of_them) for name in known}
    cut = {step for name in known for step in recovered[name].cut if step >= first}.difference(*held.values())
    return RecoverySummary(ranges, held, cut, [path for one in recovered.values() for path in one.aside])


def changed(path: Path) -> int:
    """The modification time in nanoseconds; 0 if the file does not exist."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def is_regular(path: Path) -> bool:
    """True for a file; false for a link, and for a pipe, which would block the reader."""
    return stat.S_ISREG(os.lstat(path).st_mode)


def checked(path: Path) -> Path:
    """``path`` itself; raises ``OSError`` if it is not a regular file."""
    if not is_regular(path):
        raise OSError(errno.EISDIR if path.is_dir() else errno.EINVAL, "this is no regular file", str(path))
    return path


def rename_damaged(path: Path) -> Path:
    """Make an unfinished file visible under a name that readers of shards ignore. Returns the new path."""
    name = path.name.removeprefix(".").removesuffix(".part")
    names = (f"{name}.damaged{f'.{copy}' if copy > 1 else ''}" for copy in count(1))
    target = next(target for name in names if not os.path.lexists(target := path.with_name(name)))
    os.rename(path, target)
    return target
