"""Chunks of host tensors, reduced by torch's operators: so small that every pass after the first reads from cache.

Passes over a chunk of normal numbers: min and max, sum, squares into a scratch buffer, their sum, their minimum (which proves
that no element is below eps; where the spread says that some will be, they are counted at once). A finite sum of squares
proves that there is no NaN and no Inf. Only where a proof fails is the chunk looked at again: smalls are counted, a chunk
whose squares leave the range of its precision is redone in float64, a chunk whose mean is large against its spread is
centred first.
"""

from __future__ import annotations

import math
import threading
from typing import Final

import numpy as np
import torch
from torch import Tensor, amin, aminmax, mul
from torch import sum as sum_of

from monitor.stats.epsilon import Epsilon
from monitor.stats.partials import EMPTY, exponent_for
from monitor.stats.torch_tensors import working_precision

CHUNK: Final = 262_144
"""Elements of a chunk. With its squares it fits the cache that a core can count on, and the cost of a call is spread thin; a
power of two, as the sizes of most tensors are, leaves no short last chunk. Measured in training: docs/performance.md."""

_LEAST_SQUARE: Final = {torch.float32: 1.2e-31, torch.float64: 1e-290}
"""What squares must be on average, so that those lost below the smallest normal number do not show in their sum."""

FEW: Final = 16_384
"""Elements up to which small ones are counted by torch, whose code is at hand in training. Beyond it numpy's comparison into
bytes is worth fetching: it is vectorised, and torch's is not."""

_MOST_VIEWS: Final = 1024

Row = tuple[float, ...]
"""One table row, in the order of ``COLUMNS``."""


class Scratch(threading.local):
    """Chunk-sized buffers, a set for each thread: backward hooks may run on the engine's threads."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}
        self._views: dict[tuple[str, torch.dtype, int], Tensor] = {}

    def like(self, v: Tensor, dtype: torch.dtype, use: str) -> Tensor:
        """A buffer in the shape of ``v``."""
        flat = self._views.get((use, dtype, v.numel()))
        if flat is None:
            flat = self._view(use, dtype, v.numel())
        return flat if v.dim() == 1 else flat.view(v.shape)

    def _view(self, use: str, dtype: torch.dtype, size: int) -> Tensor:
        """A model has few sizes of tensors, and cutting a view costs as much as a small reduction."""
        if len(self._views) >= _MOST_VIEWS:
            self._views.clear()
        buffer = self._buffers.get((use, dtype))
        if buffer is None:
            buffer = self._buffers[use, dtype] = torch.empty(CHUNK, dtype=dtype, device="cpu")
        view = self._views[use, dtype, size] = buffer[:size]
        return view


class ChunkKernel:
    """Reduces chunks of host tensors to table rows.

    Attributes:
        scratch: Buffers of a chunk.
    """

    def __init__(self, eps: float) -> None:
        self._eps = {torch.float32: Epsilon.of(eps, np.float32), torch.float64: Epsilon.of(eps, np.float64)}
        self._zero_is_small = eps > 0
        self.scratch = Scratch()

    def converted(self, piece: Tensor) -> Tensor:
        """``piece`` in its working precision: itself, converted in a buffer, or its magnitude where it is complex."""
        precision = working_precision(piece.dtype)
        if piece.dtype is precision:
            return piece
        buffer = self.scratch.like(piece, precision, "staged")
        if not piece.is_complex():
            return buffer.copy_(piece)
        exact = piece.to(torch.complex64) if piece.dtype is torch.complex32 else piece
        return torch.abs(exact, out=buffer)

    def reduce(self, v: Tensor) -> Row:
        """The row of a chunk in float32 or float64, of at least one element."""
        precision, n = v.dtype, v.numel()
        least, most = aminmax(v)
        lo, hi = least.item(), most.item()
        total = sum_of(v).item()
        squares = mul(v, v, out=self.scratch.like(v, precision, "squares"))
        sumsq = sum_of(squares).item()
        if not n * _LEAST_SQUARE[precision] <= sumsq < math.inf:
            return zeros(n, self._zero_is_small) if lo == hi == 0.0 else self._difficult(v)
        eps = self._eps[precision]
        # With a bound of 0 nothing is small: who asks for no count pays for none.
        none_is = lo >= eps.bound or hi <= -eps.bound or not eps.bound
        smalls = 0.0 if none_is else self._smalls(v, squares, sumsq, eps)
        m2 = sumsq - total * total / n
        if m2 < 0.25 * sumsq:
            m2 = self._centred(v, total / n)
        return (1.0, n, 0.0, 0.0, 0.0, smalls, lo, hi, total, sumsq, m2, 0.0)

    def _smalls(self, v: Tensor, squares: Tensor, sumsq: float, eps: Epsilon) -> float:
        """How many |x| are below eps. May overwrite ``squares``."""
        n = v.numel()
        if eps.square is None:
            return self._below(torch.abs(v, out=squares), eps.bound)
        # Where that many elements of such a size have one near zero anyway, the proof that none is would be a wasted pass.
        if n * eps.bound < math.sqrt(sumsq / n) and amin(squares).item() >= eps.square:
            return 0.0
        return self._below(squares, eps.square)

    def _below(self, magnitudes: Tensor, bound: float) -> float:
        """How many ``magnitudes`` are below ``bound``. May overwrite them."""
        if magnitudes.numel() <= FEW:
            return magnitudes.lt_(bound).sum().item()
        below = self.scratch.like(magnitudes, torch.bool, "below").numpy()
        numbers = magnitudes.numpy()
        return float(np.count_nonzero(np.less(numbers, numbers.dtype.type(bound), out=below)))

    def _centred(self, v: Tensor, mean: float) -> float:
        """Σ (x - mean)², corrected for the rounding of the mean."""
        centred = torch.sub(v, mean, out=self.scratch.like(v, v.dtype, "squares"))
        rest = centred.sum().item()
        return max(0.0, centred.mul_(centred).sum().item() - rest * rest / v.numel())

    def _difficult(self, v: Tensor) -> Row:
        """A chunk with NaN or Inf in it, or with squares outside the range of its precision: float64 throughout."""
        n = v.numel()
        wide = self.scratch.like(v, torch.float64, "wide").copy_(v).view(-1)
        finite = wide[torch.isfinite(wide)]
        nans, posinfs = torch.isnan(wide).sum().item(), wide.eq(math.inf).sum().item()
        neginfs = n - finite.numel() - nans - posinfs
        if finite.numel() == 0:
            return (1.0, n, nans, posinfs, neginfs, 0.0, *EMPTY[6:])
        lo, hi = (bound.item() for bound in aminmax(finite))
        smalls = finite.abs().lt_(self._eps[torch.float64].bound).sum().item()
        exponent = exponent_for(max(abs(lo), abs(hi)))
        scaled = torch.ldexp(finite, torch.tensor(-exponent, dtype=torch.int32)) if exponent else finite
        total, sumsq = scaled.sum().item(), scaled.square().sum().item()
        centred = scaled - total / len(scaled)
        m2 = max(0.0, centred.square().sum().item() - centred.sum().item() ** 2 / len(scaled))
        return (1.0, n, nans, posinfs, neginfs, smalls, lo, hi, total, sumsq, m2, float(exponent))


def zeros(count: int, are_small: bool) -> Row:
    """The row of that many zeros."""
    return (1.0, count, 0.0, 0.0, 0.0, float(count * are_small), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
