"""How the fused kernels read each dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from monitor.stats.torch_tensors import working_precision

READ: Final = 16
"""Bytes that a thread reads at once: as many as a device's memory instructions can."""

_ELEMENTS: Final[Mapping[torch.dtype, tuple[str, str]]] = {
    torch.float64: ("float64", ""),
    torch.float32: ("float32", ""),
    torch.float16: ("float16", ""),
    torch.bfloat16: ("int16", "bfloat16"),
    torch.int64: ("int64", ""),
    torch.int32: ("int32", ""),
    torch.int16: ("int16", ""),
    torch.int8: ("int8", ""),
    torch.uint64: ("uint64", ""),
    torch.uint32: ("uint32", ""),
    torch.uint16: ("uint16", ""),
    torch.uint8: ("uint8", ""),
    torch.bool: ("int8", "bool"),
    torch.complex128: ("float64", "complex128"),
    torch.complex64: ("int64", "complex64"),
    torch.complex32: ("int32", "complex32"),
}
"""The type that Triton reads, and what is then made of it."""

_FLOAT8: Final = ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")


@dataclass(frozen=True, slots=True)
class Format:
    """A dtype, as the kernels read it.

    Attributes:
        element: Triton's name of the type that is read.
        decode: What is made of it (``_numbers`` in the source); empty where it is a number as it is.
        work: The precision in which it is reduced.
        group: Adjacent elements that a thread reads at once.
        reads: Groups that a thread reads before it looks at the first: several reads in flight, as far as registers go.
        least: What squares must be on average, so that those lost below the smallest normal number do not show in their sum.
    """

    element: str
    decode: str
    work: str
    group: int
    reads: int
    least: float

    def lane(self, aligned: bool) -> int:
        """Elements of one lane in one tile. What cannot be read in whole groups takes more registers to read."""
        return self.group * (self.reads if aligned else max(1, self.reads // 2))


def _format(dtype: torch.dtype, element: str, decode: str) -> Format:
    narrow = working_precision(dtype) is torch.float32
    registers = 8 if dtype.is_complex else 32 if narrow else 16  # numbers that a thread has room for at once
    group = min(max(1, READ // dtype.itemsize), registers // 2)
    reads = min(4, registers // group)
    return Format(element, decode, "float32" if narrow else "float64", group, reads, 1.2e-31 if narrow else 1e-290)


def _formats() -> dict[torch.dtype, Format]:
    formats = {dtype: _format(dtype, *how) for dtype, how in _ELEMENTS.items()}
    for name in _FLOAT8:
        dtype = getattr(torch, f"float8_{name}", None)  # newer torch has more of them
        if dtype is not None:
            formats[dtype] = _format(dtype, "uint8", name)
    return formats


FORMATS: Final[Mapping[torch.dtype, Format]] = _formats()
"""Dtypes that the fused kernels read; others are left to the portable kernel."""
