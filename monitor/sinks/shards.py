"""Which rows share a file, what it is called, and when it is seen.

A file of a kind holds the steps of a record and is called after them. It takes its name when the record is complete, so a
reader never meets a torn one, and a process that is killed loses at most the record that it had open. Steps that were there
before, from a flush or from an earlier process, are carried over if their columns are the same. If not, the record is shared
by several files, each called after the steps that it really holds. Nothing that cannot be carried over is replaced.
"""

from __future__ import annotations

import errno
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Final, NamedTuple

from monitor.sinks.parts import Part

_SHARD_NAME: Final = re.compile(r"(?P<kind>.+)_(?P<first>\d+)-(?P<last>\d+)(?:\.\d+)?\.csv")


class Steps(NamedTuple):
    """The steps from ``first`` to ``last``, both included."""

    first: int
    last: int

    @classmethod
    def of_record(cls, step: int, steps_per_record: int) -> Steps:
        """The record that ``step`` falls in."""
        first = step - step % steps_per_record
        return cls(first, first + steps_per_record - 1)


@dataclass(frozen=True, slots=True)
class Carried:
    """What a file holds of the steps before a certain one.

    Attributes:
        text: Its header and the rows of these steps.
        first: The first of these steps, None if there are no rows.
    """

    text: bytes
    first: int | None


Carry = Callable[[Path, bytes, int], Carried | None]
"""From a file, a header and a step: what the file holds of earlier steps; None if rows below that header cannot join it."""

Write = Callable[[str, bytes | memoryview], None]
"""Takes a kind and some of its rows in the step at hand."""


@dataclass(slots=True)
class Shard:
    """The open file of a kind.

    Attributes:
        record: The steps that it may hold.
        header: The first line, ended by a newline.
        replaces: The file whose rows it carries on, if any.
        shares_record: Whether the record has other files too, so that this one must be called after its own steps.
        first, last: The steps that it does hold; ``last`` is None until one was written.
    """

    kind: str
    record: Steps
    header: bytes
    part: Part
    replaces: Path | None
    shares_record: bool
    first: int | None
    last: int | None = None

    def keep(self, step: int) -> None:
        """The rows of ``step`` are all there."""
        self.part.keep()
        self.first, self.last = step if self.first is None else self.first, step

    def takes(self, step: int, header: bytes) -> bool:
        """Whether rows of ``step`` can be added at its end."""
        return self.header == header and (self.last is None or self.last < step) and not self.part.released

    @property
    def called_after(self) -> Steps:
        """The steps that its name says."""
        if not self.shares_record or self.first is None or self.last is None:
            return self.record
        return Steps(self.first, self.last)


