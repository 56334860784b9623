"""DistributedDataParallel: two ranks hold the same reduced gradients, weights and moments, and one of them writes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from jobs import Job
from typer.testing import CliRunner

from monitor.anomalies.ranking.cli import app
from monitor.pytorch.gradients import CHANGED
from monitor.recording.parameters import AGGREGATED_EARLY

STEPS = 3
HOW = [
    "plain",
    "views",
    "no-sync",
    "no-sync-views",
    "fp16-hook",
    "own-hook",
    "static",
    "unused",
    "linear",
    "no-sync-reentrant",
    "evaluation-mode",
    "one-backward",
]
SAME_ON_BOTH = ("grad_reduced", "param_origin", "param_updated", "exp_avg", "exp_avg_sq")
Statistics = Mapping[str, Any]


@pytest.fixture(scope="module", params=HOW)
def how(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def job(how: str, run_job: Callable[..., Job]) -> Job:
    return run_job("data_parallel.py", 2, how)


def statistics(job: Job, kind: str, rank: int, step: int) -> dict[str, Statistics]:
    """By name of the parameter."""
    return {row.name: row.values for row in job.rows(kind, rank) if row.step == step}


def mean_and_bound(values: Statistics) -> tuple[float, float]:
    """The mean over the elements of a tensor, and a bound for that of their magnitudes."""
    return values["mean"], values["norm"] / math.sqrt(math.prod(map(int, values["shape"].strip("()[]").split(","))))


def test_training_has_the_same_bits(job: Job) -> None:
    assert job.plain == job.monitored


def test_nothing_is_warned_of_and_nothing_needs_a_note_but_the_mode(job: Job, how: str) -> None:
    modes = 2 if how == "evaluation-mode" else 0
    assert [("was in evaluation mode when step 0" in said) for said in job.warnings] == [True] * modes
    notes = {"evaluation_mode": "the model trains in evaluation mode, first in step 0"} if modes else {}
    assert [job.manifest(rank).notes for rank in (0, 1)] == [notes, notes]


@pytest.mark.parametrize("step", range(STEPS))
def test_the_norm_of_all_reduced_gradients_is_what_torch_reports(job: Job, step: int) -> None:
    assert job.plain[0]["gradients"][step] == pytest.approx(job.total_norm("grad_reduced", step), rel=1e-5)


def test_the_rank_that_writes_all_gradients_has_their_norm_as_a_number_of_the_run(job: Job) -> None:
    assert job.numbers("grad_norm", 0) == pytest.approx(job.plain[0]["gradients"], rel=1e-6)
    assert job.numbers("grad_norm", 1) == []
    assert job.numbers("learning_rate.0", 0) == job.numbers("learning_rate.0", 1) != []


@pytest.mark.parametrize("step", range(STEPS))
def test_the_norm_of_all_weights_is_that_of_the_model(job: Job, step: int) -> None:
    assert job.plain[0]["before"][step] == pytest.approx(job.total_norm("param_origin", step), rel=1e-5)
    assert job.plain[0]["after"][step] == pytest.approx(job.total_norm("param_updated", step), rel=1e-5)


def test_the_norm_of_all_moments_is_that_of_the_optimizer(job: Job) -> None:
    """A step begins with those that the one before has left."""
    for step in range(1, STEPS):
        for kind, expected in zip(("exp_avg", "exp_avg_sq"), job.plain[0]["moments"][step - 1], strict=True):
            assert expected == pytest.approx(job.total_norm(kind, step), rel=1e-5)


def test_replicas_are_written_by_the_first_rank_and_local_gradients_by_both(job: Job) -> None:
    for kind in SAME_ON_BOTH:
        assert job.rows(kind, 0)
        assert not job.rows(kind, 1)
        placements = {one.placement.replicas for (of, _), one in job.series(0).items() if of == kind}
        assert placements == {(0, 1)}
    assert job.rows("grad_unreduced", 0)
    assert job.rows("grad_unreduced", 1)


def test_local_gradients_average_to_the_reduced_one(job: Job, how: str) -> None:
    """As far as the type allows in which they are exchanged: each term is rounded to it, and so is their sum."""
    rounding = torch.finfo(torch.float16 if how == "fp16-hook" else torch.float32).eps
    for step in range(STEPS):
        local = [statistics(job, "grad_unreduced", rank, step) for rank in (0, 1)]
        reduced = statistics(job, "grad_reduced", 0, step)
        assert sorted(local[0]) == sorted(local[1]) == sorted(reduced)
        for name, values in reduced.items():
            (mean, bound), (other_mean, other_bound) = (mean_and_bound(one[name]) for one in local)
            assert values["mean"] == pytest.approx((mean + other_mean) / 2, rel=1e-5, abs=rounding * (bound + other_bound))


@pytest.mark.parametrize("how", ["linear"], indirect=True)
def test_of_gradients_that_are_multiples_every_statistic_averages(job: Job) -> None:
    for step in range(STEPS):
        local = [statistics(job, "grad_unreduced", rank, step) for rank in (0, 1)]
        for name, values in statistics(job, "grad_reduced", 0, step).items():
            for op in ("min", "max", "mean", "norm"):
                assert local[1][name][op] == pytest.approx(2 * local[0][name][op], rel=1e-5)
                assert values[op] == pytest.approx((local[0][name][op] + local[1][name][op]) / 2, rel=1e-5)


@pytest.mark.parametrize("how", ["unused"], indirect=True)
def test_a_parameter_that_no_rank_uses_has_no_gradient_and_no_moment(job: Job) -> None:
    for rank in (0, 1):
        of = {kind for kind, name in job.series(rank) if "spare" in name}
        assert of == ({"param_origin", "param_updated"} if rank == 0 else set())


def test_parameters_that_the_wrapper_reduces_later_are_replicas(run_job: Callable[..., Job]) -> None:
    """It does not wait for this reduction, so their reduced gradients are missing. Weights and moments count once."""
    job = run_job("data_parallel.py", 2, "delayed")
    for step in range(STEPS):
        test_the_norm_of_all_weights_is_that_of_the_model(job, step)
        assert "module.last.bias" not in {*statistics(job, "grad_reduced", 0, step), *statistics(job, "grad_reduced", 1, step)}
    test_the_norm_of_all_moments_is_that_of_the_optimizer(job)
    test_replicas_are_written_by_the_first_rank_and_local_gradients_by_both(job)
    assert any("No reduction of 1 " in said for said in job.warnings)


def test_a_parameter_that_one_rank_uses_has_its_local_gradient_there_alone(run_job: Callable[..., Job]) -> None:
    job = run_job("data_parallel.py", 2, "one-rank")
    assert job.plain == job.monitored
    assert job.warnings == []
    for step in range(STEPS):
        local = [statistics(job, "grad_unreduced", rank, step) for rank in (0, 1)]
        reduced = statistics(job, "grad_reduced", 0, step)
        assert {name for name in reduced if name not in local[0]} == {"module.spare.weight", "module.spare.bias"}
        assert sorted(local[1]) == sorted(reduced)
        for name in ("module.spare.weight", "module.spare.bias"):
            for op in ("min", "max", "mean", "norm"):
                assert reduced[name][op] == pytest.approx(local[1][name][op] / 2, rel=1e-5)
        assert job.plain[0]["gradients"][step] == pytest.approx(job.total_norm("grad_reduced", step), rel=1e-5)


def test_a_parameter_that_it_ignores_is_written_by_every_rank(run_job: Callable[..., Job]) -> None:
    job = run_job("data_parallel.py", 2, "ignored")
    assert job.plain == job.monitored
    assert job.warnings == []
    ignored = "module.first.bias"
    for kind in SAME_ON_BOTH:
        assert {row.name for row in job.rows(kind, 1)} == {ignored}
        assert ignored in {row.name for row in job.rows(kind, 0)}
        assert job.series(0)[kind, ignored].placement.replicas == ()
    for step in range(STEPS):
        for rank in (0, 1):
            local, reduced = (statistics(job, kind, rank, step)[ignored] for kind in ("grad_unreduced", "grad_reduced"))
            for op in ("min", "max", "mean", "norm"):
                assert local[op] == pytest.approx(reduced[op], rel=1e-6)
            assert job.plain[rank]["ignored"][step] == pytest.approx(reduced["norm"], rel=1e-5)
        both = math.hypot(job.plain[0]["gradients"][step], job.plain[1]["ignored"][step])
        assert both == pytest.approx(job.total_norm("grad_reduced", step), rel=1e-5)


def test_parts_of_a_module_that_is_not_called_have_their_reduced_gradients(run_job: Callable[..., Job]) -> None:
    job = run_job("data_parallel_parts.py", 2)
    assert job.plain == job.monitored
    assert job.warnings == []
    assert [job.manifest(rank).notes for rank in (0, 1)] == [{}, {}]
    for step in range(STEPS):
        rows = statistics(job, "grad_reduced", 0, step)
        for part in ("made", "judged"):
            norm = math.hypot(*(values["norm"] for name, values in rows.items() if name.startswith(part)))
            assert job.plain[0][part][step] == pytest.approx(norm, rel=1e-5)


def test_a_part_whose_wrapper_is_bypassed_has_no_reduced_gradients(run_job: Callable[..., Job]) -> None:
    job = run_job("data_parallel_bypassed.py", 2)
    assert job.plain == job.monitored
    for step in range(STEPS):
        rows = statistics(job, "grad_reduced", 0, step)
        assert {name.split(".")[0] for name in rows} == {"wrapped"}
        norm = math.hypot(*(values["norm"] for values in rows.values()))
        assert job.plain[0]["gradients"][step] == pytest.approx(norm, rel=1e-5)
    assert "bypassed" in job.manifest(0).notes["grad_reduced"]


@pytest.mark.parametrize("how", ["synced", "synced-views"])
def test_without_no_sync_the_manifest_says_that_ranks_are_mixed(run_job: Callable[..., Job], how: str) -> None:
    job = run_job("data_parallel.py", 2, how)
    assert job.plain == job.monitored
    assert job.warnings == []
    assert [job.manifest(rank).notes for rank in (0, 1)] == [{"grad_unreduced": AGGREGATED_EARLY}] * 2
    for step in range(STEPS):
        assert job.plain[0]["gradients"][step] == pytest.approx(job.total_norm("grad_reduced", step), rel=1e-5)


@pytest.mark.parametrize("how", ["synced", "synced-alone", "no-sync", "no-sync-alone", "shared"])
def test_wrappers_inside_a_module_are_said_to_mix_ranks_if_they_do(run_job: Callable[..., Job], how: str) -> None:
    job = run_job("data_parallel_pair.py", 2, how)
    assert job.plain == job.monitored
    assert job.warnings == []
    note = AGGREGATED_EARLY if "synced" in how else None
    assert [job.manifest(rank).notes.get("grad_unreduced") for rank in (0, 1)] == [note, note]


@pytest.mark.parametrize("how", ["clipped", "not-bound"])
def test_what_clipping_has_written_to_is_marked(run_job: Callable[..., Job], how: str) -> None:
    job = run_job("data_parallel.py", 2, how)
    assert job.plain == job.monitored
    assert job.manifest(0).notes == {"grad_reduced": CHANGED}
    assert job.manifest(1).notes == {}
    for step in range(STEPS):
        expected = 1e-3 if how == "clipped" else job.plain[0]["gradients"][step]
        assert expected == pytest.approx(job.total_norm("grad_reduced", step), rel=1e-5)
    for rank in (0, 1):
        assert job.numbers("grad_norm", rank) == pytest.approx(job.plain[0]["gradients"], rel=1e-6)
        after = [min(norm, 1e-3 if how == "clipped" else norm) for norm in job.plain[0]["gradients"]]
        assert job.numbers("grad_norm_clipped", rank) == pytest.approx(after, rel=1e-4)


def test_without_a_group_every_rank_writes_and_the_manifest_knows_the_replicas(run_job: Callable[..., Job]) -> None:
    job = run_job("data_parallel.py", 2, "no-group")
    for rank in (0, 1):
        assert job.rows("grad_reduced", rank)
        assert job.manifest(rank).groups == {"dp": (0, 1)}
        assert {one.placement.unclaimed for (kind, _), one in job.series(rank).items() if kind == "grad_reduced"} == {(0, 1)}


def test_the_replica_check_keeps_norm_and_checksum_of_what_is_not_written(run_job: Callable[..., Job]) -> None:
    job = run_job("data_parallel.py", 2, "plain", replica_check=True)
    assert not job.rows("replica", 0)
    written = {(f"{kind}/{row.name}", row.step): row.values for kind in SAME_ON_BOTH for row in job.rows(kind, 0)}
    kept = {(row.name, row.step): row.values for row in job.rows("replica", 1)}
    assert kept == {place: {op: values[op] for op in ("norm", "checksum")} for place, values in written.items()}
    assert {len(values["checksum"]) for values in kept.values()} == {16}


def test_two_healthy_ranks_are_reported_with_the_rows_that_both_have_judged(run_job: Callable[..., Job]) -> None:
    alert = {"rules": [{"rule_name": "AnomalyNan"}], "dump": True}
    job = run_job("data_parallel.py", 2, "plain", alert=alert)
    kinds = (*SAME_ON_BOTH, "grad_unreduced", "replica")
    rows = [sum(len(job.rows(kind, rank)) for kind in kinds) for rank in (0, 1)]
    assert min(rows) > 0
    assert rows[0] == rows[1]
    result = CliRunner().invoke(app, ["-d", str(job.base)])
    assert (result.exit_code, result.output.splitlines()[-1]) == (
        0,
        f"No event in {sum(rows):,} rows of 2 ranks in {STEPS} steps.",
    )
