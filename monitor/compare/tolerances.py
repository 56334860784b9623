"""How far two runs may part by rounding alone.

The first step that both have is held to the precision of the run. Rounding grows from step to step, by how much depends on the
training: a later step is held to what the steps before it have shown.

A file can allow more or less, in multiples of what rounding explains in one step. ``first`` holds in the first step:

    {"runs": 3, "first": 0, "last": 99, "allowed": {
        "actv": {"first": 0.6, "later": 7.1},
        "run/tokens_per_second": {"first": 40000.0, "later": 52000.0}}}
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from monitor.compare.values import Compared, ComparisonError, Finding
from monitor.series import DIRECTION_KIND, LEARNING_RATE, RUN_KIND
from monitor.sinks.csv import fixed_from
from monitor.stats.histograms import LOSSES, PERCENTILES
from monitor.stats.ops import INTEGER_OPS, LAYOUT_OPS

EPSILONS: Final = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""By dtype, from 1 to the next number."""
SINGLE: Final = EPSILONS["float32"]
"""Sums are accumulated at least so finely."""

GROWTH: Final = 16.0
"""The factor by which rounding may grow from one step to the next. In pairs of runs it was at most 9 (docs/comparing.md)."""

ELEMENTS: Final = "elements"
"""How many a whole tensor has: an op of comparisons of whole tensors."""
WHOLE_OPS: Final = (*INTEGER_OPS, ELEMENTS)
SUMS_OVER_RANKS: Final = 2.0
"""How much more rounding explains in another layout, where ranks round their parts of sums to the run's dtype."""
EXTREMES: Final = ("min", "max", "absmax")
VALUE: Final = "value"
"""The op of the run's own numbers."""
AVERAGES: Final = ("mean", "norm", "std", "rms", "absmean", VALUE)
HIGHER: Final = ("kurtosis", "skewness")
SHARES: Final = ("zeros", "dead_units", *LOSSES)
OF_ANY_SIZE: Final = ("massive_channel", "smallest_nonzero")
"""Rounding decides which of two equal elements is the largest, and how small a sum is whose terms cancel."""
OVER_MEDIAN: Final = "massive"
"""A median is rounded as the largest elements are, of which it may be a small part."""
RATE: Final = re.compile(rf"{LEARNING_RATE}(\.\d+)?")
GIVEN: Final = re.compile(rf"{RATE.pattern}|epoch|tokens")
"""Numbers of a run that no arithmetic of training has touched."""
WEIGHTS: Final = ("param_origin", "param_updated")
OF_UPDATES: Final = 1 / 64
"""An update is a small part of a weight, and so is its error."""
OF_OTHERS: Final = 1 / 64
"""Gradients smaller than this share of the largest of their kind are held to that: they may be sums that cancel. Those of one
dimension, such as of biases before a normalization, are held to the largest itself."""
UPDATES: Final = 2.0
"""Updates of Adam by which a weight of one dimension may differ in each step. The bias of keys in attention, for one, has no
gradient but rounding, and Adam makes whole updates of it; it may be a part of a vector that has real gradients elsewhere."""
LEAST_LOGGED: Final = 1 / 64
"""Logged numbers may be differences of larger ones, as some losses are: smaller ones are held to this."""
ALONE_SHARE: Final = 1 / 8
"""Share of itself by which a mean may differ, if no other op shows how large the tensor is."""


class SeriesFacts(NamedTuple):
    """What is known of a series from its first measurement."""

    dtype: str
    shape: tuple[int, ...] | None

    @property
    def elements(self) -> int:
        """The number of elements; 1 if it is not known."""
        return math.prod(self.shape or ())

    @property
    def epsilon(self) -> float | None:
        """The distance from 1 to the next number of the dtype; None if it is no float."""
        if self.dtype.startswith("float8"):
            return 2.0**-2 if "e5m2" in self.dtype else 2.0**-3
        return EPSILONS.get(self.dtype)


SeriesKey = tuple[str, int, str] | tuple[str, int, str, int]
"""Kind, stage and name, and the rank of a series that is not the same on all ranks."""
Facts = dict[SeriesKey, SeriesFacts]

UNKNOWN: Final = SeriesFacts("", None)


# --- What a file allows: by how much healthy runs of a pipeline differ, learned from repeats.

MARGIN: Final = 2.0
"""How many times what repeats have shown is allowed: a few of them do not show the most that there can be."""

