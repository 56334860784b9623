"""Rows beside what they have to hold."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from loop_rows import Expected, Place, Rows, Wide

SMALL = 1e-8
"""``eps`` of the configuration."""

ROUNDING = 1e-12
"""Of a share, which is otherwise exact."""


def faults(expected: Rows, found: Mapping[Place, Mapping[str, Any]], tolerance: float) -> Iterator[str]:
    """What is wrong, a line each."""
    for place in sorted(expected.keys() - found.keys()):
        if not expected[place].unless:
            yield f"missing: {place}"
    for place in sorted(found.keys() - expected.keys()):
        yield f"not expected: {place}"
    for place in sorted(expected.keys() & found.keys()):
        for op, right in numbers_of(place.kind, expected[place], tolerance).items():
            if not is_right(found[place].get(op), right):
                yield f"wrong: {place}: {op} is {found[place].get(op)}, and should be {right.value}"
        yield from _wrong_histogram(place, expected[place], found[place], tolerance)


class Right(NamedTuple):
    """A number as it has to be.

    Attributes:
        value: None if there has to be none.
        within: How far off it may be; 0 of a count.
    """

    value: float | None
    within: float = 0.0


def is_right(found: Any, right: Right) -> bool:
    if found is None or right.value is None:
        return found is None and right.value is None
    if not math.isfinite(right.value):
        return str(float(found)) == str(right.value)
    return bool(abs(found - right.value) <= right.within)


def numbers_of(kind: str, expected: Expected, tolerance: float) -> dict[str, Right]:
    """What has to be in a row, by op; ``tolerance`` is relative to the numbers that it was made from."""
    tensors = [x.ravel() for x in expected.tensors]
    with np.errstate(all="ignore"):
        if kind == "update_ratio":
            return _ratio(*tensors, tolerance)
        return {"mg_direction": _agreeing(*tensors)} if kind == "mg_direction" else _statistics(*tensors, tolerance)


def _statistics(x: Wide, tolerance: float) -> dict[str, Right]:
    within = tolerance * (float(np.abs(x).max()) if np.isfinite(x).all() else 1.0)
    may_be_small = float((np.abs(np.abs(x) - SMALL) <= within).mean())
    return {
        "min": Right(float(x.min()), within),
        "max": Right(float(x.max()), within),
        "mean": Right(float(x.mean()), within),
        "norm": Right(norm(x), tolerance * norm(x)),
        "zeros": Right(float((np.abs(x) < SMALL).mean()), may_be_small + ROUNDING),
        "nans": Right(float(np.isnan(x).sum())),
        "infs": Right(float(np.isinf(x).sum())),
        "absmax": Right(float(np.abs(x).max()), within),
        "std": Right(float(x.std()), within),
    }


def _ratio(before: Wide, after: Wide, tolerance: float) -> dict[str, Right]:
    """An update is the difference of weights, and is as exact as they are."""
    update, weight = norm(after - before), norm(before)
    return {
        "update_norm": Right(update, tolerance * max(update, weight)),
        "weight_norm": Right(weight, tolerance * weight),
        "update_ratio": Right(update / weight, tolerance * max(1.0, update / weight)) if weight else Right(None),
    }


def _agreeing(gradient: Wide, momentum: Wide) -> Right:
    return Right(float((np.sign(gradient) == np.sign(momentum)).mean()), ROUNDING)


def norm(x: Wide) -> float:
    return float(np.sqrt((x * x).sum()))


def _wrong_histogram(place: Place, expected: Expected, found: Mapping[str, Any], tolerance: float) -> Iterator[str]:
    """Of numbers that round to the end of a bin either bin is right."""
    if place.kind not in ("adam_update", "adam_ratio"):
        return
    x = expected.tensors[0].ravel()
    x = x[np.isfinite(x)]
    upto = np.cumsum(found["histogram"])
    for bin_, end in enumerate(np.linspace(-1.0, 1.0, 65)):
        fewest, most = (int((x <= end + off).sum()) for off in (-tolerance, tolerance))
        if not fewest <= upto[bin_] <= most:
            yield f"wrong: {place}: histogram has {upto[bin_]} elements up to {end}, and should have {fewest} to {most}"
            return
    if upto[-1] != len(x):
        yield f"wrong: {place}: histogram has {upto[-1]} elements, and should have {len(x)}"
