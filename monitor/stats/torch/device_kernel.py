"""The portable kernel for accelerators, in torch operators only. It brings no value to the host, so it never waits.

Its temporaries are chunk-sized. Where the host kernel branches on a value, this kernel computes both outcomes: it masks
elements that are not finite, and squares values after scaling them by a power of two near the chunk's absmax.

The histogram of magnitudes has a kernel of its own here.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Final

import numpy as np
import torch
from torch import Tensor

from monitor.stats.histograms import BINS, UPPER
from monitor.stats.ops import Epsilon
from monitor.stats.partials import (
    ABSSUM,
    BITS_HIGH,
    BITS_LOW,
    COLUMNS,
    COUNT,
    EXPONENT,
    LEAST,
    M2,
    M3,
    M4,
    MAX,
    MIN,
    NANS,
    NEGINFS,
    POSINFS,
    SMALLS,
    SUM,
    SUMSQ,
    WRITES,
)
from monitor.stats.torch.memory import persistent, sent
from monitor.stats.torch.tensors import BYPASSED_KEYS, Readable, magnitudes_of, pieces, readable, words_in, working_precision

CHUNK: Final = 1 << 22
"""Elements of a chunk: enough to fill a device, 16 MiB per float32 temporary."""


class TorchDeviceKernel:
    """Reduces tensors of any device to table rows, in stream order.

    Args:
        higher, check_sums: Whether to measure the higher moments, and the check sums (``partials``). Tensors that repeat
            elements get no check sums.
    """

    def __init__(self, eps: float, chunk: int = CHUNK, *, higher: bool = False, check_sums: bool = False) -> None:
        self._higher, self._check_sums = higher, check_sums
        self._eps = {torch.float32: Epsilon.of(eps, np.float32).bound, torch.float64: Epsilon.of(eps, np.float64).bound}
        self._zero_is_small = 1.0 if eps > 0 else 0.0
        self._chunk_size = chunk

    def reduce_into(self, x: Tensor, page: Tensor, row: int, offset: Tensor | None = None) -> bool:
        """Write the partials of ``x`` into ``page[row + offset]``. False, and nothing written, if ``x`` has no data to read.

        Args:
            page: float64, shape ``(rows, len(COLUMNS))``, on the device of ``x``.
            offset: An integer on the same device; the host never reads it. If it is negative, nothing is written.
        """
        with torch._C._ExcludeDispatchKeyGuard(BYPASSED_KEYS):
            source = readable(x)
            if source is None:
                return False
            numbers = self._reduce(source)
            if offset is None:
                page[row].copy_(numbers)
            else:
                _write_below(page, row, offset, numbers)
        return True

    def _reduce(self, source: Readable) -> Tensor:
        x = source.dense
        rows = [self._chunk(piece) for piece in pieces(x, self._chunk_size)]
        if source.implicit_zeros:
            rows.append(self._constant(source.implicit_zeros, x.device))
        if not rows:
            return self._constant(0, x.device, lo=math.inf, hi=-math.inf)
        row = rows[0] if len(rows) == 1 else _union(torch.stack(rows), self._higher, words_in(x.dtype))
        return row if source.repeats == 1 else _repeated(row, source.repeats)

    def _constant(self, zeros: int, device: torch.device, lo: float = 0.0, hi: float = 0.0) -> Tensor:
        """The row of so many zeros, filled in on the device: a tensor made from host values needs a synchronising copy."""
        row = torch.zeros(len(COLUMNS), dtype=torch.float64, device=device)
        for column, value in ((WRITES, 1.0), (COUNT, zeros), (SMALLS, zeros * self._zero_is_small), (MIN, lo), (MAX, hi)):
            row[column] = value
        if self._check_sums:
            row[BITS_LOW], row[BITS_HIGH] = zeros & _HALF, zeros >> 32
        return row

    def _chunk(self, piece: Tensor) -> Tensor:
        v = _working(piece)
        finite = torch.isfinite(v)
        n = finite.sum()
        kept = torch.where(finite, v, 0.0)
        absmax = kept.abs().amax()
        # ``frexp`` would return the exponent directly, but not every device has it.
        exponent = torch.where(absmax > 0, absmax.double().log2().floor(), 0.0)
        scaled = torch.ldexp(kept, -exponent.to(v.dtype)) if v.dtype is torch.float32 else kept * torch.exp2(-exponent)
        total = scaled.sum(dtype=torch.float64)
        sumsq = scaled.square().sum(dtype=torch.float64)
        off = torch.where(finite, scaled - (total / n.clamp(min=1)).to(v.dtype), 0.0)
        m2 = off.square().sum(dtype=torch.float64) - off.sum(dtype=torch.float64).square() / n.clamp(min=1)
        lo, hi = torch.where(finite, v, math.inf).amin(), torch.where(finite, v, -math.inf).amax()
        m3 = m4 = abssum = least = torch.zeros_like(total)
        if self._higher:
            m2 = torch.where(lo < hi, m2, 0.0)  # of equal elements it is a rounding error
            m3, m4 = (torch.where(lo < hi, moment, 0.0) for moment in _higher_moments(off, n))
            abssum, least = scaled.abs().sum(dtype=torch.float64), _least(kept.abs())
        numbers = {
            WRITES: torch.ones_like(n),
            COUNT: torch.full_like(n, v.numel()),
            NANS: torch.isnan(v).sum(),
            POSINFS: (v == math.inf).sum(),
            NEGINFS: (v == -math.inf).sum(),
            SMALLS: (v.abs() < self._eps[v.dtype]).sum(),
            MIN: lo,
            MAX: hi,
            SUM: total,
            SUMSQ: sumsq,
            M2: m2.clamp(min=0.0),
            M3: m3,
            M4: m4,
            ABSSUM: abssum,
            LEAST: least,
            EXPONENT: exponent,
            **dict.fromkeys(range(BITS_LOW, len(COLUMNS)), torch.zeros_like(total)),
        }
        if self._check_sums:
            numbers |= enumerate(_halves(*_check_sums(piece)), BITS_LOW)
        row = torch.stack([numbers[column].double() for column in range(len(COLUMNS))])
        return _small_exponent(row, most=200 if self._higher else 330)


def _least(magnitudes: Tensor) -> Tensor:
    """The smallest one other than 0; 0 if there is none."""
    least = torch.where(magnitudes > 0, magnitudes, math.inf).amin()
    return torch.where(torch.isinf(least), 0.0, least)


def _higher_moments(off: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    """``m3`` and ``m4`` (``partials.higher_moments``).

    Args:
        off: The distances of finite elements from about their mean, below 4; 0 for the other elements.
        n: The number of finite elements.
    """
    squares = off.square()
    s, q, c = (powers.sum(dtype=torch.float64) for powers in (off, squares, squares * off))
    rest = s / n.clamp(min=1)
    around = n * rest.square()
    m3 = c - rest * (3 * q - 2 * around)
    return m3, squares.square_().sum(dtype=torch.float64) - rest * (4 * c - rest * (6 * q - 3 * around))


_HALF: Final = 0xFFFF_FFFF


def _check_sums(piece: Tensor) -> tuple[Tensor, Tensor]:
    """``bits`` and ``places`` (``partials``) of a piece, int64, which is computed modulo 2^64."""
    whole = piece.resolve_conj().resolve_neg().contiguous().as_strided((piece.numel(),), (1,))
    if piece.itemsize == 1:
        words = whole.view(torch.uint8).to(torch.int64)
    elif piece.itemsize == 2:
        words = whole.view(torch.int16).to(torch.int64).bitwise_and_(0xFFFF)
    else:
        words = whole.view(torch.int32).to(torch.int64).bitwise_and_(_HALF)
    bits = words.sum() + piece.numel()
    return bits, words.mul_(torch.arange(len(words), device=piece.device)).sum()


def _halves(bits: Tensor, places: Tensor) -> list[Tensor]:
    """The columns of the check sums."""
    return [half.double() for one in (bits, places) for half in (one & _HALF, (one >> 32) & _HALF)]


def _write_below(page: Tensor, row: int, offset: Tensor, numbers: Tensor) -> None:
    place = (offset.clamp(min=0).long() + row).view(1)
    kept = page.index_select(0, place)
    page.index_copy_(0, place, torch.where(offset >= 0, numbers.view(1, -1), kept))


def _working(piece: Tensor) -> Tensor:
    if piece.is_complex():
        piece = torch.abs(piece.to(torch.complex64) if piece.dtype is torch.complex32 else piece)
    return piece.to(working_precision(piece.dtype))


def _small_exponent(row: Tensor, most: int) -> Tensor:
    """The row with exponent 0 if its exponent is below ``most``, so that its sums of powers fit a float64."""
    exponent = row[EXPONENT]
    fits = exponent.abs() < most
    scale = torch.exp2(torch.where(fits, exponent, 0.0))
    square = scale * scale
    sums = [row[SUM] * scale, row[SUMSQ] * square, row[M2] * square, row[M3] * square * scale, row[M4] * square * square]
    rest = [row[ABSSUM] * scale, row[LEAST], torch.where(fits, 0.0, exponent)]
    return torch.cat([row[:SUM], torch.stack([*sums, *rest]), row[BITS_LOW:]])


def _union(rows: Tensor, higher: bool, words: int) -> Tensor:
    """``partials.union`` in torch operators: shapes ``(sets, len(COLUMNS))`` to ``(len(COLUMNS),)``."""
    column = rows.unbind(1)
    sumsq, exponent = column[SUMSQ], column[EXPONENT]
    top = torch.where(sumsq > 0, exponent, -math.inf).amax()
    top = torch.where(torch.isfinite(top), top, 0.0)
    down = torch.exp2(exponent - top)
    n = column[COUNT] - column[NANS] - column[POSINFS] - column[NEGINFS]
    sums = column[SUM] * down
    mean = sums.sum() / n.sum().clamp(min=1)
    off = sums / n.clamp(min=1) - mean
    m2 = column[M2] * down.square()
    counts = rows[:, COUNT : SMALLS + 1].sum(0)
    squares = [(sumsq * down.square()).sum(), (m2 + n * off.square()).sum()]
    if higher:
        m3, m4 = column[M3] * down.square() * down, column[M4] * down.square().square()
        squares += [*_higher_of_all(n, off, m2, m3, m4), (column[ABSSUM] * down).sum(), _least(column[LEAST])]
    else:
        squares += [torch.zeros_like(top)] * 4
    rest = [column[MIN].amin(), column[MAX].amax(), sums.sum(), *squares, top, *_checked_union(rows, words)]
    return torch.cat([torch.ones_like(counts[:1]), counts, torch.stack(rest)])


def _checked_union(rows: Tensor, words: int) -> list[Tensor]:
    """The columns of the check sums of pieces that follow each other. Without check sums they remain 0."""
    halves, count = rows[:, BITS_LOW:].long(), rows[:, COUNT].long()
    bits, places = halves[:, 0] | halves[:, 1] << 32, halves[:, 2] | halves[:, 3] << 32
    begins = (count.cumsum(0) - count) * words
    moved = torch.where(bits != 0, places + begins * (bits - count), 0)
    return _halves(bits.sum(), moved.sum())


def _higher_of_all(n: Tensor, off: Tensor, m2: Tensor, m3: Tensor, m4: Tensor) -> list[Tensor]:
    """``m3`` and ``m4`` of the union of sets, as in ``partials.combine_groups``; zeros if they leave the range.

    Args:
        off: The mean of each set minus the mean of all.
    """
    around = n * off.square()
    cubes, fourths = (m3 + off * (3 * m2 + around)).sum(), (m4 + off * (4 * m3 + off * (6 * m2 + around))).sum()
    known = torch.isfinite(cubes) & torch.isfinite(fourths)
    return [torch.where(known, moment, 0.0) for moment in (cubes, fourths)]


def _repeated(row: Tensor, times: int) -> Tensor:
    """The row of a tensor in which every element is repeated ``times`` times."""
    counts, extremes, sums = row[COUNT:MIN], row[MIN:SUM], row[SUM:LEAST]
    rest = [row[LEAST:BITS_LOW], torch.zeros_like(row[BITS_LOW:])]
    return torch.cat([row[:COUNT], counts * times, extremes, sums * times, *rest])


# --- Histograms of magnitudes, by binary search.


def count_magnitudes_on_device(x: Tensor) -> Tensor | None:
    """The histogram on the tensor's own device, int64. Brings no value to the host, so nothing waits."""
    with torch._C._ExcludeDispatchKeyGuard(BYPASSED_KEYS):
        source = readable(x)
        if source is None:
            return None
        x = source.dense
        edges = _edges(x.device)
        counts = torch.zeros(BINS, dtype=torch.int64, device=x.device)
        for piece in pieces(x, CHUNK):
            exact = magnitudes_of(piece)
            counts.scatter_add_(0, _bins_of(exact, edges), torch.isfinite(exact).to(torch.int64))
        counts *= source.repeats
        counts[0] += source.implicit_zeros
        return counts


