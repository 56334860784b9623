"""Partials: the mergeable numbers that a tensor is reduced to.

The mean of means is wrong as soon as shards differ in size, and norms do not add: two shards with norms 3 and 4 make a tensor
of norm 5. So a kernel never reports results. It reports these partials, which combine exactly, and every op is derived from
them afterwards (``ops.py``).

Over all elements: ``count`` and the counts of NaN, +Inf, -Inf and of |x| < eps. Over the finite ones: ``min``, ``max``, and
three sums that are kept divided by a power of two, so that no finite tensor overflows them:

    sum = Σ x / 2^e        sumsq = Σ x² / 4^e        m2 = Σ (x - mean)² / 4^e        e = exponent, almost always 0

``m2`` stands beside ``sumsq`` because a variance taken as a difference of the other two loses every digit when the mean is
large against the spread. It merges by the pairwise formula of Chan, Golub and LeVeque (1979), "Updating formulae and a
pairwise algorithm for computing sample variances".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

WRITES: Final = 0
COUNT: Final = 1
NANS: Final = 2
POSINFS: Final = 3
NEGINFS: Final = 4
SMALLS: Final = 5
MIN: Final = 6
MAX: Final = 7
SUM: Final = 8
SUMSQ: Final = 9
M2: Final = 10
EXPONENT: Final = 11

COLUMNS: Final = ("writes", "count", "nans", "posinfs", "neginfs", "smalls", "min", "max", "sum", "sumsq", "m2", "exponent")
"""The columns of a table row, float64 each. ``writes`` says whether the row was written since the last seal; the rest are
the partials. Counts are exact up to 2^53."""

PARTIALS: Final = COLUMNS[1:]
COUNTS: Final = ("count", "nans", "posinfs", "neginfs", "smalls")

Floats = NDArray[np.float64]

EMPTY: Final = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, np.inf, -np.inf, 0.0, 0.0, 0.0, 0.0)
"""The row of a tensor without elements (``writes`` aside): the neutral element of ``combine``."""


@dataclass(frozen=True, slots=True)
class Partials:
    """Aligned columns of partials, one entry a row.

    Attributes:
        columns: float64, shape ``(len(COLUMNS), rows)``, contiguous along rows.
    """

    columns: Floats

    @classmethod
    def from_rows(cls, rows: Floats) -> Partials:
        """From table rows, shape ``(rows, len(COLUMNS))``."""
        return cls(np.ascontiguousarray(rows.T))

    def __len__(self) -> int:
        return int(self.columns.shape[1])

    def __getitem__(self, name: str) -> Floats:
        column: Floats = self.columns[COLUMNS.index(name)]
        return column

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_] | slice) -> Partials:
        return Partials(self.columns[:, rows])

    @property
    def finite(self) -> Floats:
        """Number of finite elements of each row."""
        c = self.columns
        finite: Floats = c[COUNT] - c[NANS] - c[POSINFS] - c[NEGINFS]
        return finite


def combine(a: Partials, b: Partials) -> Partials:
    """The partials of the union of two sets of elements, row by row. Associative up to float64 rounding."""
    x, y = a.columns, b.columns
    out = x + y
    out[MIN] = np.minimum(x[MIN], y[MIN])
    out[MAX] = np.maximum(x[MAX], y[MAX])
    exponent = np.maximum(x[EXPONENT], y[EXPONENT])
    down_x, down_y = (exponent - p[EXPONENT] for p in (x, y))
    sum_x, sum_y = _lowered(x[SUM], down_x), _lowered(y[SUM], down_y)
    out[SUM] = sum_x + sum_y
    out[SUMSQ] = _lowered(x[SUMSQ], 2 * down_x) + _lowered(y[SUMSQ], 2 * down_y)
    out[M2] = _lowered(x[M2], 2 * down_x) + _lowered(y[M2], 2 * down_y) + _between(sum_x, a.finite, sum_y, b.finite)
    out[EXPONENT] = exponent
    return Partials(out)


def combine_all(parts: Iterable[Partials]) -> Partials:
    """Combine from left to right: the order is the caller's and decides the last bit."""
    parts = iter(parts)
    total = next(parts)
    for part in parts:
        total = combine(total, part)
    return total


def _lowered(values: Floats, power: Floats) -> Floats:
    lowered: Floats = np.ldexp(values, -power.astype(np.int64))
    return lowered


def _between(sum_x: Floats, n_x: Floats, sum_y: Floats, n_y: Floats) -> Floats:
    """What the distance of the two means adds to m2: (mean_x - mean_y)² n_x n_y / (n_x + n_y)."""
    both = (n_x > 0) & (n_y > 0)
    n_x, n_y = np.where(both, n_x, 1.0), np.where(both, n_y, 1.0)
    between: Floats = np.where(both, (sum_x / n_x - sum_y / n_y) ** 2 * (n_x / (n_x + n_y) * n_y), 0.0)
    return between
