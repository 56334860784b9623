"""The kernel for tensors in host memory: a chunk at a time, so that every pass after the first reads from cache.

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
from monitor.stats.partials import EMPTY, Floats, union
from monitor.stats.torch_modes import KEYS_ABOVE_US
from monitor.stats.torch_small_tensors import Staging, reduce_segments
from monitor.stats.torch_tensors import Readable, is_plain, pieces, readable, working_precision

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


class HostKernel:
    """Reduces host tensors to table rows."""

    def __init__(self, eps: float) -> None:
        self._eps = {torch.float32: Epsilon.of(eps, np.float32), torch.float64: Epsilon.of(eps, np.float64)}
        self._zero_is_small = 1.0 if eps > 0 else 0.0
        self._scratch = Scratch()

    def reduce_into(self, x: Tensor, page: Floats, row: int) -> bool:
        """Write the partials of ``x`` into ``page[row]``. False if ``x`` has no data to read; the row is then untouched."""
        numbers = self.reduce(x)
        if numbers is None:
            return False
        page[row] = numbers
        return True

    def staged_rows(self, staging: Staging) -> Floats:
        """The rows of the tensors in ``staging``, shape ``(len(staging), len(COLUMNS))``, which is empty then."""
        numbers, lengths = staging.take()
        starts = np.cumsum(lengths) - lengths
        rows, hold = reduce_segments(numbers, starts, lengths, self._eps[torch.float32].bound, np.empty(len(numbers)))
        for place in np.flatnonzero(~hold).tolist():
            rows[place] = self.reduce(torch.tensor(numbers[starts[place] : starts[place] + lengths[place]]))
        return rows

    def reduce(self, x: Tensor) -> Row | Floats | None:
        """The row of ``x``, shape ``(len(COLUMNS),)``; None if it has no data to read."""
        with torch._C._ExcludeDispatchKeyGuard(KEYS_ABOVE_US):
            if x.numel() <= CHUNK and is_plain(x):
                return self._chunk(x.view(-1))  # most tensors of most models, on the shortest way
            source = readable(x)
            return None if source is None else self._reduce(source)

    def _reduce(self, source: Readable) -> Row | Floats:
        x = source.dense
        if x.is_conj() or x.is_neg():
            x = x.resolve_conj().resolve_neg()
        rows = [self._chunk(piece) for piece in pieces(x, CHUNK)]
        if source.implicit_zeros:
            rows.append(self._zeros(source.implicit_zeros))
        if source.repeats > 1:
            rows = [_repeated(row, source.repeats) for row in rows]
        if len(rows) == 1:
            return rows[0]
        return union(np.array(rows)) if rows else (1.0, *EMPTY[1:])

    def _zeros(self, count: int) -> Row:
        return (1.0, count, 0.0, 0.0, 0.0, count * self._zero_is_small, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)

    def _chunk(self, piece: Tensor) -> Row:
        precision = working_precision(piece.dtype)
        v = piece if piece.dtype is precision else self._staged(piece, precision)
        n = v.numel()
        least, most = aminmax(v)
        lo, hi = least.item(), most.item()
        total = sum_of(v).item()
        squares = mul(v, v, out=self._scratch.like(v, precision, "squares"))
        sumsq = sum_of(squares).item()
        if not n * _LEAST_SQUARE[precision] <= sumsq < math.inf:
            return self._zeros(n) if lo == hi == 0.0 else self._difficult(v)
        eps = self._eps[precision]
        # With a bound of 0 nothing is small: who asks for no count pays for none.
        none_is = lo >= eps.bound or hi <= -eps.bound or not eps.bound
        smalls = 0.0 if none_is else self._smalls(v, squares, sumsq, eps)
        m2 = sumsq - total * total / n
        if m2 < 0.25 * sumsq:
            m2 = self._centred(v, total / n)
        return (1.0, n, 0.0, 0.0, 0.0, smalls, lo, hi, total, sumsq, m2, 0.0)

    def _staged(self, piece: Tensor, precision: torch.dtype) -> Tensor:
        """``piece`` in its working precision: converted, or its magnitude where it is complex."""
        buffer = self._scratch.like(piece, precision, "staged")
        if not piece.is_complex():
            return buffer.copy_(piece)
        exact = piece.to(torch.complex64) if piece.dtype is torch.complex32 else piece
        return torch.abs(exact, out=buffer)

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
        below = self._scratch.like(magnitudes, torch.bool, "below").numpy()
        numbers = magnitudes.numpy()
        return float(np.count_nonzero(np.less(numbers, numbers.dtype.type(bound), out=below)))

    def _centred(self, v: Tensor, mean: float) -> float:
        """Σ (x - mean)², corrected for the rounding of the mean."""
        centred = torch.sub(v, mean, out=self._scratch.like(v, v.dtype, "squares"))
        rest = centred.sum().item()
        return max(0.0, centred.mul_(centred).sum().item() - rest * rest / v.numel())

    def _difficult(self, v: Tensor) -> Row:
        """A chunk with NaN or Inf in it, or with squares outside the range of its precision: float64 throughout."""
        n = v.numel()
        wide = self._scratch.like(v, torch.float64, "wide").copy_(v).view(-1)
        finite = wide[torch.isfinite(wide)]
        nans, posinfs = torch.isnan(wide).sum().item(), wide.eq(math.inf).sum().item()
        neginfs = n - finite.numel() - nans - posinfs
        if finite.numel() == 0:
            return (1.0, n, nans, posinfs, neginfs, 0.0, *EMPTY[6:])
        lo, hi = (bound.item() for bound in aminmax(finite))
        smalls = finite.abs().lt_(self._eps[torch.float64].bound).sum().item()
        exponent = _exponent(max(abs(lo), abs(hi)))
        scaled = torch.ldexp(finite, torch.tensor(-exponent, dtype=torch.int32)) if exponent else finite
        total, sumsq = scaled.sum().item(), scaled.square().sum().item()
        centred = scaled - total / len(scaled)
        m2 = max(0.0, centred.square().sum().item() - centred.sum().item() ** 2 / len(scaled))
        return (1.0, n, nans, posinfs, neginfs, smalls, lo, hi, total, sumsq, m2, float(exponent))


def _exponent(absmax: float) -> int:
    """The power of two to divide by before squaring in float64; 0 wherever squares and their sums fit."""
    return math.frexp(absmax)[1] if absmax and not 1e-100 < absmax < 1e100 else 0


def _repeated(row: Row, times: int) -> Row:
    """The row of a tensor that holds every element ``times`` over: extremes and exponent stay, the rest multiplies."""
    return (1.0, *(n * times for n in row[1:6]), row[6], row[7], *(s * times for s in row[8:11]), row[11])
