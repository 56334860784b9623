"""Stages of a pipeline in DistributedDataParallel: the schedule has the reducer reduce after the last micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from jobs import Job

from monitor.recording.attached_model import WITHOUT_GROUP
from monitor.recording.parameters import AGGREGATED_EARLY

MICRO_STEPS, STEPS = 4, 3


@pytest.fixture(scope="module", params=["rehearsed", "static"])
def how(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def job(how: str, run_job: Callable[..., Job]) -> Job:
    return run_job("stages_in_ddp.py", 4, how)


def test_training_has_the_same_bits(job: Job) -> None:
    assert job.plain == job.monitored


def test_nothing_is_warned_of(job: Job) -> None:
    assert job.warnings == []


@pytest.mark.parametrize("step", range(STEPS))
def test_one_rank_of_each_stage_has_the_reduced_gradients(job: Job, step: int) -> None:
    expected = math.hypot(*(job.plain[rank]["gradients"][step] for rank in (0, 1)))
    assert expected == pytest.approx(job.total_norm("grad_reduced", step), rel=1e-5)
    assert [job.rows("grad_reduced", rank) for rank in (2, 3)] == [[], []]


def test_a_note_says_that_ranks_are_mixed_where_the_rehearsal_has_the_first_micro_batch_reduced(job: Job, how: str) -> None:
    noted = [AGGREGATED_EARLY in str(job.manifest(rank).notes.get("grad_unreduced")) for rank in range(4)]
    assert noted == [how == "rehearsed"] * 4


def test_the_local_gradients_of_steps_without_a_rehearsal_have_the_reduced_one_as_their_mean(job: Job, how: str) -> None:
    for stage in (0, 1):
        reduced = {(row.name, row.step): row.values["mean"] for row in job.rows("grad_reduced", stage)}
        local = [row for rank in (stage, stage + 2) for row in job.rows("grad_unreduced", rank)]
        for (name, step), expected in reduced.items():
            if step == 0 and how == "rehearsed":
                continue
            means = [row.values["mean"] / MICRO_STEPS for row in local if (row.name, row.step) == (name, step)]
            assert expected == pytest.approx(sum(means) / 2, rel=1e-4, abs=1e-8)
            assert len(means) == 2


def test_a_pipeline_without_groups_is_warned_of_if_it_has_fewer_ranks_than_the_job(
    run_job: Callable[..., Job],
) -> None:
    by_hand = run_job("stages_in_ddp.py", 4, "by-hand")
    assert by_hand.plain == by_hand.monitored
    assert [said.count(WITHOUT_GROUP) for said in by_hand.said] == [1, 0, 0, 0]
