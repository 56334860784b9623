"""The histograms of a step, as TensorBoard shows them: a list of buckets, each a left edge, a right edge and a count.

The counts are those of the bins, untouched. What has to be found for them is an axis on which people can read them, and edges
that are finite.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.plugins.histogram import metadata
from tensorboard.util.tensor_util import make_tensor_proto

from monitor.series import ADAM_KINDS, SeriesTable
from monitor.sinks.cells import encodable
from monitor.stats.histograms import FIRST_POWER, MAGNITUDES, UNIT_BINS, UNIT_UPPER, UPPER
from monitor.stats.ops import counted
from monitor.stats.partials import Floats, Partials
from monitor.stats.rows import KindRows, StepRows

SIGNED: Final = "histogram"
"""Ends the tags of histograms of signed numbers."""

_OF_MAGNITUDES: Final = metadata.create_summary_metadata(
    display_name=None,
    description=(
        "Elements by the base-2 logarithm of their magnitude: at −10 stand those around 2⁻¹⁰. "
        "Zeros, which have no logarithm, are left out, and so are NaN and Inf."
    ),
)
_OF_SIGNED: Final = metadata.create_summary_metadata(
    display_name=None,
    description=(
        f"Elements by their value: {UNIT_BINS} equal bins between −1 and 1 and one for all that lies beyond at each side, "
        "which ends at the least and at the greatest element. NaN and Inf are left out."
    ),
)

_POWERS: Final[Floats] = np.log2(UPPER[1:-1])
_LOWEST: Final = float(FIRST_POWER - 1)
"""Where the bin of the smallest magnitudes begins: behind it single precision has nothing."""


class Histograms:
    """Spells the histograms of one rank."""

    def __init__(self, series: SeriesTable, rank: int) -> None:
        self._series = series
        self._rank = rank

    def of(self, rows: StepRows) -> Iterator[memoryview]:
        """Fields ``value`` of a summary: of magnitudes where they are among the ops, of signed numbers of ``ADAM_KINDS``."""
        for kind in rows.kinds:
            if kind in ADAM_KINDS:
                yield from self._spelled(rows.read(kind), SIGNED, _OF_SIGNED)
            elif MAGNITUDES in rows.ops_of(kind):
                yield from self._spelled(rows.read(kind), MAGNITUDES, _OF_MAGNITUDES)

    def _spelled(self, rows: KindRows, ending: str, described: SummaryMetadata) -> Iterator[memoryview]:
        buckets_of = signed if ending == SIGNED else magnitudes
        for row in np.flatnonzero(counted(rows.partials)).tolist():
            buckets = buckets_of(rows.partials, row)
            if len(buckets):
                tag = self._series[rows.series[row]].tag(self._rank, int(rows.micro_step[row]))
                yield histogram_value(f"{tag}_{ending}", buckets, described)


def histogram_value(tag: str, buckets: Floats, described: SummaryMetadata) -> memoryview:
    """A field ``value`` of a summary that is a histogram.

    Args:
        buckets: Left edge, right edge and count of each bucket, ascending, float64, shape ``(buckets, 3)``.
    """
    summary = Summary()
    summary.value.add(tag=encodable(tag), metadata=described, tensor=make_tensor_proto(buckets, dtype=np.float64))
    return memoryview(summary.SerializeToString())


def magnitudes(partials: Partials, row: int) -> Floats:
    """Buckets over log2|x|, from the first that has elements to the last; none where all elements are zero.

    The bin for what single precision does not reach ends at the greatest magnitude there is.
    """
    counts = _histogram(partials, row)[1:]
    filled = np.flatnonzero(counts)
    if not len(filled):
        return np.empty((0, 3))
    greatest = max(abs(partials["min"][row]), abs(partials["max"][row]), UPPER[-2])
    edges = np.array([_LOWEST, *_POWERS, np.log2(greatest)])
    return _buckets(edges, counts, slice(int(filled[0]), int(filled[-1]) + 1))


def signed(partials: Partials, row: int) -> Floats:
    """Buckets over x: always those between -1 and 1, so that the axis stays, and those beyond where they have elements.

    None where a bin beyond has elements and the extremes say otherwise.
    """
    counts = _histogram(partials, row)[: len(UNIT_UPPER)]
    below, above = counts[0] > 0, counts[-1] > 0
    least, greatest = partials["min"][row], partials["max"][row]
    if (below and not -np.inf < least <= UNIT_UPPER[0]) or (above and not UNIT_UPPER[-2] <= greatest < np.inf):
        return np.empty((0, 3))
    edges = np.array([least, *UNIT_UPPER[:-1], greatest])
    return _buckets(edges, counts, slice(0 if below else 1, len(counts) - (0 if above else 1)))


def _histogram(partials: Partials, row: int) -> NDArray[np.int64]:
    assert partials.histogram is not None, "of rows that were counted"
    counts: NDArray[np.int64] = partials.histogram[row]
    return counts


def _buckets(edges: Floats, counts: NDArray[np.int64], some: slice) -> Floats:
    return np.column_stack([edges[:-1], edges[1:], counts])[some]
