"""Jobs that end badly are distinguished from others, and nothing is left of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_ranks, running


def test_a_rank_that_fails_ends_the_job_and_is_known_by_its_status(tmp_path: Path) -> None:
    job = run_ranks(2, "never_ends.py", tmp_path / "job", msrun=True)
    assert job.status != 0
    assert [rank.status for rank in job.ranks] == [None, 3]
    assert [rank.said for rank in job.ranks] == ["", "fails\n"]
    assert job.scheduler.status == 0
    assert running(tmp_path / "job") == []


def test_a_job_that_hangs_is_ended_with_all_its_ranks(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError):
        run_ranks(2, "never_ends.py", tmp_path / "job", "all", msrun=True, idle_s=8.0)
    assert (tmp_path / "job" / "log" / "worker_1.log").exists()
    assert running(tmp_path / "job") == []
