"""What there is of the rows of a kind, in shards and in merged tables."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from monitor.sinks.arrow import FILLED, HISTOGRAM, PARTIALS, SUMS
from monitor.stats.features import own_columns
from monitor.stats.histograms import LOSSES, MAGNITUDES
from monitor.stats.ops import NUMERIC_OPS, is_of

Fields = Iterable[tuple[str, pa.DataType]]

_PARTIALS: Final = [(name, pa.float64() if name in SUMS else pa.int64()) for name in PARTIALS]


@dataclass(frozen=True, slots=True)
class Columns:
    """Of one kind.

    Attributes:
        ops: In the order in which they stand in merged tables: of features their own columns. ``magnitude_histogram`` is text
            there, and as a number how many elements were counted.
        histogram: Whether rows may have a histogram of magnitudes.
    """

    kind: str
    ops: tuple[str, ...] = NUMERIC_OPS
    histogram: bool = False

    @classmethod
    def of(cls, kind: str, *, histograms: bool) -> Columns:
        """Args: histograms: Whether the job has counted magnitudes."""
        own = own_columns(kind)
        if own or not histograms or not is_of(MAGNITUDES, kind):
            return cls(kind, own or NUMERIC_OPS)
        return cls(kind, (*NUMERIC_OPS, *LOSSES, MAGNITUDES), histogram=True)

    @property
    def numbers(self) -> tuple[str, ...]:
        """Those of the ops that are numbers."""
        return tuple(op for op in self.ops if op != MAGNITUDES)

    def exact(self, identity: Fields) -> pa.Schema:
        """Of rows whose partials are known."""
        return pa.schema([*identity, *_PARTIALS, *self._histogram()])

    def rounded(self, identity: Fields) -> pa.Schema:
        """Of rows of which only ops were kept; null is what is not known."""
        return pa.schema([*identity, *((op, pa.float64()) for op in self.numbers), *self._histogram()])

    def _histogram(self) -> list[tuple[str, pa.DataType]]:
        return [(HISTOGRAM, FILLED)] if self.histogram else []
