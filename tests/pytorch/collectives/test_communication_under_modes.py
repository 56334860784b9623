"""Communication under modes, transforms, checkpoints and subclasses: they see what they would see of an unmonitored run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from jobs import Job
from outcomes import calls, outcome, tensor, values
from watching import assert_statistics

GATHERED, GATHERED_TWICE = {"all_gather_into_tensor": 1}, {"all_gather_into_tensor": 2}
SUMMED = {"reduce_scatter_tensor": 1, "all_gather_into_tensor": 1}
CALLS = {
    "operators": {"all_reduce": 4},
    "functions": {"all_reduce": 4},
    "default device": {"all_reduce": 4},
    "communication debugged": {"all_reduce": 4},
    "checkpoint": {"all_reduce": 3},
    "reentrant checkpoint": {"all_reduce": 3},
    "grad": {},
    "jvp": {"all_reduce": 1},
    "fake": {},
    "meta": {},
    "traced": {},
    "subclassed": {"all_reduce": 1, "broadcast": 1},
    "rows to columns": GATHERED_TWICE,  # gloo has no exchange of parts; the gradient comes back the same way
    "rows to whole": GATHERED,
    "columns to rows": GATHERED_TWICE,
    "columns to whole": GATHERED,
    "whole to rows": GATHERED,
    "whole to columns": GATHERED,
    "sums to rows": SUMMED,
    "sums to columns": SUMMED,
    "sums to whole": {"all_reduce": 1},
    "no_grad": {"all_gather_into_tensor": 3},
    "inference_mode": {"all_gather_into_tensor": 3},
    "product": {"scatter": 2, "all_reduce": 1},
    "below": {"all_to_all_single": 1},
}
"""Calls by operator: of forward, recomputation and backward together."""


@pytest.fixture(scope="module")
def job(run_ranks: Callable[..., Job]) -> Job:
    return run_ranks("modes.py", 2, cc_pre_hook=True)


def step_of(job: Job, case: str) -> int:
    return list(job.monitored[0]["cases"]).index(case)


def test_no_case_is_left_out(job: Job) -> None:
    assert sorted(CALLS) == sorted(job.monitored[0]["cases"])


@pytest.mark.parametrize("case", CALLS)
def test_nothing_that_a_program_can_see_is_different(case: str, job: Job) -> None:
    for rank in range(2):
        outcome(job, rank, case)


@pytest.mark.parametrize("case", CALLS)
def test_every_call_that_communicates_is_recorded_once(case: str, job: Job) -> None:
    assert [calls(job, rank, step_of(job, case)) for rank in range(2)] == [CALLS[case]] * 2


def test_what_is_exchanged_by_an_operator_of_another_namespace_is_recorded_as_it_was(job: Job) -> None:
    for rank in range(2):
        row = values(job, rank, step_of(job, "below"))["all_to_all_single.post_0"]
        assert_statistics(row, tensor(outcome(job, rank, "below")["told"]))


def test_nothing_else_has_changed_and_nothing_is_missing(job: Job) -> None:
    assert job.warnings == []
    assert all(plain["random"] == monitored["random"] for plain, monitored in zip(job.plain, job.monitored, strict=True))
    assert all("communication" not in job.manifest(rank).notes for rank in range(2))
