"""What is read of two tensors at once, on the device where they are: chunk by chunk, and nothing waits for the device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from monitor.stats.histograms import UNIT_BINS
from monitor.stats.partials import COUNT, M2, MAX, MIN, NANS, NEGINFS, POSINFS, SMALLS, SUM, SUMSQ
from monitor.stats.torch_tensors import pieces

CHUNK: Final = 262_144
CHUNK_THERE: Final = 1 << 22
"""Elements of a chunk on the host, where it stays in the cache, and on an accelerator, which it fills."""

_HALF: Final = UNIT_BINS // 2

Numbers = Mapping[int, float | Tensor]
"""By column of partials; tensors have one element."""


def agreement(gradient: Tensor, momentum: Tensor, *, uphill: bool = False) -> Tensor:
    """How many elements have the same sign, both zero included; float64, one element. NaN agrees with nothing.

    Args:
        uphill: The optimizer maximizes: it goes by the gradient's opposite.
    """
    agreeing = []
    for g, m in together(gradient, momentum):
        signs = torch.sgn(g)  # 0 of NaN
        agree = torch.eq(signs.neg_() if uphill else signs, torch.sgn(m)).logical_and_(g == g).logical_and_(m == m)
        agreeing.append(agree.sum(dtype=torch.float64))
    return _total(agreeing, gradient)


def squares_of_update(after: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """The squares of the norms of ``after - before`` and of ``before``; float64, one element each."""
    both = [_squares(*chunks) for chunks in together(after, before)]
    return _total([update for update, _ in both], after), _total([weight for _, weight in both], after)


def _squares(after: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    exact_after, exact_before = after.to(torch.float64), before.to(torch.float64)
    update = exact_after.sub_(exact_before) if exact_after is not after else exact_after - exact_before
    return update.square_().sum(), exact_before.square().sum()


def _total(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.stack(list(parts)).sum() if parts else torch.zeros((), dtype=torch.float64, device=like.device)


def together(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The elements that stand at the same place in tensors of one shape, a chunk of each at a time."""
    chunk = CHUNK if tensors[0].is_cpu else CHUNK_THERE
    alike = all(one.stride() == tensors[0].stride() for one in tensors)
    flat = tensors if alike else [one.reshape(-1) for one in tensors]
    yield from zip(*(pieces(one, chunk) for one in flat), strict=True)


class SignedCounts:
    """Partials and a histogram of chunks of a tensor that is never whole, of signed numbers that are mostly between -1 and 1.

    Bins as in ``UNIT_UPPER``. What partials need scaling for does not happen to such numbers in float64.
    """

    def __init__(self, like: Tensor, eps: float) -> None:
        self._eps = eps
        self._counts = torch.zeros(UNIT_BINS + 2, dtype=torch.int64, device=like.device)
        self._parts: list[Tensor] = []
        self._elements = 0

    def add(self, chunk: Tensor) -> None:
        """Float32 or float64."""
        finite = torch.isfinite(chunk)
        kept = torch.where(finite, chunk, 0)
        # Multiplied by a power of two nothing is rounded, so no number changes its sign or its bin.
        bins = torch.ceil(kept * _HALF).clamp_(-_HALF, _HALF + 1).add_(_HALF).to(torch.int64)
        self._counts.scatter_add_(0, bins.reshape(-1), finite.reshape(-1).to(torch.int64))
        self._elements += chunk.numel()
        self._parts.append(
            torch.stack(
                [
                    torch.isnan(chunk).sum(dtype=torch.float64),
                    torch.isposinf(chunk).sum(dtype=torch.float64),
                    torch.isneginf(chunk).sum(dtype=torch.float64),
                    ((kept.abs() < self._eps) & finite).sum(dtype=torch.float64),
                    torch.where(finite, chunk, math.inf).amin().to(torch.float64),
                    torch.where(finite, chunk, -math.inf).amax().to(torch.float64),
                    kept.sum(dtype=torch.float64),
                    kept.to(torch.float64).square_().sum(),
                ]
            )
        )

    def numbers(self) -> Numbers:
        """Of all that was added, by column of partials."""
        if not self._parts:
            return {COUNT: 0.0, MIN: math.inf, MAX: -math.inf}
        parts = torch.stack(self._parts)
        counts, sums = parts[:, :4].sum(dim=0), parts[:, 6:].sum(dim=0)
        finite = (self._elements - counts[:3].sum()).clamp(min=1)
        return {
            COUNT: float(self._elements),
            **dict(zip((NANS, POSINFS, NEGINFS, SMALLS), counts, strict=True)),
            MIN: parts[:, 4].amin(),
            MAX: parts[:, 5].amax(),
            SUM: sums[0],
            SUMSQ: sums[1],
            M2: (sums[1] - sums[0].square() / finite).clamp(min=0),
        }

    def histogram(self) -> Tensor:
        """Elements in each bin, int64, shape ``(UNIT_BINS + 2,)``."""
        return self._counts
