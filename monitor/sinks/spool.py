"""Formats with one file for all kinds of a record: a hidden part collects the steps until a shard is made of them in memory.

``hdf5`` and ``parquet`` share everything here: names, kills, recovery, steps that are written again, full disks.
"""

from __future__ import annotations

import errno
import os
import re
import struct
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce
from itertools import count
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow.compute import and_, equal  # type: ignore[attr-defined]
from pyarrow.ipc import IpcReadOptions, IpcWriteOptions, new_stream, open_stream  # type: ignore[attr-defined]

from monitor.sinks.arrow import FILLED, HISTOGRAM, SCHEMA, Measurements, ShardMetadata, completed
from monitor.sinks.files import AppendFile, RecoveredFiles, StepSpan, changed, checked, is_regular, opened, rename_damaged
from monitor.sinks.protocol import RemovedFileError, SinkContext
from monitor.stats.table import StepRows

# --- The part: a hidden file that collects the steps of a record.
#
# The file is a sequence of blocks, each after its length and checksum. So the file of a killed process shows where its
# whole steps end. A block is an Arrow stream: one batch of rows, and the shard's metadata. It contains the names of
# series, so the file can be read on its own.

_FRAME: Final = struct.Struct("<II")
_OPTIONS: Final = IpcWriteOptions(compression="lz4", use_threads=False)
_READING: Final = IpcReadOptions(use_threads=False)
"""Without threads: if Arrow cannot start a thread, it ends the process, and training with it."""


class SpoolBlock(NamedTuple):
    """Rows of one or several steps, with their metadata."""

    rows: pa.RecordBatch
    facts: ShardMetadata

    def packed(self) -> bytes:
        """The block as bytes, to be appended to a part."""
        sink = pa.BufferOutputStream()
        with new_stream(sink, self.rows.schema.with_metadata(self.facts.packed()), options=_OPTIONS) as stream:  # type: ignore[no-untyped-call]
            stream.write_batch(self.rows)
        content = sink.getvalue()
        return _FRAME.pack(len(content), zlib.crc32(content)) + memoryview(content)


def read_blocks(path: Path) -> Iterator[SpoolBlock]:
    """The blocks of a file, up to the first one that is not whole.

    Raises:
        OSError: the file cannot be read.
    """
    for content in _contents(path):
        with open_stream(content, options=_READING) as stream:  # type: ignore[no-untyped-call]
            (rows,) = stream
            yield SpoolBlock(completed(rows), ShardMetadata.unpacked(stream.schema.metadata))


def whole_bytes(path: Path) -> int:
    """Where the last whole block ends.

    Raises:
        OSError: the file cannot be read.
    """
    return sum(_FRAME.size + len(content) for content in _contents(path))


