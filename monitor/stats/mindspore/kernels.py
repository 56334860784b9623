"""The kernels that reduce MindSpore's tensors: one for tensors on a device, one for tensors in host memory.

The device kernel uses operations that MindSpore has on every device, and brings no value to the host. It reduces a tensor piece
by piece, each to a *piece row* in float32, because devices need not have float64. The writer combines piece rows in float64
once they are on the host (``combined``). So nothing is accumulated in float32 beyond a piece, and counts are exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Final

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops
from numpy.typing import NDArray

from monitor.stats import partials
from monitor.stats.host.array_kernel import NumpyKernel, Raw
from monitor.stats.mindspore.tensors import Number, has_data, on_host
from monitor.stats.ops import Epsilon
from monitor.stats.partials import Floats

PIECE: Final = 1 << 22
"""Elements of a piece: enough to fill a device, 16 MiB per float32 temporary, and few enough for exact counts in float32."""

PIECE_COLUMNS: Final = partials.EXPONENT + 5
"""Columns of a piece row: those of a table row up to ``exponent`` without ``writes``, where ``count`` counts the finite
elements only; then the remainders of integer extremes that float32 cannot hold, to be added to the extremes; then the mean, and
what its multiple lacks of ``sum``; then the greatest distance from the mean. ``m3`` and ``m4`` are divided by its third and
fourth power, which float32 may not hold. ``CHECK_COLUMNS`` follow where check sums are measured."""

CHECK_COLUMNS: Final = 8
"""``bits`` less ``count``, and ``places`` (``partials``), each in four parts of 16 bits, the lowest first."""

_STEP: Final = {ms.float32: 50, ms.float64: 400}
"""Exponent steps of the scaling before squaring: elements are scaled by 2 to the power of 0, ±1 or ±2 steps, so that the
greatest is near 1. Elements that vanish beside it are too small to matter."""

_LOW_BITS: Final = (1 << 24) - 1
_EXACT: Final = frozenset({ms.float32, ms.float16, ms.bfloat16, ms.int8, ms.uint8, ms.int16, ms.bool_})
_INTEGERS: Final = frozenset({ms.int32, ms.int64, ms.uint16, ms.uint32})
_READ: Final = _EXACT | _INTEGERS | {ms.float64, ms.complex64}


@dataclass(frozen=True, slots=True)
class _Scale:
    """A power of two to divide by, and the magnitude from which on it applies."""

    limit: Tensor
    exponent: Tensor
    factor: Tensor

    @classmethod
    def of(cls, exponent: int, precision: ms.Type) -> _Scale:
        halfway = exponent - math.copysign(_STEP[precision] // 2, exponent)
        return cls(*(Tensor(number, precision) for number in (2.0**halfway, float(exponent), 2.0**-exponent)))


class _Constants:
    """Constants as tensors on the device: MindSpore would treat Python numbers as float32.

    Attributes:
        bound: ``|x| < bound`` is what ``zeros`` counts.
    """

    def __init__(self, bound: float, precision: ms.Type) -> None:
        self.bound = Tensor(bound, precision)
        self._zero, self._one = Tensor(0.0, precision), Tensor(1.0, precision)
        self._large = [_Scale.of(steps * _STEP[precision], precision) for steps in (1, 2)]
        self._small = [_Scale.of(-steps * _STEP[precision], precision) for steps in (1, 2)]

    def scale(self, absmax: Tensor) -> tuple[Tensor, Tensor]:
        """The exponent of the power of two to divide by, and its reciprocal. Comparisons make it exact on any device."""
        exponent, factor = self._zero, self._one
        for scales, beyond in ((self._large, mint.gt), (self._small, mint.lt)):
            for one in scales:
                there = beyond(absmax, one.limit)
                exponent, factor = mint.where(there, one.exponent, exponent), mint.where(there, one.factor, factor)
        return exponent, factor


class MindSporeDeviceKernel:
    """Reduces tensors of any device to piece rows, in the order of the device's queue.

    Args:
        higher, check_sums: Whether to measure the higher moments, and the check sums (``partials``).
    """

    def __init__(self, eps: float, piece: int = PIECE, *, higher: bool = False, check_sums: bool = False) -> None:
        self._higher, self._check_sums = higher, check_sums
        self._constants = {
            ms.float32: _Constants(Epsilon.of(eps, np.float32).bound, ms.float32),
            ms.float64: _Constants(Epsilon.of(eps, np.float64).bound, ms.float64),
        }
        self._low_bits = Tensor(_LOW_BITS, ms.int64)
        self._piece_size = piece

    def reduce(self, x: Tensor) -> Tensor | None:
        """The piece rows of ``x`` end to end, float64 if ``x`` is, else float32; None if unreadable. See ``combined``.

        Does not wait for the device. Cutting a tensor larger than a piece waits until MindSpore has dispatched all earlier
        operations.
        """
        if not has_data(x) or x.dtype not in _READ:
            return None
        if not x.size:
            return Tensor(
                [*partials.EMPTY[partials.COUNT : partials.BITS_LOW], *[0.0] * (5 + CHECK_COLUMNS * self._check_sums)],
                ms.float32,
            )
        pieces = (x,) if x.size <= self._piece_size else mint.split(x.reshape(-1), self._piece_size)
        return mint.cat([self._piece(piece) for piece in pieces])

    def words(self, x: Tensor) -> int:
        """Words of an element, for ``combined``; 0 if check sums are not measured."""
        return max(1, x.itemsize // 4) if self._check_sums else 0

    def _piece(self, piece: Tensor) -> Tensor:
        v = _real(piece)
        constants = self._constants[v.dtype]
        finite = mint.isfinite(v)
        n = mint.sum(finite, dtype=v.dtype)
        kept = mint.where(finite, v, 0.0)
        zero = mint.mul(n, 0.0)
        lo, hi = mint.amin(mint.where(finite, v, math.inf)), mint.amax(mint.where(finite, v, -math.inf))
        exponent, scale = constants.scale(mint.amax(mint.abs(kept)))
        scaled = mint.mul(kept, scale)
        total = mint.sum(scaled)
        at_least_one = mint.clamp(n, min=1.0)
        mean = mint.div(total, at_least_one)
        off = mint.where(finite, mint.sub(scaled, mean), 0.0)
        rest = mint.sum(off)
        m2 = mint.clamp(mint.sub(mint.sum(mint.square(off)), mint.div(mint.square(rest), at_least_one)), min=0.0)
        infinite = [mint.sum(mint.eq(v, sign), dtype=v.dtype) for sign in (math.inf, -math.inf)]
        counts = [n, mint.sum(mint.ne(v, v), dtype=v.dtype), *infinite]
        smalls = mint.sum(mint.lt(mint.abs(v), constants.bound), dtype=v.dtype)
        extremes = [lo, hi, zero, zero] if piece.dtype not in _INTEGERS else self._integer_extremes(piece)
        m3, m4, far = _relative_moments(off, n) if self._higher else (zero, zero, zero)
        magnitudes = [mint.sum(mint.abs(scaled)), _least(mint.abs(kept))] if self._higher else [zero, zero]
        sums = [total, mint.sum(mint.square(scaled)), m2, m3, m4, *magnitudes, exponent]
        checks = [one.to(v.dtype) for one in _check_sums(piece)] if self._check_sums else []
        numbers = [*counts, smalls, *extremes[:2], *sums, *extremes[2:], mean, rest, far, *checks]
        return mint.cat([number.reshape(1) for number in numbers])

    def _integer_extremes(self, piece: Tensor) -> list[Tensor]:
        """Minimum and maximum, and the remainder of each that float32 cannot hold: exact below 2^48."""
        whole = piece.to(ms.int64)
        least_and_most = [mint.amin(whole), mint.amax(whole)]
        lows = [mint.bitwise_and(one, self._low_bits) for one in least_and_most]
        highs = [mint.sub(one, low) for one, low in zip(least_and_most, lows, strict=True)]
        return [one.to(ms.float32) for one in (*highs, *lows)]


_INTEGER_OF: Final = {2: ms.int16, 4: ms.int32, 8: ms.int64}
"""The integer with the bits of an element."""


def _check_sums(piece: Tensor) -> list[Tensor]:
    """``CHECK_COLUMNS`` of a piece, int64, which is computed modulo 2^64."""
    flat = piece.reshape(-1)
    whole = (flat.view(_INTEGER_OF[piece.itemsize]) if piece.itemsize > 1 else flat).to(ms.int64)
    index = ops.arange(piece.size)  # int64
    if piece.itemsize == 8:
        low, high = _bits(whole, 0, 32), _bits(whole, 32, 32)
        words = mint.add(low, high)
        of_elements = _sum(mint.mul(words, index))
        places = mint.add(mint.add(of_elements, of_elements), _sum(high))
    else:
        words = _bits(whole, 0, 8 * piece.itemsize)
        places = _sum(mint.mul(words, index))
    return [_bits(one, 16 * part, 16) for one in (_sum(words), places) for part in range(4)]


def _sum(x: Tensor) -> Tensor:
    """The sum of a piece of int64, 16 bits at a time: MindSpore adds integers in float64."""
    parts = [mint.sum(_bits(x, 16 * part, 16)) for part in range(4)]
    shifted = [ops.bitwise_left_shift(one, Tensor(16 * part, ms.int64)) for part, one in enumerate(parts) if part]
    return reduce(mint.add, shifted, parts[0])


def _bits(x: Tensor, first: int, count: int) -> Tensor:
    shifted = ops.bitwise_right_shift(x, Tensor(first, ms.int64)) if first else x
    return mint.bitwise_and(shifted, Tensor((1 << count) - 1, ms.int64))


def _least(magnitudes: Tensor) -> Tensor:
    """The smallest one other than 0; 0 if there is none."""
    least = mint.amin(mint.where(mint.gt(magnitudes, 0.0), magnitudes, math.inf))
    return mint.where(mint.isfinite(least), least, 0.0)


def _relative_moments(off: Tensor, n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``m3`` and ``m4`` divided by powers of the greatest distance from the mean, and that distance.

    Args:
        off: The distances of finite elements from about their mean; 0 for the other elements.
        n: The number of finite elements.
    """
    far = mint.amax(mint.abs(off))
    return *_moments(mint.div(off, mint.where(mint.gt(far, 0.0), far, 1.0)), n), far


