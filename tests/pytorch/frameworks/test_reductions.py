"""A row of ``grad_reduced`` is the mean over the data-parallel ranks, or absent: two ranks, each way against the gathered mean."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from jobs import Job

from monitor.capture.gradients import NOT_REDUCED

RunJob = Callable[..., Job]
REDUCED = [
    "one-by-one", "micro-steps", "behind-the-version", "awaited", "futures", "coalesced", "flat", "flat-at-once", "views",
    "in-slices", "under-a-device", "scattered", "functionally", "hooks", "no-group", "wrapped", "wrapped-inside",
    "wrapped-in-the-end",
]  # fmt: skip
LOCAL = ["inside", "none", "clipped", "loss-alone", "greatest", "over-a-part", "zeroed", "early", "no-sync", "noop"]
SAID = NOT_REDUCED.partition(":")[0]


@pytest.fixture(scope="module")
def ran(run_job: RunJob) -> Callable[[str], Job]:
    @cache
    def run(how: str) -> Job:
        return run_job("reductions.py", 2, how, wg_distribution=True, param_distribution=False, mv_distribution=False, replica_check=True)

    return run


def norms(job: Job, kind: str = "grad_reduced", rank: int = 0) -> dict[tuple[int, str], float]:
    return {(row.step, row.name.removeprefix("module.")): row.values["norm"] for row in job.rows(kind, rank)}


def means(job: Job) -> dict[tuple[int, str], float]:
    told = job.monitored[0]
    return {(step, name): norm for step, of in enumerate(told["means"]) for name, norm in zip(told["names"], of, strict=True)}


@pytest.mark.parametrize("how", REDUCED)
def test_a_gradient_that_was_seen_to_be_reduced_has_the_mean_over_the_ranks(ran: Callable[[str], Job], how: str) -> None:
    job = ran(how)
    assert norms(job) == pytest.approx(means(job), rel=1e-5)
    assert not any("grad_reduced is missing" in line for line in job.warnings)


@pytest.mark.parametrize("how", LOCAL)
def test_a_gradient_that_nobody_reduced_before_the_step_has_no_row_and_that_is_said(
    ran: Callable[[str], Job], how: str
) -> None:
    job = ran(how)
    assert norms(job) == {}
    assert norms(job, "replica", 1) == {}
    assert len([line for line in job.warnings if "grad_reduced is missing" in line]) == 2  # on each rank once
    assert str(job.manifest(0).notes["grad_reduced"]).find(SAID) >= 0


def test_of_gradients_some_of_which_are_reduced_these_have_rows(ran: Callable[[str], Job]) -> None:
    job = ran("some")
    assert norms(job) == pytest.approx({key: norm for key, norm in means(job).items() if key[1] == "0.weight"}, rel=1e-5)
    assert "3 parameters, 0.bias, 2.weight, 2.bias" in str(job.manifest(0).notes["grad_reduced"])


def test_a_rank_that_is_its_whole_data_parallel_group_has_nothing_to_reduce(ran: Callable[[str], Job]) -> None:
    job = ran("alone")
    for rank in range(2):
        assert norms(job, rank=rank) == norms(job, "grad_unreduced", rank) != {}


@pytest.mark.parametrize("how", [*REDUCED, *LOCAL, "some", "alone"])
def test_training_has_the_same_bits_with_the_monitor(ran: Callable[[str], Job], how: str) -> None:
    job = ran(how)
    assert job.plain == job.monitored


def test_what_hooks_of_the_loops_own_reduce_is_read_before_them_as_it_was(ran: Callable[[str], Job]) -> None:
    job = ran("hooks")
    assert norms(job, "grad_unreduced") != pytest.approx(norms(job), rel=1e-3)
