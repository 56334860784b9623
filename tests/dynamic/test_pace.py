"""How often ranks ask, by how many there are and by what their store can answer."""

from __future__ import annotations

import pytest

from monitor.dynamic.step_boundary import PollingIntervals


@pytest.mark.parametrize(
    ("world", "asked_per_second", "idle", "bound"),
    [(8, 2_000, 1.0, 4.0), (10_000, 2_000, 5.0, 20.0), (8, 200, 1.0, 4.0), (400, 200, 2.0, 8.0)],
)
def test_ranks_ask_as_often_as_their_store_can_answer_and_once_a_second_at_most(
    world: int, asked_per_second: int, idle: float, bound: float
) -> None:
    pace = PollingIntervals.of(world, asked_per_second)
    assert (pace.idle, pace.bound) == (idle, bound)
    assert world / pace.idle <= asked_per_second
