"""What rules remember of rows, kept aligned with the rows of the step at hand."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from monitor.series import NO_MICRO_STEP
from monitor.stats.partials import Floats
from monitor.stats.rows import KindRows

MOST_ABSENT: Final = 200_000
"""Rows that a step lacks are remembered up to this number, or twice as many as it has: names may be new in every step."""


class Aligned:
    """Numbers for the (series, micro-step) of a kind that were seen, in columns.

    Those of the rows seen last stand in front, in the order of these rows, the others behind them, those seen longest ago
    last. A step with the same rows, as nearly all have, costs one comparison; one with others a rearrangement of everything.
    """

    def __init__(self, fields: int) -> None:
        self._series = self._micro_step = np.zeros(0, np.int64)
        self._columns = np.zeros((fields, 0))
        self._present = 0

    def with_rows(self, rows: KindRows) -> Floats:
        """The numbers of these rows, shape ``(fields, rows)``, to be changed in place; zeros where a row is new."""
        here = slice(0, self._present)
        if not (np.array_equal(rows.series, self._series[here]) and np.array_equal(rows.micro_step, self._micro_step[here])):
            self._rearrange(rows)
        return self._columns[:, : self._present]

    def _rearrange(self, rows: KindRows) -> None:
        known = len(self._series)
        series, micro_step = np.append(self._series, rows.series), np.append(self._micro_step, rows.micro_step)
        keys = series * (micro_step.max(initial=NO_MICRO_STEP) + 2) + micro_step + 1
        source = _places(keys[:known], keys[known:])
        absent = np.ones(known + 1, np.bool_)
        absent[source] = absent[known] = False
        rest = np.flatnonzero(absent)[: max(MOST_ABSENT, 2 * len(rows))]
        new = np.zeros((len(self._columns), 1))
        self._columns = np.append(self._columns, new, axis=1).take(np.append(source, rest), axis=1)
        self._series = np.append(rows.series, self._series[rest])
        self._micro_step = np.append(rows.micro_step, self._micro_step[rest])
        self._present = len(rows)


def _places(known: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each wanted key stands among those known; ``len(known)`` where it does not."""
    order = np.argsort(known, kind="stable")  # call order is nearly sorted, which this makes use of
    place = np.searchsorted(known, wanted, sorter=order)
    found = np.append(order, len(known))[place]
    found[np.append(known, -1)[found] != wanted] = len(known)
    return found
