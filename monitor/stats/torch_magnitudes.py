"""Histograms of tensors of any device, in the bins of ``monitor.stats.histograms``.

The exponent of a number of single precision stands in its bits, so a bin is found without a comparison: the bits plus the
greatest mantissa, shifted, number the powers of two such that each bin includes its upper end. What that leaves coarse is
looked at again only where there is something: subnormal numbers, which share one exponent, and the few magnitudes at which a
format of low precision begins to overflow.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monitor.stats.histograms import BINS, FIRST_POWER, FORMATS, UPPER
from monitor.stats.torch_modes import KEYS_ABOVE_US
from monitor.stats.torch_tensors import Readable, pieces, readable, working_precision

CHUNK: Final = 262_144
"""Elements that are looked at together; in the cache, as in ``torch_host_kernel``."""

CHUNK_THERE: Final = 1 << 22
"""The same on an accelerator: enough to fill it."""

_MANTISSA: Final = 23
_SIGN: Final = 0x7FFF_FFFF
_INFINITE: Final = 255
"""The bin of what is greater than 2**127, Inf included, of the bins by exponent; NaN is in the one after it."""
_SMALLEST_NORMAL: Final = -126

_EXPONENTS: Final = np.searchsorted(UPPER, 2.0 ** np.arange(_SMALLEST_NORMAL, 129.0))
"""The bin of each exponent from that of 2**-126 on: where an edge within lies below, the last of its bins."""

_SPLITS: Final = tuple(
    (int(np.searchsorted(UPPER, one.overflows)), one.overflows)
    for one in sorted(FORMATS.values(), key=lambda one: one.overflows)
)
"""The bins that end where a format overflows, and those ends."""


def count_magnitudes(x: Tensor) -> NDArray[np.int64] | None:
    """The histogram of a tensor on the host, shape ``(BINS,)``; None if it has no data to read."""
    with torch._C._ExcludeDispatchKeyGuard(KEYS_ABOVE_US):
        source = readable(x)
        return None if source is None else _of_source(source)


def count_magnitudes_there(x: Tensor) -> Tensor | None:
    """The same for any device and there, int64: no value is brought to the host, and nothing waits."""
    with torch._C._ExcludeDispatchKeyGuard(KEYS_ABOVE_US):
        source = readable(x)
        if source is None:
            return None
        x = source.dense
        edges = torch.tensor(UPPER, dtype=torch.float32, device=x.device)
        counts = torch.zeros(BINS, dtype=torch.int64, device=x.device)
        for piece in pieces(x, CHUNK_THERE):
            exact = _magnitudes(piece)
            counts.scatter_add_(0, _bins_of(exact, edges), torch.isfinite(exact).to(torch.int64))
        counts *= source.repeats
        counts[0] += source.implicit_zeros
        return counts


def _bins_of(magnitudes: Tensor, edges: Tensor) -> Tensor:
    single = magnitudes.to(torch.float32)
    bins = torch.bucketize(single, edges)
    bins = torch.where((single == 0) & (magnitudes != 0), 1, bins)
    return torch.where(torch.isfinite(single), bins, BINS - 1)


def _of_source(source: Readable) -> NDArray[np.int64]:
    x = source.dense
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    counts = np.zeros(BINS, dtype=np.int64)
    for piece in pieces(x, CHUNK):
        counts += _of_piece(piece)
    counts *= source.repeats
    counts[0] += source.implicit_zeros
    return counts


def _of_piece(piece: Tensor) -> NDArray[np.int64]:
    """Copies: the bits that are counted are our own, and a view of the user's storage by numpy would bind it."""
    exact = _magnitudes(piece) if piece.is_complex() or working_precision(piece.dtype) is torch.float64 else piece
    single = torch.empty(piece.shape, dtype=torch.float32, device="cpu").copy_(exact).view(-1)
    counts = _of_singles(single)
    if exact.dtype is torch.float64:
        _give_back_what_rounded(counts, exact, single)
    return counts


def _magnitudes(piece: Tensor) -> Tensor:
    """Shape ``(elements,)``, in float32 or float64."""
    if piece.is_complex():
        return torch.abs(piece.to(torch.complex64) if piece.dtype is torch.complex32 else piece).reshape(-1)
    return piece.to(working_precision(piece.dtype)).abs().reshape(-1)


def _of_singles(v: Tensor) -> NDArray[np.int64]:
    """Of float32, shape ``(elements,)``, contiguous and ours."""
    magnitudes = v.numpy().view(np.uint32)
    np.bitwise_and(magnitudes, np.uint32(_SIGN), out=magnitudes)
    exponents = (magnitudes + np.uint32((1 << _MANTISSA) - 1)) >> np.uint32(_MANTISSA)
    by_exponent = torch.bincount(torch.from_numpy(exponents.view(np.int32)), minlength=_INFINITE + 2).numpy()
    counts = np.zeros(BINS, dtype=np.int64)
    counts[0] = by_exponent[0]
    counts[_EXPONENTS] = by_exponent[1 : _INFINITE + 1]
    if by_exponent[1]:
        _spread_subnormals(counts, magnitudes)
    if by_exponent[_INFINITE]:
        counts[_EXPONENTS[-1]] -= np.count_nonzero(magnitudes == np.float32(np.inf).view(np.uint32))
    _split(counts, magnitudes)
    return counts


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


def _give_back_what_rounded(counts: NDArray[np.int64], exact: Tensor, single: Tensor) -> None:
    """What single precision rounded to zero is the smallest there is, and what it made infinite the greatest.

    ``single`` holds magnitudes.
    """
    lost = int(((exact != 0) & (single == 0)).sum())
    counts[0] -= lost
    counts[1] += lost
    counts[-1] += int((torch.isfinite(exact) & torch.isinf(single)).sum())
