"""Many small host tensors at once: biases, norms, their gradients and moments.

A reduction of a thousand elements costs less than the call that asks for it, and a model has hundreds of such tensors. So they
are laid end to end in a buffer, and each statistic of all of them is one segmented reduction in float64, where the squares of
float32 neither overflow nor vanish.
"""

from __future__ import annotations

from ctypes import string_at
from typing import Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from monitor.stats.partials import COLUMNS, COUNT, M2, MAX, MIN, SMALLS, SUM, SUMSQ, WRITES, Floats
from monitor.stats.torch.tensors import plain_address

SMALL: Final = 1024
"""Elements up to which a tensor is cheaper as one of many."""

BATCH: Final = 98_304
"""Elements of a buffer: what it is reduced to stays in the second-level cache."""

SMALL_BYTES: Final = 4 * SMALL
BATCH_BYTES: Final = 4 * BATCH

SegmentRows = tuple[Floats, NDArray[np.bool_]]
"""Rows, shape ``(tensors, len(COLUMNS))``, and which of them hold; the others want a closer look."""


class Staging:
    """Copies of small tensors that wait to be reduced together.

    A copy is a ``bytes`` of the tensor's memory: amid communication, with cold caches, that costs a fifth of ``clone``. (It is
    never numpy's view of a tensor, whose storage could then not be resized any more, as FSDP does.)
    """

    def __init__(self) -> None:
        self._copies: list[bytes] = []
        self._bytes = 0

    def __len__(self) -> int:
        """How many there are."""
        return len(self._copies)

    @property
    def is_half_full(self) -> bool:
        return 2 * self._bytes > BATCH_BYTES

    def add(self, x: Tensor) -> bool:
        """Copy ``x``, if it is small, its memory holds what it says, and there is room."""
        size = 4 * x.numel()
        if size > SMALL_BYTES or self._bytes + size > BATCH_BYTES or not (address := plain_address(x)):
            return False
        self._copies.append(string_at(address, size))
        self._bytes += size
        return True

    def cut(self, tensors: int) -> None:
        """Let go of all but the first ``tensors``."""
        self._bytes -= sum(map(len, self._copies[tensors:]))
        del self._copies[tensors:]

    def take(self) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """What was copied, end to end, and the number of elements of each; there is nothing from now on."""
        lengths = np.array([len(copy) // 4 for copy in self._copies], dtype=np.int64)
        numbers = np.frombuffer(b"".join(self._copies), dtype=np.float32)
        self.cut(0)
        return numbers, lengths


def reduce_segments(
    narrow: NDArray[np.float32], starts: NDArray[np.int64], lengths: NDArray[np.int64], bound: float, wide: Floats
) -> SegmentRows:
    """The rows of tensors that lie end to end.

    Args:
        narrow: Their elements.
        starts: Where each begins, ascending from 0.
        lengths: How many elements each has, none 0.
        bound: ``|x| < bound`` is what ``zeros`` counts, exact for float32.
        wide: Scratch of their size.

    Returns:
        Rows, shape ``(len(starts), len(COLUMNS))``, and which of them hold: not those of tensors with NaN or Inf, nor those
        whose mean is so large against their spread that even float64 would lose it.
    """
    np.copyto(wide, narrow)
    rows = np.zeros((len(starts), len(COLUMNS)))
    rows[:, WRITES] = 1.0
    rows[:, COUNT] = lengths
    with np.errstate(invalid="ignore"):
        low = rows[:, MIN] = np.minimum.reduceat(narrow, starts)
        high = rows[:, MAX] = np.maximum.reduceat(narrow, starts)
        below = np.abs(narrow) < np.float32(bound)
        if below.any():
            rows[:, SMALLS] = np.add.reduceat(below, starts, dtype=np.int64)
        total = rows[:, SUM] = np.add.reduceat(wide, starts)
        np.multiply(wide, wide, out=wide)
        sumsq = rows[:, SUMSQ] = np.add.reduceat(wide, starts)
        m2 = rows[:, M2] = sumsq - total * total / lengths
    # A constant tensor (a fresh norm's weight) leaves a difference of rounding errors, which is a spread of zero.
    constant = low == high
    rows[constant, M2] = 0.0
    return rows, np.isfinite(sumsq) & (constant | (m2 > 1e-8 * sumsq))
