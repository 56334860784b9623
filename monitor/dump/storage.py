"""Tensors in files of numpy, those of types that numpy lacks included.

Such a tensor is stored as the integers that its bits spell, in a structured dtype of one field that has the name of the type:
``[('bfloat16', '<u2')]``. Any numpy reads that, and ``load_tensor`` knows what the bits mean.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from monitor.coordinator.output import write_whole

Array = NDArray[Any]


class Format(NamedTuple):
    """A floating-point type of eight bits or fewer: a sign, an exponent, a mantissa.

    Attributes:
        exponent: Its bits; likewise of ``mantissa``.
        special: What stands for no finite number: ``ieee`` (the greatest exponent: Inf and NaN), ``fn`` (all ones: NaN),
            ``fnuz`` (minus zero: NaN).
    """

    exponent: int
    mantissa: int
    bias: int
    special: str


FORMATS: Final = {
    "float8_e4m3fn": Format(4, 3, 7, "fn"),
    "float8_e5m2": Format(5, 2, 15, "ieee"),
    "float8_e4m3fnuz": Format(4, 3, 8, "fnuz"),
    "float8_e5m2fnuz": Format(5, 2, 16, "fnuz"),
}


def save_tensor(path: Path, array: Array, dtype: str | None = None) -> None:
    """Write a file that is seen complete or not at all.

    Args:
        dtype: The name of a type that numpy lacks; ``array`` then holds unsigned integers, the bits of its elements.

    Raises:
        OSError: It cannot be written.
    """
    if dtype is not None:
        array = np.ascontiguousarray(array).view([(dtype, array.dtype.newbyteorder("<"))]).reshape(array.shape)
    content = io.BytesIO()
    np.save(content, array, allow_pickle=False)
    write_whole(path, content.getbuffer())  # type: ignore[arg-type]


def load_tensor(path: str | os.PathLike[str]) -> Array:
    """What a dump has stored of a tensor: the array itself, or, of a type that numpy lacks, the same numbers in a wider one.

    bfloat16 and the types of eight bits become float32, complex32 becomes complex64; not one of their numbers changes.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no file of numpy's, or of a type that nobody here knows.
    """
    stored: Array = np.load(path, allow_pickle=False)
    if stored.dtype.names is None:
        return stored
    dtype = stored.dtype.names[0]
    if dtype not in (*_WIDENED, *FORMATS):
        raise ValueError(f"{os.fspath(path)} holds elements of type {dtype}, which is not known")
    bits = stored[dtype]
    return _table(dtype)[bits] if dtype in FORMATS else _WIDENED[dtype](bits)


def bits_of(path: str | os.PathLike[str]) -> tuple[Array, str | None]:
    """What stands in a file as it stands there: an array, and the name of its type where numpy lacks that."""
    stored: Array = np.load(path, allow_pickle=False)
    return (stored, None) if stored.dtype.names is None else (stored[stored.dtype.names[0]], stored.dtype.names[0])


def _from_bfloat16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _from_complex32(bits: Array) -> Array:
    parts = np.ascontiguousarray(bits).view(np.float16).astype(np.float32)
    return parts.view(np.complex64).reshape(bits.shape)


def _from_powers(bits: Array) -> Array:
    """The type of scales: an exponent and nothing else."""
    numbers = np.ldexp(1.0, bits.astype(np.int32) - 127)
    return np.where(bits == 0xFF, np.nan, numbers).astype(np.float32)


_WIDENED: Final[dict[str, Callable[[Array], Array]]] = {
    "bfloat16": _from_bfloat16,
    "complex32": _from_complex32,
    "float8_e8m0fnu": _from_powers,
}


@cache
def _table(dtype: str) -> Array:
    """Every number of the type, by its bits, in float32."""
    return np.array([_number(bits, FORMATS[dtype]) for bits in range(256)], dtype=np.float32)


def _number(bits: int, of: Format) -> float:
    sign = -1.0 if bits >> 7 else 1.0
    exponent, mantissa = bits >> of.mantissa & (1 << of.exponent) - 1, bits & (1 << of.mantissa) - 1
    if (of.special == "fnuz" and bits == 0x80) or (of.special == "fn" and bits & 0x7F == 0x7F):
        return float("nan")
    if of.special == "ieee" and exponent == (1 << of.exponent) - 1:
        return float("nan") if mantissa else sign * float("inf")
    if exponent == 0:
        return float(sign * np.ldexp(mantissa, 1 - of.bias - of.mantissa))
    return float(sign * np.ldexp(mantissa + (1 << of.mantissa), exponent - of.bias - of.mantissa))