@cache
def _edges(device: torch.device) -> Tensor:
    """The bin edges on a device, copied once."""
    return persistent(device, lambda: sent(UPPER, device).to(torch.float32))


def _bins_of(magnitudes: Tensor, edges: Tensor) -> Tensor:
    single = magnitudes.to(torch.float32)
    bins = torch.bucketize(single, edges)
    bins = torch.where((single == 0) & (magnitudes != 0), 1, bins)
    return torch.where(torch.isfinite(single), bins, BINS - 1)


# --- Numbers whose squares fit a float64: no scaling is needed.

_ADDED: Final = (NANS, POSINFS, NEGINFS, SMALLS, SUM, SUMSQ)


def unscaled_part(chunk: Tensor, kept: Tensor, finite: Tensor, eps: float, *, higher: bool) -> Tensor:
    """The numbers of a chunk, in float64, for ``union_of_unscaled``.

    Args:
        kept: The chunk with 0 in place of elements that are not finite.
        finite: Which elements are finite.
        higher: Whether to measure the higher moments, too.
    """
    numbers = {
        NANS: torch.isnan(chunk).sum(dtype=torch.float64),
        POSINFS: torch.isposinf(chunk).sum(dtype=torch.float64),
        NEGINFS: torch.isneginf(chunk).sum(dtype=torch.float64),
        SMALLS: ((kept.abs() < eps) & finite).sum(dtype=torch.float64),
        MIN: torch.where(finite, chunk, math.inf).amin().to(torch.float64),
        MAX: torch.where(finite, chunk, -math.inf).amax().to(torch.float64),
        SUM: kept.sum(dtype=torch.float64),
        SUMSQ: kept.to(torch.float64).square_().sum(),
    }
    centred = _centred_part(kept, finite, numbers[SUM]) if higher else []
    if higher:
        magnitudes = kept.abs()
        centred += [magnitudes.sum(dtype=torch.float64), _least(magnitudes).to(torch.float64)]
    return torch.stack([*(numbers[column] for column in (*_ADDED, MIN, MAX)), *centred])


