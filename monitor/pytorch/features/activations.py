"""Massive activations, active units, effective rank and norms of the tokens of an output, read in blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from monitor.recording.features import reading
from monitor.stats.torch.tensors import capturing, has_memory, working_precision

BLOCK: Final = 1 << 17
"""Elements that are converted to float64 at once on the host, which fit a core's cache."""

BLOCK_ON_DEVICE: Final = 1 << 23
"""The same on an accelerator, where the calls cost more than the computation."""


def activation_of(x: Tensor) -> reading.Activation:
    """What a strided floating-point tensor with elements shows. Waits for no device.

    Raises:
        MisfitError: Its elements are not in memory, or a graph is captured, which would overwrite what is kept of it.
    """
    if capturing(x.device):
        raise reading.MisfitError(reading.CAPTURED)
    if x.is_nested or x.is_meta or not has_memory(x):
        raise reading.MisfitError(reading.NO_ELEMENTS)
    x = x.unsqueeze(0) if x.dim() == 1 else x
    peaks, norms = _peaks_and_norms(x)
    largest = peaks.amax()  # NaN if there is one
    wrong = largest - largest  # 0, or NaN
    median, typical = _quantiles(x)
    ratio = torch.where((median > 0) | wrong.isnan(), largest / median + wrong, -math.inf)
    seen = torch.cat([peaks > reading.QUIET * typical, wrong.isnan().view(1)])
    tokens, channel, rank = x.numel() // x.shape[-1], peaks.argmax(), _effective_rank(x) + wrong
    return reading.Activation(tokens, norms + wrong, ratio, channel, channel * channel, rank, seen)


def last_active(before: Tensor | None, seen: Tensor, step: int) -> Tensor:
    """The last step of each entry, int32."""
    now = seen.to(torch.int32) * step
    return now if before is None else torch.maximum(before.to(now.device), now)


def active_share(last: Tensor, units: int, step: int) -> Tensor:
    """The share of units that were active after ``step``. The last entry is that of NaN and Inf."""
    active = last > step
    return torch.where(active[units], math.nan, active[:units].double().mean())


def _peaks_and_norms(x: Tensor) -> tuple[Tensor, Tensor]:
    """The largest magnitude of each channel, and the sum of the norms of the tokens, float64."""
    peaks = torch.zeros(x.shape[-1], dtype=torch.float64, device=x.device)
    norms = torch.zeros((), dtype=torch.float64, device=x.device)
    for block in _blocks(x):
        magnitudes = block.double().abs()
        peak = magnitudes.amax(0)
        if x.dtype == torch.float64:  # squares of other dtypes fit
            scale = torch.where((greatest := peak.amax()) > 0, greatest, 1.0)
            norms += torch.linalg.vector_norm(magnitudes / scale, dim=1).sum() * scale
        else:
            norms += torch.linalg.vector_norm(magnitudes, dim=1).sum()
        peaks = torch.maximum(peaks, peak)
    return peaks, norms


def _blocks(x: Tensor) -> Iterator[Tensor]:
    """All tokens, in matrices of at most a block. No copy is larger."""
    block = BLOCK if x.is_cpu else BLOCK_ON_DEVICE
    if x.dim() == 2 or x.is_contiguous() or x.numel() <= block:
        yield from x.reshape(-1, x.shape[-1]).split(max(1, block // x.shape[-1]))
        return
    for part in x.unbind(max(range(x.dim() - 1), key=x.stride)):
        yield from _blocks(part)


def _quantiles(x: Tensor) -> tuple[Tensor, Tensor]:
    """The median and the typical magnitude of sampled elements."""
    size, channels = x.numel(), x.shape[-1]
    distance = reading.distance_of_elements(size, channels)
    if x.is_contiguous():
        sample = x.view(-1)[::distance]
    else:
        sample = x[_places(torch.arange(0, size, distance, device=x.device), x.shape)]
    ordered = sample.double().abs().sort().values
    at = [reading.rank_of_quantile(len(ordered), quantile) - 1 for quantile in (0.5, reading.TYPICAL)]
    return ordered[at[0]], ordered[at[1]]


def _effective_rank(x: Tensor) -> Tensor:
    """The effective rank of sampled tokens, from the matrix of their cosines. A decomposition would wait for the device."""
    tokens = x.shape[:-1]
    places = torch.arange(0, tokens.numel(), reading.distance_of_tokens(tokens.numel()), device=x.device)
    sample = x[_places(places, tokens)].to(working_precision(x.dtype))
    scale = sample.abs().amax(1, keepdim=True).double()
    scale = torch.where(scale == 0, 1.0, scale)
    products = torch.zeros((len(sample), len(sample)), dtype=torch.float64, device=x.device)
    for part in sample.split(BLOCK // reading.TOKENS_AT_MOST, dim=1):
        wide = part / scale
        products.addmm_(wide, wide.t())
    squares = products.diagonal()
    inverse = torch.where(squares == 0, 0.0, squares.rsqrt())
    cosines = products * inverse * inverse.unsqueeze(1)
    number = (squares != 0).sum()
    rank = number * number / cosines.square().sum()
    return torch.where(number > 1, rank, -math.inf) if x.shape[-1] > 1 else torch.full_like(rank, -math.inf)


def _places(index: Tensor, shape: torch.Size) -> tuple[Tensor, ...]:
    """The places of elements that are numbered in the order of the dimensions."""
    places: list[Tensor] = []
    for size in reversed(shape):
        places.append(index % size)
        index = index // size
    return tuple(reversed(places))
