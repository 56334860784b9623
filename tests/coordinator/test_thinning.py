"""Which steps are removed when a rank's directory is full: the oldest half is halved first, then it is quartered, and so on."""

from __future__ import annotations

import logging
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from monitor.coordinator.manifest import Timeline
from monitor.coordinator.manifest_format import StepRanges
from monitor.coordinator.thinning import MOST_KEPT, DiskBound, ThinningRule
from monitor.failures import Failures


class Run:
    """A timeline of steps of one byte each, which is thinned when it has more than ``room`` steps."""

    def __init__(self, room: int, per_record: int = 1, interval: int = 1) -> None:
        self.line, self.room, self.rule = Timeline(), room, ThinningRule(per_record, interval)
        self.trained: list[int] = []

    def train(self, first: int, last: int, *alerts: int) -> None:
        for step in range(first, last, self.rule.interval):
            if step in alerts:
                self.line.thinned.alert(step)
            self.line.write(step, "complete")
            self.trained.append(step)
            if self.line.counts[0] > self.room:
                self.line.thin(self.rule, self.line.counts[0] - self.room)

    @property
    def written(self) -> list[int]:
        return [
            step for one in self.line.manifest_fields()["steps"].written.ranges for step in range(one[0], one[1] + 1, one[2])
        ]

    @property
    def removed(self) -> dict[int, list[int]]:
        record = self.line.manifest_fields()["thinned"]
        return {int(level): list(steps.steps()) for level, steps in record.steps.items()}

    @property
    def all_removed(self) -> list[int]:
        return sorted(step for steps in self.removed.values() for step in steps)


def test_the_oldest_half_is_halved_first() -> None:
    run = Run(64)
    run.train(0, 80)
    assert run.removed == {2: list(range(1, 32, 2))}


def test_each_level_begins_at_twice_the_age_of_the_level_before() -> None:
    run = Run(200)
    run.train(0, 1000)
    ages = [999 - max(steps) for steps in run.removed.values()]
    assert list(run.removed) == [2, 4, 8, 16]
    assert [after / before for before, after in pairwise(ages)] == pytest.approx([2, 2, 2], rel=0.1)


def test_the_older_a_step_the_fewer_of_its_neighbours_stay() -> None:
    run = Run(64)
    run.train(0, 5000)
    gaps = [after - before for before, after in pairwise(run.written)]
    assert gaps == sorted(gaps, reverse=True)
    assert set(gaps) <= {2**power for power in range(12)}


@settings(max_examples=30)
@given(
    steps=st.integers(1, 400),
    room=st.integers(30, 100),
    per_record=st.sampled_from([1, 4, 10]),
    interval=st.sampled_from([1, 3]),
    alerts=st.lists(st.integers(0, 400), max_size=3),
)
def test_every_step_is_written_or_removed_and_none_is_both(
    steps: int, room: int, per_record: int, interval: int, alerts: list[int]
) -> None:
    run = Run(room, per_record, interval)
    run.train(0, steps, *alerts)
    assert sorted([*run.written, *run.all_removed]) == run.trained
    newest = run.trained[-1] // per_record * per_record - per_record
    assert run.written[-8:] == run.trained[-8:]
    assert {step for step in run.trained if step >= newest} <= set(run.written)


def test_steps_with_alerts_and_their_neighbours_stay() -> None:
    run = Run(64)
    run.train(0, 3000, 101, 107, 108)
    assert {100, 101, 102, 106, 107, 108, 109} <= set(run.written)
    assert {103, 105, 110, 111} <= set(run.all_removed)


def test_an_alert_that_is_known_late_has_its_neighbours_too() -> None:
    run = Run(64)
    run.train(0, 50)
    run.line.thinned.alert(41)
    run.train(50, 3000)
    assert {40, 41, 42} <= set(run.written)


def test_a_rule_that_fires_in_every_step_does_not_fill_the_disk() -> None:
    run = Run(MOST_KEPT + 60)
    run.train(0, 1200, *range(1200))
    assert run.written[:MOST_KEPT] == list(range(MOST_KEPT))
    assert len(run.written) <= MOST_KEPT + 60


def test_the_manifest_stays_small_however_long_the_run() -> None:
    run = Run(500)
    run.train(0, 8000, *range(0, 8000, 397))
    fields = run.line.manifest_fields()
    ranges = [fields["steps"].written, *fields["thinned"].steps.values(), fields["thinned"].kept]
    assert sum(len(one.ranges) for one in ranges) < 500
    assert all(one.rest is None for one in ranges)


def test_if_no_more_can_be_removed_the_newest_and_some_older_steps_stay() -> None:
    run = Run(5)
    run.train(0, 300)
    assert run.written[-9:] == list(range(291, 300))
    assert 0 in run.written


def test_a_run_that_resumes_goes_on_where_the_earlier_one_stopped() -> None:
    whole, first, second = Run(64), Run(64), Run(64)
    whole.train(0, 400, 33)
    first.train(0, 200, 33)
    second.line.thinned = type(first.line.thinned).restored(first.line.manifest_fields()["thinned"])
    second.line._written = StepRanges(first.written)
    second.train(200, 400)
    assert second.written == whole.written


def test_a_step_that_is_done_again_is_no_longer_removed() -> None:
    run = Run(64)
    run.train(0, 200)
    resumed = Run(64)
    resumed.line._resumed = True
    resumed.line._written = StepRanges(run.written)
    resumed.line.thinned = type(run.line.thinned).restored(run.line.manifest_fields()["thinned"])
    resumed.train(51, 60)
    assert not {step for step in resumed.all_removed if step >= 60}
    assert set(range(51, 60)) <= {*resumed.written, *resumed.all_removed}


def bound_of(directory: Path, most: int, failures: Failures | None = None) -> DiskBound:
    return DiskBound(directory, failures or Failures(), most, ThinningRule(1, 1))


def test_every_file_of_the_directory_counts(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes(bytes(600))
    (tmp_path / "manifest.json").write_bytes(bytes(300))
    (tmp_path / ".part").write_bytes(bytes(100))
    assert bound_of(tmp_path, 1000).excess(0, 10) == 0
    assert bound_of(tmp_path, 999).excess(0, 10) == 1
    assert bound_of(tmp_path, 500).excess(0, 10) == 6  # 510 of 1,000 bytes, of ten steps


def test_what_the_sinks_report_is_added_without_listing_again(tmp_path: Path) -> None:
    bound = bound_of(tmp_path, 1000)
    bound.excess(0, 1), bound.excess(0, 1)
    (tmp_path / "rows.csv").write_bytes(bytes(2000))
    assert bound.excess(1001, 10) == 1  # 21 of 1,001 bytes, of ten steps
    bound.recount()
    assert bound.excess(1001, 10) == 6


def test_it_is_said_once_that_no_more_can_be_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    failures = Failures()
    bound = bound_of(tmp_path, 1000, failures)
    with caplog.at_level(logging.WARNING):
        bound.warn(5000), bound.warn(6000)
    assert failures.counts == {"max_output_bytes": 1}
    assert "Raise max_output_bytes" in caplog.text