def _moments(off: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    """``m3`` and ``m4`` (``partials.higher_moments``)."""
    squares = mint.square(off)
    rest = mint.div(mint.sum(off), mint.clamp(n, min=1.0))
    q, c, f = mint.sum(squares), mint.sum(mint.mul(squares, off)), mint.sum(mint.square(squares))
    around = mint.mul(n, mint.square(rest))
    m3 = mint.sub(c, mint.mul(rest, mint.sub(mint.mul(q, 3.0), mint.mul(around, 2.0))))
    inner = mint.sub(mint.mul(c, 4.0), mint.mul(rest, mint.sub(mint.mul(q, 6.0), mint.mul(around, 3.0))))
    return m3, mint.sub(f, mint.mul(rest, inner))


def _real(piece: Tensor) -> Tensor:
    if piece.dtype == ms.complex64:
        return mint.abs(piece).to(ms.float32)  # a complex number with imaginary part 0; ``real`` would wait
    return piece if piece.dtype in _STEP else piece.to(ms.float32)


def combined(end_to_end: NDArray[np.float32] | Floats, words: int = 0) -> Floats:
    """The table row of a tensor, from its piece rows on the host.

    Args:
        words: Words of an element, if the piece rows have ``CHECK_COLUMNS``; else 0.
    """
    pieces = end_to_end.reshape(-1, PIECE_COLUMNS + CHECK_COLUMNS * bool(words))
    rows = np.empty((len(pieces), len(partials.COLUMNS)))
    rows[:, partials.WRITES] = 1.0
    rows[:, partials.COUNT : partials.BITS_LOW] = pieces[:, : partials.EXPONENT]
    rows[:, partials.COUNT] += rows[:, partials.COUNT + 1 : partials.NEGINFS + 1].sum(axis=1)
    remainders = pieces[:, partials.EXPONENT :]
    rows[:, [partials.MIN, partials.MAX]] += remainders[:, :2]
    mean, rest, far = remainders[:, 2:5].astype(np.float64).T
    # Of a sum in float32, the rounding would look like a spread between the means of pieces.
    rows[:, partials.SUM] = pieces[:, 0] * mean + rest
    rows[:, partials.M3] *= far**3
    rows[:, partials.M4] *= far**4
    # The moments of equal elements are rounding errors.
    rows[rows[:, partials.MIN] == rows[:, partials.MAX], partials.M2 : partials.M4 + 1] = 0.0
    rows[:, partials.BITS_LOW :] = _check_columns(remainders[:, 5:], rows[:, partials.COUNT]) if words else 0.0
    _clear_exponents(rows)
    return rows[0] if len(rows) == 1 else partials.union(rows, max(1, words))


def _check_columns(parts: NDArray[np.float32] | Floats, count: Floats) -> Floats:
    """The columns of the check sums of pieces, shape ``(pieces, 4)``, from ``CHECK_COLUMNS``."""
    sums = parts.astype(np.uint64).reshape(-1, 2, 4) << np.arange(0, 64, 16, dtype=np.uint64)
    bits, places = sums.sum(axis=2, dtype=np.uint64).T
    return partials.check_columns(np.array([bits + count.astype(np.uint64), places])).T


def _clear_exponents(rows: Floats) -> None:
    """Set the exponent to 0 if the sums of squares fit a float64: always, except for some tensors of float64."""
    fits = (np.abs(rows[:, partials.EXPONENT]) < _STEP[ms.float64]) | (rows[:, partials.SUMSQ] == 0)
    exponents = np.where(fits, rows[:, partials.EXPONENT], 0.0).astype(np.int64)
    for column, power in partials.SCALED:
        rows[:, column] = np.ldexp(rows[:, column], power * exponents)
    rows[fits, partials.EXPONENT] = 0.0


# --- Numbers near 1, whose squares fit a float32: no scaling is needed, and chunks can be combined on the device.


_LEAST_VARIANCE: Final = 1e-15
"""Least variance at which fourth powers in float32 have all digits."""


def unscaled_part(chunk: Tensor, kept: Tensor, finite: Tensor, bound: Tensor, *, higher: bool) -> Tensor:
    """The numbers of a chunk, in float32, for ``union_of_unscaled``.

    Args:
        kept: The chunk with 0 in place of elements that are not finite.
        finite: Which elements are finite.
        bound: Magnitudes below it are counted as ``smalls``.
        higher: Whether to measure the higher moments, too.
    """
    n, total = mint.sum(finite, dtype=ms.float32), mint.sum(kept)
    off = mint.where(finite, mint.sub(chunk, mint.div(total, mint.clamp(n, min=1.0))), 0.0)
    numbers = [
        n,
        mint.sum(mint.ne(chunk, chunk), dtype=ms.float32),
        mint.sum(mint.eq(chunk, math.inf), dtype=ms.float32),
        mint.sum(mint.eq(chunk, -math.inf), dtype=ms.float32),
        mint.sum(mint.lt(mint.abs(chunk), bound), dtype=ms.float32),
        mint.amin(mint.where(finite, chunk, math.inf)),
        mint.amax(mint.where(finite, chunk, -math.inf)),
        total,
        mint.sum(mint.mul(kept, kept)),
        mint.sum(mint.mul(off, off)),
        *((*_moments(off, n), mint.sum(mint.abs(kept)), _least(mint.abs(kept))) if higher else ()),
    ]
    return mint.cat([number.reshape(1) for number in numbers])


def union_of_unscaled(chunks: Sequence[Tensor], elements: int, *, higher: bool) -> dict[int, Number]:
    """The partials of all ``elements`` of some chunks, by column."""
    if not chunks:
        return {column: partials.EMPTY[column] for column in range(partials.COUNT, len(partials.COLUMNS))}
    parts = mint.cat([one.reshape(1, -1) for one in chunks])
    counts, least, most, sums, m2 = (_columns(parts, *span) for span in ((0, 5), (5, 1), (6, 1), (7, 2), (9, 1)))
    finite, (total, squares) = mint.sum(_columns(counts, 0, 1)), _sums(sums)
    n = _columns(counts, 0, 1)
    off = _columns(sums, 0, 1) / mint.clamp(n, min=1.0) - total / mint.clamp(finite, min=1.0)
    between = mint.sum(mint.mul(n, mint.mul(off, off)))
    numbers = [mint.amin(least), mint.amax(most), total, squares, mint.add(mint.sum(m2), between)]
    if higher:
        numbers += _higher_of_all(n, off, m2, *(_columns(parts, column, 1) for column in (10, 11)))
        numbers += [mint.sum(_columns(parts, 12, 1)), _least(_columns(parts, 13, 1))]
    return dict(enumerate([float(elements), *_sums(_columns(counts, 1, 4)), *numbers], partials.COUNT))


def _higher_of_all(n: Tensor, off: Tensor, m2: Tensor, m3: Tensor, m4: Tensor) -> list[Tensor]:
    """``m3`` and ``m4`` of the union of chunks, as in ``partials.combine_groups``; zeros if float32 may have lost digits.

    Args:
        off: The mean of each chunk minus the mean of all.
    """
    around = mint.mul(n, mint.mul(off, off))
    cubes = mint.sum(m3 + mint.mul(off, m2 * 3.0 + around))
    fourths = mint.sum(m4 + mint.mul(off, m3 * 4.0 + mint.mul(off, m2 * 6.0 + around)))
    known = mint.gt(mint.sum(m2) + mint.sum(around), mint.sum(n) * _LEAST_VARIANCE)
    known = mint.logical_and(known, mint.logical_and(mint.isfinite(cubes), mint.isfinite(fourths)))
    return [mint.where(known, moment, 0.0) for moment in (cubes, fourths)]


def _columns(parts: Tensor, first: int, count: int) -> Tensor:
    return mint.narrow(parts, 1, first, count)


def _sums(parts: Tensor) -> list[Tensor]:
    """The sum of each column."""
    return [mint.sum(_columns(parts, column, 1)) for column in range(parts.shape[1])]


# --- Tensors in host memory. MindSpore shares that memory with numpy, whose reductions are faster and exist for every
# dtype.


class MindSporeHostKernel:
    """Reduces host tensors to table rows. Waits for earlier operations, as ``on_host`` does."""

    def __init__(self, eps: float, *, higher: bool = False, check_sums: bool = False) -> None:
        self._arrays = NumpyKernel(eps, higher=higher, check_sums=check_sums)

    def reduce_into(self, x: Tensor, page: Floats, row: int) -> bool:
        """Write the partials of ``x`` into ``page[row]``. False if ``x`` has no data to read; the row is then untouched.

        Raises:
            EarlierFailure: An earlier operation has failed.
        """
        return has_data(x) and self.reduce_array(on_host(x), page, row)

    def reduce_array(self, elements: Raw, page: Floats, row: int) -> bool:
        """The same for an array that is already on the host."""
        return self._arrays.reduce_into(elements, page, row)
