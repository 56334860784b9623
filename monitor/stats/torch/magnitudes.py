"""Histograms of magnitudes of torch tensors: on the host from the bits (``host.array_kernel``), on devices by binary search."""

from __future__ import annotations

from functools import cache
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monitor.stats.histograms import BINS, UPPER
from monitor.stats.host.array_kernel import EXPONENT_BINS, of_singles, restore_rounded
from monitor.stats.torch.memory import persistent
from monitor.stats.torch.tensors import BYPASSED_KEYS, Readable, pieces, readable, working_precision

CHUNK: Final = 262_144
"""Elements counted at a time on the host; they stay in the cache, as in ``torch.host_kernel``."""

DEVICE_CHUNK: Final = 1 << 22
"""Elements counted at a time on an accelerator: enough to fill it."""


def count_magnitudes(x: Tensor) -> NDArray[np.int64] | None:
    """The histogram of a tensor on the host, shape ``(BINS,)``; None if it has no data to read."""
    with torch._C._ExcludeDispatchKeyGuard(BYPASSED_KEYS):
        source = readable(x)
        return None if source is None else _of_source(source)


def count_magnitudes_on_device(x: Tensor) -> Tensor | None:
    """The histogram on the tensor's own device, int64. Brings no value to the host, so nothing waits."""
    with torch._C._ExcludeDispatchKeyGuard(BYPASSED_KEYS):
        source = readable(x)
        if source is None:
            return None
        x = source.dense
        edges = _edges(x.device)
        counts = torch.zeros(BINS, dtype=torch.int64, device=x.device)
        for piece in pieces(x, DEVICE_CHUNK):
            exact = _magnitudes(piece)
            counts.scatter_add_(0, _bins_of(exact, edges), torch.isfinite(exact).to(torch.int64))
        counts *= source.repeats
        counts[0] += source.implicit_zeros
        return counts


@cache
def _edges(device: torch.device) -> Tensor:
    """The bin edges on a device, copied once from pinned memory, without waiting for earlier launches."""
    there = device.type != "cpu"

    def make() -> Tensor:
        return torch.tensor(UPPER, dtype=torch.float32, pin_memory=there).to(device, non_blocking=there)

    return persistent(device, make)


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
    """The histogram of a copy: the bits are overwritten, and torch cannot resize a storage that numpy has a view of."""
    exact = _magnitudes(piece) if piece.is_complex() or working_precision(piece.dtype) is torch.float64 else piece
    single = torch.empty(piece.shape, dtype=torch.float32, device="cpu").copy_(exact).view(-1)
    counts = of_singles(single.numpy(), _counted)
    if exact.dtype is torch.float64:
        lost = int(((exact != 0) & (single == 0)).sum())
        restore_rounded(counts, lost, int((torch.isfinite(exact) & torch.isinf(single)).sum()))
    return counts


def _counted(bins: NDArray[np.int32]) -> NDArray[np.int64]:
    """Count with torch, whose ``bincount`` accepts int32."""
    counts: NDArray[np.int64] = torch.bincount(torch.from_numpy(bins), minlength=EXPONENT_BINS).numpy()
    return counts


def _magnitudes(piece: Tensor) -> Tensor:
    """The magnitudes, shape ``(elements,)``, in float32 or float64."""
    if piece.is_complex():
        return torch.abs(piece.to(torch.complex64) if piece.dtype is torch.complex32 else piece).reshape(-1)
    return piece.to(working_precision(piece.dtype)).abs().reshape(-1)
