"""DistributedDataParallel: two ranks hold the same reduced gradients, weights and moments, and one of them writes them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from jobs import Job

HOW = ["plain", "views", "no-sync", "hook"]


@pytest.fixture(scope="module", params=HOW)
def job(request: pytest.FixtureRequest, run_job: Callable[..., Job]) -> Job:
    return run_job("data_parallel.py", 2, request.param)


def test_training_has_the_same_bits(job: Job) -> None:
    assert job.plain == job.monitored


def test_nothing_is_warned_of(job: Job) -> None:
    assert job.warnings == []


@pytest.mark.parametrize("step", range(3))
def test_the_norm_of_all_reduced_gradients_is_what_clipping_reports(job: Job, step: int) -> None:
    assert job.plain[0]["gradients"][step] == pytest.approx(job.total_norm("grad_reduced", step), rel=1e-5)


@pytest.mark.parametrize("step", range(3))
def test_the_norm_of_all_weights_is_that_of_the_model(job: Job, step: int) -> None:
    assert job.plain[0]["before"][step] == pytest.approx(job.total_norm("param_origin", step), rel=1e-5)
    assert job.plain[0]["after"][step] == pytest.approx(job.total_norm("param_updated", step), rel=1e-5)


def test_the_norm_of_all_moments_is_that_of_the_optimizer(job: Job) -> None:
    for step in (1, 2):
        for kind, expected in zip(("exp_avg", "exp_avg_sq"), job.plain[0]["moments"][step], strict=True):
            assert expected == pytest.approx(job.total_norm(kind, step), rel=1e-5)


def test_replicas_are_written_by_the_first_rank_and_local_gradients_by_both(job: Job) -> None:
    for kind in ("grad_reduced", "param_origin", "param_updated", "exp_avg", "exp_avg_sq"):
        assert job.rows(kind, 0)
        assert not job.rows(kind, 1)
        placements = {one.placement.replicas for (of, _), one in job.series(0).items() if of == kind}
        assert placements == {(0, 1)}
    assert job.rows("grad_unreduced", 0)
    assert job.rows("grad_unreduced", 1)


def test_local_gradients_average_to_the_reduced_one(job: Job) -> None:
    if "hook" in job.said:
        return
    for step in range(3):
        local = [{row.name: row.values for row in job.rows("grad_unreduced", rank) if row.step == step} for rank in (0, 1)]
        reduced = {row.name: row.values for row in job.rows("grad_reduced", 0) if row.step == step}
        assert sorted(local[0]) == sorted(local[1]) == sorted(reduced)
        for name, values in reduced.items():
            mean = (local[0][name]["mean"] + local[1][name]["mean"]) / 2
            assert values["mean"] == pytest.approx(mean, rel=1e-2 if "hook" in str(job.base) else 1e-4, abs=1e-6)


def test_without_a_group_every_rank_writes_and_the_manifest_knows_the_replicas(run_job: Callable[..., Job]) -> None:
    job = run_job("data_parallel.py", 2, "no-group")
    for rank in (0, 1):
        assert job.rows("grad_reduced", rank)
        assert {one.placement.unclaimed for (kind, _), one in job.series(rank).items() if kind == "grad_reduced"} == {(0, 1)}


def test_the_replica_check_keeps_the_norm_of_what_is_not_written(run_job: Callable[..., Job]) -> None:
    job = run_job("data_parallel.py", 2, "plain", replica_check=True)
    assert not job.rows("replica", 0)
    written = {
        (f"{kind}/{row.name}", row.step): row.values["norm"]
        for kind in ("grad_reduced", "param_origin", "param_updated", "exp_avg", "exp_avg_sq")
        for row in job.rows(kind, 0)
    }
    kept = {(row.name, row.step): row.values for row in job.rows("replica", 1)}
    assert kept == {place: {"norm": norm} for place, norm in written.items()}
