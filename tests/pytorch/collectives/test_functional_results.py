"""Results of functional collectives, however they are waited for, and calls that outlive their step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from jobs import Job
from outcomes import outcome, tensor, together, values
from watching import assert_statistics

GATHERED = ("part", "parts", "viewed", "raw part", "waited for twice", "overwritten at once", "into")
REDUCED = {"chained": 2, "given to others": 2, "in place": 1}


@pytest.fixture(scope="module")
def job(run_ranks: Callable[..., Job]) -> Job:
    return run_ranks("functional_results.py", 2, cc_pre_hook=True)


def rows_of(job: Job, rank: int, case: str) -> dict[str, dict[str, Any]]:
    return values(job, rank, list(job.monitored[0]["cases"]).index(case))


def given(job: Job, rank: int, case: str) -> Any:
    """What came out, before anybody changed it."""
    first, *_ = outcome(job, rank, case)["told"]
    return together(first if isinstance(first, list) else [first])


def test_no_case_is_left_out(job: Job) -> None:
    assert sorted([*GATHERED, *REDUCED, "one of several", "begun", "ended"]) == sorted(job.monitored[0]["cases"])


def test_programs_find_what_they_would_find(job: Job) -> None:
    for rank in range(2):
        assert not any("raised" in outcome(job, rank, case) for case in job.monitored[0]["cases"])


@pytest.mark.parametrize("case", GATHERED)
def test_all_of_an_output_is_recorded_whichever_part_of_it_is_waited_for(case: str, job: Job) -> None:
    for rank in range(2):
        (row,) = (row for name, row in rows_of(job, rank, case).items() if ".post_" in name)
        assert (row["shape"], row["calls"]) == ("[8]", 1)
        assert_statistics(row, given(job, rank, case))


@pytest.mark.parametrize("case", REDUCED)
def test_each_output_is_recorded_as_it_was_when_it_was_waited_for(case: str, job: Job) -> None:
    for rank in range(2):
        row = rows_of(job, rank, case)["all_reduce.post_0"]
        assert row["calls"] == REDUCED[case]
        assert_statistics(row, given(job, rank, case))


def test_all_outputs_of_a_call_are_recorded(job: Job) -> None:
    for rank in range(2):
        assert_statistics(
            rows_of(job, rank, "one of several")["all_reduce_coalesced.post_0"], given(job, rank, "one of several")
        )


def test_a_call_counts_where_it_is_issued_and_its_output_where_it_is_waited_for(job: Job) -> None:
    for rank in range(2):
        assert sorted(rows_of(job, rank, "begun")) == ["all_gather_into_tensor.pre_0", "all_reduce.pre_0"]
        reduced, whole = map(tensor, outcome(job, rank, "ended")["told"])
        rows = rows_of(job, rank, "ended")
        assert sorted(rows) == ["all_gather_into_tensor.post_0", "all_reduce.post_0"]
        assert_statistics(rows["all_reduce.post_0"], reduced)
        assert_statistics(rows["all_gather_into_tensor.post_0"], whole)


def test_nothing_is_warned_of_and_nothing_is_missing(job: Job) -> None:
    assert job.warnings == []
    assert all("communication" not in job.manifest(rank).notes for rank in range(2))
