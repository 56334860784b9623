"""The ``hdf5`` format: all kinds of a record in one file, with partials in place of ops. Has the sink and ``read_hdf5``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Final

import pyarrow as pa

from monitor.sinks import hdf5_files
from monitor.sinks.arrow import whole, with_ops
from monitor.sinks.files import ALL_STEPS, RecoveredFiles, StepSpan
from monitor.sinks.hdf5_write import image
from monitor.sinks.protocol import SinkContext
from monitor.sinks.spool import MIB, NotAShardError, ShardFormat, SpooledSink, held_steps, recover_shards

__all__ = ["FORMAT", "Hdf5Sink", "NotAShardError", "held", "read_hdf5", "recover"]

FORMAT: Final = ShardFormat(
    suffix=".h5",
    called="HDF5",
    signature=b"\x89HDF\r\n\x1a\n",
    image=image,
    look=hdf5_files.look,
    steps=hdf5_files.steps_of,
    rows=hdf5_files.rows_of,
    most_bytes=64 * MIB,  # about 1.2 million rows; making a shard of them takes 120 MB of memory
)


class Hdf5Sink(SpooledSink):
    """Writes ``metrics_{first}-{last}.h5`` into the rank's directory. See ``SpooledSink``."""

    def __init__(self, context: SinkContext) -> None:
        super().__init__(context, FORMAT)


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
    with hdf5_files.opened(Path(fspath(path))) as file:
        table = hdf5_files.read_rows(file, kinds, ALL_STEPS if steps is None else StepSpan(*steps))
    return whole(table) if ops is None else with_ops(table, ops)


def recover(directory: Path, newest: int, saved_ns: int, begun_ns: int) -> RecoveredFiles:  # noqa: ARG001 - one file has all kinds
    """See ``monitor.sinks.files.CrashRecovery``."""
    return recover_shards(FORMAT, directory, newest, saved_ns)


def held(directory: Path, steps: StepSpan) -> set[int]:
    """See ``monitor.sinks.files.CrashRecovery``."""
    return held_steps(FORMAT, directory, steps)
