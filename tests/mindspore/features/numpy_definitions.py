"""What features are, written down from their definitions in float64, with everything in memory at once."""

from __future__ import annotations

import math

import mindspore as ms
import numpy as np
from mindspore import Tensor
from sampled_outputs import sampled_elements, sampled_tokens

FLOATS = [ms.float32, ms.float16, ms.bfloat16, ms.float64]


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def exact(x: Tensor) -> np.ndarray:
    """What a tensor holds, float64."""
    return (x.to(ms.float32) if x.dtype == ms.bfloat16 else x).asnumpy().astype(np.float64)


def number(x: object) -> float:
    return float(x.asnumpy()) if isinstance(x, Tensor) else float(x)


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def entropies(shares: np.ndarray) -> np.ndarray:
    return -(shares * np.log(np.where(shares > 0, shares, 1.0))).sum(-1)


def attention_weights(query: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Of (batch, heads, sequence, size) and a key of fewer heads: (batch, heads, sequence, sequence), causal."""
    return softmax(attention_scores(query, key))


def attention_scores(query: np.ndarray, key: np.ndarray) -> np.ndarray:
    """The same before the softmax."""
    key = key.repeat(query.shape[1] // key.shape[1], axis=1)
    scores = query @ key.swapaxes(2, 3) * query.shape[3] ** -0.5
    return np.where(np.tri(query.shape[2], dtype=bool), scores, -np.inf)


def entropy_and_greatest(weights: np.ndarray, heads: int = 1, rows: int = 1) -> tuple[float, float]:
    """Means over the queries of the first heads of the first rows of the batch, 0 for all of them."""
    sample = weights[: rows or None, : heads or None]
    return entropies(sample).mean(), sample.max(-1).mean()


def similarity(weight: np.ndarray) -> float:
    """The mean cosine of two different rows."""
    rows = weight / np.linalg.norm(weight, axis=1, keepdims=True)
    cosines, experts = rows @ rows.T, len(rows)
    return (cosines.sum() - np.trace(cosines)) / (experts * (experts - 1))


def entropy_per_token(logits: np.ndarray) -> float:
    """The mean entropy of the softmax over the last dimension."""
    return entropies(softmax(logits)).mean()


def health(x: np.ndarray) -> dict[str, float]:
    """The columns of ``activation_hook`` that a single forward gives, without those that have no number."""
    ordered, tokens = np.sort(np.abs(sampled_elements(x))), sampled_tokens(x)
    lengths = np.linalg.norm(tokens, axis=1, keepdims=True)
    energies = np.linalg.svd(tokens / np.where(lengths > 0, lengths, 1.0), compute_uv=False) ** 2
    directed = (lengths > 0).sum() > 1 and x.shape[-1] > 1
    median = ordered[(len(ordered) - 1) // 2]
    place = np.unravel_index(np.abs(x).argmax(), x.shape)
    massive = {"massive": np.abs(x).max() / median, "massive_channel": int(place[-1])} if median else {}
    return {
        **massive,
        **({"effective_rank": energies.sum() ** 2 / (energies**2).sum()} if directed else {}),
        "residual_norm": np.linalg.norm(x, axis=-1).mean(),
    }


def active_units(x: np.ndarray) -> np.ndarray:
    """Which channels exceed a hundredth of the 90th percentile of the magnitudes in any token."""
    ordered = np.sort(np.abs(sampled_elements(x)))
    return np.abs(x).reshape(-1, x.shape[-1]).max(0) > 0.01 * ordered[math.ceil(0.9 * len(ordered)) - 1]
