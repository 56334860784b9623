"""Recovers the unfinished files of a killed process in the ``hdf5`` format: makes their whole steps visible.

All kinds are in one part, so a step is in it whole or not at all. The part becomes a shard with the name that the process would
have given it, and replaces the files that it was to replace. A part without whole steps, or whose steps are all visible, is
removed.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from monitor.sinks.files import StepSpan
from monitor.sinks.hdf5 import Hdf5Shards
from monitor.sinks.hdf5_files import Hdf5Shard, drafts_in, is_shard, parts_in, shards_in
from monitor.sinks.recovery import RecoveredFiles, changed, checked, is_regular, rename_damaged
from monitor.sinks.step_spool import read_blocks, whole_bytes


def recover(directory: Path, newest: int, saved_ns: int, begun_ns: int) -> RecoveredFiles:  # noqa: ARG001 - one file has all kinds
    """See ``monitor.sinks.recovery.CrashRecovery``."""
    for draft in drafts_in(directory):  # the file that it was to replace is still there
        draft.unlink()
    recovered = RecoveredFiles()
    for path, record in list(parts_in(directory)):
        recovered.ranges.add(record)
        if is_shard(checked(path)):
            _recover_shard(path, record, recovered)
        else:
            _recover_steps(path, record)
    late = (steps for path, steps in shards_in(directory) if steps.last >= newest and changed(path) >= saved_ns)
    recovered.ranges.update(late)
    return recovered


def held(directory: Path, steps: StepSpan) -> set[int]:
    """See ``monitor.sinks.recovery.CrashRecovery``."""
    shards = (Hdf5Shard.read(path) for path, named in shards_in(directory) if named.meets(steps) and is_regular(path))
    return {step for shard in shards if shard is not None for step in shard.steps()}


def _recover_shard(path: Path, record: StepSpan, recovered: RecoveredFiles) -> None:
    """Recover a part that is a whole shard already and only lacks its name."""
    shard = Hdf5Shard.read(path)
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
