"""Rounding moves a small median as it moves the largest elements; a real change of activations is larger."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from monitor.compare.tolerances import Circumstances, Rounding

COLUMNS = ("massive", "massive_channel", "dead_units", "effective_rank", "residual_norm")


def row(x: np.ndarray) -> dict[str, Any]:
    """A row of ``activation_hook`` of numbers of single precision."""
    magnitudes = np.abs(x)
    values = (magnitudes.max() / np.median(magnitudes), int(magnitudes.max(0).argmax()), 0.0, 8.0, 5.0)
    return {"vpp_stage": 0, "name": "h.0.activation", "rank": 0, "step": 0, **dict(zip(COLUMNS, values, strict=True))}


def share(one: np.ndarray, other: np.ndarray) -> float:
    rounding = Rounding(({}, {}), Circumstances(first=0))
    return rounding.share("activation_hook", (row(one), row(other)), COLUMNS, 0.0, None)[0]


@pytest.mark.parametrize("median", [1.0, 1e-2, 1e-5])
def test_a_median_may_differ_by_the_rounding_of_the_largest_element(median: float) -> None:
    x = np.random.default_rng(0).uniform(0.9, 1.1, (65, 33)) * median
    x[0, 5] = 100.0
    assert share(x, x + 100.0 * 2.0**-23) < 1
    assert share(x, x + 100.0 * 2.0**-14) > 1


def test_which_of_two_equal_channels_is_the_largest_is_no_difference() -> None:
    x = np.random.default_rng(0).uniform(0.9, 1.1, (65, 33))
    x[0, 5], x[1, 7] = 10.0, 10.0
    other = x.copy()
    other[1, 7] += 1e-6
    assert row(x)["massive_channel"] != row(other)["massive_channel"]
    assert share(x, other) < 1
