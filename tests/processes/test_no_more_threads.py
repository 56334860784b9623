"""A container that allows no more threads: no library that the monitor calls may end the process for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("scripts") / "no_more_threads.py"
ROOT = Path(__file__).parents[2]


def trained(directory: Path, formats: str, when: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, SCRIPT, directory, formats, when]
    return subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("formats", ["csv", "hdf5", "tensorboard", "csv,hdf5,tensorboard"])
def test_training_goes_on_where_no_thread_can_be_started_any_more(tmp_path: Path, formats: str) -> None:
    ended = trained(tmp_path, formats, "while")
    assert (ended.returncode, ended.stdout[:7]) == (0, "trained"), ended.stderr[-2000:]


@pytest.mark.parametrize("formats", ["csv", "hdf5"])
def test_a_run_is_resumed_where_no_thread_can_be_started(tmp_path: Path, formats: str) -> None:
    assert trained(tmp_path, formats, "while").returncode == 0
    ended = trained(tmp_path, formats, "before")
    assert (ended.returncode, ended.stdout[:7]) == (0, "trained"), ended.stderr[-2000:]
