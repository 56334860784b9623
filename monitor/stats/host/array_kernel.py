"""Reduces numpy arrays to partials and histograms: with the native kernel if it was built, else with numpy.

The numpy path works chunk by chunk in float64, where squares of float32 neither overflow nor vanish. Minimum and maximum are
computed in the elements' own precision: if both are finite, all elements are. A second pass is needed only for chunks with NaN
or Inf, for squares beyond the range of float64, and for means that are large compared with the spread.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from monitor.stats.histograms import BINS, FORMATS, UPPER
from monitor.stats.ops import Epsilon
from monitor.stats.partials import BITS_LOW, COLUMNS, EMPTY, Floats, Words, check_columns, exponent_for, higher_moments, union

# --- The native kernel in C, which computes every partial of a host array in one read.
#
# numpy and torch take one pass, and one call, per statistic. The native kernel computes all of them in one loop at
# about the speed of memory, and a small tensor costs one call. It is built if there is a C compiler when the package is
# installed; without it, the numpy kernel does the same work. Every processor computes the same bits (``host_pass.h``).

try:
    from monitor.stats import _host_kernel
except ImportError:
    _host_kernel = None  # type: ignore[assignment]

VARIABLE: Final = "MONITOR_NATIVE"
"""The environment variable that, set to 0, switches off the modules in C: portable kernels and CSV formatting replace them."""

FLOAT32, FLOAT64, BFLOAT16, FLOAT16, INT64 = range(5)
"""The kernel's numbers of the element formats."""

Reduce = Callable[..., bool]
"""Takes the arguments of ``NativeKernel.reduce_into`` without the format, and perhaps the histogram to write."""


class NativeKernel:
    """Reduces contiguous elements to table rows. It has no state, so several threads may use it at once.

    Args:
        higher, check_sums: Whether to measure the higher moments, and the check sums (``partials``).
    """

    def __init__(self, eps: float, *, higher: bool = False, check_sums: bool = False) -> None:
        narrow, wide = Epsilon.of(eps, np.float32).bound, Epsilon.of(eps, np.float64).bound
        bounds = (narrow, wide, narrow, narrow, wide)
        wanted = higher * _host_kernel.HIGHER | check_sums * _host_kernel.CHECK_SUMS
        self._of: tuple[Reduce, ...] = tuple(
            partial(_host_kernel.reduce, form, bound, wanted) for form, bound in enumerate(bounds)
        )

    def of(self, form: int) -> Reduce:
        """``reduce_into`` for one format, without the cost of a Python frame."""
        return self._of[form]

    def reduce_into(self, source: Any, count: int, form: int, page: Floats, row: int) -> bool:
        """Write the partials of ``count`` elements, at least one, into ``page[row]``.

        Args:
            source: A contiguous array, or the address of the first element. The caller guarantees that the address is valid.
            form: ``FLOAT32``, ``FLOAT64``, ``BFLOAT16``, ``FLOAT16`` or ``INT64``.

        Returns:
            False, and nothing written, if powers of float64 leave its range: the portable kernels scale them.
        """
        return self._of[form](source, count, page, row)


def native_kernel(eps: float, *, higher: bool = False, check_sums: bool = False) -> NativeKernel | None:
    """The native kernel; None if it was not built or is switched off."""
    return NativeKernel(eps, higher=higher, check_sums=check_sums) if _host_kernel is not None and is_wanted() else None


def is_wanted() -> bool:
    """Whether the modules in C are to be used if they were built."""
    return os.environ.get(VARIABLE) != "0"


# --- Arrays that a framework shares with numpy, read as real numbers, a chunk at a time.

CHUNK: Final = 32_768
"""Elements of a chunk. In float64 they take 256 KiB, so every pass after the first reads from the second-level cache."""

Reals = NDArray[np.float32] | NDArray[np.float64]
Raw = NDArray[Any]

_FORMATS: Final = {
    np.dtype(np.float32): FLOAT32,
    np.dtype(np.float64): FLOAT64,
    np.dtype(np.float16): FLOAT16,
    np.dtype(np.int64): INT64,
}
_BFLOAT16: Final = "bfloat16"
_HALF_OF_FLOAT32: Final = 16
_NUMBERS: Final = "biufc"


def is_readable(x: Raw) -> bool:
    """Whether this module can read the elements: numbers of numpy's own dtypes, and bfloat16."""
    return x.dtype.kind in _NUMBERS or _is_bfloat16(x)


