"""A sample of the drills is passed, and what a drill checks can fail."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import verdicts
from damage import DAMAGES
from evidence import sampled
from reading_back import Output
from spec import Job

from monitor.coordinator.manifest_format import read_manifest

DRILLS = Path(__file__).resolve().parents[2] / "tools" / "drills"
sys.path.append(str(DRILLS))


SAMPLE = ("errors of the disk", "no descriptors", "killed", "raises in forward", "commands read damaged files")


@pytest.mark.parametrize("name", sampled(SAMPLE, 2, 4))
def test_a_drill_is_passed(name: str, tmp_path: Path) -> None:
    command = [
        sys.executable,
        DRILLS / "drill.py",
        "--only",
        name,
        "--minutes",
        "0",
        "--ranks",
        "1",
        "--beside",
        "1",
        "--quiet",
    ]
    done = subprocess.run(command, env=os.environ | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert list(tmp_path.glob("drills-*")) == []


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a job of four steps recorded."""
    place = tmp_path_factory.mktemp("drilled")
    config = {"wg_distribution": True, "ops": ["min", "max", "mean", "norm", "nans"], "step_count_per_record": 2}
    job = Job(output=str(place / "out"), told=str(place / "told"), steps=4, config=config)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(DRILLS), str(DRILLS.parents[1])])}
    subprocess.run([sys.executable, DRILLS / "job.py", job.text()], env=environment, check=True, capture_output=True)
    return place


def test_the_losses_of_a_job_that_ended_are_one_a_step(recorded: Path) -> None:
    *steps, end = verdicts.losses(recorded / "told")
    assert [line.split()[0] for line in steps] == ["0", "1", "2", "3"]
    assert end == "end"
    verdicts.check_losses(steps, steps)
    with pytest.raises(verdicts.DrillError, match="step 2 has another loss"):
        verdicts.check_losses([steps[0], f"2 {(1.0).hex()}"], steps)


def test_a_row_that_differs_from_a_healthy_one_is_found(recorded: Path) -> None:
    rows = verdicts.rows_below(recorded / "out", [0])
    verdicts.check_rows(rows, rows)
    key, row = next(iter(rows.items()))
    with pytest.raises(verdicts.DrillError, match="another one than in a healthy run"):
        verdicts.check_rows(rows, rows | {key: ("1e9", *row[1:])})
    with pytest.raises(verdicts.DrillError, match="no such row"):
        verdicts.check_rows(rows, {other: row for other, row in rows.items() if other != key})


def test_a_step_of_which_nothing_is_known_and_one_without_its_rows_are_found(recorded: Path) -> None:
    rows = verdicts.rows_below(recorded / "out", [0])
    assert verdicts.check_steps(recorded / "out", {0: range(4)}, rows) == 0
    with pytest.raises(verdicts.DrillError, match=r"nothing is said of steps \[4, 5\]"):
        verdicts.check_steps(recorded / "out", {0: range(6)}, rows)
    with pytest.raises(verdicts.DrillError, match=r"steps without rows are called written: \[3\]"):
        verdicts.check_steps(recorded / "out", {0: range(4)}, {key: row for key, row in rows.items() if key[4] != 3})
    assert verdicts.accounted(read_manifest(Output(recorded / "out").directory() / "manifest.json")) == set(range(4))


def test_every_damage_changes_a_file(tmp_path: Path) -> None:
    for how in DAMAGES:
        path = tmp_path / how.__name__
        path.write_bytes(before := b"0123456789" * 20)
        how(path, random.Random(3))
        assert path.is_symlink() or not path.is_file() or path.read_bytes() != before, how
