"""The stopping rule for spectral norms: Lanczos on A = W^T W from a random vector, with a bound on the error.

After k products Lanczos has a polynomial p of degree k with ``p(A) start = a vector of norm 1``. Let γ be the component of
``start`` along the eigenvector of an eigenvalue λ of A. Then ``|γ p(λ)| <= 1``. The probability that a random start has a
component below a tiny γ is tiny. Beyond the eigenvalues found, p grows fast. Where p exceeds 1 / γ there is no eigenvalue
(Hochstenbach, "Probabilistic upper bounds for the matrix two-norm", 2013). A matrix with a dominant first singular value takes
5 products. A matrix of random numbers, whose singular values are close to each other, takes 40.

Each row starts from the same vector. A vector that is kept from step to step never finds a direction orthogonal to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

WITHIN: Final = 0.01
"""Relative error: the true spectral norm may be larger than the reported one by this fraction of itself."""

ALLOWED: Final = 1 / (1 - WITHIN) ** 2
"""The largest ratio of the squares of the true and the reported spectral norm."""

RISK: Final = 1e-4
"""Upper bound of the probability that the start's component along the first singular vector is smaller than assumed."""

MOST: Final = 96
"""Maximum number of products where numbers can be read at once. A matrix that needs more has no spectral norm."""

UNREAD: Final = 48
"""Number of products on an accelerator, where reading a number would wait for all queued operations."""

SQUARINGS: Final = 12
"""2^12 steps of power iteration in the Krylov space, which has at most ``UNREAD`` dimensions."""

NOISE: Final = 0.5
"""The fraction of a vector's length that a second orthogonalization must leave. Below it, the vector is rounding noise."""

FARTHEST: Final = 126
"""The largest exponent of the powers of two that scale elements: 2^-126 is the smallest normal float32."""

SEED: Final = 20_251_207
CERTAIN, UNCERTAIN = 1.0, 2.0
"""The number of matrices that a row states. A row of two matrices has no spectral norm, and no combination with it has one."""


@lru_cache(maxsize=64)
def start(columns: int) -> NDArray[np.float32]:
    """The start vector of norm 1, the same in each call. It must not be changed.

    No element is near 0, because singular vectors of sparse matrices are unit vectors.
    """
    generator = np.random.Generator(np.random.PCG64(SEED))
    drawn = generator.uniform(0.5, 1.5, columns) * generator.choice((-1.0, 1.0), columns)
    unit: NDArray[np.float32] = (drawn / np.linalg.norm(drawn)).astype(np.float32)
    return unit


def growth_needed(columns: int) -> float:
    """1 / γ: a weighted sum of independent elements, each of density 1/2, has a density of at most 1/√2 (Rogozin, Ball)."""
    length = math.sqrt(columns * 13 / 12)
    return length * math.sqrt(2) / RISK


class Tridiagonal:
    """The tridiagonal matrix of Lanczos, for a matrix without negative eigenvalues.

    Attributes:
        largest: The largest eigenvalue at the last check.
        certain: Whether no eigenvalue is larger than ``ALLOWED`` times ``largest``.
    """

    def __init__(self, columns: int) -> None:
        self._diagonal: list[float] = []
        self._beside: list[float] = []
        self._columns, self._look_at = columns, 2
        self.largest, self.certain = 0.0, False

    def add(self, along: float, before: float, beside: float) -> bool:
        """Add a product. Returns whether the largest eigenvalue is certain.

        Args:
            along: The component of the product along the vector that was multiplied.
            before: The length of the product after orthogonalization against all vectors so far.
            beside: The length after a second orthogonalization, which removes rounding errors of the first. A much smaller
                length means that only rounding noise was left.
        """
        beside = beside if beside > NOISE * before else 0.0
        self._diagonal.append(along)
        self._beside.append(beside)
        size = len(self._diagonal)
        exhausted = beside == 0 or size == self._columns
        if exhausted or size == MOST or size >= self._look_at:
            self._look_at = size + max(1, size // 4)
            self.largest = largest_eigenvalue(self._diagonal, self._beside)
            self.certain = exhausted or self._grows()
        return self.certain

    def _grows(self) -> bool:
        """Whether the polynomial exceeds the bound at ``ALLOWED`` times the largest eigenvalue; it grows with each product."""
        allowed, needed = self.largest * ALLOWED, growth_needed(self._columns)
        before, value, last = 0.0, 1.0, 0.0
        for along, beside in zip(self._diagonal, self._beside, strict=True):
            before, value, last = value, ((allowed - along) * value - last * before) / beside, beside
            if value > needed:  # the polynomial of any degree gives a bound
                return True
        return False


def largest_eigenvalue(diagonal: Sequence[float], beside: Sequence[float]) -> float:
    """The largest eigenvalue of a symmetric tridiagonal matrix without negative eigenvalues."""
    size = len(diagonal)
    lower = np.zeros(size * size)
    lower[:: size + 1] = diagonal
    lower[size :: size + 1] = beside[:-1]
    return max(float(np.linalg.eigvalsh(lower.reshape(size, size))[-1]), 0.0)
