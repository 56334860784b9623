"""The files of the ``csv`` format in a rank's directory: which rows share a file, its name, and when it becomes visible.

A file of a kind holds the steps of one record and is named after them. It gets its name when the record is complete. So readers
never see a torn file, and a killed process loses at most its open record.

Steps already in the record, from a flush or an earlier process, are carried over if their columns are the same. If not, several
files share the record, each named after the steps that it really holds.

When a record is written again, the old rows from its first new step on are removed from every file of every kind. So no step is
there twice, and no step mixes old and new rows. Files of other programs are never touched.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow.csv import ConvertOptions, ParseOptions, ReadOptions, read_csv as read_arrow  # type: ignore[attr-defined]

from monitor.sinks import files
from monitor.sinks.files import NamedShard, PartialFile, RecoveredFiles, StepSpan, changed, checked, is_regular, rename_damaged
from monitor.sinks.protocol import RemovedFileError

# --- The rows of a CSV file as bytes, each with its step, so that some can be kept and others removed.

BEGINNING: Final = b"vpp_stage,name,step,"
"""Every file of this format begins with these bytes."""

_DIALECT: Final = ParseOptions(newlines_in_values=True)
_STEPS: Final = ConvertOptions(column_types={"step": pa.int64()}, include_columns=["step"])
_ONE_THREAD: Final = ReadOptions(use_threads=False)


@dataclass(frozen=True, slots=True)
class CsvRows:
    """The content of a file: a header and whole lines, each with its step.

    Attributes:
        header: The first line, ended by a newline.
        rows: The other lines, uint8, shape ``(bytes,)``.
        lengths: Bytes of each row, its newline included; int64, shape ``(rows,)``.
        steps: Step of each row; int64, shape ``(rows,)``.
    """

    header: bytes
    rows: NDArray[np.uint8]
    lengths: NDArray[np.int64]
    steps: NDArray[np.int64]

    @classmethod
    def nothing(cls, header: bytes) -> CsvRows:
        """A header and no rows."""
        none = np.empty(0, np.int64)
        return cls(header, np.empty(0, np.uint8), none, none)

    @classmethod
    def read(cls, path: Path) -> CsvRows | None:
        """The content of a file; None if it does not exist or is not of this format."""
        try:
            return cls.parse(path.read_bytes())
        except (FileNotFoundError, IsADirectoryError, PermissionError):
            return None

    @classmethod
    def parse(cls, text: bytes) -> CsvRows | None:
        """The content of a text; None if it is not whole or not of this format."""
        ends = line_ends(text)
        if not text.startswith(BEGINNING) or ends[-1:].tolist() != [len(text)]:
            return None
        try:
            steps = _steps_of(text)
        except pa.ArrowInvalid:
            return None
        if len(ends) != 1 + len(steps):
            return None
        return cls(text[: ends[0]], np.frombuffer(text, dtype=np.uint8)[ends[0] :], np.diff(ends), steps)

    def only(self, kept: NDArray[np.bool_]) -> CsvRows:
        """The rows where ``kept`` is true; ``kept`` has the shape ``(rows,)``."""
        return CsvRows(self.header, self.rows[np.repeat(kept, self.lengths)], self.lengths[kept], self.steps[kept])

    def before(self, step: int) -> CsvRows:
        return self.only(self.steps < step)

    def text(self) -> bytes:
        return self.header + self.rows.tobytes()

    def rows_of(self, step: int) -> bytes:
        return self.only(self.steps == step).rows.tobytes()

    def first(self) -> int | None:
        """The first step; None if there are no rows."""
        return int(self.steps.min()) if len(self.steps) else None

    def last(self) -> int | None:
        return int(self.steps.max()) if len(self.steps) else None


def line_ends(text: bytes) -> NDArray[np.int64]:
    """The end of each whole line, one past its newline. A newline after an odd number of quotes is part of a name."""
    characters = np.frombuffer(text, dtype=np.uint8)
    within_quotes = np.bitwise_xor.accumulate(characters == ord('"'))
    return np.flatnonzero((characters == ord("\n")) & ~within_quotes) + 1


def _steps_of(text: bytes) -> NDArray[np.int64]:
    table = read_arrow(pa.BufferReader(text), _ONE_THREAD, _DIALECT, _STEPS)
    if table["step"].null_count:
        raise pa.ArrowInvalid("a row has no step")
    steps: NDArray[np.int64] = table["step"].to_numpy()
    return steps


MOST_RECORDS: Final = 1000
"""A file whose name spans at least so many records is not indexed by record."""

Write = Callable[[str, bytes | memoryview], None]
"""Takes a kind and some of its rows of the current step."""


@dataclass(slots=True)
class OpenShard:
    """The open file of a kind.

    Attributes:
        record: The steps that it may hold.
        header: The first line, ended by a newline.
        replaces: The file whose rows it carries over, if any.
        shares_record: Whether the record has other files too, so that this one must be named after its own steps.
        first, last: The steps that it holds; ``last`` is None until a step was written.
        steps: Those that were written to it.
    """

    kind: str
    record: StepSpan
    header: bytes
    part: PartialFile
    replaces: Path | None
    shares_record: bool
    first: int | None
    last: int | None = None
    steps: list[int] = field(default_factory=list)

    def keep(self, step: int) -> None:
        """Commit the rows of ``step``."""
        self.part.keep()
        self.steps.append(step)
        self.first, self.last = step if self.first is None else self.first, step

    def takes(self, step: int, header: bytes) -> bool:
        """Whether rows of ``step`` can be appended."""
        return self.header == header and (self.last is None or self.last < step) and not self.part.released

    @property
    def called_after(self) -> StepSpan:
        """The steps in the file's name."""
        if not self.shares_record or self.first is None or self.last is None:
            return self.record
        return StepSpan(self.first, self.last)


