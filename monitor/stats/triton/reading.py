"""How the fused kernels read each dtype, and how a tensor is cut into programs.

This module does without Triton: builds of torch for CPUs do not bring it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from monitor.stats.torch.tensors import working_precision

READ: Final = 16
"""Bytes that a thread reads at once: the most that a device's memory instructions can read."""

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
"""The type that Triton reads, and how it is decoded."""

_FLOAT8: Final = ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")


@dataclass(frozen=True, slots=True)
class ElementFormat:
    """How the kernels read a dtype.

    Attributes:
        element: Triton's name of the type that is read.
        decode: How it is decoded (``_numbers``); empty if it is a number already.
        work: The precision in which it is reduced.
        group: Adjacent elements that a thread reads at once.
        reads: Groups that a thread reads before it uses the first: several reads are in flight, as far as registers suffice.
        least: The least mean of squares at which squares lost below the smallest normal number do not change the sum.
    """

    element: str
    decode: str
    work: str
    group: int
    reads: int
    least: float

    def lane(self, aligned: bool) -> int:
        """Elements of one lane in one tile. Reads that are not of whole groups need more registers."""
        return self.group * (self.reads if aligned else max(1, self.reads // 2))


def _format(dtype: torch.dtype, element: str, decode: str) -> ElementFormat:
    narrow = working_precision(dtype) is torch.float32
    registers = 8 if dtype.is_complex else 32 if narrow else 16  # numbers that fit a thread's registers at once
    group = min(max(1, READ // dtype.itemsize), registers // 2)
    reads = min(4, registers // group)
    return ElementFormat(element, decode, "float32" if narrow else "float64", group, reads, 1.2e-31 if narrow else 1e-290)


def _formats() -> dict[torch.dtype, ElementFormat]:
    formats = {dtype: _format(dtype, *how) for dtype, how in _ELEMENTS.items()}
    for name in _FLOAT8:
        dtype = getattr(torch, f"float8_{name}", None)  # newer versions of torch have more of them
        if dtype is not None:
            formats[dtype] = _format(dtype, "uint8", name)
    return formats


FORMATS: Final[Mapping[torch.dtype, ElementFormat]] = _formats()
"""Dtypes that the fused kernels read; others are left to the portable kernel."""

# --- How a tensor is cut into parts, one program each.


@dataclass(frozen=True, slots=True)
class Blocks:
    """Sizes of the fused kernels' work.

    Attributes:
        lanes: Threads of a program, each with its own running columns; a multiple of the threads of a warp.
        rows: Parts that are combined at once.
        parts: Number of programs that fills any device.
        few: Number of programs above which parts of one tile cost more time than they save: each program ends with a sum over
            its lanes.
        least: Tiles of a part that suffice to hide this cost.
        tiles: Most tiles of a part.
    """

    lanes: int = 128
    rows: int = 128
    parts: int = 512
    few: int = 128
    least: int = 4
    tiles: int = 64


@dataclass(frozen=True, slots=True)
class Cut:
    """``parts`` parts of ``tiles`` tiles each; the last part may be shorter."""

    parts: int
    tiles: int


def cut(elements: int, lane: int, blocks: Blocks) -> Cut:
    """How a tensor is cut. The cut depends on its size and on how it can be read, not on the device or on other tensors.

    Args:
        lane: Elements of one lane in one tile.
    """
    tiles = -(-elements // (lane * blocks.lanes))
    wanted = max(-(-tiles // blocks.parts), min(blocks.least, tiles // blocks.few))
    each = min(blocks.tiles, 1 << max(0, wanted - 1).bit_length())
    return Cut(max(1, -(-tiles // each)), each)