def stored(x: Raw) -> tuple[Raw, int] | None:
    """The elements and their format for the native kernel; None unless they are contiguous and of its formats."""
    if not x.size or not (x.flags.c_contiguous or x.flags.f_contiguous):
        return None
    elements = x if x.flags.c_contiguous else x.T
    if _is_bfloat16(x):
        return elements.view(np.uint16), BFLOAT16
    form = _FORMATS.get(x.dtype)
    return None if form is None else (elements, form)


class Chunks(threading.local):
    """Cuts arrays into chunks, and converts elements into buffers that each thread has of its own."""

    def __init__(self) -> None:
        self._narrow = np.empty(CHUNK, dtype=np.float32)
        self._wide = np.empty(CHUNK)

    def of(self, x: Raw) -> Iterator[Reals]:
        """The elements in float32 if that holds their precision, else in float64; magnitudes of complex elements.

        A chunk is valid until the next one is requested. An array that is not contiguous is copied chunk by chunk.
        """
        elements = x.reshape(-1) if x.flags.c_contiguous else x.flat
        for start in range(0, x.size, CHUNK):
            yield self._real(elements[start : start + CHUNK])

    def _real(self, v: Raw) -> Reals:
        if v.dtype == np.float32 or v.dtype == np.float64:
            return v
        if v.dtype.kind == "c":
            return np.abs(v)
        if v.dtype == np.float16:
            return np.take(_halves(), v.view(np.uint16), out=self._narrow[: len(v)], mode="wrap")
        if _is_bfloat16(v):
            return self._from_bfloat16(v)
        wide = self._wide[: len(v)]
        np.copyto(wide, v)
        return wide

    def _from_bfloat16(self, v: Raw) -> Reals:
        """A bfloat16 is the upper half of a float32."""
        narrow = self._narrow[: len(v)]
        bits = narrow.view(np.uint32)
        np.copyto(bits, v.view(np.uint16))
        np.left_shift(bits, _HALF_OF_FLOAT32, out=bits)
        return narrow


def as_reals(x: Raw) -> Reals:
    """The floating-point elements in their shape: float64 stays, others become float32. Copies only if it converts."""
    if _is_bfloat16(x):
        bits = x.view(np.uint16).astype(np.uint32) << np.uint32(_HALF_OF_FLOAT32)
        reals: Reals = bits.view(np.float32)
        return reals
    return x if x.dtype == np.float64 else x.astype(np.float32, copy=False)


def rounded_to_bfloat16(x: Reals) -> NDArray[np.float32]:
    """The elements rounded to the nearest bfloat16, ties to even. NaN stays NaN."""
    bits = x.astype(np.float32).view(np.uint32)
    odd = (bits >> np.uint32(_HALF_OF_FLOAT32)) & np.uint32(1)
    upper = (bits + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF_0000)
    return np.where(np.isnan(x), np.float32(np.nan), upper.view(np.float32))


def _is_bfloat16(x: Raw) -> bool:
    """Frameworks register their own dtype for bfloat16, with the kind of raw memory."""
    return x.dtype.kind == "V" and x.dtype.name == _BFLOAT16


@cache
def _halves() -> NDArray[np.float32]:
    """Every float16 as float32, indexed by its bits: a lookup takes a fifth of the time of numpy's conversion."""
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


_LEAST_SPREAD: Final = 1e-4
"""Least ratio of the spread to the sum of squares at which their difference has eleven digits."""

Row = tuple[float, ...]
"""One table row, in the order of ``COLUMNS``."""


class _Scratch(threading.local):
    """Chunk-sized buffers for temporaries, a set for each thread."""

    def __init__(self) -> None:
        self.wide, self.power = np.empty(CHUNK), np.empty(CHUNK)
        self.magnitudes = {np.dtype(one): np.empty(CHUNK, dtype=one) for one in (np.float32, np.float64)}
        self.below = np.empty(CHUNK, dtype=np.bool_)


