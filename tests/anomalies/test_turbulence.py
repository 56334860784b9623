"""``AnomalyTurbulence``: what is far from what it used to be, in either direction, and what does not count as far."""

from __future__ import annotations

import math

import numpy as np
import pytest
from rule_parts import INF, NAN, Event, Watched, said
from sink_rows import Measured

from monitor.series import Series
from monitor.stats.partials import EXPONENT, SUM, SUMSQ, KindRows
from monitor.stats.table import StepRows

NORM, MEAN = ("a", "AnomalyTurbulence", "norm"), ("a", "AnomalyTurbulence", "mean")


def of(threshold: float = 0.5) -> Watched:
    return Watched(("AnomalyTurbulence", threshold))


def after(*tensors: list[float], threshold: float = 0.5) -> Watched:
    """The tensor ``a`` has had these values, and nothing fired."""
    watched = of(threshold)
    for values in tensors:
        assert watched.step(a=values) == []
    return watched


def test_a_first_observation_is_compared_with_nothing() -> None:
    assert of().step(a=[1e9], b=[-5.0]) == []


@pytest.mark.parametrize(("values", "norm", "mean"), [([16.0], 16.0, 16.0), ([4.0], 4.0, 4.0)])
def test_a_deviation_fires_in_both_directions(values: list[float], norm: float, mean: float) -> None:
    assert after([10.0], [10.0]).step(a=values) == [
        Event("actv", "a", -1, "AnomalyTurbulence", "norm", norm, 10.0),
        Event("actv", "a", -1, "AnomalyTurbulence", "mean", mean, 10.0),
    ]


@pytest.mark.parametrize("value", [15.0, 5.0, 10.0])
def test_what_lies_on_the_bound_or_within_it_does_not(value: float) -> None:
    assert after([10.0], [10.0]).step(a=[value]) == []


def test_a_zeroed_tensor_is_a_deviation() -> None:
    assert said(after([3.0, 4.0]).step(a=[0.0, 0.0])) == [NORM, MEAN]


def test_a_mean_of_the_other_sign_is_a_deviation_and_a_negative_one_is_compared_by_its_magnitude() -> None:
    assert said(after([-10.0]).step(a=[10.0])) == [MEAN]
    assert after([-10.0]).step(a=[-14.0]) == []
    assert said(after([-10.0]).step(a=[-16.0])) == [NORM, MEAN]


def test_norm_and_mean_are_judged_apart() -> None:
    assert said(after([1.0, 1.0]).step(a=[2.0, 0.0])) == []
    assert said(after([1.0, 1.0]).step(a=[3.0, -1.0])) == [NORM]


@pytest.mark.parametrize("mean", [1e-9, -1e-9, 0.0])
def test_a_mean_that_is_almost_nothing_next_to_its_tensor_may_change_by_any_factor(mean: float) -> None:
    """Peers, fault 6: means near zero fired all the time."""
    watched = after([1 + mean, -1 + mean])
    for other in (5e-7, -3e-8, 0.0, 0.02, -0.4):
        assert watched.step(a=[1 + other, -1 + other]) == []


def test_such_a_mean_fires_when_it_becomes_large_next_to_its_tensor() -> None:
    """The bound is half of the root mean square, 1."""
    assert said(after([1.0, -1.0]).step(a=[1.06, -0.04])) == [MEAN]


def test_a_mean_within_twice_its_sampling_error_is_judged_by_the_scale_of_its_tensor() -> None:
    """Of 16 elements of scale 1 a mean of 0.3 says no more than one of -0.1: its sampling error is 0.25."""
    assert after(sixteen(0.3)).step(a=sixteen(-0.1)) == []
    assert said(after(sixteen(0.6)).step(a=sixteen(-0.3))) == [MEAN]
    assert said(after(sixteen(0.3)).step(a=sixteen(0.95))) == [MEAN]


def test_the_more_elements_a_tensor_has_the_smaller_a_mean_says_something() -> None:
    assert said(after(sixteen(0.3) * 100).step(a=sixteen(-0.1) * 100)) == [MEAN]


def sixteen(mean: float) -> list[float]:
    """With this mean and a root mean square of 1."""
    spread = math.sqrt(1 - mean**2)
    return [mean + spread, mean - spread] * 8


def test_a_tiny_tensor_is_judged_like_any_other() -> None:
    assert said(after([1e-9, 1.1e-9]).step(a=[2e-9, 2.2e-9])) == [NORM, MEAN]


