"""Collectives that fail: programs see the exceptions that they would see, nothing is held, and the next call is recorded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from jobs import Job
from outcomes import calls, outcome, tensor, values
from watching import assert_statistics

RAISING = (
    "call", "gather", "receive", "barrier", "object", "wait", "wait twice", "future", "followed", "functional", "backward",
)  # fmt: skip


@pytest.fixture(scope="module")
def job(run_ranks: Callable[..., Job]) -> Job:
    return run_ranks("failing.py", 2, cc_pre_hook=True)


def step_of(job: Job, case: str) -> int:
    return list(job.monitored[0]["cases"]).index(case)


@pytest.mark.parametrize("case", RAISING)
def test_the_exception_is_the_one_that_torch_raises(case: str, job: Job) -> None:
    assert outcome(job, 0, case)["told"][0] == "RuntimeError"


def test_what_a_hook_of_the_users_raises_in_backward_arrives(job: Job) -> None:
    for rank in range(2):
        assert outcome(job, rank, "hook")["told"][:2] == ["ValueError", "of the user's, at bucket 0"]


def test_tensors_of_a_call_that_failed_are_released(job: Job) -> None:
    assert outcome(job, 0, "held")["told"] == []


@pytest.mark.parametrize("case", RAISING)
def test_a_call_that_failed_has_no_row_of_what_came_out(case: str, job: Job) -> None:
    assert [name for name in values(job, 0, step_of(job, case)) if ".post_" in name] == []


def test_the_next_call_is_recorded(job: Job) -> None:
    for rank in range(2):
        assert calls(job, rank, step_of(job, "afterwards")) == {"all_reduce": 1}
        row = values(job, rank, step_of(job, "afterwards"))["all_reduce.post_0"]
        assert_statistics(row, tensor(outcome(job, rank, "afterwards")["told"][1]))


def test_nothing_is_warned_of(job: Job) -> None:
    assert job.warnings == []
