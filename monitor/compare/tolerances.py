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
from monitor.stats.histograms import LOSSES
from monitor.stats.ops import INTEGER_OPS, TEXT_OPS

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
    """

    def __init__(self, series: Iterable[pa.Table]) -> None:
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

    def share(
        self,
        kind: str,
        left: Mapping[str, Any],
        right: Mapping[str, Any],
        ops: Sequence[str],
        *,
        first: bool,
        others: float = 0.0,
    ) -> float:
        """The largest difference of two rows, as a multiple of what rounding explains in one step.

        Args:
            first: Whether it is the first step that both have.
            others: The ``largest`` of this kind and step.
        """
        own, count = self._of(kind, left)
        epsilon = self._coarsest
        if kind in WEIGHTS:
            was_updated = not (first and kind == WEIGHTS[0])
            is_vector = (kind, left["vpp_stage"], left["name"]) in self._vectors
            epsilon = own + was_updated * max(OF_UPDATES * self._coarsest, OF_VECTORS if is_vector else 0.0)
        scales = _Scales(left, right, count, OF_OTHERS * others)
        exact = kind == RUN_KIND and left["name"].startswith(GIVEN)
        return max((_of_op(kind, op, left[op], right[op], scales, 0.0 if exact else epsilon) for op in ops), default=0.0)

    def _of(self, kind: str, row: Mapping[str, Any]) -> tuple[float, int]:
        """Epsilon and number of elements of a series."""
        return self._own.get((kind, row["vpp_stage"], row["name"]), (self._coarsest, 1))


class _Scales:
    """What differences of a row are measured against."""

    def __init__(self, left: Mapping[str, Any], right: Mapping[str, Any], count: int, least: float) -> None:
        norms = [row["norm"] for row in (left, right) if row.get("norm") is not None]
        ends = [abs(row[op]) for row in (left, right) for op in EXTREMES if row.get(op) is not None]
        self.count, self._least = max(count, 1), least
        self._most = max(filter(math.isfinite, ends), default=0.0)
        self._root_mean_square = max(filter(math.isfinite, norms), default=0.0) / math.sqrt(self.count) if count > 1 else 0.0

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
        return abs(a - b) / (32 * epsilon + 2 / scales.count)
    own = max(abs(a), abs(b))
    if op == "kurtosis":
        return abs(a - b) / max(own, 3.0) / (16 * epsilon + 64 * SINGLE)
    averaged = epsilon * min(1.0, 1 / 4 + 4 / math.sqrt(scales.count)) + 8 * SINGLE
    unit = averaged if op in ("mean", "norm", "std") else 4 * epsilon + 16 * SINGLE
    return abs(a - b) / scales.of(op, own) / unit


def epsilon_of(dtype: str | None) -> float | None:
    """Of a dtype of any framework; None if it is none of floats."""
    name = (dtype or "").rpartition(".")[2].lower()
    if name.startswith("float8"):
        return 2.0**-2 if "e5m2" in name else 2.0**-3
    return EPSILONS.get(name)


def judged(compared: Compared) -> Compared:
    """Without what rounding explains. Texts that say that bits differ say no more.

    Args:
        compared: With findings in order of steps.
    """
    kept: list[Finding] = []
    largest: float | None = None
    number = 0
    for _, some in itertools.groupby(compared.findings, key=lambda one: one.step):
        found = [one for one in some if one.what not in TEXT_OPS or one.what in ("shape", "dtype")]
        allowed = 1.0 if largest is None else GROWTH * max(1.0, largest)
        within = [one.rounding for one in found if one.rounding <= allowed]
        kept += [one for one in found if one.rounding > allowed]
        largest, number = max([largest or 0.0, *within]), number + len(within)
    return replace(compared, findings=kept, rounded=number, most_rounded=largest or 0.0)