class CsvShards:
    """The shards of a directory. At most one per kind is open, and all open ones belong to one record.

    Every method may raise OSError: every shard then holds whole steps, and the next step can be written.
    """

    def __init__(self, directory: Path, steps_per_record: int) -> None:
        self._directory = directory
        self._within = os.path.join(directory, "")
        self._steps_per_record = steps_per_record
        self._open: dict[str, OpenShard] = {}
        self._named_bytes = 0  # by which the visible files have grown
        self._since: int | None = None  # the first step that was written since the files were last made visible
        self._there: _FileIndex | None = None

    @contextmanager
    def step(self, step: int, headers: Mapping[str, bytes]) -> Iterator[Write]:
        """Write one step for all kinds; if the context raises, for none.

        Args:
            headers: By kind. A kind without rows gets no file.
        """
        record = self._record_of(step)
        self._make_way(step, record, headers)
        touched: set[str] = set()

        def write(kind: str, text: bytes | memoryview) -> None:
            touched.add(kind)
            if kind in self._open:
                self._open[kind].part.write(text)
            else:
                self._open[kind] = self._new(kind, record, headers[kind], step, text)

        try:
            yield write
            for kind in touched:
                self._open[kind].part.finish()
        except BaseException:
            self._forget(touched)
            raise
        self._keep(step, touched)
        if step == record.last:
            self.flush()

    def flush(self) -> None:
        """Give every shard its name."""
        self._publish(list(self._open.values()))

    def close(self) -> None:
        """Give every shard its name, and close all files, also those that could not be named."""
        try:
            self.flush()
        finally:
            for shard in self._open.values():
                with suppress(OSError):
                    shard.part.release()
            self._open.clear()

    @property
    def grown(self) -> int:
        """See ``monitor.sinks.protocol.ThinnableSink``."""
        return self._named_bytes + sum(shard.part.size for shard in self._open.values())

    def remove(self, steps: Collection[int]) -> None:
        """See ``monitor.sinks.protocol.ThinnableSink``."""
        found = {one for record in set(map(self._record_of, steps)) for one in self._files().with_some_of(record)}
        gone = np.fromiter(steps, np.int64, len(steps))
        for one in sorted(found):
            self._named_bytes -= _keep_rows(one.path, lambda step: ~np.isin(step, gone))

    def carried_on(self, named: NamedShard, header: bytes) -> CsvRows:
        """The visible rows, in the columns of ``header``, of the record that an unfinished file belongs to."""
        return _joined(self._files().of(named.kind, named.steps), header)[1]

    def take_up(
        self, since: int, left: Mapping[NamedShard, tuple[PartialFile, CsvRows]], written_before: Callable[[Path], bool]
    ) -> None:
        """Make the unfinished files of another process visible: parts of one record that hold whole steps.

        Args:
            since: The first step that the process wrote after it last made files visible.
            written_before: Whether a file is older than that process, which may have made some of the parts visible.
        """
        for named, (part, rows) in left.items():
            found = self._files().of(named.kind, named.steps)
            replaces, _ = _joined(found, rows.header)
            shares = any(one.path != replaces for one in found)
            shard = OpenShard(named.kind, named.steps, rows.header, part, replaces, shares, rows.first(), rows.last())
            self._open[named.kind] = shard
        self._take_out(StepSpan(since, self._record_of(since).last), written_before)
        self.close()

    def _record_of(self, step: int) -> StepSpan:
        return StepSpan.of_record(step, self._steps_per_record)

    def _make_way(self, step: int, record: StepSpan, headers: Mapping[str, bytes]) -> None:
        """Finish the shards if rows of ``step`` cannot be appended to them."""
        self._check_removed()
        shards = self._open.values()
        for shard in shards:
            shard.shares_record |= shard.record == record and shard.header != headers.get(shard.kind, shard.header)
        if any(shard.record != record or not shard.takes(step, headers.get(shard.kind, shard.header)) for shard in shards):
            self.flush()
        if not self._open:
            self._since = None

    def _check_removed(self) -> None:
        removed = [shard for shard in self._open.values() if shard.part.gone()]
        if removed:
            for shard in removed:
                self._drop(shard.kind)
            raise RemovedFileError(removed[0].part.path, [step for shard in removed for step in shard.steps])

    def _keep(self, step: int, kinds: Iterable[str]) -> None:
        for kind in kinds:
            self._open[kind].keep(step)
        self._since = step if self._since is None else self._since

    def _forget(self, kinds: Iterable[str]) -> None:
        for kind in kinds:
            shard = self._open.get(kind)
            if shard is not None and shard.last is None:
                self._drop(kind)
            elif shard is not None:
                shard.part.forget()

    def _drop(self, kind: str) -> PartialFile:
        part = self._open.pop(kind).part
        part.discard()
        return part

    def _new(self, kind: str, record: StepSpan, header: bytes, step: int, text: bytes | memoryview) -> OpenShard:
        """A new shard that holds the rows carried over, then ``text``."""
        before, replaces, first, shares_record = header, None, None, False
        if found := self._files().of(kind, record):
            replaces, rows = _joined(found, header)
            carried = rows.before(step if self._since is None else self._since)
            before, first = carried.text(), carried.first()
            shares_record = any(one.path != replaces for one in found)
        part = PartialFile.begin(self._within + files.part_name(files.shard_name(kind, record)), before, text)
        return OpenShard(kind, record, header, part, replaces, shares_record, first)

    def _publish(self, shards: list[OpenShard]) -> None:
        """Give each shard its name. Tries all, then raises the first error."""
        if shards and self._since is not None:
            self._take_out(StepSpan(self._since, shards[0].record.last))
            self._since = None
        errors = [error for error in map(self._publish_one, shards) if error is not None]
        if errors:
            raise errors[0]

    def _take_out(self, steps: StepSpan, among: Callable[[Path], bool] = os.path.lexists) -> None:
        """Remove these steps, which were written again, from the files that no open shard replaces."""
        for one in self._files().with_some_of(self._record_of(steps.first)):
            replaced = any(one.path == shard.replaces for shard in self._open.values())
            if not replaced and one.steps.meets(steps) and among(one.path):
                self._named_bytes -= _keep_rows(one.path, lambda step: (step < steps.first) | (step > steps.last))

    def _publish_one(self, shard: OpenShard) -> OSError | None:
        try:
            shard.part.release()
            self._give_name(shard)
            del self._open[shard.kind]
        except OSError as error:
            if shard.part.gone():
                self._drop(shard.kind)
            return error
        return None

    def _give_name(self, shard: OpenShard) -> None:
        steps = shard.called_after
        path = self._free_path(shard.kind, steps, shard.replaces)
        before = files.size_of(shard.replaces) if shard.replaces else 0
        # First onto the file that it replaces, so that no row is ever visible twice.
        os.replace(shard.part.path, shard.replaces or path)
        if shard.replaces:
            os.replace(shard.replaces, path)
        self._named_bytes += shard.part.size - before
        self._files().add(shard.kind, steps, path)

    def _free_path(self, kind: str, steps: StepSpan, replaces: Path | None) -> str:
        for copy in count(1):
            path = self._within + files.shard_name(kind, steps, copy)
            if not os.path.lexists(path) or (replaces is not None and Path(path) == replaces):
                break
        return path

    def _files(self) -> _FileIndex:
        """The index of the directory's files. The directory is listed once."""
        if self._there is None:
            self._there = _FileIndex(self._directory, self._steps_per_record)
        return self._there


