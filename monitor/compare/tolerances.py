"""How far two runs may part by rounding alone.

The first step that both have is held to the precision of the run. Rounding grows from step to step, by how much depends on the
training: a later step is held to what the steps before it have shown.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import pyarrow as pa

from monitor.compare.values import Compared, Finding
from monitor.series import DIRECTION_KIND, RUN_KIND
from monitor.sinks.csv import fixed_from
from monitor.stats.histograms import LOSSES
from monitor.stats.ops import INTEGER_OPS

EPSILONS: Final = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""By dtype, from 1 to the next number."""
SINGLE: Final = EPSILONS["float32"]
"""Sums are accumulated at least so finely."""

GROWTH: Final = 16.0
"""By how much rounding may grow from one step to the next: measured on pairs of runs, the most was 9 (docs/comparing.md)."""

EXTREMES: Final = ("min", "max", "absmax")
SHARES: Final = ("zeros", *LOSSES)
GIVEN: Final = ("learning_rate", "epoch", "tokens")
"""Numbers of a run that no arithmetic of training has touched."""
WEIGHTS: Final = ("param_origin", "param_updated")
OF_UPDATES: Final = 1 / 64
"""An update is a small part of a weight, and so is its error."""
OF_OTHERS: Final = 1 / 64
"""Gradients smaller than this share of the largest of their kind are held to that. Some are sums that cancel, such as those of
the bias of keys in attention: rounding is all that they have."""
OF_VECTORS: Final = 2.0**-13
"""The bias of keys has no gradient but rounding, of which Adam makes whole updates. No other weight is like that."""


class Rounding:
    """What rounding explains in rows of two runs.

    Args:
        series: Those of both, as ``RunSource.series``. The coarsest dtype in a run is the precision of all but its weights.
        first: The first step that both have.

    Attributes:
        explained: How many rows differ by what rounding explains in one step.
        by_step: The largest of these differences, as a multiple of that.
    """

    def __init__(self, series: Iterable[pa.Table], first: int) -> None:
        self.explained = 0
        self.by_step: dict[int, float] = {}
        self._first = first
        self._own: dict[tuple[str, int, str], tuple[float, int]] = {}
        self._vectors: set[tuple[str, int, str]] = set()
        for table in series:
            columns = table.group_by(["kind", "vpp_stage", "name", "shape", "dtype"]).aggregate([]).to_pylist()
            for one in columns:
                if (epsilon := epsilon_of(one["dtype"])) is not None and one["kind"] != RUN_KIND:
                    key = one["kind"], one["vpp_stage"], one["name"]
                    known = self._own.get(key, (0.0, 1))[0]
                    shape = json.loads(one["shape"] or "[]")
                    self._own[key] = max(epsilon, known), math.prod(shape)
                    self._vectors.update([key] if len(shape) == 1 else [])
        self._coarsest = max((epsilon for epsilon, _ in self._own.values()), default=SINGLE)

    def largest(self, kind: str, rows: Iterable[Mapping[str, Any]]) -> Mapping[int, float]:
        """By step, the largest root mean square of a kind of gradients or moments. Empty for other kinds."""
        found: dict[int, float] = {}
        for row in rows if "grad" in kind or kind.startswith("exp_avg") else ():
            norm, (_, count) = row.get("norm"), self._of(kind, row)
            if norm is not None and math.isfinite(norm):
                found[row["step"]] = max(found.get(row["step"], 0.0), norm / math.sqrt(max(count, 1)))
        return found

    def explains(self, share: float, step: int) -> bool:
        """Whether a difference is no larger than rounding makes it in one step. If so, it is counted."""
        if share > 1.0:
            return False
        self.explained += 1
        self.by_step[step] = max(self.by_step.get(step, 0.0), share)
        return True

    def share(
        self, kind: str, rows: Sequence[Mapping[str, Any]], ops: Sequence[str], others: float, ndigits: int | None
    ) -> float:
        """The largest difference of two rows, as a multiple of what rounding explains in one step.

        Args:
            rows: That of the left side, and that of the right.
            others: The ``largest`` of this kind and step.
            ndigits: Decimals of a row of CSV, if one of them is; None if both are exact.
        """
        left, right = rows
        own, count = self._of(kind, left)
        epsilon = self._coarsest
        if kind in WEIGHTS:
            was_updated = kind != WEIGHTS[0] or left["step"] != self._first
            is_vector = (kind, left["vpp_stage"], left["name"]) in self._vectors
            epsilon = own + was_updated * max(OF_UPDATES * self._coarsest, OF_VECTORS if is_vector else 0.0)
        scales = _Scales(rows, count, OF_OTHERS * others, ndigits)
        exact = kind == RUN_KIND and left["name"].startswith(GIVEN)
        return max((_of_op(kind, op, left[op], right[op], scales, 0.0 if exact else epsilon) for op in ops), default=0.0)

    def _of(self, kind: str, row: Mapping[str, Any]) -> tuple[float, int]:
        """Epsilon and number of elements of a series."""
        return self._own.get((kind, row["vpp_stage"], row["name"]), (self._coarsest, 1))


