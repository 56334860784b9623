"""How a histogram has changed over the steps, in bounded memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from monitor.stats.partials import Floats

Shades = NDArray[np.uint8]
"""How much of a tensor is in each bin: 0 where nothing is, from 1 on the logarithm of the share."""

DEEPEST: Final = 253
"""The shade of a bin that holds every element."""

DECADES: Final = 4
"""From ``DEEPEST`` down to shade 1, which is that of all shares of one in ``10**DECADES`` and less."""


def shades(counts: NDArray[np.int64], elements: Floats) -> Shades:
    """The shades of histograms.

    Args:
        counts: Elements in each bin, shape ``(rows, bins)``.
        elements: All elements of each row, at least one, shape ``(rows,)``.

    Returns:
        uint8, shape ``(rows, bins)``.
    """
    share = counts / elements[:, None]
    with np.errstate(divide="ignore"):
        depth = 1 + np.log10(share) / DECADES
    shade = 1 + np.rint(np.clip(depth, 0, 1) * (DEEPEST - 1))
    return np.where(counts > 0, shade, 0).astype(np.uint8)


@dataclass(frozen=True, slots=True)
class History:
    """Columns of shades in the order of the recorded steps. A column of several steps has the deepest shade of each bin in
    any of them: what stood out in one step is not averaged away.

    Attributes:
        shades: Shape ``(columns, bins)``.
        last: The last step of each column, shape ``(columns,)``.
        first: The first step of all, if there is one.
        each: How many recorded steps a full column is of. All but the last one are full.
        in_last: How many the last one is of.
    """

    shades: Shades
    last: NDArray[np.int64]
    first: int = 0
    each: int = 1
    in_last: int = 0

    @classmethod
    def empty(cls, bins: int) -> History:
        """Of no step yet."""
        return cls(np.empty((0, bins), dtype=np.uint8), np.empty(0, dtype=np.int64))

    @property
    def recorded(self) -> int:
        """How many steps there are."""
        return (len(self.last) - 1) * self.each + self.in_last if len(self.last) else 0

    def with_step(self, step: int, shade: Shades, most: int) -> History:
        """With one step more. Columns that reach it are dropped first: the run has gone back.

        Args:
            shade: Shape ``(bins,)``.
            most: How many columns there may be, at least 2.
        """
        history = self._before(step)
        while len(history.last) > most or (len(history.last) == most and history.in_last == history.each):
            history = history._halved()
        return history._joined(step, shade) if 0 < history.in_last < history.each else history._followed(step, shade)

    def _before(self, step: int) -> History:
        kept = int(np.searchsorted(self.last, step))
        if kept == len(self.last):
            return self
        if not kept:
            return History.empty(self.shades.shape[1])
        return History(self.shades[:kept], self.last[:kept], self.first, self.each, self.each)

    def _halved(self) -> History:
        """Two columns become one."""
        first_of_pair = np.arange(0, len(self.last), 2)
        last_of_pair = np.minimum(first_of_pair + 1, len(self.last) - 1)
        in_last = self.in_last if len(self.last) % 2 else self.each + self.in_last
        joined = np.maximum.reduceat(self.shades, first_of_pair, axis=0)
        return History(joined, self.last[last_of_pair], self.first, 2 * self.each, in_last)

    def _joined(self, step: int, shade: Shades) -> History:
        columns, last = self.shades.copy(), self.last.copy()
        np.maximum(columns[-1], shade, out=columns[-1])
        last[-1] = step
        return History(columns, last, self.first, self.each, self.in_last + 1)

    def _followed(self, step: int, shade: Shades) -> History:
        first = self.first if len(self.last) else step
        return History(np.vstack([self.shades, shade]), np.append(self.last, step), first, self.each, 1)