OF_ITS_OWN: Final = 16.0
"""A tensor that differs by so many times what nine tenths of its kind do has an entry of its own."""

Multiple = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


class Allowed(BaseModel):
    """For a kind, or for tensors of one: how large differences may be."""

    model_config = ConfigDict(extra="forbid", strict=True)

    first: Multiple
    later: Multiple


class Limits(BaseModel):
    """The content of a file of limits: the differences that are allowed.

    Attributes:
        runs: How many it was learned from; 0 if somebody has written it.
        first, last: The steps that it holds for; later ones are held to how rounding grows.
        allowed: By kind, or by ``kind/name``, where ``*`` is any text. The longest entry that fits counts.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    runs: int = 0
    first: int = 0
    last: int = 2**63 - 1
    allowed: dict[str, Allowed]

    def unfit(self, series: Collection[tuple[str, str]]) -> list[str]:
        """The entries that match none of these series.

        Args:
            series: Kinds and names.
        """
        kinds, names = {kind for kind, _ in series}, [f"{kind}/{name}" for kind, name in series]
        return [key for key in self.allowed if key not in kinds and not any(map(_pattern(key), names))]

    @classmethod
    def read(cls, path: Path) -> Limits:
        """From a file.

        Raises:
            ComparisonError: It is no file of limits. The message names the entry.
            OSError: It cannot be read.
        """
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            raise ComparisonError(f"{path} has no limits that can be used: {where}: {first['msg']}.") from error

    @classmethod
    def learned(cls, pairs: Sequence[Compared], runs: int) -> Limits:
        """From all pairs of healthy runs. The same bits allow nothing else; otherwise at least what rounding explains is."""
        most: dict[str, dict[str, tuple[float, float]]] = {kind: {} for pair in pairs for kind in sorted(pair.counted)}
        for (kind, name), found in (one for pair in pairs for one in pair.seen.items()):
            before = most[kind].get(name, (0.0, 0.0))
            most[kind][name] = max(before[0], found[0]), max(before[1], found[1])
        least = 1.0 if any(any(found) for series in most.values() for found in series.values()) else 0.0
        allowed: dict[str, Allowed] = {}
        for kind, series in most.items():
            own = _of_their_own(kind, series)
            allowed[kind] = _allowed([found for name, found in series.items() if name not in own], least)
            allowed |= {f"{kind}/{name}": _allowed([series[name]], least) for name in sorted(own)}
        first, last = min(pair.steps[0] for pair in pairs), max(pair.steps[1] for pair in pairs)
        return cls(runs=runs, first=first, last=last, allowed=allowed)

    def write(self, path: Path) -> None:
        """Raises: OSError: It cannot be written."""
        entries = ",\n".join(f"    {json.dumps(key)}: {one.model_dump_json()}" for key, one in self.allowed.items())
        about = json.dumps({"runs": self.runs, "first": self.first, "last": self.last})[1:-1]
        path.write_text(f'{{{about}, "allowed": {{\n{entries}\n}}}}\n')

    def of(self, kind: str, name: str, step: int, *, is_first: bool) -> float | None:
        """How large the difference of a row may be; None if nothing says so."""
        if not self.first <= step <= self.last:
            return None
        own = f"{kind}/{name}"
        fitting = [key for key in self.allowed if key == kind or _pattern(key)(own)]
        if not fitting:
            return None
        found = self.allowed[max(fitting, key=len)]
        return found.first if is_first else found.later


@cache
def _pattern(key: str) -> Callable[[str], bool]:
    """Whether a ``kind/name`` fits a key, which may have the stage in it as findings do."""
    bare = re.sub(r"/\d+:", "/", key)
    return lambda name: name in (key, bare) or fnmatchcase(name, bare)


def _usual(sizes: list[float]) -> float:
    """The size that nine tenths do not exceed."""
    return sorted(sizes)[math.ceil(0.9 * len(sizes)) - 1]


def _of_their_own(kind: str, series: Mapping[str, tuple[float, float]]) -> set[str]:
    """The names that get entries of their own. Numbers of the run are nothing like each other."""
    usual = [_usual([found[at] for found in series.values()]) for at in (0, 1)] if series else []
    odd = (any(found[at] > OF_ITS_OWN * max(1.0, usual[at]) for at in (0, 1)) for found in series.values())
    return {name for name, is_odd in zip(series, odd, strict=True) if is_odd or kind == RUN_KIND}


def _allowed(found: Iterable[tuple[float, float]], least: float) -> Allowed:
    first, later = (max(MARGIN * max(sizes), least) for sizes in zip((0.0, 0.0), *found, strict=True))
    return Allowed(first=float(f"{first:.4g}"), later=float(f"{later:.4g}"))


# --- What rounding explains.


@dataclass(frozen=True, slots=True)
class Circumstances:
    """How two runs have come to the steps that are compared.

    Attributes:
        first: The first step that both have.
        is_late: Whether they have trained before it.
        rate: The largest learning rate.
        other_layout: Whether other ranks hold other parts: sums over ranks are rounded once more.
    """

    first: int
    is_late: bool = False
    rate: float = 0.0
    other_layout: bool = False


class Rounding:
    """What rounding explains in rows of two runs.

    Args:
        sides: What is known of the series of each. The coarsest dtype in a run, but for float8, is the precision of all but its
            weights.
        limits: What is allowed besides.

    Attributes:
        circumstances: Those of the runs.
        seen: By kind and name, the largest difference in the first step and in later ones, as a multiple of what rounding
            explains in one step.
        explained: How many rows differ by what rounding explains in one step.
        by_step: The largest of these differences, as a multiple of that, by kind and step.
        unlike: The shape or dtype of each side, by series, where both are known and not the same.
        precision: The distance from 1 to the next number in the coarsest dtype.
    """

    def __init__(self, sides: Sequence[Facts], circumstances: Circumstances, limits: Limits | None = None) -> None:
        self.seen: dict[tuple[str, str], tuple[float, float]] = {}
        self.explained = 0
        self.by_step: dict[tuple[str, int], float] = {}
        self.circumstances, self._limits = circumstances, limits
        self._times = SUMS_OVER_RANKS if circumstances.other_layout else 1.0
        self._begun = 0 if circumstances.is_late else circumstances.first
        self._facts = _known(*sides)
        self.unlike = _unlike(*sides)
        known = [one.epsilon for side in sides for (kind, *_), one in side.items() if kind != RUN_KIND]
        floats = [epsilon for epsilon in known if epsilon is not None and epsilon <= EPSILONS["bfloat16"]]
        self.precision = max(floats, default=SINGLE)

    def facts(self, kind: str, row: Mapping[str, Any]) -> SeriesFacts:
        """The facts of the series of a row, as far as either side knows them."""
        return _of(self._facts, (kind, row["vpp_stage"], row["name"], row["rank"])) or UNKNOWN

    def unlike_of(self, kind: str, row: Mapping[str, Any]) -> Iterable[tuple[str, str, str]]:
        """How the series of a row differs on both sides. Later calls for the series return nothing."""
        key = kind, row["vpp_stage"], row["name"]
        return self.unlike.pop((*key, row["rank"]), []) or self.unlike.pop(key, [])

    def largest(self, kind: str, rows: Iterable[Mapping[str, Any]]) -> Mapping[int, float]:
        """By step, the largest root mean square, or magnitude, of a kind of gradients or moments. Empty for other kinds."""
        found: dict[int, float] = {}
        for row in rows if _cancels(kind) else ():
            count = row.get(ELEMENTS) or self.facts(kind, row).elements
            sizes = [] if row.get("norm") is None else [row["norm"] / math.sqrt(max(count, 1))]
            sizes = sizes or [abs(row[op]) for op in (*EXTREMES, "mean") if row.get(op) is not None]
            found[row["step"]] = max([found.get(row["step"], 0.0), *filter(math.isfinite, sizes)])
        return found

    def _is_first(self, step: int) -> bool:
        return step == self.circumstances.first and not self.circumstances.is_late

    def allowed(self, kind: str, name: str, step: int) -> float | None:
        """What the file of limits allows for a row; None if it says nothing."""
        return None if self._limits is None else self._limits.of(kind, name, step, is_first=self._is_first(step))

    def explains(self, share: float, kind: str, name: str, step: int) -> bool:
        """Whether a difference is no larger than limits allow, or than rounding makes it in one step. If so, it is counted."""
        if math.isfinite(share):
            first, later = self.seen.get((kind, name), (0.0, 0.0))
            is_first = self._is_first(step)
            self.seen[kind, name] = (max(first, share), later) if is_first else (first, max(later, share))
        allowed = self.allowed(kind, name, step)
        if share > (1.0 if allowed is None else allowed):
            return False
        self.explained += 1
        if kind != RUN_KIND or allowed is None:  # any number may stand in a loop's log
            self.by_step[kind, step] = max(self.by_step.get((kind, step), 0.0), share)
        return True

    def share(
        self, kind: str, rows: Sequence[Mapping[str, Any]], ops: Sequence[str], others: float, ndigits: int | None
    ) -> tuple[float, str]:
        """The largest difference of two rows, as a multiple of what rounding explains in one step, and its op.

        Args:
            rows: That of the left side, and that of the right.
            others: The ``largest`` of this kind and step.
            ndigits: Decimals of a row of CSV, if one of them is; None if both are exact.
        """
        left, right = rows
        facts = self.facts(kind, left)
        vector = len(facts.shape or ()) == 1
        scales = _Scales(rows, left.get(ELEMENTS) or facts.elements, (1.0 if vector else OF_OTHERS) * others, ndigits)
        epsilon = self.precision if facts.epsilon is None else max(self.precision, facts.epsilon)
        if facts.dtype and facts.epsilon is None:  # whole numbers, whose sums alone are rounded
            epsilon = SINGLE
        if kind in WEIGHTS:
            updates = left["step"] - self._begun + (kind != WEIGHTS[0] or left["step"] > self._begun)
            epsilon = (facts.epsilon or self.precision) + (OF_UPDATES * self.precision if updates else 0.0)
            scales.slack = UPDATES * self.circumstances.rate * updates if vector else 0.0
        if kind == RUN_KIND:
            scales.least = LEAST_LOGGED
            epsilon = 0.0 if GIVEN.fullmatch(left["name"]) else epsilon
        unjudged = (*OF_ANY_SIZE, *(SHARES if vector and (_cancels(kind) or scales.slack) else ()))
        judged = [op for op in ops if op not in unjudged]
        shares = ((_of_op(kind, op, left[op], right[op], scales, epsilon), op) for op in judged)
        most, op = max(shares, default=(0.0, ""))
        return most / self._times, op


def facts_of(table: pa.Table) -> Facts:
    """The facts in a table of ``RunSource.series``."""
    found: dict[tuple[str, int, str], list[tuple[SeriesFacts, list[int]]]] = {}
    grouped = table.group_by(["kind", "vpp_stage", "name", "shape", "dtype"]).aggregate([("rank", "list")])
    for row in grouped.to_pylist():
        shape = tuple(json.loads(row["shape"])) if row["shape"] else None
        facts = SeriesFacts((row["dtype"] or "").rpartition(".")[2].lower(), shape)
        found.setdefault((row["kind"], row["vpp_stage"], row["name"]), []).append((facts, row["rank_list"]))
    alike: Facts = {key: some[0][0] for key, some in found.items() if len(some) == 1}
    others = ((key, facts, ranks) for key, some in found.items() if len(some) > 1 for facts, ranks in some)
    return alike | {(*key, rank): facts for key, facts, ranks in others for rank in ranks}


def _of(facts: Facts, key: SeriesKey) -> SeriesFacts | None:
    return facts.get(key) or facts.get(key[:3])


def _pairs(left: Facts, right: Facts) -> Iterator[tuple[SeriesKey, SeriesFacts | None, SeriesFacts | None]]:
    return ((key, _of(left, key), _of(right, key)) for key in left.keys() | right.keys())


def _known(left: Facts, right: Facts) -> Facts:
    """What either side knows of each series; merged sets of CSV do not know shapes."""
    found: Facts = {}
    for key, one, other in _pairs(left, right):
        both = [facts for facts in (one, other) if facts is not None]
        dtype = max(both, key=lambda facts: (facts.epsilon or 0.0, facts.dtype)).dtype
        found[key] = SeriesFacts(dtype, next((facts.shape for facts in both if facts.shape is not None), None))
    return found


def _unlike(left: Facts, right: Facts) -> dict[SeriesKey, list[tuple[str, str, str]]]:
    found: dict[SeriesKey, list[tuple[str, str, str]]] = {}
    for key, one, other in _pairs(left, right):
        for what in LAYOUT_OPS if one is not None and other is not None else ():
            own, others = getattr(one, what), getattr(other, what)
            if own != others and own not in ("", None) and others not in ("", None):
                found.setdefault(key, []).append((what, str(own), str(others)))
    return found


def _cancels(kind: str) -> bool:
    """Whether a kind may be made of sums that cancel: gradients, and moments, which are made of them."""
    return "grad" in kind or kind.startswith("exp_avg")


class _Scales:
    """The scales against which differences of a row are measured.

    Attributes:
        least: The least magnitude.
        slack: What elements may differ by, besides.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], count: int, least: float, ndigits: int | None) -> None:
        norms = [row["norm"] for row in rows if row.get("norm") is not None]
        ends = [abs(row[op]) for row in rows for op in EXTREMES if row.get(op) is not None]
        self.count, self.least, self.slack = max(count, 1), least, 0.0
        self._digit, self._fixed_from = (0.0, 0.0) if ndigits is None else (10.0**-ndigits, fixed_from(ndigits))
        self._most = max(filter(math.isfinite, ends), default=0.0)
        roots = [norm / math.sqrt(self.count) for norm in norms] if count > 1 else []
        roots += [row["rms"] for row in rows if row.get("rms") is not None]
        self._root_mean_square = max(filter(math.isfinite, roots), default=0.0)

    def apart(self, a: float, b: float, elements: float = 1.0) -> float:
        """Their distance without the slack and what CSV rounds: a unit in the last digit, also where it writes an exponent.

        Args:
            elements: How often the slack of an element counts.
        """
        most = max(abs(a), abs(b))
        digit = self._digit * (1.0 if most >= self._fixed_from else 10 * most)
        return max(0.0, abs(a - b) - digit - self.slack * elements)

    def of(self, op: str, own: float) -> float:
        if op == "norm":
            return max(own, self.least * math.sqrt(self.count))
        if op in EXTREMES:
            return max(self._most, own, self.least)
        return max(self._root_mean_square or self._most, own, self.least) if op in AVERAGES else max(own, self.least)

    @property
    def knows_size(self) -> bool:
        """Whether another number than a mean says how large the tensor is."""
        return max(self._most, self._root_mean_square, self.least) > 0


