"""Histograms of magnitudes by power of two, and the elements that would underflow or overflow in low-precision formats.

A bin holds the elements with ``upper[i - 1] < |x| <= upper[i]``; the first bin holds the zeros. The edges are the powers of two
of float32, and one more edge where each low-precision format begins to overflow. So the elements that a format would lose are a
sum of whole bins. Elements of float64 are counted after rounding to float32; those beyond its range are in the bins at the
ends, never among the zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]
"""The elements in each bin of each row, shape ``(rows, BINS)``."""


@dataclass(frozen=True, slots=True)
class LowPrecisionFormat:
    """A low-precision format with rounding to nearest, ties to even.

    Attributes:
        underflows: The greatest magnitude that becomes zero: half of the smallest subnormal.
        overflows: The greatest float32 that does not become infinite, NaN or saturated.
    """

    underflows: float
    overflows: float


def _below(limit: float) -> float:
    """The float32 just below ``limit``: numbers from ``limit`` on round up beyond the format."""
    return float(np.nextafter(np.float32(limit), np.float32(0)))


FORMATS: Final = {
    "fp16": LowPrecisionFormat(2.0**-25, _below(65520.0)),
    "bf16": LowPrecisionFormat(2.0**-134, _below(2.0**128 - 2.0**119)),
    "e4m3": LowPrecisionFormat(
        2.0**-10, 464.0
    ),  # a tie between 448, the greatest number, and the next one beyond rounds to 448
    "e5m2": LowPrecisionFormat(2.0**-17, _below(61440.0)),
}

FIRST_POWER: Final = -149
LAST_POWER: Final = 128

_POWERS: Final = [2.0**power for power in range(FIRST_POWER, LAST_POWER + 1)]

UPPER: Final = np.array(sorted({0.0, *_POWERS, *(one.overflows for one in FORMATS.values()), np.inf}))
"""The greatest magnitude in each bin, float64, shape ``(BINS,)``. The last bin is for magnitudes beyond float32."""

BINS: Final = len(UPPER)

UNIT_BINS: Final = 64
UNIT_UPPER: Final = np.array([*np.linspace(-1.0, 1.0, UNIT_BINS + 1), np.inf])
"""The upper ends of the bins of a histogram of signed numbers, most of which are between -1 and 1, float64."""

MAGNITUDES: Final = "magnitude_histogram"
LOSSES: Final = tuple(f"{what}_{name}" for name in FORMATS for what in ("underflow", "overflow"))
"""Ops derived from the histogram: the fraction of all elements (``count``) that a format would lose."""

PERCENTILES: Final = {
    "abs_p01": 0.01,
    "abs_p05": 0.05,
    "abs_p25": 0.25,
    "abs_p50": 0.5,
    "abs_p75": 0.75,
    "abs_p95": 0.95,
    "abs_p99": 0.99,
    "abs_p999": 0.999,
}
"""Ops derived from the histogram: the magnitude that at least this share of the finite elements do not exceed."""

COUNTED: Final = (*LOSSES, *PERCENTILES)
"""All numbers that are derived from the histogram."""

HISTOGRAM_OPS: Final = (MAGNITUDES, *COUNTED)


def lost_elements(op: str, counts: Counts) -> Counts:
    """The number of elements of each row that one of ``LOSSES`` counts. Zeros do not underflow; Inf and NaN are in no bin."""
    what, _, name = op.partition("_")
    if what == "underflow":
        bins = slice(1, int(np.searchsorted(UPPER, FORMATS[name].underflows)) + 1)
    else:
        bins = slice(int(np.searchsorted(UPPER, FORMATS[name].overflows)) + 1, BINS)
    elements: Counts = counts[:, bins].sum(axis=1)
    return elements


_ROWS: Final = 4096
"""Rows whose histograms are summed up at a time."""

_FLAT: Final = 1e-6
"""Growth in place of none, since formulas divide by it."""


STEEPEST: Final = 12.0
"""The most powers of two by which the number of elements changes from one power of two to the next."""


def percentiles(op: str, counts: Counts, greatest: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """One of ``PERCENTILES`` of each row, and which rows have it: those whose element is in a bin with two ends.

    The element lies in the same bin as the result, so each is less than twice the other. Within the bin, the number of elements
    is taken to grow or to fall as it does from the bin below to the bin above.

    Args:
        greatest: The greatest magnitude of each row.
    """
    found, known = np.zeros(len(counts)), np.zeros(len(counts), dtype=np.bool_)
    filled = np.flatnonzero(counts.any(axis=0))
    if not len(filled):
        return found, known
    # Most of the bins are empty in all rows. The next ones on both sides stay, since formulas look at neighbours.
    first, end = max(int(filled[0]) - 1, 0), min(int(filled[-1]) + 2, BINS)
    for start in range(0, len(counts), _ROWS):
        some = counts[start : start + _ROWS, first:end]
        rows, until = np.arange(len(some)), np.cumsum(some, axis=1)
        rank = np.maximum(np.ceil(PERCENTILES[op] * until[:, -1]), 1)
        last = end - first - 1
        place = np.minimum((until < rank[:, np.newaxis]).sum(axis=1), last)
        bins = place + first
        within, below = some[rows, place], some[rows, np.maximum(bins - 1, 1) - first]
        share = (rank - until[rows, place] + within - 0.5) / np.maximum(within, 1)
        growth = np.log2((some[rows, np.minimum(place + 1, last)] + 1) / (below + 1)) / 2
        growth = np.clip(np.where(np.abs(growth) < _FLAT, _FLAT, growth), -STEEPEST, STEEPEST)
        share = np.log2(1 + share * (np.exp2(growth) - 1)) / growth
        known[start : start + _ROWS] = (until[:, -1] > 0) & (bins < BINS - 1)
        upper = np.where(bins < BINS - 1, UPPER[bins], 1)
        lower = np.where(bins > 1, UPPER[bins - 1], UPPER[1] / 2)
        found[start : start + _ROWS] = np.where(bins > 0, lower * (upper / np.where(lower > 0, lower, 1)) ** share, 0.0)
    return np.minimum(found, greatest), known


def upper_text(upper: float) -> str:
    """The upper end of a bin as text."""
    return f"{upper:.8g}"


def histogram_text(counts: NDArray[np.int64]) -> str:
    """A row's histogram as text: upper end and elements of each bin that is not empty, for example ``0:12 0.5:7 1:3``."""
    filled = np.flatnonzero(counts)
    return " ".join(f"{upper_text(UPPER[i])}:{counts[i]}" for i in filled.tolist())
