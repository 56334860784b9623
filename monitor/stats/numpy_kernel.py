"""The kernel for what numpy can read: the native one where it is there, else numpy, a chunk at a time, in float64, where
squares of float32 neither overflow nor vanish.

Extremes are found in the elements' own precision: where both are finite, so is everything between them. Only chunks that
hold a NaN or an Inf, squares of float64 that leave its range, and means that are large against the spread want a closer look.
"""

from __future__ import annotations

import math
import threading
from typing import Final

import numpy as np

from monitor.stats.epsilon import Epsilon
from monitor.stats.native import NativeKernel, native_kernel
from monitor.stats.numpy_tensors import CHUNK, Chunks, Raw, Reals, is_readable, stored
from monitor.stats.partials import COLUMNS, EMPTY, Floats, exponent_for, union

_LEAST_SPREAD: Final = 1e-4
"""The share of the squares that the spread must hold: a difference of the two then has eleven digits."""

Row = tuple[float, ...]
"""One table row, in the order of ``COLUMNS``."""


class _Scratch(threading.local):
    """Chunk-sized buffers, a set for each thread."""

    def __init__(self) -> None:
        self.wide = np.empty(CHUNK)
        self.magnitudes = {np.dtype(one): np.empty(CHUNK, dtype=one) for one in (np.float32, np.float64)}
        self.below = np.empty(CHUNK, dtype=np.bool_)


class NumpyKernel:
    """Reduces arrays to table rows. May be used by several threads at once.

    Args:
        with_native: Whether the native kernel is used where there is one.
    """

    def __init__(self, eps: float, *, with_native: bool = True) -> None:
        self._native: NativeKernel | None = native_kernel(eps) if with_native else None
        self._bounds = {np.dtype(one): one(Epsilon.of(eps, one).bound) for one in (np.float32, np.float64)}
        self._chunks = Chunks()
        self._scratch = _Scratch()

    def reduce_into(self, x: Raw, page: Floats, row: int) -> bool:
        """Write the partials of ``x`` into ``page[row]``. False, and nothing written, if they are no numbers."""
        if not is_readable(x):
            return False
        page[row] = self.reduce(x)
        return True

    def reduce(self, x: Raw) -> Row | Floats:
        """The row of a readable array, shape ``(len(COLUMNS),)``."""
        whole = self._natively(x)
        if whole is not None:
            return whole
        with np.errstate(all="ignore"):
            rows = [self._chunk(v) for v in self._chunks.of(x)]
        if len(rows) == 1:
            return rows[0]
        return union(np.array(rows)) if rows else (1.0, *EMPTY[1:])

    def _natively(self, x: Raw) -> Floats | None:
        """The row of floats without gaps; None where the native kernel cannot tell, or is not there."""
        found = None if self._native is None else stored(x)
        if self._native is None or found is None:
            return None
        elements, form = found
        page: Floats = np.empty((1, len(COLUMNS)))
        return page[0] if self._native.reduce_into(elements, x.size, form, page, 0) else None

    def _chunk(self, v: Reals) -> Row | Floats:
        row = self._natively(v)
        return self._portably(v) if row is None else row

    def _portably(self, v: Reals) -> Row:
        lo, hi = float(np.minimum.reduce(v)), float(np.maximum.reduce(v))
        if math.isfinite(lo) and math.isfinite(hi):
            return self._finite(v, lo, hi)
        return self._not_finite(v)

    def _finite(self, v: Reals, lo: float, hi: float) -> Row:
        n = len(v)
        exponent = exponent_for(max(-lo, hi)) if v.dtype == np.float64 else 0
        wide = self._widened(v, exponent)
        total = float(np.add.reduce(wide))
        np.multiply(wide, wide, out=wide)
        sumsq = float(np.add.reduce(wide))
        m2 = 0.0 if lo == hi else sumsq - total * total / n
        if lo != hi and m2 < _LEAST_SPREAD * sumsq:
            m2 = self._centred(v, exponent, total / n)
        return (1.0, n, 0.0, 0.0, 0.0, self._smalls(v, lo, hi), lo, hi, total, sumsq, m2, float(exponent))

    def _centred(self, v: Reals, exponent: int, mean: float) -> float:
        """Σ (x - mean)², corrected for the rounding of the mean."""
        wide = self._widened(v, exponent)
        np.subtract(wide, mean, out=wide)
        rest = float(np.add.reduce(wide))
        np.multiply(wide, wide, out=wide)
        return max(0.0, float(np.add.reduce(wide)) - rest * rest / len(v))

    def _widened(self, v: Reals, exponent: int) -> Floats:
        """Divided by 2^exponent, in the scratch buffer."""
        wide = self._scratch.wide[: len(v)]
        np.copyto(wide, v)
        return np.ldexp(wide, -exponent, out=wide) if exponent else wide

    def _smalls(self, v: Reals, lo: float, hi: float) -> float:
        """How many |x| are below eps."""
        bound = self._bounds[v.dtype]
        if not bound or lo >= bound or hi <= -bound:  # none is below 0: a dump asks for none
            return 0.0
        magnitudes = np.abs(v, out=self._scratch.magnitudes[v.dtype][: len(v)])
        return float(np.count_nonzero(np.less(magnitudes, bound, out=self._scratch.below[: len(v)])))

    def _not_finite(self, v: Reals) -> Row:
        """A chunk with NaN or Inf in it: they are counted, and the rest is reduced as ever."""
        posinfs, neginfs = np.count_nonzero(v == math.inf), np.count_nonzero(v == -math.inf)
        finite = v[np.isfinite(v)]
        counts = (1.0, len(v), len(v) - len(finite) - posinfs - neginfs, posinfs, neginfs)
        if not len(finite):
            return (*counts, *EMPTY[5:])
        return (*counts, *self._finite(finite, float(finite.min()), float(finite.max()))[5:])
