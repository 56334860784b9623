"""The ``hdf5`` format: all kinds of a record in one file, with partials in place of ops. Has the sink and ``read_hdf5``."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from os import PathLike, fspath
from pathlib import Path
from typing import Final

import h5py
import numpy as np
import pyarrow as pa

from monitor.sinks import hdf5_files
from monitor.sinks.arrow import FILLED, HISTOGRAM, SCHEMA, Measurements, ShardMetadata, whole, with_ops
from monitor.sinks.files import AppendFile, RecoveredFiles, StepSpan, changed, checked, is_regular, opened, rename_damaged
from monitor.sinks.hdf5_files import NotAShardError
from monitor.sinks.hdf5_write import SpoolBlock, image, read_blocks, whole_bytes
from monitor.sinks.protocol import SinkContext
from monitor.stats.table import StepRows

# --- The files in a rank's directory.
#
# Steps are collected in a hidden part until their record is complete. Then a shard is made of the part and gets its name.
# A shard is made in memory, so a record of very many rows is cut into several shards, each named after its own steps.
#
# A step that is written again replaces the old one and all later steps in its record. So a part begins with the earlier
# steps from the shards of its record, and its shard replaces those shards.

PLAIN: Final = pa.schema([(one.name, pa.string() if pa.types.is_dictionary(one.type) else one.type) for one in SCHEMA])
"""``SCHEMA`` with plain texts in place of dictionary indices."""

MIB: Final = 1 << 20

MOST_BYTES: Final = 64 * MIB
"""Greatest size of a part: about 1.2 million rows. Making a shard of it takes 120 MB of memory."""

FULL: Final = 16 * MIB
"""A shard of this size or more is final: later steps go into a new shard."""


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
    """

    file: AppendFile
    record: StepSpan
    first: int
    since: int
    last: int | None = None
    replaces: list[Path] = field(default_factory=list)

    def takes(self, step: int) -> bool:
        """Whether ``step`` can be appended."""
        return self.record.holds(StepSpan(step, step)) and (self.last is None or self.last < step) and not self.file.released


class Hdf5Shards:
    """The shards of a directory, of which at most one is unfinished.

    Every method may raise OSError: visible files then hold whole steps, and the next step can be written.
    """

    def __init__(self, directory: Path, steps_per_record: int) -> None:
        self._directory = directory
        self._steps_per_record = steps_per_record
        self._part: _PartialShard | None = None
        self._names = hdf5_files.ShardIndex(directory, steps_per_record)

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
        part.last = step
        if step == part.record.last or part.file.size >= MOST_BYTES:
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
        carried_on = [shard.path for shard in fitting if {step for step in shard.steps() if step < since} <= steps]
        file = AppendFile(left, opened(left), size, size)
        self._publish(_PartialShard(file, record, min(steps), since, max(steps), carried_on))

    def _make_way(self, step: int) -> None:
        """Finish the part if ``step`` cannot be appended to it."""
        part = self._part
        if part is not None and part.file.gone():
            self._drop(part)
            raise FileNotFoundError(errno.ENOENT, "the file was removed while the monitor wrote to it", part.file.path)
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
        path = self._directory / hdf5_files.part_name(hdf5_files.shard_name(record))
        part = _PartialShard(AppendFile(path, opened(path, os.O_CREAT | os.O_TRUNC)), record, step, step)
        try:
            for shard in _carried_on(self._names.shards_of(record), step, facts):
                self._carry(part, shard)
        except BaseException:
            part.file.discard()
            raise
        return part

    def _carry(self, part: _PartialShard, shard: hdf5_files.Hdf5Shard) -> None:
        """Begin ``part`` with the shard's rows of earlier steps."""
        earlier = StepSpan(part.record.first, part.since - 1)
        for block in shard.blocks(earlier):
            part.file.write(block.packed())
        part.file.keep()
        part.first = min(part.first, shard.span.first)
        part.replaces.append(shard.path)

    def _publish(self, part: _PartialShard) -> None:
        size = part.file.size
        part.file.release()
        _make_shard(Path(part.file.path))
        self._take_out(part)
        self._give_name(part, cut=size >= MOST_BYTES)

    def _take_out(self, part: _PartialShard) -> None:
        """Remove the steps that were written again from the shards that ``part`` does not replace."""
        again = StepSpan(part.since, part.record.last)
        for shard in self._names.shards_of(part.record, anywhere=True):
            if shard.path not in part.replaces and shard.span.meets(again):
                _rewrite(shard, again)

    def _give_name(self, part: _PartialShard, *, cut: bool) -> None:
        path = self._free_path(part, cut=cut)
        # First remove the other replaced files, then rename over one of them, so that no row is ever visible twice.
        first, *others = part.replaces or [path]
        for other in others:
            other.unlink(missing_ok=True)
        os.replace(part.file.path, first)
        if first != path:
            os.replace(first, path)
        self._names.add(path)

    def _free_path(self, part: _PartialShard, *, cut: bool) -> Path:
        last = part.record.last if part.last is None else part.last
        shares = any(path not in part.replaces for path in self._names.of(part.record))
        steps = StepSpan(part.first, last) if shares or (cut and last < part.record.last) else part.record
        paths = (self._directory / hdf5_files.shard_name(steps, copy) for copy in count(1))
        return next(path for path in paths if path in part.replaces or not os.path.lexists(path))