def _of_op(kind: str, op: str, a: float | None, b: float | None, scales: _Scales, epsilon: float) -> float:
    if a == b or (a is not None and b is not None and math.isnan(a) and math.isnan(b)):
        return 0.0
    if a is None or b is None or not math.isfinite(a) or not math.isfinite(b) or op in WHOLE_OPS or not epsilon:
        return math.inf
    own = max(abs(a), abs(b))
    if op in SHARES or kind == DIRECTION_KIND:
        return scales.apart(a, b) / (32 * epsilon + 2 / scales.count)
    if op in PERCENTILES:
        return scales.apart(a, b) / scales.of("rms", own) / (32 * epsilon + 2 / scales.count)
    if op == OVER_MEDIAN:
        return scales.apart(a, b) / abs(a * b) / (4 * epsilon + 16 * SINGLE)
    if op in HIGHER:
        return scales.apart(a, b) / max(own, 3.0) / (16 * epsilon + 64 * SINGLE)
    if op == "mean" and scales.count > 1 and not scales.knows_size:
        return scales.apart(a, b) / own / ALONE_SHARE
    averaged = epsilon * min(1.0, 1 / 4 + 4 / math.sqrt(scales.count)) + 8 * SINGLE
    unit = averaged if op in AVERAGES else 4 * epsilon + 16 * SINGLE
    return scales.apart(a, b, math.sqrt(scales.count) if op == "norm" else 1.0) / scales.of(op, own) / unit


