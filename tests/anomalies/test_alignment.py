"""What rules remember of a row follows it through steps with other rows."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st
from rule_parts import Watched, said
from sink_rows import Measured

from monitor.anomalies.scanner import RowStates
from monitor.stats.partials import COLUMNS, KindRows, Partials

Key = tuple[int, int]
KEYS = st.tuples(st.integers(0, 4), st.integers(-1, 2))


def rows_of(keys: list[Key]) -> KindRows:
    series, micro_step = np.array(keys, np.int64).reshape(-1, 2).T
    zeros = np.zeros(len(keys), np.int64)
    return KindRows(series, micro_step, np.arange(len(keys)), zeros, Partials(np.zeros((len(COLUMNS), len(keys)))))


@given(st.lists(st.lists(KEYS, unique=True, max_size=8), max_size=8))
def test_each_row_finds_what_was_left_with_it_whatever_rows_there_were_between(steps: list[list[Key]]) -> None:
    aligned, expected = RowStates(2), {}
    for keys in steps:
        numbers = aligned.with_rows(rows_of(keys))
        assert numbers.T.tolist() == [expected.get(key, [0.0, 0.0]) for key in keys]
        numbers += [[1.0], [2.0]]
        for key in keys:
            before = expected.get(key, [0.0, 0.0])
            expected[key] = [before[0] + 1, before[1] + 2]


def test_the_same_rows_again_are_the_same_memory() -> None:
    aligned, rows = RowStates(1), rows_of([(0, -1), (3, 0)])
    assert np.shares_memory(aligned.with_rows(rows), aligned.with_rows(rows_of([(0, -1), (3, 0)])))


def turbulent() -> Watched:
    return Watched(("AnomalyTurbulence", 0.5))


def test_a_row_that_vanishes_and_returns_is_compared_with_what_it_was() -> None:
    watched = turbulent()
    for tensors in ({"a": [10.0], "b": [1.0]}, {"b": [1.0]}, {"c": [5.0], "b": [1.0]}):
        assert watched.step(**tensors) == []
    found = watched.step(b=[1.0], a=[100.0])
    assert [(one.name, one.mean) for one in found] == [("a", 10.0), ("a", 10.0)]


def test_a_series_that_is_new_in_mid_run_disturbs_no_other() -> None:
    watched = turbulent()
    for _ in range(3):
        assert watched.step(a=[10.0], b=[1.0]) == []
    assert watched.step(new=[1e6], a=[10.0], b=[1.0]) == []
    assert said(watched.step(new=[1e6], a=[10.0], b=[9.0])) == [
        ("b", "AnomalyTurbulence", "norm"),
        ("b", "AnomalyTurbulence", "mean"),
    ]


def test_micro_steps_of_a_series_have_means_of_their_own() -> None:
    """Under ``monitor_mbs_grad`` the gradient of a micro-step holds those before it."""
    watched = turbulent()
    for _ in range(3):
        accumulated = [Measured("w", [10.0 * (m + 1)], m) for m in range(4)]
        assert watched.step({"grad_unreduced": accumulated}) == []


def test_kinds_of_one_name_have_means_of_their_own() -> None:
    watched = turbulent()
    for _ in range(2):
        assert watched.step({"param_origin": [Measured("w", [1.0])], "grad_reduced": [Measured("w", [1e-6])]}) == []


def test_rows_seen_longest_ago_are_forgotten_beyond_a_bound() -> None:
    aligned = RowStates(1)
    for step in range(5):
        numbers = aligned.with_rows(rows_of([(100_000 * step + one, -1) for one in range(100_000)]))
        numbers += 1.0
    assert aligned.with_rows(rows_of([(400_000, -1), (300_000, -1), (0, -1)])).tolist() == [[1.0, 1.0, 0.0]]
