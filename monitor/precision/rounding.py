"""What rounding to a low-precision format loses of a tensor, from its histogram of magnitudes.

A bin says how many elements are in ``(low, high]``, not where. So every number has an expected value, for elements that are
spread evenly over their bin, and a bound that holds wherever they are. ``docs/precision-advice.md`` derives both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from monitor.sinks import arrow
from monitor.stats.histograms import FORMATS, UPPER
from monitor.stats.partials import Floats

Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Grid:
    """The numbers of a low-precision format, with rounding to nearest.

    Attributes:
        name: A key of ``FORMATS`` of ``monitor.stats.histograms``.
        mantissa: Stored bits of the mantissa.
        lowest: The exponent of the least normal number.
        greatest: The greatest finite number.
        saturates: Whether larger numbers become ``greatest``, as casts to float8 do. Otherwise they become infinite.
    """

    name: str
    mantissa: int
    lowest: int
    greatest: float
    saturates: bool

    @property
    def step(self) -> float:
        """The distance of subnormal numbers."""
        return 2.0 ** (self.lowest - self.mantissa)

    @property
    def usual_error(self) -> float:
        """The expected relative error of normal numbers that are spread evenly between two powers of two."""
        return float(2.0**-self.mantissa / np.sqrt(28.0))

    @property
    def most_error(self) -> float:
        """The greatest relative error of a normal number."""
        half = 2.0 ** -(self.mantissa + 1)
        return half / (1.0 + half)

    def squares(self, ends: Floats) -> Floats:
        """The integral from 0 to each end of the expected squared error of a number there.

        Within a binade the error is even over half the distance of two numbers: its mean square is distance² / 12. What becomes
        zero has itself as its error, and what saturates its distance to the greatest number.
        """
        inside = np.minimum(ends, self.greatest)
        low = 2.0**self.lowest
        binade = np.exp2(np.frexp(np.maximum(inside, low))[1] - 1.0)
        normal = low**3 + (binade**3 - low**3) / 7.0 + binade**2 * (inside - binade)
        rounded = 4.0**-self.mantissa / 12.0 * np.where(inside > low, normal, low**2 * inside)
        found = np.where(inside <= self.step / 2, inside**3 / 3.0, rounded)
        integral: Floats = found + (ends - inside) ** 3 / 3.0
        return integral

    def most(self, ends: Floats) -> Floats:
        """The greatest error of a number up to each end."""
        inside = np.minimum(ends, self.greatest)
        binade = np.exp2(np.frexp(np.nextafter(np.maximum(inside, 2.0**self.lowest), 0.0))[1] - 1.0)
        distance = np.maximum(binade, 2.0**self.lowest) * 2.0**-self.mantissa
        greatest: Floats = np.maximum(np.minimum(distance / 2, inside), ends - inside)
        return greatest


GRIDS: Final = {
    one.name: one
    for one in (
        Grid("e4m3", 3, -6, 448.0, saturates=True),
        Grid("e5m2", 2, -14, 57344.0, saturates=True),
        Grid("fp16", 10, -14, 65504.0, saturates=False),
        Grid("bf16", 7, -126, 2.0**128 - 2.0**120, saturates=False),
    )
}


@dataclass(frozen=True, slots=True)
class Magnitudes:
    """The filled bins of some rows, and what else is known of these rows.

    Attributes:
        row: Of each bin its row, ascending.
        low, high: The ends of each bin: its elements are in ``(low, high]``. The last one of a row ends at ``absmax``.
        elements: In each bin. Zeros are in no bin.
        count: The elements of each row, with zeros.
        absmax, norm: Of each row.
    """

    row: Index
    low: Floats
    high: Floats
    elements: Floats
    count: Floats
    absmax: Floats
    norm: Floats

    @classmethod
    def of(cls, texts: pa.ChunkedArray, absmax: Floats, norm: Floats) -> Magnitudes:
        """Args: texts: Histograms as ``histogram_text`` of ``monitor.stats.histograms`` writes them, none of them null.

        Raises:
            ValueError: A text is not such a histogram.
        """
        coded = texts.combine_chunks().cast(pa.string()).dictionary_encode()
        coded = coded.combine_chunks() if isinstance(coded, pa.ChunkedArray) else coded
        lists = arrow.parsed(pa.chunked_array([coded.dictionary]))
        starts, which = lists.offsets.to_numpy(), coded.indices.to_numpy()
        each = np.diff(starts)[which]
        row = np.repeat(np.arange(len(which)), each)
        place = np.arange(len(row)) - np.repeat(np.cumsum(each) - each, each) + np.repeat(starts[which], each)
        entries = lists.flatten()
        bins = entries.field("bin").to_numpy()[place]
        elements = entries.field("elements").to_numpy()[place].astype(np.float64)
        count = np.bincount(row, elements, len(which)).astype(np.float64)
        kept = (bins > 0) & (elements > 0)
        row, bins, elements = row[kept], bins[kept], elements[kept]
        low = UPPER[bins - 1]
        return cls(row, low, np.maximum(np.minimum(UPPER[bins], absmax[row]), low), elements, count, absmax, norm)

    def __len__(self) -> int:
        return len(self.count)

    def sums(self, of_bins: Floats) -> Floats:
        """The sum over the bins of each row."""
        return np.bincount(self.row, of_bins, len(self)).astype(np.float64)

    def lesser_half(self) -> Floats:
        """How many elements of each bin are among the lesser half of the elements that are not zero."""
        upto = np.cumsum(self.elements)
        first = np.searchsorted(self.row, np.arange(len(self)))
        before = np.concatenate([[0.0], upto])[first]
        half = self.sums(self.elements) / 2
        found: Floats = np.clip(half[self.row] + before[self.row] - (upto - self.elements), 0.0, self.elements)
        return found


class Lost(NamedTuple):
    """What a format loses of each row. Shares are of all elements, errors relative to the norm.

    Attributes:
        underflow, most_underflow: The share that becomes zero without being zero: expected, and at most.
        subnormal, most_subnormal: The share that is not above the least normal number and not lost: it keeps fewer digits.
        saturated, most_saturated: The share that is too large.
        error, most_error: ‖q(x) - x‖ / ‖x‖.
        small_error: The expected error of the lesser half of the elements that are not zero, relative to the norm of that half.
            Outliers, which are most of the norm, do not hide it.
    """

    underflow: Floats
    most_underflow: Floats
    subnormal: Floats
    most_subnormal: Floats
    saturated: Floats
    most_saturated: Floats
    error: Floats
    most_error: Floats
    small_error: Floats


def lost(grid: Grid, rows: Magnitudes, scale: Floats) -> Lost:
    """What a cast of ``x * scale`` loses.

    Args:
        scale: Of each row, finite and above 0.
    """
    limits = FORMATS[grid.name]
    with np.errstate(all="ignore"):
        factor = scale[rows.row]
        low, high = rows.low * factor, rows.high * factor
        zero, most_zero = _shares(rows, low, high, limits.underflows)
        below, most_below = _shares(rows, low, high, 2.0**grid.lowest)
        inside, least_inside = _shares(rows, low, high, limits.overflows, least=True)
        filled = rows.sums(rows.elements) / np.maximum(rows.count, 1)
        over, most_over = np.maximum(filled - inside, 0.0), np.maximum(filled - least_inside, 0.0)
        expected, most, small = _errors(grid, rows, low, high, scale)
        if not grid.saturates:
            expected, most = np.where(over > 0, np.inf, expected), np.where(most_over > 0, np.inf, most)
    return Lost(zero, most_zero, below - zero, most_below, over, most_over, expected, most, small)


def _shares(rows: Magnitudes, low: Floats, high: Floats, end: float, *, least: bool = False) -> tuple[Floats, Floats]:
    """The share of elements up to ``end``: expected, and at most or at least."""
    part = np.clip((end - low) / np.where(high > low, high - low, 1.0), 0.0, 1.0)
    part = np.where(high <= end, 1.0, part)
    bound = high <= end if least else low < end
    total = np.maximum(rows.count, 1)
    return rows.sums(rows.elements * part) / total, rows.sums(rows.elements * bound) / total


def _errors(grid: Grid, rows: Magnitudes, low: Floats, high: Floats, scale: Floats) -> tuple[Floats, Floats, Floats]:
    """The expected error, its bound, and the expected error of the lesser half."""
    width = np.where(high > low, high - low, 1.0)
    each = np.where(high > low, (grid.squares(high) - grid.squares(low)) / width, grid.most(high) ** 2 / 3)
    most = grid.most(high) ** 2
    squares = (rows.norm * scale) ** 2
    normal = low >= 2.0**grid.lowest
    within = normal & (high <= grid.greatest * (1 + 1e-12))
    in_bins = rows.sums(rows.elements * most)
    relative = grid.most_error**2 * squares + rows.sums(np.where(within, 0.0, rows.elements * most))
    half = rows.lesser_half()
    energy = rows.sums(half * (low**2 + low * high + high**2) / 3)
    return (
        _root(rows.sums(rows.elements * each), squares),
        _root(np.minimum(in_bins, relative), squares),
        _root(rows.sums(half * each), energy),
    )


def _root(squares: Floats, of: Floats) -> Floats:
    """The root of a ratio; 0 where nothing is lost."""
    found: Floats = np.where(squares > 0, np.sqrt(squares / of), 0.0)
    return found
