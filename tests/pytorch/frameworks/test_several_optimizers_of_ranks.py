"""Optimizers of several kinds on two ranks: state that is stacked, dealt out to ranks or cut is recorded as what it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from jobs import Job

from monitor.series import Shard

STEPS = 3
MATRICES = ("3.weight", "4.weight", "5.weight")
SLICES = {"0.weight": 128, "2.weight": 4}
"""Parameters that are cut into slices of rows, and how many rows are in each."""


@pytest.fixture(scope="module")
def nanochat(run_job: Callable[..., Job]) -> Job:
    return run_job("several_optimizers.py", 2, "nanochat", update_ratio=True)


@pytest.fixture(scope="module")
def torchtitan(run_job: Callable[..., Job]) -> Job:
    return run_job("several_optimizers.py", 2, "torchtitan", update_ratio=True)


@pytest.fixture(scope="module")
def redundant(run_job: Callable[..., Job]) -> Job:
    fields = dict.fromkeys(("update_ratio", "mg_direction", "optimizer_health"), True)
    return run_job("several_optimizers.py", 2, "redundant", **fields)


@pytest.fixture(params=["nanochat", "torchtitan", "redundant"])
def job(request: pytest.FixtureRequest) -> Job:
    found: Job = request.getfixturevalue(request.param)
    return found


def norms(job: Job, kind: str, rank: int, step: int) -> dict[str, float]:
    return {row.name: row.values["norm"] for row in job.rows(kind, rank) if row.step == step}


def test_training_has_the_same_bits(job: Job) -> None:
    assert job.plain == job.monitored


@pytest.mark.parametrize("step", range(STEPS))
@pytest.mark.parametrize("kind", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("rank", [0, 1])
def test_each_moment_that_a_rank_writes_is_one_that_it_holds(job: Job, rank: int, kind: str, step: int) -> None:
    held = job.plain[rank]["moments"][step][kind]
    found = norms(job, kind, rank, step)
    assert {name: held[name] for name in found} == pytest.approx(found, rel=1e-6)


@pytest.mark.parametrize("kind", ["exp_avg", "exp_avg_sq"])
def test_no_moment_is_missing_that_any_rank_holds(job: Job, kind: str) -> None:
    held = {name for rank in (0, 1) for name in job.plain[rank]["moments"][2][kind]}
    assert held == {name for rank in (0, 1) for name in norms(job, kind, rank, 2)}


@pytest.mark.parametrize("step", range(STEPS))
def test_weights_are_those_before_and_after_the_step(job: Job, step: int) -> None:
    for rank in (0, 1):
        for kind, when in (("param_origin", "before"), ("param_updated", "after")):
            found = norms(job, kind, rank, step)
            assert {name: job.plain[rank][when][step][name] for name in found} == pytest.approx(found, rel=1e-6)
    written = {row.name for rank in (0, 1) for row in job.rows("param_updated", rank) if row.step == step}
    assert written == set(job.plain[0]["after"][step])


def test_a_matrix_s_momentum_is_written_by_the_rank_that_steps_it(nanochat: Job) -> None:
    found = [[name for name in norms(nanochat, "exp_avg", rank, 1) if name in MATRICES] for rank in (0, 1)]
    assert found == [["3.weight", "4.weight"], ["5.weight"]]


def test_slices_of_moments_are_shards_of_their_parameter(nanochat: Job) -> None:
    for name, rows in SLICES.items():
        for rank in (0, 1):
            found = nanochat.series(rank)["exp_avg", name].placement.shard
            assert isinstance(found, Shard)
            assert (found.ranks, found.offset) == ((0, 1), (rank * rows, 0))


def test_what_reduces_inside_its_step_has_no_reduced_gradients_and_says_so(nanochat: Job) -> None:
    assert [nanochat.rows("grad_reduced", rank) for rank in (0, 1)] == [[], []]
    assert any("grad_reduced" in line for line in nanochat.warnings)


def test_stacked_second_moments_have_a_reason_instead_of_rows(nanochat: Job) -> None:
    assert "second_momentum_buffer" in nanochat.manifest(0).notes["optimizer_state"]


@pytest.mark.parametrize("kind", ["exp_avg", "exp_avg_sq", "other", "optimizer_health"])
def test_each_rank_writes_what_comes_from_the_moments_that_it_holds(redundant: Job, kind: str) -> None:
    found = [{row.name for row in redundant.rows(kind, rank) if row.step == 2} for rank in (0, 1)]
    assert found == [set(redundant.plain[rank]["moments"][2]["exp_avg"]) for rank in (0, 1)]
    assert all(found)
    health = [row.values for rank in (0, 1) for row in redundant.rows("optimizer_health", rank) if row.step == 2]
    assert all(row["staleness"] > 0 for row in health)
    assert all("optimizer_state" not in redundant.manifest(rank).notes for rank in (0, 1))
