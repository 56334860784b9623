"""When a spectral norm is certain: Lanczos with A = W^T W from a random vector, and a bound on what it can have missed.

After k products Lanczos knows a polynomial p of degree k with ``p(A) start = a vector of norm 1``. So an eigenvalue λ of A, of
whose eigenvector ``start`` holds the part γ, satisfies ``|γ p(λ)| <= 1``. A random start holds less than a tiny γ with a tiny
probability only. Beyond the eigenvalues found, p grows fast: where it exceeds 1 / γ there is no eigenvalue (Hochstenbach,
"Probabilistic upper bounds for the matrix two-norm", 2013). A matrix whose first singular value stands out takes 5 products,
one whose singular values lie as close as those of random numbers takes 40.

Each row begins anew: a vector that is kept from step to step never finds a direction that is orthogonal to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

WITHIN: Final = 0.01
"""By what part of itself the spectral norm may exceed what is reported."""

ALLOWED: Final = 1 / (1 - WITHIN) ** 2
"""By what the square of the spectral norm may exceed that of what is reported."""

RISK: Final = 1e-4
"""The probability, at most, that the random start holds less of the first singular vector than the bound takes for granted."""

MOST: Final = 96
"""Products, at most, where each number may be read at once. A matrix that needs more has no spectral norm in its row."""

UNREAD: Final = 48
"""Products on an accelerator, where reading a number would wait for all that was asked of it before."""

SQUARINGS: Final = 12
"""2^12 steps of power iteration in the space of the products, which has ``UNREAD`` dimensions at most."""

NOISE: Final = 0.5
"""Of what is left of a vector, the part that must still be left when it is taken away again."""

FARTHEST: Final = 126
"""Powers of two that elements are scaled by reach so far: 2^-126 is the smallest normal float32."""

SEED: Final = 20_251_207
CERTAIN, UNCERTAIN = 1.0, 2.0
"""How many matrices a row says it is of: a row of two has no spectral norm, whatever it is combined with."""


@lru_cache(maxsize=64)
def start(columns: int) -> NDArray[np.float32]:
    """The same vector each time, of norm 1, not to be changed.

    No element is near 0: the singular vectors of sparse matrices are unit vectors.
    """
    generator = np.random.Generator(np.random.PCG64(SEED))
    drawn = generator.uniform(0.5, 1.5, columns) * generator.choice((-1.0, 1.0), columns)
    unit: NDArray[np.float32] = (drawn / np.linalg.norm(drawn)).astype(np.float32)
    return unit


def growth_needed(columns: int) -> float:
    """1 / γ. A weighted sum of independent elements, each of density 1/2, has a density of at most 1/√2 (Rogozin, Ball)."""
    length = math.sqrt(columns * 13 / 12)
    return length * math.sqrt(2) / RISK


class Tridiagonal:
    """What Lanczos has found of a matrix without negative eigenvalues.

    Attributes:
        largest: The largest eigenvalue found, when it was last looked for.
        certain: Whether no eigenvalue is greater than ``ALLOWED`` times that.
    """

    def __init__(self, columns: int) -> None:
        self._diagonal: list[float] = []
        self._beside: list[float] = []
        self._columns, self._look_at = columns, 2
        self.largest, self.certain = 0.0, False

    def add(self, along: float, before: float, beside: float) -> bool:
        """Take in a product. Whether the largest eigenvalue is certain.

        Args:
            along: The part of the product along the vector that was multiplied.
            before: The length of what is left when the parts along all vectors so far are taken away.
        beside: The same when they are taken away once more, since the first time rounds. If that is much less, there was
                nothing but rounding.
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
        """Evaluate the polynomial where the next eigenvalue is allowed: it grows from step to step there."""
        allowed, needed = self.largest * ALLOWED, growth_needed(self._columns)
        before, value, last = 0.0, 1.0, 0.0
        for along, beside in zip(self._diagonal, self._beside, strict=True):
            before, value, last = value, ((allowed - along) * value - last * before) / beside, beside
            if value > needed:  # the polynomial of each degree is a bound
                return True
        return False


def largest_eigenvalue(diagonal: Sequence[float], beside: Sequence[float]) -> float:
    """Of a symmetric tridiagonal matrix without negative eigenvalues."""
    size = len(diagonal)
    lower = np.zeros(size * size)
    lower[:: size + 1] = diagonal
    lower[size :: size + 1] = beside[:-1]
    return max(float(np.linalg.eigvalsh(lower.reshape(size, size))[-1]), 0.0)
