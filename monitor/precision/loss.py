"""How much the loss of a step can change if the operands of a GEMM are rounded, from recorded norms.

To first order the loss changes by ⟨∂L/∂x, δx⟩ + ⟨∂L/∂W, δW⟩, which is at most ‖∂L/∂x‖ ‖δx‖ + ‖∂L/∂W‖ ‖δW‖. Errors of rounding
have no direction. So what is expected is smaller by the root of the number of elements, and the second order counts, too: both
come from the error of the output, which has the relative errors of the operands. ``docs/precision-advice.md`` derives this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from monitor.precision.judging import FP8, Errors
from monitor.precision.operands import GRADIENT, INPUT, RESULTS, WEIGHT, Gemm, OperandRows
from monitor.precision.rounding import Index
from monitor.stats.partials import Floats

FORWARD: Final = (INPUT, WEIGHT)
"""The operands on which the loss of a step depends."""


class Effect(NamedTuple):
    """What rounding an operand does to the loss of a step, for each GEMM the most of all steps.

    Attributes:
        most: A bound of the first order.
        variance: The expected square of the first order.
        curvature: The expected second order, which only raises the loss.
    """

    most: Floats
    variance: Floats
    curvature: Floats


Judged = tuple[OperandRows, Mapping[str, Errors]]
"""Rows, and their errors by format."""


@dataclass(frozen=True, slots=True)
class Joined:
    """The rows of inputs with what belongs to them, in groups: a GEMM, a step and a rank.

    Attributes:
        group: Of each row its group.
        gemm: Of each group.
        place: Of each group the row of its weight.
        complete: Of each group, whether everything needed is there for this step, on all ranks.
        taken, of_input: Norms for each row: of the input and of its gradient.
        weight, of_weight: Norms for each group: of the weight and of its gradient.
        square: For each row ‖∂L/∂y‖² ‖y‖² / n, with the output y of n elements, or the same of the input: the lesser one.
        tokens: Of each row the number of vectors that are multiplied.
    """

    group: Index
    gemm: Index
    place: Index
    complete: NDArray[np.bool_]
    taken: Floats
    of_input: Floats
    weight: Floats
    of_weight: Floats
    square: Floats
    tokens: Floats

    def sums(self, of_rows: Floats) -> Floats:
        """The sum over the rows of each group."""
        return np.bincount(self.group, of_rows, len(self.gemm)).astype(np.float64)


class LossEffects:
    """The effects of all GEMMs, which adds steps, some at a time."""

    def __init__(self, gemms: Sequence[Gemm]) -> None:
        self._widths = np.array([max(1, one.width) for one in gemms], dtype=np.float64)
        self.known: NDArray[np.bool_] = np.zeros(len(gemms), dtype=np.bool_)
        """Of each GEMM, whether the effects of any step are known."""
        self._effects = {
            (what, name): Effect(*(np.zeros(len(gemms)) for _ in Effect._fields)) for what in FORWARD for name in FP8
        }

    def of(self, what: str, name: str) -> Effect:
        """The effect of an operand in a format."""
        return self._effects[what, name]

    def add(self, judged: Mapping[str, Judged], norms: Mapping[str, OperandRows | None]) -> None:
        """Add some steps.

        Args:
            judged: By operand; those without rows are absent.
            norms: Rows of ``OF_INPUT``, ``OF_WEIGHT`` and ``OUTPUT``.
        """
        if not all(what in judged and len(judged[what][0]) for what in (INPUT, WEIGHT, GRADIENT)):
            return
        rows, errors = judged[INPUT]
        weights, weight_errors = judged[WEIGHT]
        joined = _joined(rows, weights, judged[GRADIENT][0], norms, self._widths)
        tokens = joined.sums(joined.tokens)
        for name in FP8:
            one = errors[name]
            squares = joined.square * one.expected**2
            curvature = joined.sums(tokens[joined.group] * squares) / 2
            most = joined.sums(one.most * joined.taken * joined.of_input)
            self._raise((INPUT, name), joined, Effect(most, joined.sums(squares), curvature))
            one = Errors(*(each[joined.place] for each in weight_errors[name]))
            apart = joined.sums(joined.square) * one.expected**2
            together = (one.expected * joined.weight * joined.of_weight) ** 2 / weights.count[joined.place]
            variance = np.maximum(apart, np.minimum(together, tokens * apart))
            curvature = joined.sums(tokens[joined.group] * joined.square) * one.expected**2 / 2
            self._raise((WEIGHT, name), joined, Effect(one.most * joined.weight * joined.of_weight, variance, curvature))

    def _raise(self, key: tuple[str, str], joined: Joined, effect: Effect) -> None:
        complete = joined.complete & np.isfinite(np.sum(effect, axis=0))
        gemm = joined.gemm[complete]
        self.known[gemm] = True
        for known, one in zip(self._effects[key], effect, strict=True):
            np.maximum.at(known, gemm, one[complete])


def _joined(
    rows: OperandRows, weights: OperandRows, given: OperandRows, norms: Mapping[str, OperandRows | None], widths: Floats
) -> Joined:
    of_input, of_weight, made = (norms.get(what) or None for what in RESULTS)  # None without rows, too
    tables = (rows, given, of_input or given, made or given)
    calls = _codes([[one.gemm, one.step, one.rank, one.call] for one in tables])
    steps = _codes([[one.gemm, one.step] for one in (rows, weights, of_weight or weights)])
    groups, first, group = np.unique(_codes([[rows.gemm, rows.step, rows.rank]])[0], return_index=True, return_inverse=True)
    place = _places(steps[0][first], steps[1])
    weight = _norms(weights.norm, place)
    of_output = _norms(given.norm, _places(calls[0], calls[1]))
    bound_of_input = weight[group] * of_output
    bound_of_weight = np.bincount(group, of_output * rows.norm, len(groups)).astype(np.float64)
    output = np.full(len(rows), np.nan) if made is None else _norms(made.norm, _places(calls[0], calls[3]))
    found_of_input = _or(bound_of_input, of_input, _places(calls[0], calls[2]))
    square = np.fmin(
        (of_output * output) ** 2 / np.maximum(given.count[_places(calls[0], calls[1])], 1),
        (found_of_input * rows.norm) ** 2 / rows.count,
    )
    lacks = np.isnan(weight) | np.isnan(bound_of_weight) | np.isnan(np.bincount(group, square, len(groups)))
    return Joined(
        group,
        rows.gemm[first],
        place,
        ~np.isin(steps[0][first], steps[0][first][lacks]),
        rows.norm,
        found_of_input,
        weight,
        _or(bound_of_weight, of_weight, _places(steps[0][first], steps[2])),
        square,
        rows.count / widths[rows.gemm],
    )


def _or(bound: Floats, rows: OperandRows | None, places: Index) -> Floats:
    """Recorded norms; where there are none, a bound of them: ‖W‖ ‖∂L/∂y‖ for inputs, ‖∂L/∂y‖ ‖x‖ for weights."""
    if rows is None:
        return bound
    found = _norms(rows.norm, places)
    return np.where(np.isnan(found), bound, found)


def _norms(norms: Floats, places: Index) -> Floats:
    found: Floats = np.where((places >= 0) & (norms[places] >= 0), norms[places], np.nan)
    return found


def _codes(tables: Sequence[Sequence[Index]]) -> list[Index]:
    """A number for each row of several tables, equal for equal rows."""
    codes = np.zeros(sum(len(one[0]) for one in tables), dtype=np.int64)
    for column in zip(*tables, strict=True):
        values, which = np.unique(np.concatenate(column), return_inverse=True)
        codes = codes * len(values) + which
    return np.split(codes, np.cumsum([len(one[0]) for one in tables])[:-1])


def _places(of: Index, among: Index) -> Index:
    """Where each number is among others, the last of several; -1 where it is not."""
    order = np.argsort(among, kind="stable")
    place = np.searchsorted(among[order], of, "right") - 1
    found: Index = np.where((place >= 0) & (among[order][place] == of), order[place], -1)
    return found
