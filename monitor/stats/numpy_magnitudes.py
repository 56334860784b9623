"""Histograms of arrays, in the bins of ``monitor.stats.histograms``.

The exponent of a number of single precision stands in its bits, so a bin is found without a comparison: the bits plus the
greatest mantissa, shifted, number the powers of two such that each bin includes its upper end. What that leaves coarse is
looked at again only where there is something: subnormal numbers, which share one exponent, and the few magnitudes at which a
format of low precision begins to overflow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from monitor.stats.histograms import BINS, FIRST_POWER, FORMATS, UPPER
from monitor.stats.numpy_tensors import Chunks, Raw, Reals, is_readable

_MANTISSA: Final = 23
_SIGN: Final = 0x7FFF_FFFF
_INFINITE: Final = 255
"""The bin of what is greater than 2**127, Inf included, of the bins by exponent; NaN is in the one after it."""
EXPONENT_BINS: Final = _INFINITE + 2
_SMALLEST_NORMAL: Final = -126

_EXPONENTS: Final = np.searchsorted(UPPER, 2.0 ** np.arange(_SMALLEST_NORMAL, 129.0))
"""The bin of each exponent from that of 2**-126 on: where an edge within lies below, the last of its bins."""

_SPLITS: Final = tuple(
    (int(np.searchsorted(UPPER, one.overflows)), one.overflows)
    for one in sorted(FORMATS.values(), key=lambda one: one.overflows)
)
"""The bins that end where a format overflows, and those ends."""

CountBins = Callable[[NDArray[np.int32]], NDArray[np.int64]]
"""How often each number below ``EXPONENT_BINS`` occurs."""


def count_magnitudes(x: Raw) -> NDArray[np.int64] | None:
    """The histogram of an array, shape ``(BINS,)``; None if its elements are no numbers."""
    if not is_readable(x):
        return None
    counts = np.zeros(BINS, dtype=np.int64)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for v in Chunks().of(x):
            counts += _of_chunk(v)
    return counts


def _of_chunk(v: Reals) -> NDArray[np.int64]:
    single = np.array(v, dtype=np.float32)
    counts = of_singles(single, _counted)
    if v.dtype == np.float64:
        lost = np.count_nonzero((single == 0) & (v != 0))
        give_back_what_rounded(counts, lost, np.count_nonzero(np.isfinite(v) & np.isinf(single)))
    return counts


def _counted(bins: NDArray[np.int32]) -> NDArray[np.int64]:
    return np.bincount(bins, minlength=EXPONENT_BINS)


def of_singles(v: NDArray[np.float32], count: CountBins) -> NDArray[np.int64]:
    """The histogram of numbers of single precision, shape ``(elements,)``; magnitudes take their place."""
    magnitudes = v.view(np.uint32)
    np.bitwise_and(magnitudes, np.uint32(_SIGN), out=magnitudes)
    exponents = (magnitudes + np.uint32((1 << _MANTISSA) - 1)) >> np.uint32(_MANTISSA)
    by_exponent = count(exponents.view(np.int32))
    counts = np.zeros(BINS, dtype=np.int64)
    counts[0] = by_exponent[0]
    counts[_EXPONENTS] = by_exponent[1 : _INFINITE + 1]
    if by_exponent[1]:
        _spread_subnormals(counts, magnitudes)
    if by_exponent[_INFINITE]:
        counts[_EXPONENTS[-1]] -= np.count_nonzero(magnitudes == np.float32(np.inf).view(np.uint32))
    _split(counts, magnitudes)
    return counts


def give_back_what_rounded(counts: NDArray[np.int64], to_zero: int, to_infinity: int) -> None:
    """What single precision rounded to zero is the smallest there is, and what it made infinite the greatest."""
    counts[0] -= to_zero
    counts[1] += to_zero
    counts[-1] += to_infinity


def _spread_subnormals(counts: NDArray[np.int64], magnitudes: NDArray[np.uint32]) -> None:
    """From the bin of the smallest normal number: subnormal bits are a whole number of 2**-149."""
    least = np.uint32(1 << _MANTISSA)
    multiples = magnitudes[(magnitudes > 0) & (magnitudes <= least)].astype(np.float64)
    fraction, power = np.frexp(multiples)
    power = power - (fraction == 0.5)  # a power of two is the upper end of its bin
    counts[_EXPONENTS[0]] = 0
    np.add.at(counts, np.searchsorted(UPPER, np.ldexp(1.0, power + FIRST_POWER)), 1)


def _split(counts: NDArray[np.int64], magnitudes: NDArray[np.uint32]) -> None:
    """Move what does not exceed a format's end into the bin that ends there."""
    for place, end in _SPLITS:
        whole = int(_EXPONENTS[np.searchsorted(_EXPONENTS, place)])
        if counts[whole]:
            above = UPPER[place - 1]
            within = (magnitudes > np.float32(above).view(np.uint32)) & (magnitudes <= np.float32(end).view(np.uint32))
            moved = np.count_nonzero(within)
            counts[place] += moved
            counts[whole] -= moved
