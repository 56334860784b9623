"""Steps in the making, as they stand in a hidden file until a shard is made of them.

A file of blocks, each with its length and checksum in front, so that whoever finds the file of a process that was killed sees
where its whole steps end. A block is a stream of Arrow: one batch of rows, and in its metadata what is to be known of the
steps. Names are in it, so that nothing but the file is needed.
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
"""A thread that Arrow cannot start ends the process: training, too."""


class SpoolBlock(NamedTuple):
    """Rows of one step, or of several, and what is to be known of these steps."""

    rows: pa.RecordBatch
    facts: ShardMetadata

    def packed(self) -> bytes:
        """For the end of a file."""
        sink = pa.BufferOutputStream()
        with new_stream(sink, self.rows.schema.with_metadata(self.facts.packed()), options=_OPTIONS) as stream:  # type: ignore[no-untyped-call]
            stream.write_batch(self.rows)
        content = sink.getvalue()
        return _FRAME.pack(len(content), zlib.crc32(content)) + memoryview(content)


def read_blocks(path: Path) -> Iterator[SpoolBlock]:
    """The blocks of a file, as far as they are whole.

    Raises:
        OSError: it cannot be read.
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
