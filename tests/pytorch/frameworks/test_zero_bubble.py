"""Schedules of ``torch.distributed.pipelining`` that split backward in two, so that no hook sees the gradients of weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from jobs import Job

RANKS = (0, 1)
EACH = {"monitor_mbs_grad": True}


@pytest.fixture(scope="module", params=["zero-bubble", "zero-bubble-v", "dual-pipe-v"])
def how(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def job(how: str, run_job: Callable[..., Job]) -> Job:
    return run_job("pipelining.py", 2, how, xy_distribution=True, all_xy=True)


@pytest.fixture(scope="module")
def in_micro_steps(how: str, run_job: Callable[..., Job]) -> Job:
    return run_job("pipelining.py", 2, how, **EACH)


@pytest.fixture(scope="module")
def not_split(run_job: Callable[..., Job]) -> Job:
    return run_job("pipelining.py", 2, "interleaved", **EACH)


def local_norms(job: Job) -> dict[tuple[str, int, int | None], float]:
    """By parameter, step and micro-step."""
    rows = [row for rank in RANKS for row in job.rows("grad_unreduced", rank)]
    found = {(row.name, row.step, row.micro_step): row.values["norm"] for row in rows}
    assert len(found) == len(rows)
    return found


def test_training_has_the_same_bits(job: Job) -> None:
    assert job.plain == job.monitored


def test_nothing_is_warned_of(job: Job, in_micro_steps: Job) -> None:
    assert job.warnings == in_micro_steps.warnings == []


@pytest.mark.parametrize("step", range(3))
def test_the_norm_of_all_reduced_gradients_is_that_over_all_stages(job: Job, step: int) -> None:
    assert job.plain[0]["gradients"][step] == pytest.approx(job.total_norm("grad_reduced", step), rel=1e-5)


@pytest.mark.parametrize("step", range(3))
def test_local_gradients_are_the_sums_that_the_schedule_divides_by_the_number_of_micro_batches(job: Job, step: int) -> None:
    assert job.plain[0]["gradients"][step] == pytest.approx(job.total_norm("grad_unreduced", step) / 4, rel=1e-5)


def test_the_rows_of_micro_steps_are_those_of_a_schedule_that_does_not_split(in_micro_steps: Job, not_split: Job) -> None:
    assert local_norms(in_micro_steps) == pytest.approx(local_norms(not_split), rel=1e-4)