def _carried_on(shards: list[hdf5_files.Hdf5Shard], step: int, facts: ShardMetadata) -> list[hdf5_files.Hdf5Shard]:
    """The shards whose rows a new part carries over.

    Those with steps from ``step`` on, which the part replaces, and the last shard before ``step`` unless it is full.
    """
    fitting = sorted((shard for shard in shards if shard.facts.fits(facts)), key=lambda shard: shard.span)
    before = [shard for shard in fitting if shard.span.last < step]
    return [shard for shard in before[-1:] if shard.size < FULL] + [shard for shard in fitting if shard.span.last >= step]


def _make_shard(path: Path) -> None:
    """Turn a part into a shard, still hidden. Does nothing if it is one already."""
    if hdf5_files.is_shard(path):
        return
    try:
        content = image(read_blocks(path))
    except (ValueError, RuntimeError) as error:  # it would fail again, so the part is removed
        path.unlink(missing_ok=True)
        raise OSError(errno.EIO, f"its steps could not be written as HDF5 and are lost: {error!r}", str(path)) from error
    hdf5_files.write_hidden(path, content)


def _rewrite(shard: hdf5_files.Hdf5Shard, without: StepSpan) -> None:
    kept = [*shard.blocks(StepSpan(0, without.first - 1)), *shard.blocks(StepSpan(without.last + 1, shard.span.last))]
    if kept:
        hdf5_files.write_hidden(shard.path, image(kept))
    else:
        shard.path.unlink(missing_ok=True)


def _news(rows: pa.Table, visible: list[pa.Table]) -> int | None:
    """The first step whose rows differ from the visible ones; None if there is none."""
    new, *known = (_plain(table) for table in (rows, *visible))
    old = pa.concat_tables([new.slice(0, 0), *known])
    steps = np.unique(new["step"].to_numpy()).tolist()
    return next((step for step in steps if not _of_step(new, step).equals(_of_step(old, step))), None)


def _plain(rows: pa.Table) -> pa.Table:
    """The rows with plain texts and a column of histograms, so that they can be compared."""
    plain = rows.select(SCHEMA.names).replace_schema_metadata(None).cast(PLAIN)
    histograms = rows[HISTOGRAM] if HISTOGRAM in rows.column_names else pa.nulls(len(rows), FILLED)
    return plain.append_column(HISTOGRAM, histograms)


def _of_step(rows: pa.Table, step: int) -> pa.Table:
    return rows.filter(pa.array(rows["step"].to_numpy() == step))


__all__ = ["Hdf5Sink", "NotAShardError", "read_hdf5"]


class Hdf5Sink:
    """Writes ``metrics_{first}-{last}.h5`` into the rank's directory.

    A step is in its file whole or not at all. A file gets its name when its record is complete, or at ``flush``.

    Raises:
        OSError: from every method, if the disk, the directory or the limit on open files does not allow the operation. The
            files then hold whole steps, and the next step can be written as soon as the cause is gone.
    """

    def __init__(self, context: SinkContext) -> None:
        self._measurements = Measurements(context.series)
        self._facts = ShardMetadata(context.rank, context.eps)
        self._shards = Hdf5Shards(context.directory, context.step_count_per_record)

    def write(self, rows: StepRows) -> None:
        """Add one step. If it was written before, it replaces the old one and all later steps in its record."""
        if len(rows):
            self._shards.write(rows.step, SpoolBlock(self._measurements.of(rows), self._facts.of(rows)))

    def flush(self) -> None:
        """Make the open record visible as it is. Later steps of the record are added to it."""
        self._shards.flush()

    def close(self) -> None:
        """Flush and close every file."""
        self._shards.close()