@pytest.mark.parametrize("bad", [[NAN, 1.0], [INF, 1.0], [-INF]])
def test_a_tensor_that_is_not_finite_fires_once_and_never_enters_the_means(bad: list[float]) -> None:
    """Peers, fault 4: one NaN made the running average NaN, and the rule never fired again."""
    watched = after([10.0], [10.0])
    [event] = watched.step(a=bad)
    assert (event.op, event.mean) == ("norm", None)
    assert not np.isfinite(event.value)
    assert watched.step(a=[10.0]) == []
    assert [one.mean for one in watched.step(a=[100.0])] == [10.0, 10.0]


def test_one_that_is_not_finite_at_first_leaves_the_next_to_be_the_first() -> None:
    watched = of()
    assert said(watched.step(a=[NAN])) == [NORM]
    assert watched.step(a=[7.0]) == []
    assert [one.mean for one in watched.step(a=[70.0])] == [7.0, 7.0]


def test_the_first_value_after_zeros_is_no_event_and_starts_the_means_afresh() -> None:
    watched = after([0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [3.0, 4.0])
    assert [one.mean for one in watched.step(a=[30.0, 40.0])] == [5.0, 3.5]


def test_a_tensor_without_elements_is_no_observation() -> None:
    watched = after([10.0], [], [])
    assert [one.mean for one in watched.step(a=[100.0])] == [10.0, 10.0]


def test_the_running_mean_is_that_of_all_values_at_first() -> None:
    assert [one.mean for one in after([10.0], [11.0], [12.0]).step(a=[99.0])] == [11.0, 11.0]


def test_after_a_hundred_values_the_weight_of_another_stays_a_hundredth() -> None:
    watched = after(*([10.0] for _ in range(150)), [14.0])
    assert [one.mean for one in watched.step(a=[99.0])] == pytest.approx([10.04] * 2)


def test_that_weight_stays_a_hundredth_beside_a_tensor_that_is_younger() -> None:
    """A tensor of zeros has no mean, so its first observation is always the next one."""
    watched = of()
    for _ in range(150):
        assert watched.step(a=[10.0], b=[0.0]) == []
    assert watched.step(a=[14.0], b=[0.0]) == []
    assert [one.mean for one in watched.step(a=[99.0], b=[0.0])] == pytest.approx([10.04] * 2)


def test_a_spike_enters_only_up_to_the_bound_so_that_the_healthy_step_after_it_is_none() -> None:
    watched = after([10.0], [10.0], [10.0])
    assert said(watched.step(a=[1e6])) == [NORM, MEAN]
    assert watched.step(a=[10.0]) == []
    [norm, _] = watched.step(a=[1e6])
    assert norm.mean == pytest.approx((3 * 10 + 15 + 10) / 5)


def test_a_new_level_that_lasts_is_accepted_in_time() -> None:
    watched = after(*([10.0] for _ in range(5)))
    fired = [bool(watched.step(a=[40.0])) for _ in range(200)]
    assert fired[0]
    assert not fired[-1]
    assert fired == sorted(fired, reverse=True)


def test_a_norm_whose_square_no_number_can_hold_is_judged_by_its_own_value() -> None:
    watched = of()
    assert watched.look(huge(watched, 1.0)) == []
    found = watched.look(huge(watched, 8.0))
    assert [(one.op, one.value, one.mean) for one in found] == [("norm", 2.0**903, 2.0**900), ("mean", 2.0**903, 2.0**900)]


def huge(watched: Watched, scale: float) -> StepRows:
    """One element of 2^900 times ``scale``, as kernels hand it on: sums divided by powers of two."""
    rows = watched.rank.step(1, {"actv": [Measured("a", [1.0])]})
    columns = rows.kinds["actv"].partials.columns
    columns[SUM], columns[SUMSQ], columns[EXPONENT] = scale, scale**2, 900
    return rows


@pytest.mark.parametrize("rows", [1, 32_768, 32_769, 70_000])
def test_every_row_of_many_is_judged_wherever_it_stands(rows: int) -> None:
    watched = of()
    assert watched.look(many(watched, rows)) == []
    odd = sorted({0, rows // 2, rows - 1})
    spiked = many(watched, rows)
    spiked.kinds["actv"].partials.columns[SUMSQ, odd] *= 9
    assert [(one.name, one.op, one.value, one.mean) for one in watched.look(spiked)] == [
        (f"r{row}", "norm", 15.0, 5.0) for row in odd
    ]


def many(watched: Watched, rows: int) -> StepRows:
    one = watched.rank.step(1, {"actv": [Measured("r0", [3.0, 4.0])]}).kinds["actv"]
    series = np.array([watched.rank.series.index_of(Series("actv", 0, f"r{row}")) for row in range(rows)])
    repeated, zeros = one.partials.take(np.zeros(rows, np.int64)), np.zeros(rows, np.int64)
    return StepRows(1, (), {"actv": KindRows(series, zeros - 1, np.arange(rows), zeros, repeated)}, watched.rank.layouts)
