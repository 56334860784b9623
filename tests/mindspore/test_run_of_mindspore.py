"""``trainermon run`` with MindSpore: the rows are those of a line in the program."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import monitor

ROOT = Path(__file__).resolve().parents[2]
LOOP = Path(__file__).with_name("scripts") / "plain_loop.py"


def printed(command: list[str], cwd: Path, **variables: str) -> tuple[str, str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MONITOR_OUTPUT_DIR": "recorded", **variables}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()[-1], done.stderr


@pytest.mark.parametrize("micro_batches", ["1", "2"])
def test_the_rows_are_those_of_a_line_in_the_program(tmp_path: Path, micro_batches: str) -> None:
    program = [sys.executable, str(LOOP)]
    plain, _ = printed(program, tmp_path, MICRO_BATCHES=micro_batches)
    by_hand, _ = printed(program, tmp_path, BY_HAND="1", MONITOR_OUTPUT_DIR="by_hand", MICRO_BATCHES=micro_batches)
    launched, said = printed([sys.executable, "-m", "monitor.launching.cli", *program], tmp_path, MICRO_BATCHES=micro_batches)
    assert plain == by_hand == launched
    assert said.count("trainermon run: attached to Net, trained by Adam.") == 1
    runs = [monitor.open_run(tmp_path / name) for name in ("by_hand", "recorded")]
    assert min(runs[1].rows("grad_reduced")["step"].to_pylist()) == 1  # the first step shows how many micro-batches there are
    assert {"grad_reduced", "param_updated", "run"} <= {*runs[1].kinds} <= {*runs[0].kinds}  # that of step 0 has activations
    for kind in runs[1].kinds:
        tables = [run.rows(kind, steps=range(2, 100)).to_pylist() for run in runs]
        kept = [[{key: value for key, value in row.items() if key not in ("call_id", "rank")} for row in one] for one in tables]
        assert kept[0] == kept[1], kind
        assert kept[0], kind
