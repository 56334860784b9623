from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from monitor.sinks.heatmaps import DEEPEST, HeatmapHistory, shades

MOST = 4


def history_of(*steps: int, most: int = MOST) -> HeatmapHistory:
    """Each step has its own number as its shade."""
    history = HeatmapHistory.empty(2)
    for step in steps:
        history = history.with_step(step, np.array([step, 0], dtype=np.uint8), most)
    return history


def columns(history: HeatmapHistory) -> list[tuple[int, int]]:
    """The deepest shade and the last step of each."""
    return list(zip(history.shades[:, 0].tolist(), history.last.tolist(), strict=True))


class TestShades:
    @pytest.mark.parametrize(
        ("elements", "shade"), [(0, 0), (1, 1), (100, 1), (1_000, 64), (10_000, 127), (1_000_000, DEEPEST)]
    )
    def test_they_are_the_logarithm_of_the_share(self, elements: int, shade: int) -> None:
        assert shades(np.array([[elements]]), np.array([1_000_000.0])).tolist() == [[shade]]

    def test_shares_are_of_the_elements_of_the_row(self) -> None:
        assert shades(np.array([[2, 0], [2, 0]]), np.array([2.0, 20.0])).tolist() == [[DEEPEST, 0], [190, 0]]


class TestHistory:
    def test_as_long_as_there_is_room_each_step_is_a_column(self) -> None:
        history = history_of(3, 5, 7, 9)
        assert columns(history) == [(3, 3), (5, 5), (7, 7), (9, 9)]
        assert (history.first, history.each, history.recorded) == (3, 1, 4)

    def test_without_room_two_steps_become_a_column(self) -> None:
        assert columns(history_of(1, 2, 3, 4, 5)) == [(2, 2), (4, 4), (5, 5)]

    def test_a_column_of_several_steps_has_the_deepest_shade_of_each_bin(self) -> None:
        history = HeatmapHistory.empty(2)
        for step, shade in enumerate(([9, 0], [2, 0], [0, 3], [0, 1])):
            history = history.with_step(step, np.array(shade, dtype=np.uint8), 2)
        assert history.shades.tolist() == [[9, 0], [0, 3]]

    def test_a_step_that_comes_again_takes_the_place_of_itself_and_of_those_after_it(self) -> None:
        assert columns(history_of(1, 2, 3, 2)) == [(1, 1), (2, 2)]
        assert columns(history_of(4, 5, 1)) == [(1, 1)]

    def test_a_column_that_a_repeated_step_was_in_is_dropped_whole(self) -> None:
        assert columns(history_of(1, 2, 3, 4, 5, 6, 3)) == [(2, 2), (3, 3)]

    def test_fewer_columns_than_there_were_are_had_by_joining_more(self) -> None:
        history = history_of(*range(8), most=8)
        assert columns(history.with_step(8, np.array([8, 0], dtype=np.uint8), 3)) == [(3, 3), (7, 7), (8, 8)]

    def test_what_a_history_was_stays_as_it_was(self) -> None:
        before = history_of(1, 2, 3, 4, 5)
        shown = columns(before)
        before.with_step(6, np.array([6, 0], dtype=np.uint8), MOST)
        assert columns(before) == shown

    @settings(max_examples=50)
    @given(st.integers(1, 200), st.integers(2, 9))
    def test_all_steps_are_in_it_in_order_and_its_columns_are_bounded(self, steps: int, most: int) -> None:
        history = history_of(*range(steps), most=most)
        assert len(history.last) <= most
        assert (history.first, history.recorded) == (0, steps)
        ends = [min((place + 1) * history.each, steps) - 1 for place in range(len(history.last))]
        assert columns(history) == list(zip(ends, ends, strict=True))
