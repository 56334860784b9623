"""DistributedDataParallel in all its ways: trains the same, each call recorded once, outputs as they came."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from jobs import Job
from outcomes import calls, outcome, together, values
from watching import assert_statistics

COUNTED = (
    "as it is", "views of buckets", "static graph", "unused parameters", "several buckets", "no buffers", "accumulating",
    "join", "fp16 hook", "all-reduce hook", "hook in a hook", "hook below Python", "sharded optimizer",
)  # fmt: skip
NOT_COUNTED = {"PowerSGD": {"all_reduce": 5, "broadcast": 8}}
"""Of the three steps: two plain, and one of what is not compressed and of two factors; buffers, and the new buckets."""

UNREAD = ("join",)
"""Where a rank tells the others that it is still there, and no one in Python waits for what they say."""

VALUES = ("gradients", "gradients in views", "sums")


@pytest.fixture(scope="module")
def job(run_ranks: Callable[..., Job]) -> Job:
    return run_ranks("data_parallel_ways.py", 2, cc_pre_hook=True)


def step_of(job: Job, case: str) -> int:
    return list(job.monitored[0]["cases"]).index(case)


def test_no_case_is_left_out(job: Job) -> None:
    assert sorted([*COUNTED, *NOT_COUNTED, *VALUES]) == sorted(job.monitored[0]["cases"])


@pytest.mark.parametrize("case", [*COUNTED, *NOT_COUNTED, *VALUES])
def test_training_is_the_same(case: str, job: Job) -> None:
    for rank in range(2):
        assert "raised" not in outcome(job, rank, case)


@pytest.mark.parametrize("case", [*COUNTED, *NOT_COUNTED])
def test_as_many_calls_are_recorded_as_the_profiler_counts(case: str, job: Job) -> None:
    for rank in range(2):
        found = calls(job, rank, step_of(job, case))
        counted = outcome(job, rank, case)["told"]["calls"]
        assert sum(found.values()) == (counted or sum(NOT_COUNTED[case].values()))
        assert found == NOT_COUNTED.get(case, found)


@pytest.mark.parametrize("case", sorted({*COUNTED, *NOT_COUNTED} - {*UNREAD}))
def test_what_comes_out_of_every_call_is_recorded(case: str, job: Job) -> None:
    for rank in range(2):
        rows: dict[str, dict[str, Any]] = values(job, rank, step_of(job, case))
        outputs = {name.removesuffix(".post_0"): row["calls"] for name, row in rows.items() if name.endswith(".post_0")}
        assert outputs == calls(job, rank, step_of(job, case))


@pytest.mark.parametrize("case", VALUES)
def test_what_the_reducer_has_summed_is_recorded_before_anybody_changes_it(case: str, job: Job) -> None:
    for rank in range(2):
        row = values(job, rank, step_of(job, case))["all_reduce.post_0"]
        assert_statistics(row, together(outcome(job, rank, case)["told"]["reduced"]))


def test_nothing_is_warned_of(job: Job) -> None:
    assert job.warnings == []