class Shards:
    """The shards of a directory, one open a kind at most.

    Every method may raise OSError: every shard then holds whole steps, and the next step can be tried.
    """

    def __init__(self, directory: Path, steps_per_record: int, carry: Carry) -> None:
        self._directory = directory
        self._steps_per_record = steps_per_record
        self._carry = carry
        self._open: dict[str, Shard] = {}
        self._others: dict[tuple[str, Steps], set[Path]] | None = None

    @contextmanager
    def step(self, step: int, headers: Mapping[str, bytes]) -> Iterator[Write]:
        """Write one step, of all kinds or, if an error leaves this context, of none.

        Args:
            headers: By kind. A kind of which nothing is written gets no file.
        """
        self._make_way(step, headers)
        touched: set[str] = set()

        def write(kind: str, text: bytes | memoryview) -> None:
            touched.add(kind)
            if kind not in self._open:
                self._open[kind] = self._new(kind, headers[kind], step)
            self._open[kind].part.write(text)

        try:
            yield write
        except BaseException:
            self._forget(touched)
            raise
        for kind in touched:
            self._open[kind].keep(step)
        self._publish(shard for shard in self._open.values() if shard.record.last == step)

    def flush(self) -> None:
        """Give every shard its name."""
        self._publish(self._open.values())

    def close(self) -> None:
        """Give every shard its name, and let go of all files, also of those that could not be named."""
        try:
            self.flush()
        finally:
            for shard in self._open.values():
                with suppress(OSError):
                    shard.part.release()
            self._open.clear()

    def _make_way(self, step: int, headers: Mapping[str, bytes]) -> None:
        """Finish the shards that rows of ``step`` cannot be added to."""
        self._miss_removed()
        record = Steps.of_record(step, self._steps_per_record)
        for shard in self._open.values():
            shard.shares_record |= shard.record == record and shard.header != headers.get(shard.kind, shard.header)
        self._publish(
            shard
            for shard in self._open.values()
            if shard.record != record or (shard.kind in headers and not shard.takes(step, headers[shard.kind]))
        )

    def _miss_removed(self) -> None:
        removed = [kind for kind, shard in self._open.items() if shard.part.gone()]
        if removed:
            paths = [self._drop(kind).path for kind in removed]
            raise FileNotFoundError(errno.ENOENT, "removed while it was being written", str(paths[0]))

    def _forget(self, kinds: Iterable[str]) -> None:
        for kind in kinds:
            shard = self._open.get(kind)
            if shard is not None and shard.last is None:
                self._drop(kind)
            elif shard is not None:
                shard.part.forget()

    def _drop(self, kind: str) -> Part:
        part = self._open.pop(kind).part
        part.discard()
        return part

    def _new(self, kind: str, header: bytes, step: int) -> Shard:
        record = Steps.of_record(step, self._steps_per_record)
        files = self._files_of(kind, record)
        replaces, carried = self._carried(files, header, step)
        part = Part(self._directory, _name(kind, record), carried.text)
        return Shard(kind, record, header, part, replaces, any(path != replaces for path in files), carried.first)

    def _carried(self, files: Iterable[Path], header: bytes, step: int) -> tuple[Path | None, Carried]:
        """The first of these files that rows of ``step`` can join, and what to carry over from it."""
        for path in files:
            carried = self._carry(path, header, step)
            if carried is not None:
                return path, carried
        return None, Carried(header, None)

    def _publish(self, shards: Iterable[Shard]) -> None:
        """Give each shard its name; of several errors raise the first, when all were tried."""
        errors = [error for error in map(self._publish_one, list(shards)) if error is not None]
        if errors:
            raise errors[0]

    def _publish_one(self, shard: Shard) -> OSError | None:
        try:
            shard.part.release()
            self._give_name(shard)
            del self._open[shard.kind]
        except OSError as error:
            if shard.part.gone():
                self._drop(shard.kind)
            return error
        return None

    def _give_name(self, shard: Shard) -> None:
        path = self._free_path(shard)
        # By way of the file that it replaces, so that its rows are never there twice.
        os.replace(shard.part.path, shard.replaces or path)
        if shard.replaces:
            os.replace(shard.replaces, path)
        if path.name != _name(shard.kind, shard.record):
            self._other_files()[shard.kind, shard.record].add(path)

    def _free_path(self, shard: Shard) -> Path:
        names = (_name(shard.kind, shard.called_after, copy) for copy in count(1))
        paths = (self._directory / name for name in names)
        return next(path for path in paths if path == shard.replaces or not os.path.lexists(path))

    def _files_of(self, kind: str, record: Steps) -> list[Path]:
        """The files that hold steps of this record: the one called after it first."""
        others = self._other_files().get((kind, record), ())
        paths = chain([self._directory / _name(kind, record)], sorted(others))
        return [path for path in paths if os.path.lexists(path)]

    def _other_files(self) -> dict[tuple[str, Steps], set[Path]]:
        """The files of a record that are not called after it. The directory is listed once, for those that were there."""
        if self._others is None:
            others: dict[tuple[str, Steps], set[Path]] = defaultdict(set)
            for kind, steps, path in _listed(self._directory):
                record = Steps.of_record(steps.first, self._steps_per_record)
                if steps.last <= record.last and path.name != _name(kind, record):
                    others[kind, record].add(path)
            self._others = others
        return self._others


def _name(kind: str, steps: Steps, copy: int = 1) -> str:
    return f"{kind}_{steps.first}-{steps.last}{f'.{copy}' if copy > 1 else ''}.csv"


def _listed(directory: Path) -> Iterator[tuple[str, Steps, Path]]:
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return
    for name in names:
        match = _SHARD_NAME.fullmatch(name)
        if match:
            yield match["kind"], Steps(int(match["first"]), int(match["last"])), directory / name
