"""How far two numbers, or two tensors, are from each other."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference between two values of the same thing.

    Attributes:
        same: Whether they are the same, bit for bit as far as that shows.
        absolute: The greatest difference of two numbers; NaN where one of them is no number and the other is.
        relative: The greatest difference as a share of the greater magnitude of the two.
        cosine: Of the angle between two tensors; None where there are no tensors, or one of them is zero.
    """

    same: bool
    absolute: float = 0.0
    relative: float = 0.0
    cosine: float | None = None

    @property
    def size(self) -> float:
        """A key for sorting: what is no number comes first."""
        return math.inf if math.isnan(self.relative) else self.relative


SAME: Final = Difference(same=True)


def of_tensors(a: NDArray[Any], b: NDArray[Any]) -> Difference:
    """The difference of two tensors of the same shape. NaN equals NaN, as the same failure in the same place does."""
    if a.dtype == b.dtype and a.tobytes() == b.tobytes():
        return Difference(same=True, cosine=1.0 if a.size and np.any(a) else None)
    kind = np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64
    x, y = a.astype(kind).ravel(), b.astype(kind).ravel()
    with np.errstate(all="ignore"):
        apart = np.abs(x - y)
        # Equal infinities differ by NaN, and so do two NaN.
        apart[(x == y) | (np.isnan(x) & np.isnan(y))] = 0.0
        share = np.where(apart == 0, 0.0, apart / np.maximum(np.abs(x), np.abs(y)))
        share = np.where(np.isinf(apart), 1.0, share)
        return Difference(same=False, absolute=_greatest(apart), relative=_greatest(share), cosine=_cosine(x, y))


def of_numbers(pairs: Iterable[tuple[Any, Any]]) -> Difference:
    """The greatest difference between two sets of statistics of the same tensor."""
    same, absolute, relative = True, 0.0, 0.0
    for one, other in pairs:
        if one is None or other is None:
            if one is not other:  # nothing is not NaN
                return Difference(same=False, absolute=math.nan, relative=math.nan)
        elif one != other and not (math.isnan(one) and math.isnan(other)):
            apart = abs(float(one) - float(other))
            share = apart / max(abs(one), abs(other)) if math.isfinite(apart) else min(apart, 1.0)
            same, absolute, relative = False, _greater(absolute, apart), _greater(relative, share)
        elif one == other == 0:
            same = same and math.copysign(1.0, one) == math.copysign(1.0, other)
    return Difference(same=same, absolute=absolute, relative=relative)


def _greater(one: float, other: float) -> float:
    """NaN, if one of them is."""
    return one if math.isnan(one) or other <= one else other


def of_leaves(a: Mapping[str, Any], b: Mapping[str, Any], names: Iterable[str]) -> Difference:
    """The greatest difference between two dumps of a tensor.

    A mean is compared with the tensor's root mean square: near zero, its own size says nothing.
    """
    shared = [name for name in names if name in a and name in b]
    found = of_numbers([(a[name], b[name]) for name in shared]) if shared else SAME
    if not found.same and "Mean" in shared and math.isfinite(found.relative):
        found = _with_a_mean_of_elements(found, a, b, [name for name in shared if name != "Mean"])
    if a.get("md5") != b.get("md5") and "md5" in a and "md5" in b:
        return Difference(same=False, absolute=found.absolute, relative=found.relative)
    return found


def _with_a_mean_of_elements(
    found: Difference, a: Mapping[str, Any], b: Mapping[str, Any], others: Sequence[str]
) -> Difference:
    scale = max(_root_mean_square(a), _root_mean_square(b))
    if scale == 0:
        return found
    mean = of_numbers([(a["Mean"], b["Mean"])])
    rest = of_numbers([(a[name], b[name]) for name in others]) if others else SAME
    return Difference(
        same=False, absolute=found.absolute, relative=max(rest.relative, min(mean.relative, mean.absolute / scale))
    )


def _root_mean_square(leaf: Mapping[str, Any]) -> float:
    """The root mean square of the elements; 0 if it is not known, or not finite."""
    norm, shape = leaf.get("Norm"), leaf.get("shape")
    if not isinstance(norm, float) or not math.isfinite(norm) or not isinstance(shape, list):
        return 0.0
    sizes = [one for one in shape if isinstance(one, int) and 0 < one < 2**63]
    return norm / math.sqrt(math.prod(map(float, sizes))) if len(sizes) == len(shape) else 0.0


