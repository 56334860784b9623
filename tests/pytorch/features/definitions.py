"""What features are, written down from their definitions in float64, with everything in memory at once."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def attention_weights(
    query: Tensor, key: Tensor, *, causal: bool = True, scale: float | None = None, mask: Tensor | None = None
) -> Tensor:
    """Of ``query`` (b, h, s, d) and ``key`` (b, hk, t, d): (b, h, s, t), float64."""
    query, key = query.detach().double(), key.detach().double()
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = query @ key.transpose(2, 3) * (query.shape[3] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.double()
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[2:], dtype=torch.bool).triu(1), -math.inf)
    return torch.softmax(scores, -1)


def entropy_and_greatest(weights: Tensor, heads: int = 1, rows: int = 1) -> tuple[float, float]:
    """Means over the queries of the first heads of the first rows of the batch, 0 for all of them."""
    sample = weights[: rows or None, : heads or None]
    return torch.special.entr(sample).sum(-1).mean().item(), sample.amax(-1).mean().item()


def similarity(weight: Tensor) -> float:
    """The mean cosine of two different rows."""
    rows = torch.nn.functional.normalize(weight.detach().double(), dim=1)
    cosines = rows @ rows.T
    experts = len(rows)
    return ((cosines.sum() - cosines.diagonal().sum()) / (experts * (experts - 1))).item()


def entropy_per_token(logits: Tensor) -> float:
    """The mean entropy of the softmax over the last dimension."""
    return torch.special.entr(torch.softmax(logits.detach().double(), -1)).sum(-1).mean().item()
