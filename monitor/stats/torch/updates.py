"""Numbers of several torch tensors, such as sign agreement and update norms: chunk by chunk, without waiting for a device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor

from monitor.stats.histograms import UNIT_BINS
from monitor.stats.partials import COLUMNS, COUNT, EMPTY, NANS, NEGINFS, POSINFS, SMALLS, SUM, SUMSQ, Floats, union
from monitor.stats.torch.device_kernel import union_of_unscaled, unscaled_part
from monitor.stats.torch.host_kernel import TorchHostKernel
from monitor.stats.torch.tensors import pieces

CHUNK: Final = 65_536
DEVICE_CHUNK: Final = 1 << 22
"""Elements of a chunk: on the host, so few that it stays in the cache with its temporaries; on a device, enough to fill it."""

_HALF: Final = UNIT_BINS // 2

Numbers = Mapping[int, float | Tensor]
"""Numbers by column of partials; tensors have one element."""


def together(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Corresponding elements of tensors of one shape, a chunk of each at a time."""
    chunk = CHUNK if tensors[0].is_cpu else DEVICE_CHUNK
    alike = all(one.stride() == tensors[0].stride() for one in tensors)
    flat = tensors if alike else [one.reshape(-1) for one in tensors]
    yield from zip(*(pieces(one, chunk) for one in flat), strict=True)


class Scratch:
    """Temporaries of a chunk, allocated once for all chunks: allocating one costs more than computing it."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def of(self, use: str, like: Tensor, dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor in the shape of ``like``. It reuses the memory of the last one with the same ``use``."""
        buffer = self._buffers.get((use, dtype))
        if buffer is None or buffer.numel() < like.numel():
            buffer = self._buffers[use, dtype] = torch.empty(like.numel(), dtype=dtype, device=like.device)
        return buffer[: like.numel()].view(like.shape)

    def copy(self, use: str, x: Tensor, dtype: torch.dtype) -> Tensor:
        """``x`` in another dtype."""
        return self.of(use, x, dtype).copy_(x)


def agreement(gradient: Tensor, momentum: Tensor, *, uphill: bool = False) -> Tensor:
    """The number of elements with equal signs; int64, one element. Two zeros agree; NaN agrees with nothing.

    Args:
        uphill: The optimizer maximizes, so it uses the negated gradient.
    """
    scratch, differing = Scratch(), torch.zeros((), dtype=torch.int64, device=gradient.device)
    for g, m in together(gradient, momentum):
        signs = torch.sgn(g, out=scratch.of("gradient", g, g.dtype))
        others = torch.sgn(m, out=scratch.of("momentum", m, m.dtype))
        difference = signs.add_(others) if uphill else signs.sub_(others)
        for x in (g, m):
            if not (x.is_cpu and _is_finite(x)):  # the sign of NaN may be 0
                difference.masked_fill_(torch.isnan(x), 1)
        differing += torch.count_nonzero(difference)
    return gradient.numel() - differing


def _is_finite(x: Tensor) -> bool:
    """Whether a host tensor is certainly finite. False also for finite elements whose sum overflows."""
    if x.is_complex():
        return False
    return math.isfinite(x.sum(dtype=torch.float32 if x.itemsize < 4 else None).item())


