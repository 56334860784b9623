"""What features are, written down from their definitions in float64, with everything in memory at once."""

from __future__ import annotations

import math

import numpy as np
import torch
from sampled_outputs import sampled_elements, sampled_tokens
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


def head_numbers(scores: Tensor, *, bound: float = 100.0, sinks: int = 1) -> dict[str, float | None]:
    """What ``attention_head_hook`` records of scores (b, h, q, k), float64, -Inf where a query does not see a key.

    Every query sees a key.
    """
    weights, seen = torch.softmax(scores, -1), scores > -math.inf
    both = seen[..., :sinks].any(-1) & seen[..., sinks:].any(-1)
    greatest = scores.amax((0, 2, 3))
    return {
        "max_logit": greatest.max().item(),
        "heads_above": (greatest > bound).double().mean().item(),
        "entropy": torch.special.entr(weights).sum(-1).mean().item(),
        "sink": weights[..., :sinks].sum(-1)[both].mean().item() if both.any() else None,
    }


def rows_of_heads(scores: Tensor, name: str, **how: float) -> dict[str, dict[str, float | None]]:
    """The rows of a module: one of all heads, and one of each."""
    each = {f"{name}.heads.{head}": head_numbers(scores[:, head : head + 1], **how) for head in range(scores.shape[1])}
    return {f"{name}.heads": head_numbers(scores, **how), **each}


def health(x: Tensor) -> dict[str, float]:
    """The columns of ``activation_hook`` that a single forward gives, from singular values and sorted magnitudes. Without those
    that have no number.
    """
    numbers = x.detach().double().numpy()
    ordered, tokens = np.sort(np.abs(sampled_elements(numbers))), sampled_tokens(numbers)
    lengths = np.linalg.norm(tokens, axis=1, keepdims=True)
    energies = np.linalg.svd((tokens / np.where(lengths > 0, lengths, 1.0)), compute_uv=False) ** 2
    directed = (lengths > 0).sum() > 1 and numbers.shape[-1] > 1
    median = ordered[(len(ordered) - 1) // 2]
    place = np.unravel_index(np.abs(numbers).argmax(), numbers.shape)
    massive = {"massive": np.abs(numbers).max() / median, "massive_channel": int(place[-1])} if median else {}
    return {
        **massive,
        **({"effective_rank": energies.sum() ** 2 / (energies**2).sum()} if directed else {}),
        "residual_norm": np.linalg.norm(numbers, axis=-1).mean(),
    }


def active_units(x: Tensor) -> np.ndarray:
    """Which channels exceed a hundredth of the 90th percentile of the magnitudes in any token."""
    numbers = np.abs(x.detach().double().numpy())
    ordered = np.sort(sampled_elements(numbers))
    return numbers.reshape(-1, numbers.shape[-1]).max(0) > 0.01 * ordered[math.ceil(0.9 * len(ordered)) - 1]
