"""``kill -9`` at random moments: what is visible is whole and right, and no more than the open record is missing."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest
from evidence import examples
from launching import EVERY_STEP, Launcher, Started
from recorded import Recorded, rank_directories

from monitor.coordinator.manifest_format import read_manifest

STEPS = 150
"""More than a run gets to before it is killed, as a rule."""

WAVES = examples(3, 13)
"""Of two kills each."""


@pytest.mark.parametrize("steps_per_record", [1, 5])
def test_every_visible_file_is_whole_and_only_the_open_record_is_missing(launcher: Launcher, steps_per_record: int) -> None:
    config = EVERY_STEP | {"step_count_per_record": steps_per_record}
    assert launcher.run("killed.py", STEPS, config=config, base=launcher.base / "whole").status == 0
    (whole,) = rank_directories(launcher.base / "whole")
    assert Recorded(whole).steps() == list(range(STEPS))

    moments = random.Random(steps_per_record)
    for wave in range(WAVES):
        bases = [launcher.base / f"{wave}-{one}" for one in range(2)]
        runs = [launcher.start("killed.py", STEPS, "wait", config=config, base=base) for base in bases]
        for run, base in zip(runs, bases, strict=True):
            kill(run, moments)
            assert_no_more_is_missing(base, whole, delivered(run))


def kill(run: Started, moments: random.Random) -> None:
    """Mostly while it writes; now and then at any moment since it began."""
    if moments.random() < 0.75:
        run.wait_for("delivered 4")
    time.sleep(moments.uniform(0.0, 0.2))
    run.send(signal.SIGKILL)
    assert run.end().status == -signal.SIGKILL


def delivered(run: Started) -> int:
    """How many steps had been handed to every format when it said so for the last time."""
    said = [line for line in run.end().out.splitlines(True) if line.startswith("delivered") and line.endswith("\n")]
    return int(said[-1].split()[1]) if said else 0


def assert_no_more_is_missing(base: Path, whole: Path, delivered: int) -> None:
    """What is visible is what a run that no one killed has written."""
    visible = {path.name: path for directory in rank_directories(base) for path in directory.glob("*.csv")}
    for name, path in visible.items():
        assert path.read_bytes() == (whole / name).read_bytes(), name
    for path in whole.glob("*.csv"):
        last = int(path.stem.split("-")[1])
        assert last >= delivered or path.name in visible, path.name
    for path in base.glob("*/manifest.json"):
        assert not read_manifest(path).closed
