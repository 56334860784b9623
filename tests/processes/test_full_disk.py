"""A disk that is full for a while, or for good: a real one, small, that only the process under test has mounted."""

from __future__ import annotations

import functools
import shutil
import subprocess
from typing import Any

import pytest
from evidence import PROVES, sampled
from launching import EVERY_STEP, Ended, Launcher
from recorded import Recorded, listed, rank_directories

MOUNT = 'mount -t tmpfs -o size=512k tmpfs "$0" && exec "$@"'


@functools.cache
def own_mounts() -> tuple[str, ...] | None:
    """A command that gives what it runs mounts of its own, which end with it. An ordinary user may be allowed them, too."""
    if shutil.which("unshare") is not None:
        for command in (("unshare", "--mount"), ("unshare", "--map-root-user", "--mount")):
            tried = subprocess.run([*command, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, check=False)
            if tried.returncode == 0:
                return command
    return None


pytestmark = pytest.mark.skipif(own_mounts() is None, reason="this system lets its user mount no disk for itself")


def train_on_small_disk(launcher: Launcher, *arguments: object, **config: Any) -> tuple[Ended, Recorded]:
    launcher.base.mkdir()
    result = launcher.base.with_name("result")
    prefix = (*(own_mounts() or ()), "sh", "-c", MOUNT, str(launcher.base))
    started = launcher.start_interpreter("full_disk.py", result, *arguments, config=EVERY_STEP | config, prefix=prefix)
    ended = started.end()
    assert ended.status == 0, ended.err
    assert list(launcher.base.iterdir()) == []
    (directory,) = rank_directories(result)
    return ended, Recorded(directory)


@pytest.mark.parametrize("leave", sampled([0, 3], 1))
def test_a_full_disk_costs_the_steps_that_it_has_no_room_for_and_nothing_else(
    launcher: Launcher, plain_losses: list[str], leave: int
) -> None:
    """Peers' fault 17. A step of which some kinds would still have found room is in none."""
    ended, recording = train_on_small_disk(launcher, leave)
    assert ended.losses == plain_losses[:12]

    recording.assert_accounts_for(range(12))
    assert recording.steps() == [0, 1, 2, 3, 8, 9, 10, 11]
    manifest = recording.manifest()
    assert (manifest.closed, manifest.dropped) == (True, {})
    [(reason, lost)] = manifest.lost["csv"].items()
    assert "No space left on device" in reason
    assert listed(lost) == [4, 5, 6, 7]
    [warning] = ended.warnings
    assert "The disk is full: free some space." in warning


@pytest.mark.skipif(not PROVES, reason="it takes 4 s: make prove runs it")
def test_an_open_record_keeps_the_steps_that_it_had_when_the_disk_was_full(launcher: Launcher, plain_losses: list[str]) -> None:
    ended, recording = train_on_small_disk(launcher, 0, step_count_per_record=6)
    assert ended.losses == plain_losses[:12]
    recording.assert_accounts_for(range(12))
    assert recording.steps()[:4] == [0, 1, 2, 3]
    assert recording.steps()[-4:] == [8, 9, 10, 11]


def test_a_disk_that_stays_full_keeps_no_run_from_ending_as_it_would_have(launcher: Launcher, plain_losses: list[str]) -> None:
    ended, recording = train_on_small_disk(launcher, 0, "for-good")
    assert ended.losses == plain_losses[:12]
    assert recording.steps() == [0, 1, 2, 3]
    assert sum("The disk is full: free some space." in warning for warning in ended.warnings) == 2, ended.err