class _FileIndex:
    """The files of a directory, by the records whose steps they hold.

    Files named after a record are not stored: there may be a million, and their names follow from the record. No other program
    makes files here, so a record after the newest file has none. So a running training costs no file system call.
    """

    def __init__(self, directory: Path, steps_per_record: int) -> None:
        self._within = os.path.join(directory, "")
        self._steps_per_record = steps_per_record
        self._kinds: set[str] = set()
        self._others: dict[StepSpan, set[NamedShard]] = defaultdict(set)
        self._long: set[NamedShard] = set()
        self._newest = -1
        for named in files.shards_in(directory):
            self.add(named.kind, named.steps, os.fspath(named.path))

    def add(self, kind: str, steps: StepSpan, path: str) -> None:
        self._kinds.add(kind)
        self._newest = max(self._newest, steps.last)
        record = self._record_of(steps.first)
        if record != steps or not path.endswith(files.shard_name(kind, record)):
            self._add_other(NamedShard(kind, steps, Path(path)), record)

    def _add_other(self, named: NamedShard, record: StepSpan) -> None:
        if named.steps.last - record.first >= MOST_RECORDS * self._steps_per_record:
            self._long.add(named)
            return
        while record.first <= named.steps.last:
            self._others[record].add(named)
            record = self._record_of(record.last + 1)

    def of(self, kind: str, record: StepSpan) -> list[NamedShard]:
        """The files of a kind that hold steps of this record only; first the file named after the record."""
        kinds = [kind] if kind in self._kinds else []
        return [one for one in self._found(kinds, record) if one.kind == kind and record.holds(one.steps)]

    def with_some_of(self, record: StepSpan) -> list[NamedShard]:
        """The files of all kinds that may hold steps of this record."""
        return self._found(sorted(self._kinds), record)

    def _found(self, kinds: Iterable[str], record: StepSpan) -> list[NamedShard]:
        """The files of ``kinds`` named after the record, then the others, of any kind."""
        if record.first > self._newest:
            return []
        names = ((kind, self._within + files.shard_name(kind, record)) for kind in kinds)
        found = [NamedShard(kind, record, Path(name)) for kind, name in names if os.path.lexists(name)]
        others = [*self._others.get(record, ()), *(one for one in self._long if one.steps.meets(record))]
        return [*found, *(one for one in sorted(others) if os.path.lexists(one.path))]

    def _record_of(self, step: int) -> StepSpan:
        return StepSpan.of_record(step, self._steps_per_record)


