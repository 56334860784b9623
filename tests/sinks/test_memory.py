from __future__ import annotations

import threading
from pathlib import Path

import pytest
from sink_rows import Measured, Rank

from monitor.sinks.memory import MemorySink

W = {"grad_reduced": [Measured("w")]}


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    return Rank(tmp_path / "never made")


def test_before_the_first_step_there_is_none(rank: Rank) -> None:
    sink = MemorySink(rank.context)
    assert sink.latest() is None
    assert sink.steps() == ()


def test_the_latest_step_is_the_one_taken_in_last(rank: Rank) -> None:
    sink = MemorySink(rank.context)
    rows = [rank.step(i, W) for i in range(3)]
    for step in rows:
        sink.write(step)
    assert sink.latest() is rows[2]


def test_earlier_steps_are_kept_up_to_a_bound(rank: Rank) -> None:
    sink = MemorySink(rank.context, keep=3)
    for step in range(10):
        sink.write(rank.step(step, W))
    assert [rows.step for rows in sink.steps()] == [7, 8, 9]


def test_it_touches_no_disk_and_stays_readable_when_closed(rank: Rank) -> None:
    sink = MemorySink(rank.context)
    sink.write(rank.step(5, W))
    sink.flush()
    sink.close()
    latest = sink.latest()
    assert latest is not None
    assert latest.step == 5
    assert not rank.context.directory.exists()


def test_a_reader_beside_the_writer_sees_steps_in_order_and_whole(rank: Rank) -> None:
    sink = MemorySink(rank.context, keep=4)
    steps = [rank.step(i, W) for i in range(2000)]
    writer = threading.Thread(target=lambda: [sink.write(rows) for rows in steps])
    writer.start()
    seen: list[int] = []
    while writer.is_alive():
        numbers = [rows.step for rows in sink.steps()]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
        seen += numbers[-1:]
    writer.join()
    assert sorted(seen) == seen
    assert steps[-1] is sink.latest()
