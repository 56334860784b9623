"""What features come to: sums, so that calls and ranks add up. Numbers of a device stay there, as tensors with one element."""

from __future__ import annotations

from typing import Any, NamedTuple

Number = Any
"""A number, or a tensor with one element."""


class Spread(NamedTuple):
    """Of attention weights, sums over queries.

    Attributes:
        queries: How many there were; without those that see no key at all.
        entropy: Of the attention weights of each, in nats.
        greatest: The greatest attention weight of each.
    """

    queries: Number
    entropy: Number
    greatest: Number


class Norms(NamedTuple):
    """Of a matrix: the square of the Frobenius norm, and an estimate of the spectral norm from below.

    Attributes:
        matrices: 1 where the estimate is certain; 2 where it is not: the row then has no spectral norm.
    """

    squares: Number
    spectral: Number
    matrices: Number


class Similarity(NamedTuple):
    """Of the rows of a matrix, over ordered pairs of two different ones: how many there are, the sum of their cosines."""

    pairs: int
    cosines: Number


class Routing(NamedTuple):
    """Of some tokens: how many, and the sum of the entropies of the softmax over the experts, in nats."""

    tokens: int
    entropy: Number
