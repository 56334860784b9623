"""The threshold of `zeros`, made exact for each precision."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Epsilon:
    """``|x| < eps`` as comparisons between numbers of one precision.

    Rounding eps to float32 can move it across a value of the tensor. ``bound`` is the smallest number of the precision that
    is not below eps, so that for every x of the precision ``|x| < eps`` and ``|x| < bound`` say the same.

    Attributes:
        bound: See above.
        square: bound², rounded to the precision, where comparing squares is exact too; otherwise None. Squares are at hand
            anyway; for an eps whose square underflows they cannot decide.
    """

    bound: float
    square: float | None

    @classmethod
    def of(cls, eps: float, precision: type[np.float32] | type[np.float64]) -> Epsilon:
        bound = precision(eps)
        if float(bound) < eps:
            bound = np.nextafter(bound, precision(np.inf))
        below = np.nextafter(bound, precision(0))
        with np.errstate(under="ignore", over="ignore"):
            square, square_below = bound * bound, below * below
        exact = np.finfo(precision).tiny <= square_below < square < np.inf
        return cls(float(bound), float(square) if exact else None)
