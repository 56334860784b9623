"""How the run of a report differs from another one: a check, and the pictures of its section.

The other run is the reference, the left side of the comparison.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from monitor.compare.runs import How, compare
from monitor.compare.sides import ALL_RANKS, rank_name
from monitor.compare.values import ALONE, Compared, ComparisonError, Finding
from monitor.merge.execution import is_url
from monitor.report import aligned
from monitor.report.checks import CheckResult
from monitor.report.facts import FEWEST_BINS, MOST_BINS, NOT_PICTURED, Facts
from monitor.report.findings import BAD, GOOD, NOT_LOOKED_AT, CheckFinding, Place
from monitor.report.history import LARGEST, Axis, Codes
from monitor.report.model import MOST_ROWS, Model
from monitor.series import RUN_KIND
from monitor.terminal import counted

MOST_PAIRS: Final = 1_000_000
"""Pairs of numbers on the page, over all tensors and columns. With more tensors there are fewer columns."""
MOST_PLACES: Final = 500
"""Tensors in the list of those that differ."""
LOSS: Final = "loss"

_NAMED: Final = re.compile(r"([^/]*)/(?:([0-9]+):)?(.*?)(?:, micro-step [0-9]+)?", re.DOTALL)
"""What a finding of a rank is of; of whole tensors there is no stage."""
_DIGITS: Final = re.compile(r"[0-9]+")
_THEN: Final = "Compare the curves of both runs, and look for what changed in this module."


@dataclass(frozen=True, slots=True)
class OtherRun:
    """The run that a report compares with, and how.

    Attributes:
        path: As it was given.
    """

    path: str
    how: How

    @classmethod
    def of(cls, run: str, path: Path, how: How) -> OtherRun:
        """Check what can be checked before anything is read.

        Raises:
            ComparisonError: One of the runs is no directory, or they are the same one.
        """
        if is_url(run):
            raise ComparisonError(f"{run} is a URL. --against compares directories: copy the merged set first.")
        if not path.is_dir():
            raise ComparisonError(f"{path} is no directory. Name the output of a run, or a merged set: --against DIR.")
        if path.resolve() == Path(run).resolve() and len(how.jobs) < 2:
            raise ComparisonError(f"{path} is the run itself. Name another one, or one of its jobs: --against-job ID.")
        return cls(str(path), how)

    def compared_with(self, facts: Facts) -> Against:
        """Compare both runs.

        Raises:
            ComparisonError, QueryError, MergeError: The runs cannot be compared.
        """
        series = sum(len(rows.series) for rows in facts.kinds.values())
        most = max(FEWEST_BINS, min(MOST_BINS, MOST_PAIRS // max(series, 1)))
        axis = Axis(facts.axis.steps, max(min(len(facts.axis.steps), most), 1))
        numbers = aligned.AlignedNumbers(axis, only_shown=series > MOST_ROWS)
        return Against(self.path, facts.path, compare(Path(self.path), Path(facts.path), self.how, numbers), numbers)


@dataclass(frozen=True)
class Against:
    """A run against another one.

    Attributes:
        other, run: Their paths.
        numbers: What the comparison has seen.
    """

    other: str
    run: str
    compared: Compared
    numbers: aligned.AlignedNumbers

    @property
    def same(self) -> float:
        """See ``aligned.same_of``."""
        return aligned.same_of(self.compared.precision)

    @property
    def check(self) -> CheckResult:
        """Bad if something differs beyond tolerance. Good only if nothing is missing on a side."""
        compared, first = self.compared, self.compared.first
        if first is not None:
            finding = CheckFinding(BAD, self.says, _place(first), _THEN)
        else:
            is_good = not (compared.is_empty or compared.not_compared)
            finding = CheckFinding(GOOD if is_good else NOT_LOOKED_AT, self.says)
        return CheckResult(f"Against {self.other}", finding, f"trainermon compare {self.other} {self.run}", True)

    @property
    def says(self) -> str:
        """The comparison in a sentence or two."""
        compared, first = self.compared, self.compared.first
        if compared.is_empty:
            return "There is no tensor that both runs have in the same step."
        rounded = f"differ by rounding, by at most {_rounded(compared.most_rounded, 2):,g} times that of one step"
        if first is not None:
            tensors = len(_firsts(compared.findings))
            more = f" {tensors:,} tensors differ." if tensors > 1 else ""
            differ = counted(compared.rounded, "more row differs", "more rows differ")
            rest = f" {differ} by no more than rounding explains after so many steps." if compared.rounded else ""
            return f"The run differs from {self.other} first in step {first.step}: {self._said(first)}.{more}{rest}"
        same = f"The same as {self.other}: {counted(compared.tensors, 'row')}"
        missing = " that both runs have. Something is on one side alone" if compared.not_compared else ""
        return f"{same}{missing}. {compared.rounded:,} of them {rounded}." if compared.rounded else f"{same}{missing}."

    def _said(self, one: Finding) -> str:
        key, place = series_of(one), _place(one)
        where = f"{key.kind} {key.name}" + ("" if place.rank is None else f" on rank {place.rank}")
        if one.what in ALONE:
            return f"{where} is there in {self._side(one)} alone"
        if one.difference is None:
            return f"{where}, whose {one.what} is {one.right or 'nothing'}, not {one.left or 'nothing'}"
        size = f"{_rounded(one.rounding, 3):,g}"
        times = f"by {size} times rounding" if math.isfinite(one.rounding) else "by more than rounding explains"
        return f"{where}, whose {one.op} is off {times}" if one.op else f"{where} is off {times}"

    def _side(self, one: Finding) -> str:
        return self.other if one.what == "missing" else self.run

    def for_programs(self) -> dict[str, Any]:
        """The comparison as JSON. ``docs/report.md`` documents its fields."""
        compared = self.compared
        return {
            "run": self.other,
            "says": self.says,
            "rows": compared.tensors,
            "rounded": compared.rounded,
            "most_rounded": compared.most_rounded,
            "steps": list(compared.steps),
            "differing": [self._listed(key, one) for key, one in _firsts(compared.findings).items()][:MOST_PLACES],
            "not_compared": list(compared.not_compared),
            "notes": list(compared.notes),
        }

    def _listed(self, key: aligned.SeriesKey, one: Finding) -> dict[str, Any]:
        place = _place(one)
        size = one.rounding if math.isfinite(one.rounding) and one.difference is not None else None
        is_value = one.difference is not None and math.isfinite(one.difference.relative)
        what = one.op or one.what
        if one.what in ALONE:
            what = f"in {self._side(one)} alone"
        elif one.difference is None:
            what = f"{one.what}: {one.right or 'nothing'}, not {one.left or 'nothing'}"
        return {
            "step": one.step,
            "rank": place.rank,
            "kind": key.kind,
            "tensor": key.name,
            "what": what,
            "times_rounding": size,
            "relative": one.difference.relative if is_value and one.difference is not None else None,
        }

    # --- The section of the page.

    def show_in(self, model: Model) -> None:
        """Add the section."""
        drawn = sorted(self._drawn(), key=lambda one: one.order)
        if len(drawn) > MOST_ROWS:
            furthest = sorted(drawn, key=lambda one: -int(one.cells.max(initial=0)))[:MOST_ROWS]
            drawn = sorted(furthest, key=lambda one: one.order)
        axis, rows = self.numbers.axis, {one.key: row for row, one in enumerate(drawn)}
        first = self.compared.first
        kinds = list(dict.fromkeys(one.key.kind for one in drawn))
        shape = (len(drawn), 2, axis.bins)
        numbers = np.concatenate([one.numbers for one in drawn]) if drawn else np.zeros(shape)
        cells = np.concatenate([one.cells for one in drawn]) if drawn else np.zeros(0, np.uint8)
        model.data["against"] = {
            "title": f"Against {self.other}",
            "says": self.says,
            "lines": self._lines(),
            "labels": [self.other, self.run],
            "first": axis.first.tolist(),
            "last": axis.last.tolist(),
            "atStep": None if first is None else first.step,
            "at": 0 if first is None else self._column(first.step),
            "codes": {"least": aligned.LEAST, "alone": aligned.ALONE, "infinite": aligned.NOT_FINITE, "same": self.same},
            "kinds": kinds,
            "tensors": [[kinds.index(one.key.kind), one.key.name, one.op] for one in drawn],
            "cells": model.put(cells),
            "numbers": model.put(_narrow(numbers)),
            "places": list(self._places(model, rows)),
            "differing": len(_firsts(self.compared.findings)),
            "loss": next((row for key, row in rows.items() if key.kind == RUN_KIND and key.name == LOSS), None),
        }

    def _lines(self) -> list[list[str]]:
        lines = [("Not compared", self.compared.not_compared), ("Note", self.compared.notes)]
        return [[what, line] for what, every in lines for line in every]

    def _drawn(self) -> Iterator[DrawnSeries]:
        for kind, rows in self.numbers.kinds.items():
            if kind in NOT_PICTURED:
                continue
            op = aligned.shown_op(kind, list(rows.grids))
            size = len(rows.orders), self.numbers.axis.bins
            grid = rows.grid(op, size[1]) if op else aligned.PairGrid.empty(*size)
            alone = np.zeros((len(grid.apart), size[1]), np.bool_)
            for number, columns in rows.alone.items():
                alone[number, sorted(columns)] = True
            codes = aligned.codes_of(grid, alone, self.same)
            for key, number in rows.numbers.items():
                one = slice(number, number + 1)
                yield DrawnSeries(_shown(key, rows), op, rows.orders[number], grid.numbers[one], codes[one])

    def _places(self, model: Model, rows: dict[aligned.SeriesKey, int]) -> Iterator[dict[str, Any]]:
        """The tensors that differ, by their first step. If the heat map lacks the tensor or the op, it has its own numbers."""
        room = MOST_PAIRS
        for key, one in list(_firsts(self.compared.findings).items())[:MOST_PLACES]:
            kind = self.numbers.kinds.get(key.kind, aligned.AlignedKind())
            shown = _shown(key, kind)
            listed = {**self._listed(shown, one), "at": self._column(one.step), "row": rows.get(shown), "lines": None}
            number, op = kind.numbers.get(key), one.op or aligned.shown_op(key.kind, list(kind.grids))
            is_drawn = listed["row"] is not None and op == aligned.shown_op(key.kind, list(kind.grids))
            if number is not None and op in kind.grids and not is_drawn and room > 0:
                grid = kind.grid(op, self.numbers.axis.bins)
                listed["lines"], listed["op"] = model.put(_narrow(grid.numbers[number])), op
                room -= self.numbers.axis.bins
            yield listed

    def _column(self, step: int) -> int:
        return int(self.numbers.axis.bin_of(np.array([step]))[0])


@dataclass(frozen=True, slots=True)
class DrawnSeries:
    """A row of the heat map. Numbers have the shape ``(1, 2, columns)``, and cells ``(1, columns)``."""

    key: aligned.SeriesKey
    op: str
    order: int
    numbers: aligned.Floats
    cells: Codes


def series_of(finding: Finding) -> aligned.SeriesKey:
    """The tensor that a finding is of."""
    match = _NAMED.fullmatch(finding.name)
    assert match is not None
    if finding.rank == rank_name(ALL_RANKS) and match[2]:  # a whole tensor has no stage, so that its name begins with a number
        return aligned.SeriesKey(match[1], 0, f"{match[2]}:{match[3]}")
    return aligned.SeriesKey(match[1], int(match[2] or 0), match[3])


def _shown(key: aligned.SeriesKey, rows: aligned.AlignedKind) -> aligned.SeriesKey:
    """With its stage in the name, if the kind has several."""
    several = any(one.stage for one in rows.numbers)
    return key._replace(name=f"{key.stage}:{key.name}") if several else key


def _place(one: Finding) -> Place:
    rank, key = _DIGITS.search(one.rank), series_of(one)
    return Place(one.step, None if rank is None else int(rank[0]), key.kind, key.name)


def _firsts(findings: Sequence[Finding]) -> dict[aligned.SeriesKey, Finding]:
    """The first finding of each tensor."""
    found: dict[aligned.SeriesKey, Finding] = {}
    for one in findings:
        found.setdefault(series_of(one), one)
    return found


def _rounded(number: float, digits: int) -> float:
    return float(f"{number:.{digits}g}")


def _narrow(numbers: aligned.Floats) -> aligned.Floats:
    """The numbers in float32, as the page has them. Finite numbers stay finite."""
    with np.errstate(over="ignore"):
        finite = np.isfinite(numbers)
        return np.where(finite, np.clip(numbers, -LARGEST, LARGEST), numbers).astype("<f4")
