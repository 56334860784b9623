"""Many small host tensors at once: biases, norms, their gradients and moments.

A reduction of a thousand elements costs less than the call that asks for it, and a model has hundreds of such tensors. So they
are laid end to end in a buffer, and each statistic of all of them is one segmented reduction in float64, where the squares of
float32 neither overflow nor vanish.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monitor.stats.partials import COLUMNS, COUNT, M2, MAX, MIN, SMALLS, SUM, SUMSQ, WRITES, Floats
from monitor.stats.torch_keys import KEYS_ABOVE_US
from monitor.stats.torch_tensors import is_plain

SMALL: Final = 1024
"""Elements up to which a tensor is cheaper as one of many."""

BATCH: Final = 98_304
"""Elements of a buffer: what it is reduced to stays in the second-level cache."""

Found = tuple[Floats, NDArray[np.bool_]]
"""Rows, shape ``(tensors, len(COLUMNS))``, and which of them hold; the others want a closer look."""


class Staging:
    """Copies of small tensors that wait to be reduced together. (Never numpy's view of a tensor: its storage could then not be
    resized any more, as FSDP does.)
    """

    def __init__(self) -> None:
        self._copies: list[Tensor] = []
        self._elements = 0

    def __len__(self) -> int:
        """How many there are."""
        return len(self._copies)

    @property
    def is_half_full(self) -> bool:
        return 2 * self._elements > BATCH

    def has_room_for(self, x: Tensor) -> bool:
        return self._elements + x.numel() <= BATCH

    def add(self, x: Tensor) -> None:
        """Copy a small tensor for which there is room."""
        with torch._C._ExcludeDispatchKeyGuard(KEYS_ABOVE_US):
            self._copies.append(x.clone())
        self._elements += x.numel()

    def cut(self, tensors: int) -> None:
        """Let go of all but the first ``tensors``."""
        self._elements -= sum([x.numel() for x in self._copies[tensors:]])
        del self._copies[tensors:]

    def take(self) -> list[Tensor]:
        """What was copied; there is nothing from now on."""
        taken, self._copies, self._elements = self._copies, [], 0
        return taken


def is_small(x: Tensor) -> bool:
    """Whether ``x`` may be one of many."""
    return x.numel() <= SMALL and is_plain(x)


def reduce_small(tensors: Sequence[Tensor], bound: float) -> Found:
    """The rows of small tensors, ``BATCH`` elements of them at most. As ``reduce_segments``."""
    lengths = np.array([x.numel() for x in tensors])
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1]))
    narrow = torch.cat([x.view(-1) for x in tensors]).numpy()
    return reduce_segments(narrow, starts, lengths, bound, np.empty(len(narrow)))


def reduce_segments(
    narrow: NDArray[np.float32], starts: NDArray[np.int64], lengths: NDArray[np.int64], bound: float, wide: Floats
) -> Found:
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
