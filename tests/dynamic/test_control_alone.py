"""One process: a change holds from the next step on, and no thread is there for an agreement."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from evidence import examples
from journals import Noted
from monitor_threads import no_thread_left, threads_of_monitors

from monitor.config import MonitorConfig, load_config
from monitor.dynamic import Controller, JobConnection, Switch
from monitor.dynamic.step_boundary import PollingIntervals
from monitor.failures import Failures

UNWATCHED = JobConnection(intervals=replace(PollingIntervals.alone(), file=3600.0))
"""A single process, whose file is looked at only when a test says so."""

RULES = {"rules": [{"rule_name": "AnomalyNan"}]}


class Training:
    """A process that trains, and the file beside it. The file is looked at when the test says so.

    Attributes:
        told: The manifest's part.
        threads: Those of dynamic monitoring.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.told = Noted()
        self.failures = Failures()
        self.control = Controller(str(path), load_config(path), UNWATCHED, self.failures)
        before = threads_of_monitors()
        self.control.start(self.told)
        self.threads = threads_of_monitors() - before
        self.look()
        self.step = -1

    def look(self, times: int = 1) -> None:
        assert self.control._watching is not None
        for _ in range(times):
            self.control._watching.turn()

    def edit(self, **fields: Any) -> None:
        self.path.write_text(json.dumps(fields))
        self.look()

    def begin(self) -> Switch[MonitorConfig] | None:
        self.step += 1
        return self.control.begin(self.step)


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    monkeypatch.setenv("DYNAMIC_MONITOR", "True")
    path = tmp_path / "config.json"
    path.write_text('{"dynamic_on": true, "collect_times": 2}')
    with no_thread_left():
        training = Training(path)
        yield training
        training.control.close()


def test_without_a_change_no_step_has_news(training: Training) -> None:
    assert [training.begin() for _ in range(5)] == [None] * 5
    assert [one.name for one in training.threads] == ["monitor-settings"]
    assert training.threads <= threads_of_monitors()


def test_a_change_holds_from_the_step_after_it_was_seen(training: Training) -> None:
    training.begin()
    training.edit(dynamic_on=True, collect_times=7)
    assert training.control.config.collect_times == 2
    switch = training.begin()
    assert switch == Switch(1, MonitorConfig(dynamic_on=True, collect_times=7), 1, "file")
    assert training.control.config == switch.config
    assert training.begin() is None


def test_of_two_changes_within_a_step_the_last_holds(training: Training) -> None:
    training.begin()
    training.edit(collect_times=3)
    training.edit(collect_times=4)
    switch = training.begin()
    assert switch is not None
    assert switch.config.collect_times == 4


def test_a_change_before_the_first_step_holds_from_that_step_on(training: Training) -> None:
    training.edit(collect_times=3)
    switch = training.begin()
    assert switch is not None
    assert (switch.from_step, switch.config.collect_times) == (0, 3)


def test_a_bad_edit_is_said_once_and_changes_nothing(training: Training, caplog: pytest.LogCaptureFixture) -> None:
    training.edit(collect_times=-1)
    training.look(3)
    assert training.begin() is None
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "collect_times: -1 is not allowed" in said
    assert "the one before stays in force" in said


def test_at_the_end_by_itself_the_file_says_so_and_switching_on_again_is_a_change(training: Training) -> None:
    training.begin()
    training.control.ended()
    training.look()
    assert training.path.read_text() == '{"dynamic_on": false, "collect_times": 2}'
    assert training.begin() is None
    training.edit(dynamic_on=True, collect_times=2)
    assert training.begin() == Switch(2, MonitorConfig(dynamic_on=True, collect_times=2), 1, "file")


def test_what_the_user_has_changed_meanwhile_is_not_switched_off(training: Training) -> None:
    training.path.write_text('{"dynamic_on": true, "collect_times": 9}')
    training.control.ended()
    training.look(2)
    assert json.loads(training.path.read_text()) == {"dynamic_on": True, "collect_times": 9}
    switch = training.begin()
    assert switch is not None
    assert switch.config.collect_times == 9


def test_what_ended_at_the_last_step_is_written_before_the_end(training: Training) -> None:
    training.control.ended()
    training.control.close()
    assert not load_config(training.path).dynamic_on


def test_a_file_that_cannot_be_written_is_said_once_and_training_continues(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("monitor.dynamic.config_file.write_whole", unwritable)
    training.control.ended()
    training.look(2)
    assert list(training.failures.counts.values()) == [1]
    assert training.begin() is None


def unwritable(*_: object, **__: object) -> None:
    raise PermissionError(13, "Permission denied", "config.json")


def test_an_alert_brings_more_detail_for_some_steps_and_then_what_was_before(training: Training) -> None:
    training.edit(dynamic_on=True, on_alert={"set": {"xy_distribution": True}, "steps": 2}, alert=RULES)
    training.begin()
    before = training.control.config
    training.control.alert()
    training.control.alert()
    deep, still, back, after = (training.begin() for _ in range(4))
    assert (still, after) == (None, None)
    assert deep is not None
    assert back is not None
    assert (deep.from_step, deep.origin, deep.config.xy_distribution) == (1, "alert", True)
    assert (back.from_step, back.origin, back.config) == (3, "return", before)
    assert deep.config == before.model_copy(update={"xy_distribution": True})


def test_an_alert_without_anything_to_switch_or_while_switched_off_changes_nothing(training: Training) -> None:
    training.control.alert()
    assert training.begin() is None
    training.edit(dynamic_on=False, on_alert={"set": {"xy_distribution": True}, "steps": 2}, alert=RULES)
    training.begin()
    training.control.alert()
    assert training.begin() is None


def test_what_held_from_which_step_on_is_written_down(training: Training) -> None:
    training.begin()
    training.edit(dynamic_on=False, collect_times=2)
    training.begin()
    first, second = training.told.records
    assert (first.number, first.origin, first.from_step, first.since, first.on) == (0, "start", 0, 0, True)
    assert (second.number, second.origin, second.from_step, second.since, second.on) == (1, "file", 1, 1, False)
    assert (first.changed, second.changed) == ("", "dynamic_on: true -> false")
    assert first.digest != second.digest
    assert training.told.undecided_since is None


def test_what_this_process_could_not_use_is_refused_with_the_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}")

    def accept(config: MonitorConfig) -> None:
        if "hdf5" in config.formats:
            raise ValueError("format hdf5 needs h5py")

    control = Controller(str(path), load_config(path), UNWATCHED, Failures(), accept=accept)
    control.start(Noted())
    path.write_text('{"format": "hdf5"}')
    control._watching.turn()
    assert control.begin(0) is None
    assert "No rank adopted the configuration that the file asked for: rank 0: format hdf5 needs h5py" in caplog.text
    control.close()


def test_a_rank_of_several_that_has_no_way_to_agree_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}")
    failures = Failures()
    control = Controller(str(path), load_config(path), JobConnection(0, 2), failures)
    control.start(Noted())
    assert control._watching is None
    assert list(failures.counts) == ["no store"]
    assert control.begin(0) is None
    control.close()


def test_many_switches_leave_nothing_behind(training: Training) -> None:
    threads = threading.active_count()
    for count in range(examples(200, 1000)):
        training.edit(collect_times=count + 10)
        assert training.begin() is not None
    assert threading.active_count() == threads
    boundary = training.control._boundary
    assert boundary._to_come == []
    assert len(training.control._queue._pending) == 0
