"""The sign of life of a rank ends with its recording, however that ends."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from monitor.coordinator import progress
from monitor.coordinator.progress import PROGRESS_FILE, Pulse, RecordedCounts, read_progress
from monitor.failures import Failures


def beating(directory: Path) -> Pulse:
    pulse = Pulse(directory, "job", 1, lambda: RecordedCounts(-1, 0, 0, 0, 0.0), Failures())
    pulse.start(lambda: 3)
    return pulse


def gone(path: Path, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not path.exists()


def there(path: Path, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return path.exists()


def test_a_recording_that_was_freed_without_an_end_takes_its_sign_of_life_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LEAST_SECONDS", 0.01)
    pulse = beating(tmp_path)
    assert there(tmp_path / PROGRESS_FILE)
    assert read_progress(tmp_path).step == 2
    del pulse
    assert gone(tmp_path / PROGRESS_FILE)


def test_a_recording_that_stopped_leaves_its_sign_of_life_until_it_is_removed(tmp_path: Path) -> None:
    pulse = beating(tmp_path)
    assert there(tmp_path / PROGRESS_FILE)
    pulse.stop()
    assert (tmp_path / PROGRESS_FILE).exists()
    pulse.remove()
    assert not (tmp_path / PROGRESS_FILE).exists()
