"""The ``hdf5`` format: all kinds of a record in one file, with partials in place of ops."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from os import PathLike, fspath

import h5py
import pyarrow as pa

from monitor.sinks.bins import whole
from monitor.sinks.facts import Facts
from monitor.sinks.hdf5_content import ALL_STEPS, NotAShardError, read_rows
from monitor.sinks.hdf5_shards import Hdf5Shards
from monitor.sinks.measurements import Measurements, with_ops
from monitor.sinks.protocol import SinkContext
from monitor.sinks.shard_names import Steps
from monitor.sinks.spool import Block
from monitor.stats.rows import StepRows

__all__ = ["Hdf5Sink", "NotAShardError", "read_hdf5"]


class Hdf5Sink:
    """Writes ``metrics_{first}-{last}.h5`` into the rank's directory.

    A step is in its file whole or not at all. A file has its name when its record is complete, or after ``flush``.

    Raises:
        OSError: from every method, if the disk, the directory or the number of open files does not allow what was asked. The
            files then hold whole steps, and the next step can be written as soon as the cause has passed.
    """

    def __init__(self, context: SinkContext) -> None:
        self._measurements = Measurements(context.series)
        self._facts = Facts(context.rank, context.eps)
        self._shards = Hdf5Shards(context.directory, context.step_count_per_record)

    def write(self, rows: StepRows) -> None:
        """Add one step. A step that was written before takes the place of the old one, and of those after it in its record."""
        if len(rows):
            self._shards.write(rows.step, Block(self._measurements.of(rows), self._facts.of(rows)))

    def flush(self) -> None:
        """Make the open record visible as it is. Its next steps join it."""
        self._shards.flush()

    def close(self) -> None:
        """Flush and let go of every file."""
        self._shards.close()


def read_hdf5(
    path: str | PathLike[str],
    *,
    kinds: Collection[str] | None = None,
    steps: tuple[int, int] | None = None,
    ops: Sequence[str] | None = None,
) -> pa.Table:
    """The rows of one file: what each is of, and its partials (``monitor.sinks.measurements.SCHEMA``). Where rows have
    histograms a column ``histogram`` follows, lists of the elements of every bin; null in the rows that have none.

    Kind by kind, and within a kind in the order in which they were measured. What is to be known of the steps stands in the
    table's metadata (``Facts.unpacked``).

    Args:
        kinds: Those to read; None: all.
        steps: The first and the last one to read; None: all. Only what is asked for is read.
        ops: Give these, derived from the partials, in place of them; also the columns of features, and ``mg_direction``. They
            need not be those that were configured. Null where a row's kind has none.

    Raises:
        OSError: the file cannot be opened, or is not HDF5.
        NotAShardError: it is HDF5, and not one of these files, or it is damaged.
        ValueError: there is no such op.
    """
    with h5py.File(fspath(path), "r", locking=False) as file:
        table = read_rows(file, kinds, ALL_STEPS if steps is None else Steps(*steps))
    return whole(table) if ops is None else with_ops(table, ops)
