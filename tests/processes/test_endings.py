"""However a run ends by itself, everything that it sealed is there, and the step in progress is marked as what it is."""

from __future__ import annotations

import pytest
from launching import EVERY_STEP, Launcher
from recorded import Recorded, listed, only_recording


def assert_ten_steps_and_the_eleventh_begun(recording: Recorded) -> None:
    """Of the eleventh the forward was done."""
    assert sorted(recording.kinds["grad_reduced"]) == list(range(10))
    assert sorted(recording.kinds["actv"]) == list(range(11))
    manifest = recording.manifest()
    assert manifest.closed
    assert listed(manifest.steps.written) == list(range(11))
    assert listed(manifest.steps.incomplete) == [10]


@pytest.mark.parametrize("steps_per_record", [1, 4])
@pytest.mark.parametrize(
    ("how", "status", "reason"),
    [
        ("return", 0, ""),
        ("close", 0, ""),
        ("raise", 1, "ArithmeticError: the loss is not what it should be"),
        ("exit", 3, ""),
        ("interrupt", -2, "KeyboardInterrupt"),
    ],
)
def test_every_step_is_there_and_the_step_in_progress_is_marked_incomplete(
    launcher: Launcher, plain_losses: list[str], how: str, status: int, reason: str, steps_per_record: int
) -> None:
    ended = launcher.run("ending.py", how, config=EVERY_STEP | {"step_count_per_record": steps_per_record})
    assert (ended.status, ended.losses) == (status, plain_losses[:10]), ended.err
    assert ended.err.rstrip().endswith(reason)
    assert ended.warnings == []

    assert_ten_steps_and_the_eleventh_begun(only_recording(launcher.base))


def test_an_interpreter_of_its_own_ends_in_the_same_way(launcher: Launcher, plain_losses: list[str]) -> None:
    ended = launcher.start_interpreter("ending.py", "exit", config=EVERY_STEP).end()
    assert (ended.status, ended.losses, ended.warnings) == (3, plain_losses[:10], []), ended.err
    assert_ten_steps_and_the_eleventh_begun(only_recording(launcher.base))
