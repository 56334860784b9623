"""How the work is cut."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from recorded_job import files, merged, sharded

from monitor.coordinator.manifest_format import StepsRecord
from monitor.merge.merge import Planner, Window, in_groups, recorded_steps
from monitor.merge.tensors import SHARDS
from monitor.sinks.files import ALL_STEPS, StepSpan


def shards(*each: tuple[int, int, int, int]) -> pa.Table:
    """Directory, first step, last step, rows."""
    rows = [(run, "actv", "x.h5", first, last, count) for run, first, last, count in each]
    return pa.table([pa.array(c).cast(f.type) for c, f in zip(zip(*rows, strict=True), SHARDS, strict=True)], schema=SHARDS)


def cut(
    *each: tuple[int, int, int, int], rows: int = 100, limit: StepSpan = ALL_STEPS, written: Sequence[StepsRecord] = ()
) -> list[Window]:
    planner = Planner(limit, rows, recorded_steps(written, [shards(*each)]))
    return list(planner.windows("actv", shards(*each), SHARDS.empty_table()))


def test_shards_that_are_small_together_are_one_piece() -> None:
    (window,) = cut((0, 0, 9, 20), (1, 0, 9, 20), (0, 10, 19, 20), (1, 10, 19, 20))
    assert (window.steps, window.pieces, window.shares, window.rows) == (StepSpan(0, 19), (StepSpan(0, 19),), (), 80)


def test_where_shards_are_large_pieces_are_ranges_of_their_steps_and_the_shards_are_read_once() -> None:
    (window,) = cut(*((run, 0, 9, 50) for run in range(8)))
    assert window.pieces == (StepSpan(0, 1), StepSpan(2, 4), StepSpan(5, 6), StepSpan(7, 9))
    assert window.shares == (range(2), range(2, 4), range(4, 6), range(6, 8))


def test_of_a_directory_that_has_very_much_no_more_is_read_at_a_time_than_two_pieces_have() -> None:
    windows = cut((0, 0, 99, 1000))
    assert [window.rows for window in windows] == [200] * 5
    assert [piece for window in windows for piece in window.pieces] == [StepSpan(n, n + 9) for n in range(0, 100, 10)]


def test_one_step_is_never_cut() -> None:
    assert [window.pieces for window in cut((0, 5, 6, 100_000))] == [(StepSpan(5, 5),), (StepSpan(6, 6),)]


@pytest.mark.parametrize(("limit", "expected"), [(StepSpan(3, 4), StepSpan(3, 4)), (StepSpan(8, 2**63 - 1), StepSpan(8, 9))])
def test_steps_that_were_not_asked_for_are_left_out(limit: StepSpan, expected: StepSpan) -> None:
    assert [window.steps for window in cut((0, 0, 9, 50), limit=limit)] == [expected]


def test_the_steps_of_a_record_that_was_not_completed_are_cut_by_those_that_it_holds() -> None:
    written = StepsRecord(count=4, ranges=((0, 30, 10),))
    (window,) = cut((0, 0, 999, 100), (1, 0, 999, 100), written=[written])
    assert window.pieces == (StepSpan(0, 19), StepSpan(20, 999))


def test_a_range_of_steps_that_cannot_be_is_not_counted_through() -> None:
    written = StepsRecord(count=2**61 + 1, ranges=((0, 2**61, 1),))
    assert len(recorded_steps([written], [shards((0, 0, 2**60, 100))])) <= 100_001


def test_windows_are_done_some_at_a_time() -> None:
    windows = cut((0, 0, 99, 1000))
    assert [len(group) for group in in_groups(windows, 450)] == [2, 2, 1]
    assert [len(group) for group in in_groups(windows, 1)] == [1] * 5


def test_rows_that_are_put_in_order_first_are_merged_to_the_same_bytes_as_those_that_are_not(tmp_path: Path) -> None:
    sharded(tmp_path, steps=5)
    merged(tmp_path, "in-order", rows=3)
    for step in range(5):
        merged(tmp_path, str(step), steps=StepSpan(step, step), rows=3)
    made = {name: content for step in range(5) for name, content in files(tmp_path / str(step)).items() if "report" not in name}
    assert made == {name: content for name, content in files(tmp_path / "in-order").items() if "report" not in name}
