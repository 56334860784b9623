"""Copies of the same numbers that differ: a lost all-reduce, a corrupted memory, a seed that went wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from monitor.merge.statistics import Index, Statistics
from monitor.stats.partials import Floats

if TYPE_CHECKING:
    from monitor.merge.reduction import Flags, Rows

COMPARED: Final = ("norm", "min", "max", "nans", "infs")
TOLERANCE: Final = 1e-6
"""Relative. Replicas are read by the same code, but perhaps on other devices, which add in another order."""

_PLAIN_FROM: Final = 1e-3
_PLAIN_BELOW: Final = 1e15
"""Between these CSV keeps so many decimals, of smaller and larger magnitudes so many digits."""


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A copy that is not what another rank has.

    Attributes:
        difference: Of the values; NaN where one of them is.
    """

    kind: str
    name: str
    step: int
    micro_step: int
    rank: int
    other: int
    op: str
    value: float
    others_value: float

    @property
    def difference(self) -> float:
        return abs(self.value - self.others_value) if self.value != self.others_value else 0.0


def compare(kind: str, rows: Rows, statistics: Statistics, with_row: Index, ndigits: int) -> list[Disagreement]:
    """Hold each row against the one that stands for the same part.

    Args:
        with_row: For each row the number of the other one.
        ndigits: Decimals of rows that come from CSV.
    """
    copies = np.flatnonzero((with_row != np.arange(len(with_row))) & ~rows.replica[with_row])
    if not len(copies):
        return []
    found: dict[int, Disagreement] = {}
    for op in COMPARED:
        for row in copies[_differ(op, statistics, copies, with_row[copies], ndigits)].tolist():
            other = int(with_row[row])
            values = (statistics.value(op, row), statistics.value(op, other))
            found.setdefault(row, _disagreement(kind, rows, row, other, op, values))
    return [found[row] for row in sorted(found)]


def _differ(op: str, statistics: Statistics, one: Index, other: Index, ndigits: int) -> Flags:
    column = statistics.op(op)
    known = column.is_valid().to_numpy(zero_copy_only=False)
    values = column.fill_null(0.0).to_numpy()
    a, b = values[one], values[other]
    rounded = ~(statistics.exact[one] & statistics.exact[other])
    with np.errstate(invalid="ignore"):
        far = ~(np.abs(a - b) <= _allowed(np.maximum(np.abs(a), np.abs(b)), rounded, ndigits))
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    differ: Flags = known[one] & known[other] & far & ~same
    return differ


def _allowed(scale: Floats, rounded: Flags, ndigits: int) -> Floats:
    """How far two values may be from each other. Half a unit in the last decimal is lost where one was rounded."""
    unit = math.pow(10.0, -min(ndigits, 16))
    finite = np.where(np.isfinite(scale), scale, 0.0)
    rounding = unit * np.where((finite < _PLAIN_FROM) | (finite >= _PLAIN_BELOW), finite, 1.0)
    allowed: Floats = TOLERANCE * finite + np.where(rounded, rounding, 0.0)
    return allowed


def _disagreement(
    kind: str, rows: Rows, row: int, other: int, op: str, values: tuple[float | None, float | None]
) -> Disagreement:
    value, others_value = (math.nan if one is None else one for one in values)
    name = rows.text("global_name", np.array([row]))[0].as_py()
    step, micro_step = int(rows.column("step")[row]), int(rows.micro_step()[row])
    return Disagreement(kind, name, step, micro_step, int(rows.rank[row]), int(rows.rank[other]), op, value, others_value)
