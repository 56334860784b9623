"""``AnomalyNan``: values that are not finite, and those that are too large."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Final

import numpy as np

from monitor.anomalies.columns import Columns, Fired
from monitor.stats.partials import MAX, MIN, NANS, Floats


class AnomalyNan:
    """Fires on a tensor with a NaN (statistic ``nans``), else with an Inf (``infs``), else with a magnitude above the
    threshold, if there is one (``absmax``): at most once a row.
    """

    name: ClassVar[str] = "AnomalyNan"
    fields: ClassVar[int] = 0

    def __init__(self, threshold: float | None = None) -> None:
        self._threshold: Final = threshold

    def judge(self, columns: Columns, _state: Floats, /) -> Iterator[Fired]:
        """See ``Rule``."""
        bad = columns.nonfinite
        if bad is not None:
            nans = columns.partials.columns[NANS] > 0
            yield Fired("nans", np.flatnonzero(nans), nonfinite=True)
            yield Fired("infs", np.flatnonzero(bad & ~nans), nonfinite=True)
        if self._threshold is not None:
            yield from self._too_large(columns, self._threshold)

    def _too_large(self, columns: Columns, threshold: float) -> Iterator[Fired]:
        """Extremes are over the finite elements, and of none of them -Inf at most."""
        low, high = columns.partials.columns[MIN], columns.partials.columns[MAX]
        if not len(low) or (high.max() <= threshold and low.min() >= -threshold):
            return
        large = (high > threshold) | (low < -threshold)
        yield Fired("absmax", np.flatnonzero(large if columns.nonfinite is None else large & ~columns.nonfinite))
