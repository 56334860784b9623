"""Groups of every kind, and calls under what a loop may have set up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from jobs import Job
from outcomes import outcome, together, values
from watching import assert_statistics

ROOTED = {
    "broadcast in another order": ("broadcast", {"pre": [1], "post": [0, 1]}),
    "scattered": ("scatter", {"pre": [1], "post": [0, 1]}),
    "gathered": ("gather", {"pre": [0, 1], "post": [1]}),
    "reduced": ("reduce", {"pre": [0, 1], "post": [1]}),
    "functionally broadcast": ("broadcast", {"pre": [1], "post": [0, 1]}),
}
"""The root has rank 0 in the group, and rank 1 in the job. Which ranks of the job have which row."""

RAISING = ("without a future", "without an end")
"""Of a Work in Python that leaves everything to torch."""

UNDER = ("double precision", "deterministic", "anomalies detected", "autocast")
OTHERS = ("in Python", "reduced in Python", "named", "broadcast alone", "by name", "of no one", "saved and loaded")


@pytest.fixture(scope="module")
def job(run_ranks: Callable[..., Job]) -> Job:
    return run_ranks("kinds_of_groups.py", 2, cc_pre_hook=True)


def rows_of(job: Job, rank: int, case: str) -> dict[str, dict[str, Any]]:
    return values(job, rank, list(job.monitored[0]["cases"]).index(case))


def given(job: Job, rank: int, case: str) -> Any:
    """What came out, before anybody changed it."""
    first, *_ = outcome(job, rank, case)["told"]
    return together(first if isinstance(first, list) else [first])


def test_no_case_is_left_out(job: Job) -> None:
    assert sorted([*ROOTED, *UNDER, *OTHERS, *RAISING]) == sorted(job.monitored[0]["cases"])


@pytest.mark.parametrize("case", [*ROOTED, *UNDER, *OTHERS])
def test_programs_find_what_they_would_find(case: str, job: Job) -> None:
    for rank in range(2):
        assert "raised" not in outcome(job, rank, case)


@pytest.mark.parametrize("case", RAISING)
def test_programs_see_the_exceptions_that_they_would_see(case: str, job: Job) -> None:
    for rank in range(2):
        assert outcome(job, rank, case)["raised"][0] == "RuntimeError"


@pytest.mark.parametrize("case", ROOTED)
def test_the_root_is_found_where_its_ranks_in_group_and_job_differ(case: str, job: Job) -> None:
    op, expected = ROOTED[case]
    names = {rank: rows_of(job, rank, case) for rank in range(2)}
    found = {what: [rank for rank in range(2) if f"{op}.{what}_0" in names[rank]] for what in ("pre", "post")}
    assert found == expected
    for rank in expected["post"]:
        assert_statistics(names[rank][f"{op}.post_0"], given(job, rank, case))


def test_a_group_of_some_ranks_has_its_own_rows(job: Job) -> None:
    for rank in range(2):
        rows = rows_of(job, rank, "broadcast alone")
        assert sorted(rows) == [f"broadcast@{rank}.post_0", f"broadcast@{rank}.pre_0"]
        assert_statistics(rows[f"broadcast@{rank}.post_0"], given(job, rank, "broadcast alone"))


def test_a_group_that_is_named_or_listed_is_recognised(job: Job) -> None:
    for rank in range(2):
        row = rows_of(job, rank, "by name")["all_reduce.post_0"]
        assert row["calls"] == 2
        assert_statistics(row, given(job, rank, "by name"))


def test_a_call_for_a_group_of_others_has_no_rows(job: Job) -> None:
    assert [rows_of(job, rank, "of no one") for rank in range(2)] == [{}, {}]


@pytest.mark.parametrize("case", UNDER)
def test_what_the_loop_has_set_up_changes_no_statistics(case: str, job: Job) -> None:
    for rank in range(2):
        row = rows_of(job, rank, case)["all_reduce.post_0"]
        assert row["calls"] == 3
        assert_statistics(row, given(job, rank, case))


def test_nothing_is_warned_of_and_nothing_is_missing(job: Job) -> None:
    assert job.warnings == []
    assert all("communication" not in job.manifest(rank).notes for rank in range(2))
