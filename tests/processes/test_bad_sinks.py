"""A format that raises, and one that does not come back: training goes on, and so does the other format."""

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
    assert (ended.status, ended.losses) == (0, plain_losses[:12])

    recording = only_recording(launcher.base)
    assert recording.steps() == list(range(12))
    manifest = recording.manifest()
    assert listed(manifest.steps.written) == [0, 1, 2, 3, 8, 9, 10, 11]
    assert list(manifest.lost) == ["api"]
    assert listed(*manifest.lost["api"].values()) == [4, 5, 6, 7]
    assert manifest.dropped == {}
    assert [warning for warning in ended.warnings if "step 4 is not to my taste" in warning] != []
    assert [warning for warning in ended.warnings if "step 5 is not to my taste" in warning] == []


def test_one_that_hangs_costs_the_steps_that_the_queue_has_no_room_for(
    launcher: Launcher, plain_losses: list[str]
) -> None:
    ended = launcher.run("bad_sink.py", "hangs", config=SMALL_QUEUE | {"close_seconds": 0.5})
    assert (ended.status, ended.losses) == (0, plain_losses[:40])
    recording = only_recording(launcher.base)
    print(ended.err, (recording.directory / "manifest.json").read_text())
    assert recording.steps() == [0, 1, 2, 3, 4]
    manifest = recording.manifest()
    assert listed(manifest.steps.written) == [0, 1, 2, 3]
    assert not manifest.closed
    assert listed(*manifest.dropped.values()) == list(range(4, 40))


def test_steps_that_a_slow_format_held_up_beyond_the_bound_are_dropped_and_the_others_are_right(
    launcher: Launcher, plain_losses: list[str]
) -> None:
    ended = launcher.run("bad_sink.py", "hangs-for-a-while", config=SMALL_QUEUE)
    assert (ended.status, ended.losses) == (0, plain_losses[:60])
    recording = only_recording(launcher.base)
    recording.assert_accounts_for(range(60))
    manifest = recording.manifest()
    print(ended.err, (recording.directory / "manifest.json").read_text())
    assert list(manifest.dropped) == ["queue full"]
    [(first, last, interval)] = manifest.dropped["queue full"].ranges
    assert (last, interval) == (39, 1)
    assert first > 6

    undisturbed = launcher.run("ending.py", "return", 60, config=EVERY_STEP, base=launcher.base / "undisturbed")
    right = only_recording(launcher.base / "undisturbed")
    assert undisturbed.losses == ended.losses
    assert recording.kinds == without(right, range(first, 60 - 20))


def without(recording: Recorded, steps: range) -> dict[str, Any]:
    return {
        kind: {step: found for step, found in rows.items() if step not in steps and step < 60}
        for kind, rows in recording.kinds.items()
    }
