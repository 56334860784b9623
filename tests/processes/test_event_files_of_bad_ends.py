"""Event files of runs that were killed, whose disk was full, or of which a format hung."""

from __future__ import annotations

import random
import signal
import time

import pytest
from event_files import ALWAYS, events_of, judged_of, steps_of
from evidence import examples
from launching import EVERY_STEP, Launcher
from recorded import listed, only_recording
from test_full_disk import own_mounts, train_on_small_disk

KILLS = examples(3, 8)


def test_a_run_that_is_killed_leaves_whole_files_with_the_first_events(launcher: Launcher) -> None:
    moments = random.Random(0)
    bases = [launcher.base / str(number) for number in range(KILLS)]
    runs = [launcher.start("killed.py", 150, "wait", config=EVERY_STEP | ALWAYS, base=base) for base in bases]
    for run, base in zip(runs, bases, strict=True):
        run.wait_for("delivered 4")
        time.sleep(moments.uniform(0.0, 0.1))
        run.send(signal.SIGKILL)
        assert run.end().status == -signal.SIGKILL
        assert steps_of(events_of(base))[0] == 1
        judged = judged_of(base)
        assert not judged.closed
        assert listed(judged.steps) == list(range(judged.steps.count))


def test_a_format_that_hangs_costs_no_event_and_steps_without_room_are_listed(launcher: Launcher) -> None:
    config = EVERY_STEP | ALWAYS | {"format": ["csv", "api"], "queue_bytes": 2**20, "queue_wait_seconds": 0}
    ended = launcher.run("bad_sink.py", "hangs", config=config | {"close_seconds": 2})
    assert ended.status == 0, ended.err
    events, judged = events_of(launcher.base), judged_of(launcher.base)
    assert steps_of(events) == [1, 2, 3, 4]
    assert listed(judged.steps) == [0, 1, 2, 3, 4]
    assert listed(*judged.not_judged.values()) == list(range(5, 40))
    assert (judged.events, judged.not_kept, judged.closed) == (len(events), {}, False)


@pytest.mark.skipif(own_mounts() is None, reason="this system lets its user mount no disk for itself")
def test_events_that_a_full_disk_had_no_room_for_are_in_the_file_once_there_is_room(launcher: Launcher) -> None:
    few = {"xy_distribution": False, "param_distribution": False}  # the disk has to hold the file twice while it is rewritten
    ended, recording = train_on_small_disk(launcher, 0, **ALWAYS, **few)
    base = recording.directory.parent
    assert steps_of(events_of(base)) == list(range(1, 12))
    judged = judged_of(base)
    assert (listed(judged.steps), judged.events, judged.closed) == (list(range(12)), len(events_of(base)), True)
    assert sum("the alert rules failed" in line and "disk is full" in line for line in ended.warnings) == 1


def test_training_under_rules_has_the_same_losses_and_without_any_nothing_of_them_is_there(
    launcher: Launcher, plain_losses: list[str]
) -> None:
    ended = launcher.run("ending.py", "return", 60, config=EVERY_STEP | ALWAYS, base=launcher.base / "rules")
    assert ended.losses == plain_losses
    assert only_recording(launcher.base / "rules").manifest().closed
    assert judged_of(launcher.base / "rules").closed
    assert launcher.run("ending.py", "return", 3, config=EVERY_STEP | {"alert": {"rules": [], "dump": True}}).status == 0
    assert not list(launcher.base.glob("anomaly*"))
