"""Which run of elements of a parameter this rank's torch optimizer steps, and where: ZeRO has it step long flat tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from monitor.series import Ranks, Shard


@dataclass(frozen=True, slots=True)
class Piece:
    """What the torch optimizer of this rank steps of one parameter.

    Attributes:
        stepped: The tensor that the optimizer knows.
        start: Where in ``stepped``, flattened, the piece begins.
        numel: Its elements, without what pads ``stepped``; 0 where other ranks step all of the parameter.
        shape: Of the parameter.
        shard: Where in the parameter the piece lies; None where it is all of it.
        group: Which of the rank's flat tensors ``stepped`` is.
        index: Which of the pieces of ``stepped`` this one is.
    """

    stepped: Tensor
    start: int
    numel: int
    shape: tuple[int, ...]
    shard: Shard | None = None
    group: int = 0
    index: int = 0

    def weight(self) -> Tensor | None:
        """None while its memory is elsewhere (swapped out, offloaded)."""
        return self.of(self.stepped)

    def of(self, whole: Tensor | None) -> Tensor | None:
        """The piece of a tensor that is laid out as ``stepped`` is; None of any other."""
        if whole is None or whole.numel() != self.stepped.numel() or self.start + self.numel > whole.numel():
            return None
        whole = whole.detach()
        return whole if whole.shape == self.shape else self.shaped(whole.view(-1).narrow(0, self.start, self.numel))

    def shaped(self, elements: Tensor) -> Tensor | None:
        """Elements of the parameter as they are recorded; None where there are none, or others than the piece's."""
        if self.numel == 0 or elements.numel() != self.numel:
            return None
        return elements.reshape(self.shape if self.shard is None else -1)


def flat_shard(ranks: Ranks, shape: tuple[int, ...], start: int, numel: int) -> Shard | None:
    """The part of a parameter that begins at element ``start``; None where one rank has it whole, for nobody else does."""
    if len(ranks) <= 1 and numel == math.prod(shape):
        return None
    return Shard(ranks, shape, (start,) if numel else (), flat=True)
