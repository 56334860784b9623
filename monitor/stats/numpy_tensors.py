"""What there is to read in an array that a framework shares with numpy: real numbers, a chunk at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from monitor.stats import native

CHUNK: Final = 32_768
"""Elements of a chunk. In float64 it is 256 KiB, so every pass after the first reads from the second-level cache."""

Reals = NDArray[np.float32] | NDArray[np.float64]
Raw = NDArray[Any]

_FORMATS: Final = {
    np.dtype(np.float32): native.FLOAT32,
    np.dtype(np.float64): native.FLOAT64,
    np.dtype(np.float16): native.FLOAT16,
}
_BFLOAT16: Final = "bfloat16"
_HALF_OF_FLOAT32: Final = 16
_NUMBERS: Final = "biufc"


def is_readable(x: Raw) -> bool:
    """Whether the elements are numbers that are understood here."""
    return x.dtype.kind in _NUMBERS or _is_bfloat16(x)


def stored(x: Raw) -> tuple[Raw, int] | None:
    """The elements and their format in the words of the native kernel, where they are floats and lie one behind the other."""
    if not x.size or not (x.flags.c_contiguous or x.flags.f_contiguous):
        return None
    elements = x if x.flags.c_contiguous else x.T
    if _is_bfloat16(x):
        return elements.view(np.uint16), native.BFLOAT16
    form = _FORMATS.get(x.dtype)
    return None if form is None else (elements, form)


class Chunks(threading.local):
    """Cuts arrays, into buffers of its own where elements have to be converted: a set for each thread."""

    def __init__(self) -> None:
        self._narrow = np.empty(CHUNK, dtype=np.float32)
        self._wide = np.empty(CHUNK)

    def of(self, x: Raw) -> Iterator[Reals]:
        """The elements in float32 where their precision fits it, else in float64; magnitudes where they are complex.

        A chunk is good until the next one is asked for. An array that is not contiguous is copied chunk by chunk.
        """
        elements = x.reshape(-1) if x.flags.c_contiguous else x.flat
        for start in range(0, x.size, CHUNK):
            yield self._real(elements[start : start + CHUNK])

    def _real(self, v: Raw) -> Reals:
        if v.dtype == np.float32 or v.dtype == np.float64:
            return v
        if v.dtype.kind == "c":
            return np.abs(v)
        if v.dtype == np.float16:
            return np.take(_halves(), v.view(np.uint16), out=self._narrow[: len(v)], mode="wrap")
        if _is_bfloat16(v):
            return self._from_bfloat16(v)
        wide = self._wide[: len(v)]
        np.copyto(wide, v)
        return wide

    def _from_bfloat16(self, v: Raw) -> Reals:
        """A bfloat16 is the upper half of a float32."""
        narrow = self._narrow[: len(v)]
        bits = narrow.view(np.uint32)
        np.copyto(bits, v.view(np.uint16))
        np.left_shift(bits, _HALF_OF_FLOAT32, out=bits)
        return narrow


def as_reals(x: Raw) -> Reals:
    """Floating-point numbers in the shape that they have: float64 where they are, else float32. A copy only of others."""
    if _is_bfloat16(x):
        bits = x.view(np.uint16).astype(np.uint32) << np.uint32(_HALF_OF_FLOAT32)
        reals: Reals = bits.view(np.float32)
        return reals
    return x if x.dtype == np.float64 else x.astype(np.float32, copy=False)


def rounded_to_bfloat16(x: Reals) -> NDArray[np.float32]:
    """To the nearest number that bfloat16 has, ties to even; what is NaN stays so."""
    bits = x.astype(np.float32).view(np.uint32)
    odd = (bits >> np.uint32(_HALF_OF_FLOAT32)) & np.uint32(1)
    upper = (bits + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF_0000)
    return np.where(np.isnan(x), np.float32(np.nan), upper.view(np.float32))


def _is_bfloat16(x: Raw) -> bool:
    """Frameworks bring a dtype of their own for it, with the kind of raw memory."""
    return x.dtype.kind == "V" and x.dtype.name == _BFLOAT16


@cache
def _halves() -> NDArray[np.float32]:
    """Every float16, by its bits: looking them up takes a fifth of the time of numpy's conversion."""
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
