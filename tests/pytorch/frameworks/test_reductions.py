"""A row of ``grad_reduced`` is the mean over the data-parallel ranks, or absent: each way against the gathered mean."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from jobs import Job

from monitor.recording.parameters import NOT_REDUCED, SUMMED_EARLY

RunJob = Callable[..., Job]
REDUCED = [
    "one-by-one", "micro-steps", "behind-the-version", "awaited", "futures", "coalesced", "flat", "flat-at-once", "views",
    "in-slices", "under-a-device", "scattered", "functionally", "hooks", "no-group", "wrapped", "wrapped-inside",
    "wrapped-in-the-end", "elsewhere", "masked", "before-local",
]  # fmt: skip
LOCAL = [
    "inside",
    "none",
    "clipped",
    "loss-alone",
    "greatest",
    "over-a-part",
    "zeroed",
    "early",
    "no-sync",
    "noop",
    "default-device",
    "called-inside",
    "stepped-by-hooks",
    "local",
]
SUMMED_EARLY_WAYS = [
    "hooked",
    "hooked-twice",
    "hooked-by-another",
    "hooked-functionally",
    "summed-in-backward",
    "early",
]
"""Those of which nothing that a parameter is given, or all but the first, is of one rank alone."""
LOCAL += SUMMED_EARLY_WAYS[:-1]
SAID = NOT_REDUCED.partition(":")[0]


@pytest.fixture(scope="module")
def jobs(run_job: RunJob) -> dict[str, Job]:
    """By the way of reducing. Two jobs try one way after the other."""
    config = {"wg_distribution": True, "param_distribution": False, "mv_distribution": False, "replica_check": True}
    found: dict[str, Job] = {}
    for ways in ([*REDUCED, "alone"], [*LOCAL, "some", "hooked-alone"]):
        job = run_job("reductions.py", 2, *ways, **config)
        for how in ways:
            plain, monitored = ([of[how] for of in told] for told in (job.plain, job.monitored))
            found[how] = Job(job.base / how, plain, monitored, job.said)
    return found


def norms(job: Job, kind: str = "grad_reduced", rank: int = 0) -> dict[tuple[int, str], float]:
    return {(row.step, row.name.removeprefix("module.")): row.values["norm"] for row in job.rows(kind, rank)}


def means(job: Job) -> dict[tuple[int, str], float]:
    told = job.monitored[0]
    return {(step, name): norm for step, of in enumerate(told["means"]) for name, norm in zip(told["names"], of, strict=True)}


@pytest.mark.parametrize("how", REDUCED)
def test_a_gradient_that_was_seen_to_be_reduced_has_the_mean_over_the_ranks(jobs: dict[str, Job], how: str) -> None:
    job = jobs[how]
    assert norms(job) == pytest.approx(means(job), rel=1e-5)
    assert "grad_reduced" not in job.manifest(0).notes or SAID not in str(job.manifest(0).notes["grad_reduced"])


@pytest.mark.parametrize("how", LOCAL)
def test_a_gradient_that_no_one_reduced_before_the_step_has_no_row_and_that_is_said(jobs: dict[str, Job], how: str) -> None:
    job = jobs[how]
    assert norms(job) == {}
    assert norms(job, "replica", 1) == {}
    assert all(SAID in str(job.manifest(rank).notes["grad_reduced"]) for rank in range(2))


def test_each_rank_warns_once_of_gradients_that_are_not_reduced(jobs: dict[str, Job]) -> None:
    counts = {how: sum("grad_reduced is missing" in line for line in jobs[how].warnings) for how in (REDUCED[0], LOCAL[0])}
    assert counts == {REDUCED[0]: 0, LOCAL[0]: 2 * len([*LOCAL, "some", "hooked-alone"])}


def test_of_gradients_some_of_which_are_reduced_these_have_rows(jobs: dict[str, Job]) -> None:
    job = jobs["some"]
    assert norms(job) == pytest.approx({key: norm for key, norm in means(job).items() if key[1] == "0.weight"}, rel=1e-5)
    assert "3 parameters, 0.bias, 2.weight, 2.bias" in str(job.manifest(0).notes["grad_reduced"])


def test_a_rank_that_is_its_whole_data_parallel_group_has_nothing_to_reduce(jobs: dict[str, Job]) -> None:
    job = jobs["alone"]
    for rank in range(2):
        assert norms(job, rank=rank) == norms(job, "grad_unreduced", rank) != {}


@pytest.mark.parametrize("how", [*REDUCED, *LOCAL, "some", "alone", "hooked-alone"])
def test_training_has_the_same_bits_with_the_monitor(jobs: dict[str, Job], how: str) -> None:
    job = jobs[how]
    assert job.plain == job.monitored


def own(job: Job, rank: int) -> dict[tuple[int, str], float]:
    told = job.monitored[rank]
    return {(step, name): norm for step, of in enumerate(told["local"]) for name, norm in zip(told["names"], of, strict=True)}


@pytest.mark.parametrize("how", ["hooks", "masked", "hooked-alone", "one-by-one", "loss-alone"])
def test_a_gradient_that_is_summed_after_it_was_accumulated_is_read_before(jobs: dict[str, Job], how: str) -> None:
    for rank in range(2):
        assert norms(jobs[how], "grad_unreduced", rank) == pytest.approx(own(jobs[how], rank), rel=1e-5)
        assert "grad_unreduced" not in jobs[how].manifest(rank).notes


@pytest.mark.parametrize("how", SUMMED_EARLY_WAYS)
def test_a_gradient_that_is_summed_before_it_is_accumulated_has_no_row_and_that_is_said(jobs: dict[str, Job], how: str) -> None:
    for rank in range(2):
        assert norms(jobs[how], "grad_unreduced", rank) == {}
        assert SUMMED_EARLY in str(jobs[how].manifest(rank).notes["grad_unreduced"])
