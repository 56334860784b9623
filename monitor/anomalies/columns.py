"""What a rule is given and what it answers: whole columns, never a row at a time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from monitor.stats.partials import NANS, NEGINFS, Floats, Partials

Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Columns:
    """The rows of one kind in one step, as rules see them."""

    partials: Partials

    @cached_property
    def nonfinite(self) -> Flags | None:
        """Which rows are of tensors that hold a NaN or an Inf; None if no row is, as nearly always."""
        counts = self.partials.columns[NANS : NEGINFS + 1]
        return counts.any(axis=0) if counts.size and counts.max() > 0 else None


@dataclass(frozen=True, slots=True)
class Fired:
    """What a rule saw of one statistic.

    Attributes:
        op: The statistic.
        rows: On which the rule fired, ascending.
        means: The running mean that each of their values was compared with; None for a rule that compares with none.
        nonfinite: Whether the rule fired because of a NaN or an Inf.
    """

    op: str
    rows: NDArray[np.int64]
    means: Floats | None = None
    nonfinite: bool = False

    def among(self, chosen: Flags) -> Fired:
        """Those on which ``chosen``, aligned with ``rows``, is true."""
        means = None if self.means is None else self.means[chosen]
        return Fired(self.op, self.rows[chosen], means, self.nonfinite)


class Rule(Protocol):
    """An alert rule. What it remembers of each row lies outside, in ``state``, so that one object judges every kind.

    Attributes:
        name: As the configuration spells it.
        fields: How many numbers it remembers of a row.
    """

    name: ClassVar[str]
    fields: ClassVar[int]

    def judge(self, columns: Columns, state: Floats, /) -> Iterable[Fired]:
        """What it fires on. At most once on a row of a tensor that holds a NaN or an Inf.

        Args:
            state: Shape ``(fields, rows)``, aligned with the rows, changed in place; zeros where a row was never seen.
        """
