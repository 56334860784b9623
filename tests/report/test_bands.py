"""The band of a number follows slow changes, and a value that leaves it is seen."""

from __future__ import annotations

import numpy as np
import pytest

from monitor.report.bands import ENOUGH, LEVEL, SPREAD, Limit, Means, Window, bands_of

LIMIT = Limit(7, 1.1)


def by_definition(values: list[float], narrowest: float) -> list[tuple[float, float]]:
    """Level and deviations of each value, one at a time, by sorted lists."""

    def median(of: list[float]) -> float:
        ordered, half = sorted(of), len(of) // 2
        return ordered[half] if len(of) % 2 else (ordered[half - 1] + ordered[half]) / 2

    logs = [float(np.log(one)) for one in values]
    apart: list[float | None] = []
    found = []
    for at, log in enumerate(logs):
        level = median(logs[at - LEVEL : at]) if at >= LEVEL else None
        own = None if level is None else log - level
        past = [one for one in apart[max(at - SPREAD, 0) : at] if one is not None]
        deviations = float("nan")
        if own is not None and len(past) >= ENOUGH:
            usual = median(past)
            spread = max(1.4826 * median([abs(one - usual) for one in past]), narrowest)
            deviations = (own - max(usual, 0.0)) / spread
        found.append((float("nan") if level is None else float(np.exp(level)), deviations))
        apart.append(own)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_bands_are_those_of_the_definition(seed: int) -> None:
    values = np.random.default_rng(seed).lognormal(0, 0.3, (70, 2))
    found = bands_of(values, 0.01)
    for column in range(2):
        expected = np.array(by_definition(values[:, column].tolist(), 0.01))
        np.testing.assert_allclose(found.level[:, column], expected[:, 0], rtol=1e-12)
        np.testing.assert_allclose(found.deviations[:, column], expected[:, 1], rtol=1e-9)


@pytest.mark.parametrize("course", [np.linspace(5, 1, 200), np.linspace(1, 3, 200), 4 / np.arange(1, 201) ** 0.3])
def test_a_number_that_changes_slowly_stays_in_its_band(course: np.ndarray) -> None:
    noise = np.random.default_rng(0).normal(0, 0.03, (200, 50))
    out = bands_of(course[:, None] * np.exp(noise), 0.01).out(LIMIT)
    assert out[20:].sum() == 0


def test_a_jump_on_a_falling_course_leaves_the_band_and_is_no_greater_than_the_values_before() -> None:
    values = 5 * np.exp(-np.arange(60) / 20) * np.exp(np.random.default_rng(0).normal(0, 0.02, 60))
    values[40] *= 1.5
    assert values[40] < values[:20].max()
    assert np.flatnonzero(bands_of(values[:, None], 0.01).out(LIMIT)[:, 0]).tolist() == [40]


def test_infinite_values_leave_each_band_and_absent_ones_none() -> None:
    values = np.random.default_rng(0).lognormal(0, 0.1, 60)
    values[40], values[45] = np.inf, np.nan
    assert np.flatnonzero(bands_of(values[:, None], 0.01).out(LIMIT)[:, 0]).tolist() == [40]


def test_rows_become_means_of_ranks_and_windows_of_columns() -> None:
    steps = np.array([3, 4, 6])
    means, window = Means(steps), Window(steps)
    rows = [(3, -1, 0, 0, 2.0), (3, -1, 0, 1, 4.0), (6, -1, 0, 0, 1.0), (6, -1, 1, 1, np.nan)]
    step, micro_step, series, rank = (np.array([row[at] for row in rows]) for at in range(4))
    for each in (means, window):
        each.add(step, micro_step, series, rank, np.array([row[4] for row in rows]))
    found, mean, greatest = means.of(0)
    assert (found.tolist(), mean.tolist(), greatest.tolist()) == ([3, 6], [3.0, 1.0], [4.0, 1.0])
    filled = window.filled()
    assert list(zip(filled.series.tolist(), filled.rank.tolist(), strict=True)) == [(0, 0), (0, 1), (1, 1)]
    np.testing.assert_array_equal(filled.values, [[2, 4, np.nan], [np.nan] * 3, [1, np.nan, np.inf]])
    np.testing.assert_array_equal(filled.together().values, [[2, 4], [np.nan] * 2, [1, np.inf]])