def _centred_part(kept: Tensor, finite: Tensor, total: Tensor) -> list[Tensor]:
    """Number of finite elements, mean, ``m2``, ``m3`` and ``m4`` of a chunk, in float64."""
    n = finite.sum(dtype=torch.float64)
    mean = total / n.clamp(min=1)
    off = torch.where(finite, kept.to(torch.float64) - mean, 0.0)
    return [n, mean, off.square().sum(), *_higher_moments(off, n)]


def union_of_unscaled(parts: list[Tensor], elements: int, *, higher: bool) -> dict[int, float | Tensor]:
    """The partials of all ``elements`` of some chunks, at least one, by column."""
    rows = torch.stack(parts)
    counted = rows[:, : len(_ADDED)].sum(dim=0)
    added = dict(zip(_ADDED, counted, strict=True))
    finite = (elements - counted[:3].sum()).clamp(min=1)
    m2 = (added[SUMSQ] - added[SUM].square() / finite).clamp(min=0)
    lo, hi = rows[:, len(_ADDED)].amin(), rows[:, len(_ADDED) + 1].amax()
    found: dict[int, float | Tensor] = {COUNT: float(elements), **added, MIN: lo, MAX: hi, M2: m2}
    if higher:
        n, mean, *moments, abssum, least = rows[:, len(_ADDED) + 2 :].unbind(1)
        both = _higher_of_all(n, mean - added[SUM] / finite, *moments)
        found |= zip((M3, M4), (torch.where(lo < hi, moment, 0.0) for moment in both), strict=True)
        found |= {ABSSUM: abssum.sum(), LEAST: _least(least)}
    return found
