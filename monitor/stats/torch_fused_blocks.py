"""How a tensor is cut into parts, a program each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Blocks:
    """Sizes of the fused kernels' work.

    Attributes:
        lanes: Threads of a program, each with running columns of its own; a multiple of the threads of a warp.
        rows: Parts that are combined at once.
        parts: Programs that fill any device: up to as many, a part is one tile.
        tiles: The most tiles of a part.
    """

    lanes: int = 128
    rows: int = 128
    parts: int = 512
    tiles: int = 64


@dataclass(frozen=True, slots=True)
class Cut:
    """``parts`` of ``tiles`` tiles each, the last of them shorter."""

    parts: int
    tiles: int


def cut(elements: int, lane: int, blocks: Blocks) -> Cut:
    """How a tensor is cut. Its size decides, and how it can be read; neither the device nor what else is reduced does.

    Args:
        lane: Elements of one lane in one tile.
    """
    tiles = -(-elements // (lane * blocks.lanes))
    wanted = -(-tiles // blocks.parts)
    each = min(blocks.tiles, 1 << max(0, wanted - 1).bit_length())
    return Cut(max(1, -(-tiles // each)), each)
