"""A format that raises, and one that does not come back: training continues, and so does the other format."""

from __future__ import annotations

from typing import Any

import pytest
from launching import EVERY_STEP, Launcher
from recorded import Recorded, listed, only_recording

BOTH: dict[str, Any] = EVERY_STEP | {"format": ["csv", "api"]}
SMALL_QUEUE: dict[str, Any] = BOTH | {"queue_bytes": 2**20, "queue_wait_seconds": 0.1}


@pytest.mark.parametrize(("how", "error"), [("raises", "RuntimeError"), ("exits", "SystemExit")])
def test_one_that_raises_loses_its_own_steps_and_is_given_every_later_one(
    launcher: Launcher, plain_losses: list[str], how: str, error: str
) -> None:
    ended = launcher.run("bad_sink.py", how, config=BOTH)
    assert (ended.status, ended.losses) == (0, plain_losses[:12]), ended.err

    recording = only_recording(launcher.base)
    assert recording.steps() == list(range(12))
    manifest = recording.manifest()
    assert listed(manifest.steps.written) == [0, 1, 2, 3, 8, 9, 10, 11]
    assert list(manifest.lost) == ["api"]
    assert listed(*manifest.lost["api"].values()) == [4, 5, 6, 7]
    assert manifest.dropped == {}
    assert sum(f"sink 'api' failed: {error}('step 4 is not to my taste')" in warning for warning in ended.warnings) == 1
    assert not any("step 5" in warning for warning in ended.warnings)


def test_one_that_hangs_costs_the_steps_that_the_queue_has_no_room_for(launcher: Launcher, plain_losses: list[str]) -> None:
    ended = launcher.run("bad_sink.py", "hangs", config=SMALL_QUEUE | {"close_seconds": 0.5})
    assert (ended.status, ended.losses) == (0, plain_losses[:40]), ended.err
    assert "caught up" not in ended.err
    recording = only_recording(launcher.base)
    assert recording.steps()[:4] == [0, 1, 2, 3]
    manifest = recording.manifest()
    assert listed(manifest.steps.written) == [0, 1, 2, 3]
    assert {sink: listed(*by.values()) for sink, by in manifest.lost.items()} == {"api": [4]}
    assert listed(*manifest.dropped.values()) == list(range(5, 40))
    assert sorted(manifest.dropped) == ["left behind when the monitor was closed", "queue full"]
    assert not manifest.closed


def test_steps_that_a_slow_format_held_up_beyond_the_bound_are_dropped_and_the_others_are_right(
    launcher: Launcher, plain_losses: list[str]
) -> None:
    ended = launcher.run("bad_sink.py", "hangs-for-a-while", config=SMALL_QUEUE)
    assert (ended.status, ended.losses) == (0, plain_losses[:60]), ended.err
    recording = only_recording(launcher.base)
    recording.assert_accounts_for(range(60))
    [(reason, dropped)] = recording.manifest().dropped.items()
    [(first, last, interval)] = dropped.ranges
    assert (reason, last, interval) == ("queue full", 39, 1)
    assert first > 6
    assert "The writer caught up" in ended.err

    undisturbed = launcher.base.with_name("undisturbed")
    assert launcher.run("killed.py", 60, config=EVERY_STEP, base=undisturbed).status == 0
    assert recording.kinds == without(range(first, last + 1), only_recording(undisturbed))


def without(steps: range, recording: Recorded) -> dict[str, Any]:
    return {kind: {step: rows[step] for step in rows if step not in steps} for kind, rows in recording.kinds.items()}
