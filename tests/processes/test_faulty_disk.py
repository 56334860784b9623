"""What can happen to the place that a run records to. Training does not notice; what could not be written is accounted for.

Peers' fault 17: any error of the file system killed the run.
"""

from __future__ import annotations

import pytest
from launching import EVERY_STEP, Launcher
from recorded import listed, only_recording, rank_directories

from monitor.coordinator.manifest_format import read_manifest

UNTIL_RESTORED = {
    "replaced": "NotADirectoryError",
    "read-only": "Permission is missing: allow this user to write there.",
    "out-of-reach": "Permission is missing: allow this user to write there.",
    "no-descriptors": "Too many open files",
}
"""Faults that pass, and what is said of them."""


@pytest.mark.parametrize("fault", UNTIL_RESTORED)
def test_while_nothing_can_be_written_training_continues_and_afterwards_writing_does(
    launcher: Launcher, plain_losses: list[str], fault: str
) -> None:
    ended = launcher.run("faulty_disk.py", fault, config=EVERY_STEP)
    assert (ended.status, ended.losses) == (0, plain_losses[:12]), ended.err

    recording = only_recording(launcher.base)
    recording.assert_accounts_for(range(12))
    manifest = recording.manifest()
    assert listed(manifest.steps.written) == [0, 1, 2, 3, 8, 9, 10, 11]
    assert listed(*manifest.lost["csv"].values()) == [4, 5, 6, 7]
    assert manifest.dropped == {}
    [warning] = [line for line in ended.warnings if "sink 'csv'" in line]
    assert UNTIL_RESTORED[fault] in warning


@pytest.mark.parametrize("format_", ["csv", "hdf5", "parquet"])
def test_steps_of_a_file_that_was_taken_away_unfinished_are_lost_with_it(
    launcher: Launcher, plain_losses: list[str], format_: str
) -> None:
    ended = launcher.run("faulty_disk.py", "replaced", config=EVERY_STEP | {"step_count_per_record": 5, "format": format_})
    assert (ended.status, ended.losses) == (0, plain_losses[:12]), ended.err
    manifest = read_manifest(rank_directories(launcher.base)[0] / "manifest.json")
    assert listed(manifest.steps.written) == [8, 9, 10, 11]
    assert listed(*manifest.lost[format_].values()) == list(range(8))


@pytest.mark.parametrize("fault", UNTIL_RESTORED)
def test_a_place_that_never_comes_back_changes_neither_training_nor_its_exit_status(
    launcher: Launcher, plain_losses: list[str], fault: str
) -> None:
    ended = launcher.run("faulty_disk.py", fault, "for-good", config=EVERY_STEP)
    assert (ended.status, ended.losses) == (0, plain_losses[:12]), ended.err
    assert len(ended.warnings) == len(set(ended.warnings)) <= 4, ended.err
    if fault == "out-of-reach":
        rank_directories(launcher.base)[0].chmod(0o700)
    if fault != "replaced":
        assert only_recording(launcher.base).steps() == [0, 1, 2, 3]


@pytest.mark.parametrize("fault", ["removed", "base-removed"])
@pytest.mark.parametrize(("steps_per_record", "lost"), [(1, []), (5, [0, 1, 2, 3, 4])])
def test_a_directory_that_is_removed_is_made_again(
    launcher: Launcher, plain_losses: list[str], fault: str, steps_per_record: int, lost: list[int]
) -> None:
    ended = launcher.run("faulty_disk.py", fault, config=EVERY_STEP | {"step_count_per_record": steps_per_record})
    assert (ended.status, ended.losses) == (0, plain_losses[:12]), ended.err

    recording = only_recording(launcher.base)
    assert recording.steps() == [step for step in range(4, 12) if step not in lost]
    manifest = recording.manifest()
    assert manifest.closed
    assert listed(manifest.steps.written) == [step for step in range(12) if step not in lost]
    assert listed(*manifest.lost.get("csv", {}).values()) == lost
    assert (recording.directory / manifest.series.file).exists()