def read_hdf5(
    path: str | PathLike[str],
    *,
    kinds: Collection[str] | None = None,
    steps: tuple[int, int] | None = None,
    ops: Sequence[str] | None = None,
) -> pa.Table:
    """Read one HDF5 file of a recording: a row per measurement, with identity and partials (``monitor.sinks.arrow.SCHEMA``).

    If rows have histograms, a column ``histogram`` follows: lists of the elements of every bin, null for rows without one. Rows
    are ordered by kind, and within a kind in the order in which they were measured. The metadata of the steps is in the table's
    metadata (``ShardMetadata.unpacked``).

    Args:
        kinds: The kinds to read; None: all.
        steps: The first and the last step to read; None: all. Nothing else is read.
        ops: Replace the partials by these ops, derived from them. Columns of features and ``mg_direction`` are allowed, and ops
            that were not configured. Null if a row's kind does not have the op.

    Raises:
        OSError: the file cannot be opened, or is not HDF5.
        NotAShardError: the file is HDF5 but not a file of this format, or it is damaged.
        ValueError: an op does not exist.
    """
    with h5py.File(fspath(path), "r", locking=False) as file:
        table = hdf5_files.read_rows(file, kinds, hdf5_files.ALL_STEPS if steps is None else StepSpan(*steps))
    return whole(table) if ops is None else with_ops(table, ops)


# --- Recovery: makes the whole steps in the unfinished files of a killed process visible.
#
# All kinds are in one part, so a step is in it whole or not at all. The part becomes a shard with the name that the
# process would have given it, and replaces the files that it was to replace. A part without whole steps, or whose steps
# are all visible, is removed.


def recover(directory: Path, newest: int, saved_ns: int, begun_ns: int) -> RecoveredFiles:  # noqa: ARG001 - one file has all kinds
    """See ``monitor.sinks.files.CrashRecovery``."""
    for draft in hdf5_files.drafts_in(directory):  # the file that it was to replace is still there
        draft.unlink()
    recovered = RecoveredFiles()
    for path, record in list(hdf5_files.parts_in(directory)):
        recovered.ranges.add(record)
        if hdf5_files.is_shard(checked(path)):
            _recover_shard(path, record, recovered)
        else:
            _recover_steps(path, record)
    late = (steps for path, steps in hdf5_files.shards_in(directory) if steps.last >= newest and changed(path) >= saved_ns)
    recovered.ranges.update(late)
    return recovered


def held(directory: Path, steps: StepSpan) -> set[int]:
    """See ``monitor.sinks.files.CrashRecovery``."""
    shards = (
        hdf5_files.Hdf5Shard.read(path)
        for path, named in hdf5_files.shards_in(directory)
        if named.meets(steps) and is_regular(path)
    )
    return {step for shard in shards if shard is not None for step in shard.steps()}


def _recover_shard(path: Path, record: StepSpan, recovered: RecoveredFiles) -> None:
    """Recover a part that is a whole shard already and only lacks its name."""
    shard = hdf5_files.Hdf5Shard.read(path)
    if shard is None or not record.holds(shard.span):
        recovered.aside.append(rename_damaged(path))
    else:
        _shards_of(path, record).take_up(path, record, shard.size, shard.rows(record), shard.facts)


def _recover_steps(path: Path, record: StepSpan) -> None:
    left = list(read_blocks(path))
    if not left:
        path.unlink()
        return
    tables = [pa.Table.from_batches([block.rows.replace_schema_metadata(None)]) for block in left]
    rows = pa.concat_tables(tables, promote_options="default")  # steps without histograms lack that column
    _shards_of(path, record).take_up(path, record, whole_bytes(path), rows, left[-1].facts)


def _shards_of(path: Path, record: StepSpan) -> Hdf5Shards:
    return Hdf5Shards(path.parent, record.last - record.first + 1)
