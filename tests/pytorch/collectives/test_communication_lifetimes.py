"""Groups that come and go, and forked processes, while one monitor listens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from jobs import Job
from outcomes import calls, outcome, together, values
from watching import assert_statistics

CASES = ("loaded", "forked", "grouped", "destroyed", "begun again", "afterwards")


@pytest.fixture(scope="module")
def job(run_ranks: Callable[..., Job]) -> Job:
    return run_ranks("lifetimes.py", 2, brief=False, cc_pre_hook=True)


def step_of(job: Job, case: str) -> int:
    return list(job.monitored[0]["cases"]).index(case)


def rows_of(job: Job, rank: int, case: str) -> dict[str, dict[str, Any]]:
    return values(job, rank, step_of(job, case))


def given(job: Job, rank: int, case: str) -> Any:
    return outcome(job, rank, case)["told"]


@pytest.mark.parametrize("case", CASES)
def test_programs_find_what_they_would_find(case: str, job: Job) -> None:
    for rank in range(2):
        assert "raised" not in outcome(job, rank, case)


def test_around_the_workers_of_a_loader_calls_are_recorded_and_in_them_nothing_is(job: Job) -> None:
    for rank in range(2):
        assert calls(job, rank, step_of(job, "loaded")) == {"all_reduce": 2}


def test_a_forked_process_communicates_unrecorded_and_ends_as_it_would(job: Job) -> None:
    for rank in range(2):
        assert given(job, rank, "forked") == [["1.0", "1.0", "1.0"], 0]
        assert rows_of(job, rank, "forked") == {}
    assert len(job.directories) == 2


def test_a_group_that_is_destroyed_meanwhile_changes_nothing_for_the_others(job: Job) -> None:
    for rank in range(2):
        row = rows_of(job, rank, "destroyed")["all_reduce.post_0"]
        assert row["calls"] == 2
        assert_statistics(row, together(given(job, rank, "destroyed")))


def test_groups_made_anew_are_called_by_the_ranks_that_they_have_now(job: Job) -> None:
    """Torch counts its groups from the beginning when all of them were destroyed, and gives them the names of others."""
    for rank in range(2):
        same_names, sums = given(job, rank, "begun again")
        assert same_names is True
        assert sorted(rows_of(job, rank, "grouped")) == [f"all_reduce@{rank}.post_0", f"all_reduce@{rank}.pre_0"]
        assert sorted(rows_of(job, rank, "begun again")) == ["all_reduce.post_0", "all_reduce.pre_0"]
        assert_statistics(rows_of(job, rank, "begun again")["all_reduce.post_0"], together(sums))


def test_what_comes_afterwards_is_recorded(job: Job) -> None:
    for rank in range(2):
        assert_statistics(rows_of(job, rank, "afterwards")["all_reduce.post_0"], together(given(job, rank, "afterwards")))


def test_nothing_is_warned_of_and_nothing_is_missing(job: Job) -> None:
    assert job.warnings == []
    assert all("communication" not in job.manifest(rank).notes for rank in range(2))
