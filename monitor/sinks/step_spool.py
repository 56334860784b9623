"""The spool: a hidden file that collects the steps of a record until an HDF5 shard is made of them.

The file is a sequence of blocks, each after its length and checksum. So the file of a killed process shows where its whole
steps end. A block is an Arrow stream: one batch of rows, and the shard's metadata. It contains the names of series, so the file
can be read on its own.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa
from pyarrow.ipc import IpcReadOptions, IpcWriteOptions, new_stream, open_stream  # type: ignore[attr-defined]

from monitor.sinks.arrow import ShardMetadata, completed

_FRAME: Final = struct.Struct("<II")
_OPTIONS: Final = IpcWriteOptions(compression="lz4", use_threads=False)
_READING: Final = IpcReadOptions(use_threads=False)
"""Without threads: if Arrow cannot start a thread, it ends the process, and training with it."""


class SpoolBlock(NamedTuple):
    """Rows of one or several steps, with their metadata."""

    rows: pa.RecordBatch
    facts: ShardMetadata

    def packed(self) -> bytes:
        """The block as bytes, to be appended to a spool."""
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