def _joined(found: Iterable[NamedShard], header: bytes) -> tuple[Path | None, CsvRows]:
    """The first of these files whose header is ``header``, with its content. None and no rows if there is none."""
    for one in found:
        rows = CsvRows.read(one.path)
        if rows is not None and rows.header == header:
            return one.path, rows
    return None, CsvRows.nothing(header)


def _keep_rows(path: Path, is_kept: Callable[[NDArray[np.int64]], NDArray[np.bool_]]) -> int:
    """Remove the other rows of a file, and return the number of bytes removed. ``is_kept`` takes the step of each row."""
    rows = CsvRows.read(path)
    if rows is None or (kept := is_kept(rows.steps)).all():
        return 0
    before = files.size_of(path)
    if kept.any():
        _replace(path, rows.only(kept).text())
    else:
        path.unlink(missing_ok=True)
    return before - files.size_of(path)


def _replace(path: Path, text: bytes) -> None:
    """Replace the file's content but keep its modification time, which says when the last step was added."""
    draft, time = path.with_name(files.draft_name(path.name)), path.stat().st_mtime_ns
    try:
        draft.write_bytes(text)
        os.utime(draft, ns=(time, time))
        os.replace(draft, path)
    except OSError:
        with suppress(OSError):
            draft.unlink()
        raise


# --- Recovery: makes the whole steps in the unfinished files of a killed process visible.
#
# In each record, the parts of all kinds agree on the finished steps, and show whether the last step was finished (see
# ``monitor.sinks.files``). Finished steps get the file names that the process would have given them. An unfinished step
# is cut off.
#
# A part may be damaged, for example by a crash of the machine. Then all parts of its record are renamed ``….damaged``,
# because a step must be there for all kinds or for none.