class NumpyKernel:
    """Reduces arrays to table rows. May be used by several threads at once.

    Args:
        with_native: Whether to use the native kernel if it was built.
        higher, check_sums: Whether to measure the higher moments, and the check sums (``partials``).
    """

    def __init__(self, eps: float, *, with_native: bool = True, higher: bool = False, check_sums: bool = False) -> None:
        self._native: NativeKernel | None = native_kernel(eps, higher=higher, check_sums=check_sums) if with_native else None
        self._of_chunks = native_kernel(eps, higher=higher) if with_native else None  # chunks may be converted: other bits
        self._higher, self._check_sums = higher, check_sums
        self._bounds = {np.dtype(one): one(Epsilon.of(eps, one).bound) for one in (np.float32, np.float64)}
        self._chunks = Chunks()
        self._scratch = _Scratch()

    def reduce_into(self, x: Raw, page: Floats, row: int) -> bool:
        """Write the partials of ``x`` into ``page[row]``. False, and nothing written, if ``x`` does not hold numbers."""
        if not is_readable(x):
            return False
        page[row] = self.reduce(x)
        return True

    def reduce(self, x: Raw) -> Row | Floats:
        """The row of a readable array, shape ``(len(COLUMNS),)``."""
        whole = _natively(self._native, x)
        if whole is not None:
            return whole
        with np.errstate(all="ignore"):
            rows = [self._chunk(v) for v in self._chunks.of(x)]
        if not rows:
            return (1.0, *EMPTY[1:])
        row = rows[0] if len(rows) == 1 else union(np.array(rows))
        return (*row[:BITS_LOW], *check_columns(_check_sums(x))[:, 0]) if self._check_sums else row

    def _chunk(self, v: Reals) -> Row | Floats:
        row = _natively(self._of_chunks, v)
        return self._portably(v) if row is None else row

    def _portably(self, v: Reals) -> Row:
        lo, hi = float(np.minimum.reduce(v)), float(np.maximum.reduce(v))
        if math.isfinite(lo) and math.isfinite(hi):
            return self._finite(v, lo, hi)
        return self._not_finite(v)

    def _finite(self, v: Reals, lo: float, hi: float) -> Row:
        n = len(v)
        exponent = exponent_for(max(-lo, hi), higher=self._higher) if v.dtype == np.float64 else 0
        wide = self._widened(v, exponent)
        total = float(np.add.reduce(wide))
        np.multiply(wide, wide, out=wide)
        sumsq = float(np.add.reduce(wide))
        m2 = 0.0 if lo == hi else sumsq - total * total / n
        if lo != hi and m2 < _LEAST_SPREAD * sumsq:
            m2 = self._centred(v, exponent, total / n)
        m3, m4 = self._higher_moments(v, exponent, total / n) if self._higher and lo != hi else (0.0, 0.0)
        magnitudes = self._magnitudes(v, exponent) if self._higher else (0.0, 0.0)
        counts = (1.0, n, 0.0, 0.0, 0.0, self._smalls(v, lo, hi))
        return (*counts, lo, hi, total, sumsq, m2, m3, m4, *magnitudes, float(exponent), *EMPTY[BITS_LOW:])

    def _centred(self, v: Reals, exponent: int, mean: float) -> float:
        """Σ (x - mean)², corrected for the rounding of the mean."""
        wide = self._widened(v, exponent)
        np.subtract(wide, mean, out=wide)
        rest = float(np.add.reduce(wide))
        np.multiply(wide, wide, out=wide)
        return max(0.0, float(np.add.reduce(wide)) - rest * rest / len(v))

    def _higher_moments(self, v: Reals, exponent: int, mean: float) -> tuple[float, float]:
        """Σ (x - mean)³ and Σ (x - mean)⁴, corrected for the rounding of the mean."""
        wide, power = self._widened(v, exponent), self._scratch.power[: len(v)]
        np.subtract(wide, mean, out=wide)
        sums = [float(np.add.reduce(wide))]
        np.copyto(power, wide)
        for _ in range(3):
            np.multiply(power, wide, out=power)
            sums.append(float(np.add.reduce(power)))
        return higher_moments(len(v), sums[0] / len(v), *sums[1:])

    def _magnitudes(self, v: Reals, exponent: int) -> tuple[float, float]:
        """``abssum`` and ``least`` (``partials``)."""
        magnitudes = np.abs(v, out=self._scratch.magnitudes[v.dtype][: len(v)])
        least = float(np.min(magnitudes, initial=np.inf, where=magnitudes > 0))
        wide = self._widened(magnitudes, exponent)
        return float(np.add.reduce(wide)), least if math.isfinite(least) else 0.0

    def _widened(self, v: Reals, exponent: int) -> Floats:
        """The chunk in float64, divided by 2^exponent, in the scratch buffer."""
        wide = self._scratch.wide[: len(v)]
        np.copyto(wide, v)
        return np.ldexp(wide, -exponent, out=wide) if exponent else wide

    def _smalls(self, v: Reals, lo: float, hi: float) -> float:
        """How many |x| are below eps."""
        bound = self._bounds[v.dtype]
        if not bound or lo >= bound or hi <= -bound:  # with eps 0, which dumps use, no magnitude is below eps
            return 0.0
        magnitudes = np.abs(v, out=self._scratch.magnitudes[v.dtype][: len(v)])
        return float(np.count_nonzero(np.less(magnitudes, bound, out=self._scratch.below[: len(v)])))

    def _not_finite(self, v: Reals) -> Row:
        """A chunk with NaN or Inf: they are counted, and the finite elements are reduced as usual."""
        posinfs, neginfs = int(np.count_nonzero(v == math.inf)), int(np.count_nonzero(v == -math.inf))
        finite = v[np.isfinite(v)]
        counts = (1.0, len(v), len(v) - len(finite) - posinfs - neginfs, posinfs, neginfs)
        if not len(finite):
            return (*counts, *EMPTY[5:])
        return (*counts, *self._finite(finite, float(finite.min()), float(finite.max()))[5:])