def squares_of_update(after: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """The squares of the norms of ``after - before`` and of ``before``; float64, one element each."""
    scratch = Scratch()
    update, weight = (torch.zeros((), dtype=torch.float64, device=after.device) for _ in range(2))
    for a, b in together(after, before):
        wide = scratch.copy("before", b, torch.float64)
        weight += _squares(wide)
        update += _squares(torch.sub(scratch.copy("after", a, torch.float64), wide, out=wide))
    return update, weight


def swallowed(after: Tensor, before: Tensor, due: Tensor, *, steps: float | Tensor = 1.0) -> dict[int, float | Tensor]:
    """How many elements have an update, and how many of these have the same value after the step as before.

    Args:
        due: Not zero where an element has an update; of the shape of the weight.
        steps: 0 if the learning rate is 0, else 1.

    Returns:
        Numbers by column of partials, as the kind ``optimizer_health`` has them.
    """
    scratch = Scratch()
    updated, same = (torch.zeros((), dtype=torch.float64, device=after.device) for _ in range(2))
    # A comparison in place gives 0 and 1, four times as fast as one that gives booleans. Their sums over a chunk are exact.
    for a, b, g in together(after, before, due):
        has_update = scratch.copy("due", g, _precision(g)).ne_(0)
        stays = scratch.copy("after", a, _precision(a)).eq_(scratch.copy("before", b, _precision(b)))
        updated += has_update.sum()
        same += stays.mul_(has_update).sum()
    return {NEGINFS: updated * steps, SMALLS: same * steps}


def staleness(
    gradient: Tensor, square: Tensor, bias: float | Tensor, lowest: float | Tensor, weight: Tensor, decay: Any
) -> dict[int, float | Tensor]:
    """The sum of g² / v with the second moment v without its bias, and how many elements have a ``square`` below ``lowest``.

    Args:
        square: The second moment after the step.
        bias: The divisor that takes the bias away.
        lowest: A smaller ``square`` counts as this.
        weight: The weight before the step.
        decay: The multiple of it that belongs to the gradient; 0 for none.

    Returns:
        Numbers by column of partials, as the kind ``optimizer_health`` has them. No element has a known second moment if that
        of any element is too small for its dtype, and its gradient is not 0.
    """
    scratch, precision = Scratch(), _precision(square)
    total, below, lost = (torch.zeros((), dtype=torch.float64, device=square.device) for _ in range(3))
    tiny = torch.finfo(precision).tiny
    may_lose = isinstance(lowest, Tensor) or lowest < tiny
    for gradient_part, square_part, weight_part in together(gradient, square, weight):
        v = scratch.copy("square", square_part, precision)
        g = scratch.copy("gradient", gradient_part, precision)
        if isinstance(decay, Tensor) or decay:
            g.add_(scratch.copy("weight", weight_part, precision).mul_(decay))
        if not v.is_cpu or not v.amin().item() >= max(lowest, tiny):
            below += scratch.copy("below", v, precision).lt_(lowest).sum()
            v.clamp_(min=lowest)
            if may_lose:
                lost += torch.count_nonzero((v < tiny) & (g != 0))
            v.clamp_(min=tiny)
        total += g.square_().div_(v).sum()
    return {SUM: total * bias, SUMSQ: lost.eq(0).to(torch.float64) * square.numel(), POSINFS: below}


def _precision(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _squares(x: Tensor) -> Tensor:
    flat = x.view(-1)
    return torch.dot(flat, flat)


class TorchSigned(Protocol):
    """Partials and a histogram of a tensor given in chunks, of signed numbers that are mostly between -1 and 1.

    Bins as in ``UNIT_UPPER``.
    """

    def add(self, chunk: Tensor) -> None:
        """Add a chunk of float32 or float64."""

    def numbers(self) -> Numbers:
        """The partials of all chunks."""

    def histogram(self) -> Tensor:
        """Elements in each bin, int64, shape ``(UNIT_BINS + 2,)``."""


def signed(like: Tensor, kernel: TorchHostKernel, eps: float) -> TorchSigned:
    """A new accumulator for chunks on the device of ``like``."""
    return TorchHostSigned(kernel) if like.is_cpu else TorchDeviceSigned(like.device, eps, higher=kernel.higher)


class TorchHostSigned:
    """The version for the host, where reading a value is free."""

    def __init__(self, kernel: TorchHostKernel) -> None:
        self._kernel = kernel
        self._scratch = Scratch()
        self._rows: list[Floats] = []
        self._counts = torch.zeros(UNIT_BINS + 2, dtype=torch.int64, device="cpu")

    def add(self, chunk: Tensor) -> None:
        row = np.asarray(self._kernel.reduce(chunk))
        self._rows.append(row)
        finite = chunk if not row[NANS : NEGINFS + 1].any() else chunk[torch.isfinite(chunk)]
        bins = _bins(torch.mul(finite, _HALF, out=self._scratch.of("bins", finite, finite.dtype)))
        numbers = self._scratch.copy("numbers", bins, torch.uint8).view(-1)
        self._counts += torch.bincount(numbers, minlength=UNIT_BINS + 2)

    def numbers(self) -> Numbers:
        row = union(np.array(self._rows)) if self._rows else np.array(EMPTY)
        return {column: float(row[column]) for column in range(COUNT, len(COLUMNS))}

    def histogram(self) -> Tensor:
        return self._counts


def _bins(halves: Tensor) -> Tensor:
    """The bin of each number, given times ``_HALF``, in place. ``_HALF`` is a power of two, so the product was not rounded."""
    return halves.ceil_().clamp_(-_HALF, _HALF + 1).add_(_HALF)


class TorchDeviceSigned:
    """The version for any device, which reads no value. Such numbers need no scaling before squaring in float64."""

    def __init__(self, device: torch.device, eps: float, *, higher: bool = False) -> None:
        self._eps = eps
        self._higher = higher
        self._counts = torch.zeros(UNIT_BINS + 2, dtype=torch.int64, device=device)
        self._parts: list[Tensor] = []
        self._elements = 0

    def add(self, chunk: Tensor) -> None:
        finite = torch.isfinite(chunk)
        kept = torch.where(finite, chunk, 0)
        bins = _bins(kept * _HALF).to(torch.int64)
        self._counts.scatter_add_(0, bins.reshape(-1), finite.reshape(-1).to(torch.int64))
        self._elements += chunk.numel()
        self._parts.append(unscaled_part(chunk, kept, finite, self._eps, higher=self._higher))

    def numbers(self) -> Numbers:
        if not self._parts:
            return dict(enumerate(EMPTY))
        return union_of_unscaled(self._parts, self._elements, higher=self._higher)

    def histogram(self) -> Tensor:
        return self._counts
