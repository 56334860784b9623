"""SIGTERM: what it does to the process stays the same, and every step that had ended is visible."""

from __future__ import annotations

import signal

import pytest
from hanging import until
from launching import EVERY_STEP, Ended, Launcher, Started
from recorded import Recorded, listed, only_recording, rank_directories

RECORDS = EVERY_STEP | {"step_count_per_record": 5}


@pytest.mark.parametrize(("how", "status"), [("default", -signal.SIGTERM), ("exits-late", 3)])
def test_every_step_that_ended_is_visible(launcher: Launcher, how: str, status: int) -> None:
    started = launcher.start("terminated.py", how, config=RECORDS)
    started.wait_for("training")
    started.send(signal.SIGTERM)
    ended = started.end()
    assert ended.status == status, ended.err
    recording = only_recording(launcher.base)
    steps = len(ended.losses)
    assert steps >= 22
    assert sorted(recording.kinds["param_updated"])[:steps] == list(range(steps))
    assert sorted(recording.kinds["param_updated"])[steps:] in ([], [steps])
    assert recording.manifest().steps.written.count >= steps
    assert_only_the_step_in_progress_was_lost(ended, recording)


def assert_only_the_step_in_progress_was_lost(ended: Ended, recording: Recorded) -> None:
    """An exception of the user's handler may come up in the midst of handing that step on; then it is said."""
    dropped = listed(*recording.manifest().dropped.values())
    assert dropped in ([], [len(ended.losses)])
    said = "[monitor] WARNING [rank 0] 1 step was dropped; see "
    assert [warning.startswith(said) for warning in ended.warnings] == [True] * len(dropped)


def test_a_handler_of_the_users_that_exits_also_gets_the_step_in_progress_written(launcher: Launcher) -> None:
    started = launcher.start("terminated.py", "exits", config=RECORDS)
    started.wait_for("training")
    started.send(signal.SIGTERM)
    ended = started.end()
    assert ended.status == 3, ended.err
    manifest = only_recording(launcher.base).manifest()
    assert manifest.closed
    incomplete = listed(manifest.steps.incomplete)
    assert incomplete in ([], [len(ended.losses)], [len(ended.losses) + 1])
    assert_only_the_step_in_progress_was_lost(ended, only_recording(launcher.base))


def test_a_handler_of_the_users_that_saves_and_continues_finds_training_and_recording_going_on(launcher: Launcher) -> None:
    """The open record is shown when the signal comes, and completed afterwards."""
    plain, started = launcher.start("terminated.py", "saves"), launcher.start("terminated.py", "saves", config=RECORDS)
    for one in (plain, started):
        one.wait_for("training")
        one.send(signal.SIGTERM)
    ended, unmonitored = started.end(), plain.end()
    assert ended.status == unmonitored.status == 0
    steps = len(ended.losses)
    assert steps >= 44
    common = min(steps, len(unmonitored.losses))
    assert ended.losses[:common] == unmonitored.losses[:common]
    only_recording(launcher.base).assert_complete(range(steps))
    assert ended.warnings == []


def two_ranks(launcher: Launcher, how: str) -> list[Started]:
    ranks = launcher.start_ranks(2, "blocked.py", how, config=RECORDS)
    ranks[0].wait_for("blocking")
    ranks[1].wait_for("trained")
    return ranks


def visible_of_rank_0(launcher: Launcher) -> list[int]:
    return sorted(Recorded(rank_directories(launcher.base)[0]).kinds.get("grad_reduced", ()))


def test_a_rank_that_is_blocked_in_a_collective_shows_its_steps_and_dies_as_it_would_have(launcher: Launcher) -> None:
    ranks = two_ranks(launcher, "default")
    ranks[0].send(signal.SIGTERM)
    assert ranks[0].end().status == -signal.SIGTERM
    assert visible_of_rank_0(launcher) == list(range(7))
    ranks[1].send(signal.SIGTERM)
    assert ranks[1].end().status == -signal.SIGTERM
    for directory in rank_directories(launcher.base):
        assert Recorded(directory).steps() == list(range(7))


def test_a_blocked_rank_whose_handler_cannot_run_shows_its_steps_all_the_same(launcher: Launcher) -> None:
    ranks = two_ranks(launcher, "handler")
    ranks[0].send(signal.SIGTERM)
    assert until(lambda: visible_of_rank_0(launcher) == list(range(7)), 120.0)
    assert ranks[0].child.poll() is None
    ranks[1].send(signal.SIGKILL)
    assert ranks[0].end().status == 3
