"""Columns of numbers as zlib streams, compressed only where there is something to gain.

Numbers of a column are alike in some of their bytes and noise in others: a sum in double precision has six bytes of noise in
eight, and a count has none. So the bytes are laid out in planes, all first bytes, then all second ones, and so on, which is
what HDF5 calls ``shuffle``. Each plane is a piece of the stream of its own: noise is stored as it is, the rest is compressed. A
compressor that is given the noise as well spends nearly all its time on it, for nothing.

The result is an ordinary zlib stream (RFC 1950 and 1951), which any reader of HDF5 takes for what its own filters make.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

LEVEL: Final = 1
"""Of zlib. Higher ones take a multiple of the time and save a few percent."""

_BEGINNING: Final = b"\x78\x01"
_END: Final = b"\x01\x00\x00\xff\xff"
"""A last block, stored and empty."""

_MOST_STORED: Final = 0xFFFF
_SAMPLE: Final = 2048
_NOISE: Final = 7.3
"""Bits a byte, of a sample, from which compression gains less than a tenth."""

Plane = NDArray[np.uint8]


def compressed(column: NDArray[Any]) -> bytes:
    """The zlib stream of the shuffled bytes of ``column``, shape ``(numbers,)``, contiguous, not empty."""
    bits = column.view(f"u{column.itemsize}")
    if (bits == bits[0]).all():
        return _of_one_number(bits[:1].tobytes(), len(bits))
    return _stream(np.ascontiguousarray(column.view(np.uint8).reshape(len(column), column.itemsize).T))


@lru_cache(maxsize=256)
def _of_one_number(number: bytes, length: int) -> bytes:
    return zlib.compress(np.repeat(np.frombuffer(number, dtype=np.uint8), length).data, LEVEL)


def _stream(planes: Plane) -> bytes:
    return b"".join([_BEGINNING, *_pieces(planes), _END, zlib.adler32(planes.data).to_bytes(4, "big")])


def _pieces(planes: Plane) -> Iterator[bytes]:
    """Blocks of a deflate stream, each piece ending at a byte's end. Neighbours that are all one byte share a piece."""
    least, greatest = planes.min(axis=1).tolist(), planes.max(axis=1).tolist()
    ends = zip(least, greatest, strict=True)
    start = 0
    for (low, high), run in groupby(ends):
        end = start + len(list(run))
        if low == high:
            yield _constant(low, (end - start) * planes.shape[1])
        else:
            for plane in planes[start:end]:
                yield from _stored(plane) if _bits_a_byte(plane) > _NOISE else (_deflated(plane),)
        start = end


@lru_cache(maxsize=256)
def _constant(value: int, length: int) -> bytes:
    return _deflated(np.full(length, value, dtype=np.uint8))


def _deflated(plane: Plane) -> bytes:
    compressor = zlib.compressobj(LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    return compressor.compress(plane.data) + compressor.flush(zlib.Z_FULL_FLUSH)


def _stored(plane: Plane) -> Iterator[bytes]:
    for start in range(0, len(plane), _MOST_STORED):
        part = plane[start : start + _MOST_STORED]
        yield b"\x00" + len(part).to_bytes(2, "little") + (len(part) ^ 0xFFFF).to_bytes(2, "little")
        yield part.tobytes()


def _bits_a_byte(plane: Plane) -> float:
    """The entropy of a sample of the plane. Of a small plane it comes out too low, which costs little."""
    sample = plane[:: max(len(plane) // _SAMPLE, 1)]
    counts = np.bincount(sample)
    shares = counts[counts > 0] / len(sample)
    return float(-(shares * np.log2(shares)).sum())