def _greatest(numbers: NDArray[np.float64]) -> float:
    return float(numbers.max()) if numbers.size else 0.0


def _cosine(x: NDArray[Any], y: NDArray[Any]) -> float | None:
    scale_x, scale_y = np.max(np.abs(x), initial=0.0), np.max(np.abs(y), initial=0.0)
    if not (0 < scale_x < math.inf and 0 < scale_y < math.inf):
        return None
    x, y = x / scale_x, y / scale_y
    return float(abs(np.vdot(x, y)) if np.iscomplexobj(x) else np.dot(x, y)) / float(np.linalg.norm(x) * np.linalg.norm(y))


# --- What a comparison has found.


ROW: Final = "row"
"""The unit of comparisons of runs."""

ALONE: Final = {"missing": "on the left side alone", "added": "on the right side alone"}
"""What a finding of one side says."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not the same on both sides.

    Attributes:
        step: Its number.
        rank: The rank's directory on the left.
        order: Its place in the execution order of that rank's step.
        name: Of the tensor, or of the entry.
        what: What is wrong, in a word: ``values``, ``shape``, ``dtype``, ``missing``, ``added``, ``argument``.
        left: What the left side has, for people; likewise ``right``.
        rounding: The difference as a multiple of what rounding explains in one step (``tolerances``).
        op: The op in which it is so large, if there are several.
        is_limited: Whether it is more than a file of limits allows.
    """

    step: int
    rank: str
    order: int
    name: str
    what: str
    left: str
    right: str
    difference: Difference | None = None
    rounding: float = math.inf
    op: str = ""
    is_limited: bool = False

    @property
    def kind(self) -> str:
        """The kind of the rows; ``tensors`` in a dump."""
        return self.name.partition("/")[0] if "/" in self.name else "tensors"

    @property
    def in_order(self) -> tuple[int, int, list[str | int]]:
        """A key for sorting in the order in which runs are executed."""
        return self.step, self.order, self.rank_order

    @property
    def rank_order(self) -> list[str | int]:
        """The rank as a key for sorting: the tenth comes after the second."""
        return _in_parts(self.rank)


@cache
def _in_parts(rank: str) -> list[str | int]:
    """Texts and numbers in turn."""
    return [int(part) if i % 2 else part for i, part in enumerate(re.split("([0-9]+)", rank))]


@dataclass(frozen=True, slots=True)
class Compared:
    """The result of a comparison.

    Attributes:
        tensors: How many were on both sides; of runs, how many rows.
        arguments: How many values that are no tensors were on both sides.
        findings: In execution order: by step, then by rank, then as the left side ran, what the right alone has in between.
        not_compared: What one side alone has, or what is known to be missing on a side, a line each.
        rounded: How many are no findings, because rounding explains their differences.
        most_rounded: The largest of these, as a multiple of what rounding explains in one step.
        notes: What is compared otherwise or not at all because the layouts differ, a line each.
        counted: The kinds of rows that were on both sides.
        steps: Of runs, the first and the last step that both have.
        seen: Of runs, how large differences were, by kind and name (``tolerances.Rounding``).
        precision: Of runs, the distance from 1 to the next number in their coarsest dtype.
    """

    tensors: int
    findings: list[Finding]
    arguments: int = 0
    not_compared: tuple[str, ...] = ()
    unit: str = "tensor"
    rounded: int = 0
    most_rounded: float = 0.0
    notes: tuple[str, ...] = ()
    counted: tuple[str, ...] = ()
    steps: tuple[int, int] = (0, 0)
    seen: Mapping[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    precision: float = 0.0

    @property
    def different(self) -> int:
        """How many findings are of something that both sides have."""
        return sum(one.what not in ALONE for one in self.findings)

    @property
    def first(self) -> Finding | None:
        """The first difference; None if there is none."""
        return next(iter(self.findings), None)

    @property
    def is_empty(self) -> bool:
        """Whether there was nothing to compare."""
        return not (self.tensors or self.arguments or self.findings)


# --- Why nothing was compared.


class ComparisonError(Exception):
    """The message names the place, the reason and what to do."""
