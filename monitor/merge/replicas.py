"""Copies of the same numbers that differ: a lost all-reduce, a corrupted memory, a seed that went wrong."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from monitor.merge.statistics import Index, Statistics
from monitor.stats.features import own_columns
from monitor.stats.partials import Floats

if TYPE_CHECKING:
    from monitor.merge.rows import Rows
    from monitor.merge.statistics import Flags


COMPARED: Final = ("norm", "min", "max", "nans", "infs")
_OF_FEATURES: Final = {"linear_hook": ("frobenius_norm",)}
"""A spectral norm is approached from step to step, and two ranks may be on different ways to it."""

TOLERANCE: Final = 1e-6
"""Relative. Replicas are read by the same code, but perhaps on other devices, which add in another order."""

NONE: Final = -1

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


def references(rows: Rows, first: Index) -> Index:
    """The row that each one is held against; its own number where there is none but itself.

    A replica is recorded once in a step. Its owner may have a row for every micro-step: the last one counts.

    Args:
        rows: In order of steps, and within a step of micro-steps.
        first: For each row the first one of the same step, micro-step and part, the owner's if there is one.
    """
    alone = np.flatnonzero(rows.replica[first])
    own = np.flatnonzero(~rows.replica)
    if not len(alone):
        return first
    key = np.stack([rows.column("step"), rows.known("tensor"), rows.known("part")])[:, np.concatenate([own, alone])]
    part = np.unique(key, axis=1, return_inverse=True)[1].reshape(-1)
    last = np.full(part.max() + 1, NONE)
    np.maximum.at(last, part[: len(own)], first[own])
    found = first.copy()
    found[alone] = np.where(last[part[len(own) :]] == NONE, alone, last[part[len(own) :]])
    return found


def not_compared(rows: Rows, reference: Index) -> Counter[int]:
    """By rank, how many replicas have nothing to be held against."""
    return Counter(rows.rank[rows.replica[reference]].tolist())


def compare(kind: str, rows: Rows, statistics: Statistics, reference: Index, ndigits: int) -> dict[int, Disagreement]:
    """Find the copies that are not what most of the copies are, or if there is no such majority not what the first one is.

    Returns:
        By row.

    Args:
        reference: See ``references``.
        ndigits: Decimals of rows that come from CSV.
    """
    copies = np.flatnonzero((reference != np.arange(len(reference))) & ~rows.replica[reference])
    if not len(copies):
        return {}
    copies = copies[np.argsort(reference[copies], kind="stable")]
    found: dict[int, Disagreement] = {}
    for op in _OF_FEATURES.get(kind, own_columns(kind)) or COMPARED:
        values = _Values.of(op, statistics, ndigits)
        for row, other in _odd(values, copies, reference[copies]):
            found.setdefault(row, _disagreement(kind, rows, row, other, op, values))
    return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True)
class _Values:
    """Of one op, a row each.

    Attributes:
        known: Whether a row has one.
        exact: Whether it was not rounded.
    """

    values: Floats
    known: Flags
    exact: Flags
    ndigits: int

    @classmethod
    def of(cls, op: str, statistics: Statistics, ndigits: int) -> _Values:
        column = statistics.op(op)
        known = column.is_valid().to_numpy(zero_copy_only=False)
        return cls(column.fill_null(0.0).to_numpy(), known, statistics.exact, ndigits)

    def differ(self, one: Index, other: Index | int) -> Flags:
        a, b = self.values[one], self.values[other]
        rounded = ~(self.exact[one] & self.exact[other])
        with np.errstate(invalid="ignore"):
            far = ~(np.abs(a - b) <= _allowed(np.maximum(np.abs(a), np.abs(b)), rounded, self.ndigits))
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        differ: Flags = self.known[one] & self.known[other] & far & ~same
        return differ


def _odd(values: _Values, copies: Index, first: Index) -> Iterator[tuple[int, int]]:
    """Each row that differs, and the one that it differs from.

    Args:
        first: What each of the copies is held against, ascending.
    """
    for each in np.unique(first[values.differ(copies, first)]).tolist():
        group = np.append(each, copies[slice(*np.searchsorted(first, [each, each + 1]))])
        usual = _usual(values, group)
        yield from ((row, usual) for row in group[values.differ(group, usual)].tolist())


def _usual(values: _Values, group: Index) -> int:
    """The first of the copies that most of them agree with, if there is one; otherwise the first."""
    first = int(group[0])
    others = group[values.differ(group, first)]
    if 2 * len(others) > len(group):  # what more than half of all have is in the middle of these
        middle = others[np.argsort(values.values[others], kind="stable")[len(others) // 2]]
        alike = others[~values.differ(others, middle)]
        return int(alike[0]) if 2 * len(alike) > len(group) else first
    return first


def _allowed(scale: Floats, rounded: Flags, ndigits: int) -> Floats:
    """How far two values may be from each other. Half a unit in the last decimal is lost where one was rounded."""
    unit = math.pow(10.0, -min(ndigits, 16))
    finite = np.where(np.isfinite(scale), scale, 0.0)
    rounding = unit * np.where((finite < _PLAIN_FROM) | (finite >= _PLAIN_BELOW), finite, 1.0)
    allowed: Floats = TOLERANCE * finite + np.where(rounded, rounding, 0.0)
    return allowed


def _disagreement(kind: str, rows: Rows, row: int, other: int, op: str, values: _Values) -> Disagreement:
    name = rows.text("global_name", np.array([row]))[0].as_py()
    step, micro_step = int(rows.column("step")[row]), int(rows.micro_step()[row])
    value, others_value = values.values[[row, other]].tolist()
    return Disagreement(kind, name, step, micro_step, int(rows.rank[row]), int(rows.rank[other]), op, value, others_value)