def judged(compared: Compared, rounding: Rounding) -> Compared:
    """Without the differences that have grown by rounding from those of earlier steps.

    Args:
        compared: With findings in order of steps, all beyond what rounding explains in one step.
    """
    kept: list[Finding] = []
    number, largest = rounding.explained, 0.0
    by_kind: dict[str, list[Finding]] = {kind: [] for kind, _ in rounding.by_step}
    for finding in compared.findings:
        by_kind.setdefault(finding.kind, []).append(finding)
    for kind, findings in by_kind.items():
        found = {step: list(some) for step, some in itertools.groupby(findings, key=lambda one: one.step)}
        most, allowed = 0.0, 1.0
        for step in sorted({*(step for one, step in rounding.by_step if one == kind), *found}):
            if step > rounding.circumstances.first or rounding.circumstances.is_late:
                allowed = GROWTH * max(1.0, most)
            explained: list[Finding] = []
            for one in found.get(step, ()):
                (explained if one.rounding <= allowed and not one.is_limited else kept).append(one)
            number += len(explained)
            most = max([most, rounding.by_step.get((kind, step), 0.0), *(one.rounding for one in explained)])
        largest = max(largest, most)
    kept.sort(key=lambda finding: finding.in_order)
    return replace(compared, findings=kept, rounded=number, most_rounded=largest)
