"""Reduces many small host tensors at once: biases, norms, their gradients and moments.

Reducing a thousand elements takes less time than the call itself, and a model has hundreds of such tensors. So they are copied
end to end into a buffer, and each statistic of all of them is one segmented reduction in float64, where squares of float32
neither overflow nor vanish.
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
"""Greatest number of elements of a tensor that is cheaper to reduce together with others."""

BATCH: Final = 98_304
"""Elements of a buffer: so few that the reduction's data stay in the second-level cache."""

SMALL_BYTES: Final = 4 * SMALL
BATCH_BYTES: Final = 4 * BATCH

SegmentRows = tuple[Floats, NDArray[np.bool_]]
"""Rows, shape ``(tensors, len(COLUMNS))``, and which of them are valid; the others must be reduced one by one."""


class Staging:
    """Copies of small tensors that wait to be reduced together.

    A copy is a ``bytes`` of the tensor's memory: during communication, with cold caches, it costs a fifth of ``clone``. It is
    never a numpy view of the tensor: torch could no longer resize the storage, as FSDP does.
    """

    def __init__(self) -> None:
        self._copies: list[bytes] = []
        self._bytes = 0

    def __len__(self) -> int:
        """The number of waiting tensors."""
        return len(self._copies)

    @property
    def is_half_full(self) -> bool:
        return 2 * self._bytes > BATCH_BYTES

    def add(self, x: Tensor) -> bool:
        """Copy ``x``. False, without a copy, if it is not small, not plain, not in memory, or if there is no room."""
        size = 4 * x.numel()
        if size > SMALL_BYTES or self._bytes + size > BATCH_BYTES or not (address := plain_address(x)):
            return False
        self._copies.append(string_at(address, size))
        self._bytes += size
        return True

    def cut(self, tensors: int) -> None:
        """Drop all but the first ``tensors`` copies."""
        self._bytes -= sum(map(len, self._copies[tensors:]))
        del self._copies[tensors:]

    def take(self) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """All copied elements end to end, and the number of elements of each tensor. Empties the staging."""
        lengths = np.array([len(copy) // 4 for copy in self._copies], dtype=np.int64)
        numbers = np.frombuffer(b"".join(self._copies), dtype=np.float32)
        self.cut(0)
        return numbers, lengths


def reduce_segments(
    narrow: NDArray[np.float32], starts: NDArray[np.int64], lengths: NDArray[np.int64], bound: float, wide: Floats
) -> SegmentRows:
    """The rows of tensors that are stored end to end.

    Args:
        narrow: The elements of all tensors.
        starts: The index of each tensor's first element, ascending from 0.
        lengths: The number of elements of each tensor, at least 1.
        bound: ``zeros`` counts ``|x| < bound``, exact for float32.
        wide: Scratch memory of the size of ``narrow``.

    Returns:
        Rows, shape ``(len(starts), len(COLUMNS))``, and which of them are valid. Rows of tensors with NaN or Inf are not, nor
        those whose mean is so large compared with the spread that even float64 loses the spread.
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
    # For a constant tensor, such as a new norm's weight, the difference is a rounding error: its spread is zero.
    constant = low == high
    rows[constant, M2] = 0.0
    return rows, np.isfinite(sumsq) & (constant | (m2 > 1e-8 * sumsq))
