"""A container that allows no more threads: no library that the monitor calls may end the process for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import Ended, Launcher


def trained(launcher: Launcher, directory: Path, formats: str, when: str) -> Ended:
    return launcher.run("no_more_threads.py", directory, formats, when, OPENBLAS_NUM_THREADS="1")


@pytest.mark.parametrize("formats", ["csv", "hdf5", "parquet", "tensorboard", "csv,hdf5,parquet,tensorboard"])
def test_training_continues_where_no_thread_can_be_started_any_more(launcher: Launcher, tmp_path: Path, formats: str) -> None:
    ended = trained(launcher, tmp_path, formats, "while")
    assert (ended.status, ended.out[:7]) == (0, "trained"), ended.err[-2000:]


@pytest.mark.parametrize("formats", ["csv", "hdf5", "parquet"])
def test_a_run_is_resumed_where_no_thread_can_be_started(launcher: Launcher, tmp_path: Path, formats: str) -> None:
    assert trained(launcher, tmp_path, formats, "while").status == 0
    ended = trained(launcher, tmp_path, formats, "before")
    assert (ended.status, ended.out[:7]) == (0, "trained"), ended.err[-2000:]
