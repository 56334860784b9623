"""Tables that one task leaves for another in a file of Arrow, read as they lie on the disk."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
from pyarrow.ipc import new_file, open_file


def write_file(path: Path, rows: pa.Table | Iterable[pa.RecordBatch], schema: pa.Schema) -> None:
    """Write a table, or batches that can be read one by one.

    Raises:
        OSError: it cannot be written.
    """
    with pa.OSFile(str(path), "wb") as file, new_file(file, schema) as writer:  # type: ignore[no-untyped-call]
        if isinstance(rows, pa.Table):
            writer.write_table(rows)
        else:
            for batch in rows:
                writer.write_batch(batch)


def read_file(path: Path) -> pa.Table:
    """All of a file. Nothing is copied: the table holds on to the file."""
    with pa.memory_map(str(path)) as file:
        return open_file(file).read_all()  # type: ignore[no-untyped-call]


def read_batch(path: Path, number: int) -> pa.Table:
    """One batch of a file."""
    with pa.memory_map(str(path)) as file:
        return pa.Table.from_batches([open_file(file).get_batch(number)])  # type: ignore[no-untyped-call]