def _contents(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while len(frame := file.read(_FRAME.size)) == _FRAME.size:
            length, checksum = _FRAME.unpack(frame)
            content = file.read(length)
            if not content or len(content) < length or zlib.crc32(content) != checksum:
                return
            yield content


def joined(blocks: Sequence[SpoolBlock]) -> tuple[pa.Table, ShardMetadata]:
    """The rows and the metadata of all blocks. Rows without histograms get nulls if others have some."""
    tables = [pa.Table.from_batches([block.rows.replace_schema_metadata(None)]) for block in blocks]
    rows = pa.concat_tables(tables, promote_options="default").unify_dictionaries()
    return rows, reduce(ShardMetadata.then, (block.facts for block in blocks))


# --- Names and content of the files of a format.

PART: Final = ".part"
"""How the name of an unfinished file ends."""

MIB: Final = 1 << 20

Source = bytes | Path
"""A shard: its content, or where it is. A training process reads contents only, so that no library touches its disk."""


class NotAShardError(ValueError):
    """The file is damaged or not a shard of this format. The message states the difference."""


@dataclass(frozen=True, slots=True)
class ShardFormat:
    """A format whose files are called ``metrics_{first}-{last}{suffix}``: everything that the spool needs to know of it.

    Attributes:
        called: Its name in messages.
        signature: The first bytes of every file. A part never begins so.
        image: Makes the content of a file. Raises ValueError or RuntimeError if that will never be possible.
        look: The metadata of a shard, and the number of rows of each kind. Raises NotAShardError, as the next two.
        steps: The steps that have rows.
        rows: The rows of some steps, kind by kind, and within a kind in the order in which they were measured. With a kind
            only its rows; otherwise the table's metadata is that of the steps.
        most_bytes: Greatest size of a part, which limits the memory that it takes to make a shard.
    """

    suffix: str
    called: str
    signature: bytes
    image: Callable[[Iterable[SpoolBlock]], bytes | memoryview]
    look: Callable[[Source], tuple[ShardMetadata, dict[str, int]]]
    steps: Callable[[Source], set[int]]
    rows: Callable[[Source, StepSpan, str | None], pa.Table]
    most_bytes: int

    @property
    def full(self) -> int:
        """A shard of this size or more is final: later steps go into a new shard."""
        return self.most_bytes // 4

    def shard_name(self, steps: StepSpan, copy: int = 1) -> str:
        return f"metrics_{steps.first}-{steps.last}{f'.{copy}' if copy > 1 else ''}{self.suffix}"

    def part_name(self, record: StepSpan) -> str:
        """The name of the hidden file that becomes the record's shard."""
        return f".{self.shard_name(record)}{PART}"

    def shards_in(self, directory: Path) -> Iterator[tuple[Path, StepSpan]]:
        """The files that a reader sees, with the steps in their names."""
        return _matching(rf"metrics_(\d+)-(\d+)(?:\.\d+)?{re.escape(self.suffix)}", directory)

    def parts_in(self, directory: Path) -> Iterator[tuple[Path, StepSpan]]:
        """The hidden unfinished files, with their records."""
        return _matching(rf"\.metrics_(\d+)-(\d+){re.escape(self.suffix)}\.part", directory)

    def drafts_in(self, directory: Path) -> list[Path]:
        """The hidden files that were to replace other files."""
        pattern = rf"\.metrics_(\d+)-(\d+)(?:\.\d+)?{re.escape(self.suffix)}(?:\.part)?\.draft"
        return [path for path, _ in _matching(pattern, directory)]

    def look_at_part(self, path: Path) -> tuple[ShardMetadata, dict[str, int]] | None:
        """The same as ``look``, of the whole steps of an unfinished file; None if there are none yet.

        Raises:
            NotAShardError: the file is damaged.
            OSError: it cannot be read.
        """
        if self.is_shard(path):
            return self.look(path)
        if (found := _whole_steps(path)) is None:
            return None
        rows, facts = found
        return facts, {one["values"]: one["counts"] for one in rows["kind"].value_counts().to_pylist()}

    def rows_of_part(self, path: Path, steps: StepSpan, kind: str) -> pa.Table:
        """The rows of a kind in some of the whole steps of an unfinished file, in the order in which they were measured.

        Raises:
            NotAShardError: the file is damaged.
            OSError: it cannot be read.
        """
        if self.is_shard(path):
            return self.rows(path, steps, kind)
        found = _whole_steps(path)
        if found is None:
            raise NotAShardError("it has no whole step")
        step = found[0]["step"].to_numpy()
        inside = pa.array((step >= steps.first) & (step <= steps.last))
        return found[0].filter(and_(inside, equal(found[0]["kind"].cast(pa.string()), kind)))

    def is_shard(self, path: Path) -> bool:
        """Whether the file is of this format, and not the blocks of an unfinished shard."""
        with open(path, "rb") as file:
            return file.read(len(self.signature)) == self.signature


def _whole_steps(path: Path) -> tuple[pa.Table, ShardMetadata] | None:
    try:
        blocks = list(read_blocks(path))
        return joined(blocks) if blocks else None
    except (ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise NotAShardError(f"its blocks are damaged: {error}") from error


def _matching(pattern: str, directory: Path) -> Iterator[tuple[Path, StepSpan]]:
    try:
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return
    for name in names:
        if match := re.fullmatch(pattern, name):
            yield directory / name, StepSpan(int(match[1]), int(match[2]))


def write_hidden(path: Path, content: bytes | memoryview) -> None:
    """Replace the file's content atomically. The file is unchanged if that fails."""
    draft = path.with_name(f".{path.name.removeprefix('.')}.draft")
    try:
        draft.write_bytes(content)
        os.replace(draft, path)
    except OSError:
        with suppress(OSError):
            draft.unlink()
        raise


@dataclass(frozen=True, slots=True)
class VisibleShard:
    """A visible file with rows.

    Attributes:
        steps: Those that have rows.
        size: In bytes.
    """

    path: Path
    form: ShardFormat
    facts: ShardMetadata
    steps: frozenset[int]
    size: int

    @classmethod
    def read(cls, path: Path, form: ShardFormat) -> VisibleShard | None:
        """The shard; None if the file is missing, not accessible, not of this format, or has no rows."""
        try:
            content = path.read_bytes()
            (facts, _), steps = form.look(content), frozenset(form.steps(content))
        except (FileNotFoundError, IsADirectoryError, PermissionError, NotAShardError):
            return None
        return cls(path, form, facts, steps, len(content)) if steps else None

    @property
    def span(self) -> StepSpan:
        """The first and the last step."""
        return StepSpan(min(self.steps), max(self.steps))

    def rows(self, steps: StepSpan) -> pa.Table:
        """The rows of these steps, kind by kind."""
        return self.form.rows(self.path.read_bytes(), steps, None)

    def blocks(self, steps: StepSpan) -> list[SpoolBlock]:
        """The rows of these steps as blocks."""
        return [SpoolBlock(batch, self.facts.only(steps)) for batch in self.rows(steps).combine_chunks().to_batches()]

    def keep(self, steps: frozenset[int]) -> int:
        """Remove the rows of all other steps, and return the number of bytes removed."""
        if self.steps.issubset(steps):
            return 0
        if self.steps.isdisjoint(steps):
            self.path.unlink(missing_ok=True)
            return self.size
        rows = self.rows(self.span)
        rows = rows.filter(pa.array(np.isin(rows["step"].to_numpy(), list(steps)))).combine_chunks()
        facts = self.facts.among(steps)
        write_hidden(self.path, self.form.image([SpoolBlock(batch, facts) for batch in rows.to_batches()]))
        return self.size - self.path.stat().st_size


class ShardIndex:
    """The files of a directory, by the records whose steps they hold.

    Files named after a record are not stored: there may be very many, and their names follow from the record. The other files
    are listed once.
    """

    def __init__(self, directory: Path, form: ShardFormat, steps_per_record: int) -> None:
        self._directory = directory
        self._form = form
        self._steps_per_record = steps_per_record
        self._others: dict[Path, StepSpan] | None = None

    def add(self, path: Path, steps: StepSpan) -> None:
        self._known().update(self._otherwise([(path, steps)]))

    def of(self, record: StepSpan) -> list[Path]:
        """The files whose names state steps of this record only; first the file named after the record."""
        return self._existing(record, [path for path, steps in self._known().items() if record.holds(steps)])

    def shards_of(self, record: StepSpan, *, anywhere: bool = False) -> list[VisibleShard]:
        """The shards among the files ``of`` this record; with ``anywhere`` also those that hold steps of other records."""
        others = [path for path, steps in self._known().items() if steps.meets(record)]
        paths = self._existing(record, others) if anywhere else self.of(record)
        return [shard for path in paths if (shard := VisibleShard.read(path, self._form)) is not None]

    def _existing(self, record: StepSpan, others: list[Path]) -> list[Path]:
        return [path for path in (self._directory / self._form.shard_name(record), *others) if os.path.lexists(path)]

    def _known(self) -> dict[Path, StepSpan]:
        if self._others is None:
            self._others = dict(self._otherwise(self._form.shards_in(self._directory)))
        return self._others

    def _otherwise(self, found: Iterable[tuple[Path, StepSpan]]) -> Iterator[tuple[Path, StepSpan]]:
        """The files that are not named after a record."""
        for path, steps in found:
            if path.name != self._form.shard_name(StepSpan.of_record(steps.first, self._steps_per_record)):
                yield path, steps


# --- The spool of a rank's directory.
#
# Steps are collected in a hidden part until their record is complete. Then a shard is made of the part and gets its name.
# A shard is made in memory, so a record of very many rows is cut into several shards, each named after its own steps.
#
# A step that is written again replaces the old one and all later steps in its record. So a part begins with the earlier
# steps from the shards of its record, and its shard replaces those shards.


@dataclass(slots=True)
class _PartialShard:
    """An unfinished shard.

    Attributes:
        file: The hidden file with its blocks, or with the whole shard.
        record: The steps that it may hold.
        first: The first step that it holds.
        since: The first new step. Visible rows of it and of later steps in the record are to be removed.
        last: The last new step; None while there is none.
        replaces: The shards whose rows it carries over.
        steps: Those that were written to it.
    """

    file: AppendFile
    record: StepSpan
    first: int
    since: int
    last: int | None = None
    replaces: list[Path] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    def takes(self, step: int) -> bool:
        """Whether ``step`` can be appended."""
        return self.record.holds(StepSpan(step, step)) and (self.last is None or self.last < step) and not self.file.released


class ShardSpool:
    """The shards of a directory, of which at most one is unfinished.

    Every method may raise OSError: visible files then hold whole steps, and the next step can be written.
    """

    def __init__(self, directory: Path, form: ShardFormat, steps_per_record: int) -> None:
        self._directory = directory
        self._form = form
        self._steps_per_record = steps_per_record
        self._part: _PartialShard | None = None
        self._named_bytes = 0  # by which the visible files have grown
        self._names = ShardIndex(directory, form, steps_per_record)

    def write(self, step: int, block: SpoolBlock) -> None:
        """Add one step."""
        self._make_way(step)
        part = self._part = self._part or self._new(step, block.facts)
        try:
            part.file.write(block.packed())
        except BaseException:
            self._forget(part)
            raise
        part.file.keep()
        part.steps.append(step)
        part.last = step
        if step == part.record.last or part.file.size >= self._form.most_bytes:
            self.flush()

    def flush(self) -> None:
        """Make a shard of the collected steps."""
        part = self._part
        if part is None:
            return
        try:
            self._publish(part)
            self._part = None
        except OSError:
            if part.file.gone():
                self._drop(part)
            raise

    def close(self) -> None:
        """Flush, and close all files, also a part that could not become a shard."""
        try:
            self.flush()
        finally:
            if self._part is not None:
                with suppress(OSError):
                    self._part.file.release()
            self._part = None

    @property
    def grown(self) -> int:
        """See ``monitor.sinks.protocol.ThinnableSink``."""
        return self._named_bytes + (0 if self._part is None else self._part.file.size)

    def remove(self, steps: Collection[int]) -> None:
        """See ``monitor.sinks.protocol.ThinnableSink``."""
        for record in sorted({StepSpan.of_record(step, self._steps_per_record) for step in steps}):
            for shard in self._names.shards_of(record, anywhere=True):
                self._named_bytes -= shard.keep(shard.steps.difference(steps))

    def take_up(self, left: Path, record: StepSpan, size: int, rows: pa.Table, facts: ShardMetadata) -> None:
        """Make the part that another process left visible, unless all its steps are.

        Args:
            left: The part, of which the first ``size`` bytes are whole.
            rows: The rows in the part.
        """
        steps = set(rows["step"].to_pylist())
        fitting = [shard for shard in self._names.shards_of(record) if shard.facts.fits(facts)]
        since = _news(rows, [shard.rows(record) for shard in fitting])
        if since is None:
            left.unlink()
            return
        carried_on = [shard.path for shard in fitting if {step for step in shard.steps if step < since} <= steps]
        file = AppendFile(left, opened(left), size, size)
        self._publish(_PartialShard(file, record, min(steps), since, max(steps), carried_on))

    def _make_way(self, step: int) -> None:
        """Finish the part if ``step`` cannot be appended to it."""
        part = self._part
        if part is not None and part.file.gone():
            self._drop(part)
            raise RemovedFileError(part.file.path, part.steps)
        if part is not None and not part.takes(step):
            self.flush()

    def _forget(self, part: _PartialShard) -> None:
        if part.last is None:
            self._drop(part)
        else:
            part.file.forget()

    def _drop(self, part: _PartialShard) -> None:
        part.file.discard()
        self._part = None

    def _new(self, step: int, facts: ShardMetadata) -> _PartialShard:
        record = StepSpan.of_record(step, self._steps_per_record)
        path = self._directory / self._form.part_name(record)
        part = _PartialShard(AppendFile(path, opened(path, os.O_CREAT | os.O_TRUNC)), record, step, step)
        try:
            self._carry(part, _carried_on(self._names.shards_of(record), step, facts))
        except BaseException:
            part.file.discard()
            raise
        return part

    def _carry(self, part: _PartialShard, shards: Sequence[VisibleShard]) -> None:
        """Begin ``part`` with the shards' rows of earlier steps."""
        earlier = StepSpan(part.record.first, part.since - 1)
        for block in _in_turn([block for shard in shards for block in shard.blocks(earlier)]):
            part.file.write(block.packed())
        part.file.keep()
        part.first = min([part.first, *(shard.span.first for shard in shards)])
        part.replaces.extend(shard.path for shard in shards)

    def _publish(self, part: _PartialShard) -> None:
        size = part.file.size
        part.file.release()
        self._make_shard(Path(part.file.path))
        self._take_out(part)
        self._give_name(part, cut=size >= self._form.most_bytes)

    def _make_shard(self, path: Path) -> None:
        """Turn a part into a shard, still hidden. Does nothing if it is one already."""
        if self._form.is_shard(path):
            return
        try:
            content = self._form.image(read_blocks(path))
        except (ValueError, RuntimeError) as error:  # it would fail again, so the part is removed
            path.unlink(missing_ok=True)
            lost = f"its steps could not be written as {self._form.called} and are lost: {error!r}"
            raise OSError(errno.EIO, lost, str(path)) from error
        write_hidden(path, content)

    def _take_out(self, part: _PartialShard) -> None:
        """Remove the steps that were written again from the shards that ``part`` does not replace."""
        again = StepSpan(part.since, part.record.last)
        for shard in self._names.shards_of(part.record, anywhere=True):
            if shard.path not in part.replaces and shard.span.meets(again):
                kept = (step for step in shard.steps if not again.first <= step <= again.last)
                self._named_bytes -= shard.keep(frozenset(kept))

    def _give_name(self, part: _PartialShard, *, cut: bool) -> None:
        path, steps = self._free_path(part, cut=cut)
        # First remove the other replaced files, then rename over one of them, so that no row is ever visible twice.
        grown = os.path.getsize(part.file.path) - sum(path.stat().st_size for path in part.replaces if path.exists())
        first, *others = part.replaces or [path]
        for other in others:
            other.unlink(missing_ok=True)
        os.replace(part.file.path, first)
        if first != path:
            os.replace(first, path)
        self._named_bytes += grown
        self._names.add(path, steps)

    def _free_path(self, part: _PartialShard, *, cut: bool) -> tuple[Path, StepSpan]:
        """A name for the shard, and the steps in it."""
        last = part.record.last if part.last is None else part.last
        shares = any(path not in part.replaces for path in self._names.of(part.record))
        steps = StepSpan(part.first, last) if shares or (cut and last < part.record.last) else part.record
        paths = (self._directory / self._form.shard_name(steps, copy) for copy in count(1))
        return next(path for path in paths if path in part.replaces or not os.path.lexists(path)), steps


def _carried_on(shards: Iterable[VisibleShard], step: int, facts: ShardMetadata) -> list[VisibleShard]:
    """The shards whose rows a new part carries over.

    Those with steps from ``step`` on, which the part replaces, and the last shard before ``step`` unless it is full.
    """
    fitting = sorted((shard for shard in shards if shard.facts.fits(facts)), key=lambda shard: shard.span)
    before = [shard for shard in fitting if shard.span.last < step]
    return [shard for shard in before[-1:] if shard.size < shard.form.full] + [
        shard for shard in fitting if shard.span.last >= step
    ]


def _in_turn(blocks: Sequence[SpoolBlock]) -> Sequence[SpoolBlock]:
    """Several blocks as one, step by step: of two shards of a record each may have steps between those of the other."""
    if len(blocks) < 2:
        return blocks
    rows, facts = joined(blocks)
    order = pa.array(np.argsort(rows["step"].to_numpy(), kind="stable"))
    return [SpoolBlock(batch, facts) for batch in rows.combine_chunks().take(order).to_batches()]


_PLAIN: Final = pa.schema([(one.name, pa.string() if pa.types.is_dictionary(one.type) else one.type) for one in SCHEMA])
"""``SCHEMA`` with plain texts in place of dictionary indices."""


def _news(rows: pa.Table, visible: Sequence[pa.Table]) -> int | None:
    """The first step whose rows differ from the visible ones; None if there is none."""
    new, *known = (_plain(table) for table in (rows, *visible))
    old = pa.concat_tables([new.slice(0, 0), *known])
    steps = np.unique(new["step"].to_numpy()).tolist()
    return next((step for step in steps if not _of_step(new, step).equals(_of_step(old, step))), None)


def _plain(rows: pa.Table) -> pa.Table:
    """The rows with plain texts and a column of histograms, so that they can be compared."""
    plain = rows.select(SCHEMA.names).replace_schema_metadata(None).cast(_PLAIN)
    histograms = rows[HISTOGRAM] if HISTOGRAM in rows.column_names else pa.nulls(len(rows), FILLED)
    return plain.append_column(HISTOGRAM, histograms)


def _of_step(rows: pa.Table, step: int) -> pa.Table:
    return rows.filter(pa.array(rows["step"].to_numpy() == step))


class SpooledSink:
    """Writes ``metrics_{first}-{last}{suffix}`` into the rank's directory.

    A step is in its file whole or not at all. A file gets its name when its record is complete, or at ``flush``.

    Raises:
        OSError: from every method, if the disk, the directory or the limit on open files does not allow the operation. The
            files then hold whole steps, and the next step can be written as soon as the cause is gone.
    """

    def __init__(self, context: SinkContext, form: ShardFormat) -> None:
        self._measurements = Measurements(context.series)
        self._facts = ShardMetadata(context.rank, context.eps, world_size=context.world_size)
        self._shards = ShardSpool(context.directory, form, context.step_count_per_record)

    def write(self, rows: StepRows) -> None:
        """Add one step. If it was written before, it replaces the old one and all later steps in its record."""
        if len(rows):
            self._shards.write(rows.step, SpoolBlock(self._measurements.of(rows), self._facts.of(rows)))

    @property
    def grown(self) -> int:
        """See ``monitor.sinks.protocol.ThinnableSink``."""
        return self._shards.grown

    def remove(self, steps: Collection[int]) -> None:
        """See ``monitor.sinks.protocol.ThinnableSink``."""
        self._shards.remove(steps)

    def flush(self) -> None:
        """Make the open record visible as it is. Later steps of the record are added to it."""
        self._shards.flush()

    def close(self) -> None:
        """Flush and close every file."""
        self._shards.close()


# --- Recovery: makes the whole steps in the unfinished files of a killed process visible.
#
# All kinds are in one part, so a step is in it whole or not at all. The part becomes a shard with the name that the
# process would have given it, and replaces the files that it was to replace. A part without whole steps, or whose steps
# are all visible, is removed.


def recover_shards(form: ShardFormat, directory: Path, newest: int, saved_ns: int) -> RecoveredFiles:
    """See ``monitor.sinks.files.CrashRecovery``."""
    for draft in form.drafts_in(directory):  # the file that it was to replace is still there
        draft.unlink()
    recovered = RecoveredFiles()
    for path, record in list(form.parts_in(directory)):
        recovered.ranges.add(record)
        shards = ShardSpool(directory, form, record.last - record.first + 1)
        if form.is_shard(checked(path)):
            _recover_shard(path, form, shards, record, recovered)
        else:
            _recover_steps(path, shards, record)
    late = (steps for path, steps in form.shards_in(directory) if steps.last >= newest and changed(path) >= saved_ns)
    recovered.ranges.update(late)
    return recovered


def held_steps(form: ShardFormat, directory: Path, steps: StepSpan) -> set[int]:
    """See ``monitor.sinks.files.CrashRecovery``."""
    paths = (path for path, named in form.shards_in(directory) if named.meets(steps) and is_regular(path))
    shards = (VisibleShard.read(path, form) for path in paths)
    return {step for shard in shards if shard is not None for step in shard.steps}


def _recover_shard(path: Path, form: ShardFormat, shards: ShardSpool, record: StepSpan, recovered: RecoveredFiles) -> None:
    """Recover a part that is a whole shard already and only lacks its name."""
    shard = VisibleShard.read(path, form)
    if shard is None or not record.holds(shard.span):
        recovered.aside.append(rename_damaged(path))
    else:
        shards.take_up(path, record, shard.size, shard.rows(record), shard.facts)


def _recover_steps(path: Path, shards: ShardSpool, record: StepSpan) -> None:
    left = list(read_blocks(path))
    if left:
        shards.take_up(path, record, whole_bytes(path), *joined(left))
    else:
        path.unlink()