class _Scales:
    """What differences of a row are measured against."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], count: int, least: float, ndigits: int | None) -> None:
        norms = [row["norm"] for row in rows if row.get("norm") is not None]
        ends = [abs(row[op]) for row in rows for op in EXTREMES if row.get(op) is not None]
        self.count, self._least = max(count, 1), least
        self._digit, self._fixed_from = (0.0, 0.0) if ndigits is None else (10.0**-ndigits, fixed_from(ndigits))
        self._most = max(filter(math.isfinite, ends), default=0.0)
        self._root_mean_square = max(filter(math.isfinite, norms), default=0.0) / math.sqrt(self.count) if count > 1 else 0.0

    def apart(self, a: float, b: float) -> float:
        """Their distance, without what CSV has rounded: a unit in the last digit, also where it writes an exponent."""
        most = max(abs(a), abs(b))
        return max(0.0, abs(a - b) - self._digit * (1.0 if most >= self._fixed_from else 10 * most))

    def of(self, op: str, own: float) -> float:
        if op == "norm":
            return max(own, self._least * math.sqrt(self.count))
        if op in EXTREMES:
            return max(self._most, own, self._least)
        return max(self._root_mean_square or self._most, own, self._least) if op in ("mean", "std") else own


def _of_op(kind: str, op: str, a: float | None, b: float | None, scales: _Scales, epsilon: float) -> float:
    if a == b or (a is not None and b is not None and math.isnan(a) and math.isnan(b)):
        return 0.0
    if a is None or b is None or not math.isfinite(a) or not math.isfinite(b) or op in INTEGER_OPS or not epsilon:
        return math.inf
    if op in SHARES or kind == DIRECTION_KIND:
        return scales.apart(a, b) / (32 * epsilon + 2 / scales.count)
    own = max(abs(a), abs(b))
    if op == "kurtosis":
        return scales.apart(a, b) / max(own, 3.0) / (16 * epsilon + 64 * SINGLE)
    averaged = epsilon * min(1.0, 1 / 4 + 4 / math.sqrt(scales.count)) + 8 * SINGLE
    unit = averaged if op in ("mean", "norm", "std") else 4 * epsilon + 16 * SINGLE
    return scales.apart(a, b) / scales.of(op, own) / unit


def epsilon_of(dtype: str | None) -> float | None:
    """Of a dtype of any framework; None if it is none of floats."""
    name = (dtype or "").rpartition(".")[2].lower()
    if name.startswith("float8"):
        return 2.0**-2 if "e5m2" in name else 2.0**-3
    return EPSILONS.get(name)


def judged(compared: Compared, rounding: Rounding) -> Compared:
    """Without the differences that have grown by rounding from those of earlier steps.

    Args:
        compared: With findings in order of steps, all beyond what rounding explains in one step.
    """
    kept: list[Finding] = []
    by_step, number = rounding.by_step, rounding.explained
    found = {step: list(some) for step, some in itertools.groupby(compared.findings, key=lambda one: one.step)}
    most, allowed = 0.0, 1.0
    for step in sorted({*by_step, *found}):
        within = [one.rounding for one in found.get(step, ()) if one.rounding <= allowed]
        kept += [one for one in found.get(step, ()) if one.rounding > allowed]
        most, number = max([most, by_step.get(step, 0.0), *within]), number + len(within)
        allowed = GROWTH * max(1.0, most)
    return replace(compared, findings=kept, rounded=number, most_rounded=most)
