"""File names of the ``csv`` format, and files that grow by whole steps, for every format."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Final, NamedTuple, Protocol

_SHARD_NAME: Final = re.compile(r"(?P<kind>.+)_(?P<first>\d+)-(?P<last>\d+)(?:\.\d+)?\.csv")
_DRAFT_NAME: Final = re.compile(r"\..+\.csv\.draft")
_PART_NAME: Final = re.compile(r"\.(?P<shard>.+)\.part")


class StepSpan(NamedTuple):
    """The steps from ``first`` to ``last``, both included."""

    first: int
    last: int

    @classmethod
    @lru_cache(maxsize=4)  # called a dozen times for each step
    def of_record(cls, step: int, steps_per_record: int) -> StepSpan:
        """The record that ``step`` falls in."""
        first = step - step % steps_per_record
        return cls(first, first + steps_per_record - 1)

    def holds(self, other: StepSpan) -> bool:
        return self.first <= other.first and other.last <= self.last

    def meets(self, other: StepSpan) -> bool:
        """Whether both have a step in common."""
        return self.first <= other.last and other.first <= self.last


ALL_STEPS: Final = StepSpan(0, 2**63 - 1)


class NamedShard(NamedTuple):
    """A file with the kind and the steps that its name states."""

    kind: str
    steps: StepSpan
    path: Path


def shard_name(kind: str, steps: StepSpan, copy: int = 1) -> str:
    return f"{kind}_{steps.first}-{steps.last}{f'.{copy}' if copy > 1 else ''}.csv"


def part_name(shard: str) -> str:
    """The name of the hidden file that becomes ``shard``."""
    return f".{shard}.part"


def draft_name(shard: str) -> str:
    """The name of the hidden file that replaces a shard when some of its rows are removed."""
    return f".{shard}.draft"


def shards_in(directory: Path) -> Iterator[NamedShard]:
    """The files that a reader sees."""
    for name in _names(directory):
        if (named := _named(name, directory / name)) is not None:
            yield named


def parts_in(directory: Path) -> Iterator[NamedShard]:
    """The unfinished files."""
    for name in _names(directory):
        match = _PART_NAME.fullmatch(name)
        if match and (named := _named(match["shard"], directory / name)) is not None:
            yield named


def drafts_in(directory: Path) -> list[Path]:
    return [directory / name for name in _names(directory) if _DRAFT_NAME.fullmatch(name)]


def _named(name: str, path: Path) -> NamedShard | None:
    match = _SHARD_NAME.fullmatch(name)
    return NamedShard(match["kind"], StepSpan(int(match["first"]), int(match["last"])), path) if match else None


def _names(directory: Path) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except FileNotFoundError:
        return []


class AppendFile:
    """A file that grows by whole steps: ``keep`` commits what was written since the last ``keep``, ``forget`` rolls it back.

    Every method but ``forget`` and ``discard`` may raise OSError. Committed bytes are unchanged then.

    Args:
        file: The descriptor, owned by this object.
        kept: How many bytes are committed.
        end: Where the next bytes go.
        new: Whether the file is empty.
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
        """Number of committed bytes."""
        return self._kept

    def gone(self) -> bool:
        """Whether the file or its directory was removed."""
        try:
            os.lstat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:  # not accessible for now
            return False
        return False

    def write(self, content: bytes | memoryview) -> None:
        """Append ``content``, uncommitted. The operating system has it on return."""
        rest = memoryview(content)
        while rest:
            written = os.pwrite(self._open_file(), rest, self._end)
            self._end += written
            rest = rest[written:]

    def keep(self) -> None:
        """Commit what was written."""
        self._kept = self._end

    def forget(self) -> None:
        """Roll back to the last ``keep``."""
        self._end = self._kept
        if self._file is not None:
            try:
                os.ftruncate(self._file, self._kept)
            except OSError:  # later writes overwrite the rest, or ``release`` cuts it off
                self._may_be_longer = True

    def release(self) -> None:
        """Close the file, which then holds the committed bytes and nothing else."""
        if self._file is None:
            return
        if self._may_be_longer or self._end > self._kept:
            os.ftruncate(self._file, self._kept)
        file, self._file = self._file, None
        try:
            os.close(file)
        except OSError:  # a network file system may report only now that it lost earlier writes
            self.discard()
            raise

    def discard(self) -> None:
        """Close the file and remove it; errors are ignored."""
        file, self._file = self._file, None
        with suppress(OSError):
            if file is not None:
                os.close(file)
        with suppress(OSError):
            os.unlink(self.path)

    def _open_file(self) -> int:
        if self._file is None:
            raise ValueError(f"{self.path} is already closed")
        return self._file


def opened(path: str | Path, how: int = 0) -> int:
    """Open a file for reading and writing, and return the descriptor. A missing directory is made.

    Args:
        how: Additional flags of ``os.open``, such as ``os.O_CREAT``.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | how
    try:
        return os.open(path, flags, 0o666)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return os.open(path, flags, 0o666)


UNFINISHED: Final = 0x80
"""Set in the first byte of a step until the step is whole. No line of a shard begins with such a byte. So the file of a killed
process shows where its whole steps end."""


class PartialFile(AppendFile):
    """The hidden file ``.{name}.part`` (``part_name``), which becomes a shard when its record is complete.

    A step is written in two phases: first ``write`` for every part, then ``finish`` for every part. So a recovery can tell
    whether the step was finished in all parts.
    """

    def __init__(
        self, path: str | Path, file: int, kept: int = 0, end: int = 0, first: bytes = b"", *, new: bool = False
    ) -> None:
        super().__init__(path, file, kept, end, new=new)
        self._first = first

    @classmethod
    def begin(cls, path: str, text: bytes, rows: bytes | memoryview = b"") -> PartialFile:
        """A new part that begins with ``text`` and ``rows``. It is removed again if that fails."""
        part = cls(path, opened(path, os.O_CREAT | os.O_TRUNC), new=True)
        try:
            part.write(text, rows)
        except OSError:
            part.discard()
            raise
        return part

    @classmethod
    def left_behind(cls, path: Path, kept: int, end: int, first: bytes) -> PartialFile:
        """The part of a process that ended: ``kept`` bytes of whole steps, then one step up to ``end``.

        Args:
            first: The first byte of that step.
        """
        return cls(path, opened(path), kept, end, first)

    def write(self, content: bytes | memoryview, more: bytes | memoryview = b"") -> None:
        """Append ``content`` and then ``more``, uncommitted. The operating system has them on return."""
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
        """Mark the step as whole, after every part has written it. ``forget`` still rolls it back."""
        if self._end > self._kept:
            os.pwrite(self._open_file(), self._first, self._kept)


# --- Recovers a rank's directory after a crash: asks each format to recover its files, and joins the results.


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


def size_of(path: Path) -> int:
    """The size in bytes; 0 if the file does not exist."""
    try:
        return path.stat().st_size
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