def _natively(native: NativeKernel | None, x: Raw) -> Floats | None:
    """The row of contiguous elements; None if the native kernel cannot compute it or was not built."""
    found = None if native is None else stored(x)
    if native is None or found is None:
        return None
    elements, form = found
    page: Floats = np.empty((1, len(COLUMNS)))
    return page[0] if native.reduce_into(elements, x.size, form, page, 0) else None


def words_of(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The unsigned integers that the check sums of elements add (``partials``)."""
    return np.dtype(f"u{min(dtype.itemsize, 4)}")


def word_sums(words: NDArray[Any], elements: int) -> Words:
    """``bits`` and ``places`` (``partials``), shape ``(2,)``, of words end to end."""
    wide = words.astype(np.uint64)
    places = np.sum(wide * np.arange(len(wide), dtype=np.uint64), dtype=np.uint64)
    return np.array([np.sum(wide, dtype=np.uint64) + np.uint64(elements), places])


def _check_sums(x: Raw) -> Words:
    """``bits`` and ``places`` of an array, shape ``(2, 1)``, a chunk at a time, in the order of memory.

    Zeros for an array that repeats elements.
    """
    sums = np.zeros(2, dtype=np.uint64)
    if any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.strides, strict=True)):
        return sums[:, np.newaxis]
    ordered = x.transpose(sorted(range(x.ndim), key=lambda dim: -x.strides[dim]))
    elements = ordered.reshape(-1) if ordered.flags.c_contiguous else ordered.flat
    kind = words_of(x.dtype)
    each = np.uint64(x.dtype.itemsize // kind.itemsize)
    for start in range(0, x.size, CHUNK):
        chunk = np.ascontiguousarray(elements[start : start + CHUNK])
        of_chunk = word_sums(chunk.view(kind), len(chunk))
        sums += of_chunk
        sums[1:] += np.uint64(start) * each * (of_chunk[:1] - np.uint64(len(chunk)))
    return sums[:, np.newaxis]


# --- Histograms of arrays, in the bins of ``monitor.stats.histograms``.
#
# The bits of a float32 contain its exponent, so a bin is found without comparisons: add the greatest mantissa to the bits
# and shift. Each bin then includes its upper end. Two cases need a second look, and only if they occur: subnormal
# numbers, which share one exponent, and bins that a low-precision format's overflow edge splits.

_MANTISSA: Final = 23
_SIGN: Final = 0x7FFF_FFFF
_INFINITE: Final = 255
"""Among the bins by exponent, the bin of magnitudes above 2**127 and of Inf. NaN is in the next one."""
EXPONENT_BINS: Final = _INFINITE + 2
_SMALLEST_NORMAL: Final = -126

_EXPONENTS: Final = np.searchsorted(UPPER, 2.0 ** np.arange(_SMALLEST_NORMAL, 129.0))
"""The bin of each exponent from 2**-126 on; if an overflow edge splits the exponent's range, the last of its bins."""

_SPLITS: Final = [
    (place, int(_EXPONENTS[np.searchsorted(_EXPONENTS, place)]))
    for place in sorted(int(np.searchsorted(UPPER, one.overflows)) for one in FORMATS.values())
]
"""The bins that end where a format begins to overflow, each with the last bin of its exponent."""

with np.errstate(over="ignore"):
    _ENDS: Final = UPPER.astype(np.float32).view(np.uint32)
_BITS: Final = _ENDS.tolist()
"""The bits of the upper end of each bin; of the last two bins those of Inf."""

if _host_kernel is not None:
    _host_kernel.divide(_ENDS)

CountBins = Callable[[NDArray[np.int32]], NDArray[np.int64]]
"""Counts how often each number below ``EXPONENT_BINS`` occurs."""

Within = Callable[[int, int], int]
"""Counts the magnitudes whose bits are above the first number, and at most the second."""


def count_natively(source: Any, count: int, form: int) -> NDArray[np.int64] | None:
    """The histogram of contiguous elements, shape ``(BINS,)``; None for elements of 64 bits, and without the native kernel.

    Args:
        source, count, form: See ``NativeKernel.reduce_into``.
    """
    if _host_kernel is None or form in (FLOAT64, INT64) or not is_wanted():
        return None
    bins = np.empty(BINS)
    _host_kernel.magnitudes(form, source, count, bins)
    return bins.astype(np.int64)


def count_magnitudes(x: Raw) -> NDArray[np.int64] | None:
    """The histogram of an array, shape ``(BINS,)``; None if its elements are not numbers."""
    if not is_readable(x):
        return None
    if (found := stored(x)) is not None and (native := count_natively(found[0], x.size, found[1])) is not None:
        return native
    counts = np.zeros(BINS, dtype=np.int64)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for v in Chunks().of(x):
            counts += _of_chunk(v)
    return counts


def _of_chunk(v: Reals) -> NDArray[np.int64]:
    single = np.array(v, dtype=np.float32)
    counts = of_singles(single, _counted)
    if v.dtype == np.float64:
        lost = int(np.count_nonzero((single == 0) & (v != 0)))
        restore_rounded(counts, lost, int(np.count_nonzero(np.isfinite(v) & np.isinf(single))))
    return counts


def _counted(bins: NDArray[np.int32]) -> NDArray[np.int64]:
    return np.bincount(bins, minlength=EXPONENT_BINS)


def of_singles(v: NDArray[np.float32], count: CountBins) -> NDArray[np.int64]:
    """The histogram of float32 numbers, shape ``(elements,)``. Overwrites them with their magnitudes."""
    magnitudes = v.view(np.uint32)
    np.bitwise_and(magnitudes, np.uint32(_SIGN), out=magnitudes)
    exponents = (magnitudes + np.uint32((1 << _MANTISSA) - 1)) >> np.uint32(_MANTISSA)
    return _in_bins(
        count(exponents.view(np.int32)), lambda low, high: int(np.count_nonzero((magnitudes > low) & (magnitudes <= high)))
    )


def _in_bins(by_exponent: NDArray[np.int64], within: Within) -> NDArray[np.int64]:
    """The histogram, from the number of elements of each exponent."""
    counts = np.zeros(BINS, dtype=np.int64)
    counts[0] = by_exponent[0]
    counts[_EXPONENTS] = by_exponent[1 : _INFINITE + 1]
    first, last = int(_EXPONENTS[0]), int(_EXPONENTS[-1])
    if by_exponent[1]:  # subnormal numbers share an exponent
        for place in range(1, first):
            _move(counts, place, first, within(_BITS[place - 1], _BITS[place]))
    if by_exponent[_INFINITE]:
        counts[last] -= within(_BITS[-1] - 1, _BITS[-1])
    for place, whole in _SPLITS:
        if counts[whole]:
            _move(counts, place, whole, within(_BITS[place - 1], _BITS[place]))
    return counts


def _move(counts: NDArray[np.int64], to: int, from_: int, elements: int) -> None:
    counts[to] += elements
    counts[from_] -= elements


def restore_rounded(counts: NDArray[np.int64], to_zero: int, to_infinity: int) -> None:
    """Move elements that float32 rounded to zero to the smallest bin, and add those that it made infinite to the greatest."""
    counts[0] -= to_zero
    counts[1] += to_zero
    counts[-1] += to_infinity
