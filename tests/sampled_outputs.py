"""The samples of an output that ``activation_hook`` looks at, by their definition."""

from __future__ import annotations

import itertools
import math

import numpy as np


def sampled_elements(x: np.ndarray) -> np.ndarray:
    """Every n-th element in the order of the dimensions: at most 16,384, where n and the number of channels are coprime."""
    distance = next(n for n in itertools.count(1) if x.size <= n * 16_384 and math.gcd(n, x.shape[-1]) == 1)
    return x.ravel()[::distance]


def sampled_tokens(x: np.ndarray) -> np.ndarray:
    """Every n-th token, at most 64."""
    tokens = x.reshape(-1, x.shape[-1])
    return tokens[:: next(n for n in itertools.count(1) if len(tokens) <= n * 64)]