class LeftoverPart:
    """A part that a killed process left.

    Attributes:
        finished: The steps marked as finished; None if they are damaged.
        whole: ``finished`` and the unmarked step after them; None if there is no such step, or if it is not whole.
        unfinished: The last step that has a line in ``whole``.
    """

    def __init__(self, named: NamedShard) -> None:
        self.named = named
        text = checked(named.path).read_bytes()
        self._begun = _unfinished_from(text)
        self._first = bytes([text[self._begun] & ~files.UNFINISHED]) if self._begun < len(text) else b""
        restored = text[: self._begun] + self._first + text[self._begun + 1 :]
        self.finished = self._parsed(text[: self._begun]) if self._begun else CsvRows.nothing(b"")
        self.whole = self._parsed(restored) if self._first else None
        self.unfinished = self._last_line_of(restored) if self._first else None

    def part(self, rows: CsvRows) -> PartialFile:
        """The file as a part that keeps ``rows``."""
        part = PartialFile.left_behind(self.named.path, self._begun, len(rows.text()), self._first)
        part.finish()
        part.keep()
        return part

    def _parsed(self, text: bytes) -> CsvRows | None:
        """The rows; None if they are damaged, not in order, or outside the record."""
        rows = CsvRows.parse(text)
        if rows is None or (rows.steps[1:] < rows.steps[:-1]).any():
            return None
        first, last = rows.first(), rows.last()
        return rows if first is None or last is None or self.named.steps.holds(StepSpan(first, last)) else None

    def _last_line_of(self, restored: bytes) -> int | None:
        end = max(line_ends(restored).tolist(), default=0)
        lines = CsvRows.parse(restored[:end]) if end > self._begun else None
        return None if lines is None else lines.last()


def recover(directory: Path, newest: int, saved_ns: int, begun_ns: int) -> RecoveredFiles:
    """See ``monitor.sinks.files.CrashRecovery``."""
    for draft in files.drafts_in(directory):  # the file that it was to replace is still there
        draft.unlink()
    recovered, records = RecoveredFiles(), defaultdict(list)
    for named in files.parts_in(directory):
        records[named.steps].append(LeftoverPart(named))
    for record, left in sorted(records.items()):
        _recover_record(directory, record, left, begun_ns, recovered)
    late = (one.steps for one in files.shards_in(directory) if one.steps.last >= newest and changed(one.path) >= saved_ns)
    recovered.ranges = {*records, *late}
    return recovered


def held(directory: Path, steps: StepSpan) -> set[int]:
    """See ``monitor.sinks.files.CrashRecovery``."""
    content = (CsvRows.read(one.path) for one in files.shards_in(directory) if one.steps.meets(steps) and is_regular(one.path))
    return {step for rows in content if rows is not None for step in np.unique(rows.steps).tolist()}


def _recover_record(
    directory: Path, record: StepSpan, left: list[LeftoverPart], begun_ns: int, recovered: RecoveredFiles
) -> None:
    kept = _agreed(left)
    if kept is None:
        recovered.aside += [rename_damaged(one.named.path) for one in left]
        return
    newest = max((last for rows in kept.values() if (last := rows.last()) is not None), default=-1)
    recovered.cut.update(one.unfinished for one in left if one.unfinished is not None and one.unfinished > newest)
    _make_visible(directory, record, kept, begun_ns)


def _agreed(left: list[LeftoverPart]) -> dict[LeftoverPart, CsvRows] | None:
    """The steps to keep of each part; None if a part is damaged.

    A step that one part marks as finished was written to all parts.
    """
    finished = {one: one.finished for one in left if one.finished is not None}
    newest = max((last for rows in finished.values() if (last := rows.last()) is not None), default=-1)
    agreed = {one: one.whole if one.unfinished == newest else rows for one, rows in finished.items()}
    whole = {one: rows for one, rows in agreed.items() if rows is not None}
    return whole if len(whole) == len(left) else None


def _make_visible(directory: Path, record: StepSpan, kept: Mapping[LeftoverPart, CsvRows], begun_ns: int) -> None:
    shards = CsvShards(directory, record.last - record.first + 1)
    news = [step for one, rows in kept.items() if (step := _news(rows, shards.carried_on(one.named, rows.header))) is not None]
    for one, rows in kept.items():
        if not news or not len(rows.steps):
            one.named.path.unlink()  # a visible file has all its steps
    if news:
        parts = {one.named: (one.part(rows), rows) for one, rows in kept.items() if len(rows.steps)}
        shards.take_up(min(news), parts, lambda path: changed(path) <= begun_ns)


def _news(rows: CsvRows, visible: CsvRows) -> int | None:
    """The first step whose rows differ from the visible ones; None if there is none."""
    steps = sorted(set(rows.steps.tolist()))
    return next((step for step in steps if rows.rows_of(step) != visible.rows_of(step)), None)


def _unfinished_from(text: bytes) -> int:
    """The beginning of the step that is not marked as finished; the end of the text if there is none."""
    begins = np.append(0, line_ends(text))
    begins = begins[begins < len(text)]
    marked = begins[(np.frombuffer(text, np.uint8)[begins] & files.UNFINISHED) > 0]
    return int(marked[0]) if len(marked) else len(text)
