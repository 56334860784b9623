"""Megatron-core on two ranks: each of its optimizers, data-, tensor-, pipeline- and expert-parallel."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from jobs import Job
from watching import Row

STEPS = range(3)
SKIPPED = 1
"""The step of fp16 whose gradients are not finite."""

TOKENS = 2 * 2 * 2 * 8
"""Of a step: ranks, micro-batches, sequences and their length."""

AS_ONE = [
    "bf16",
    "overlap-member",
    "distributed-overlap",
    "distributed-overlap-each",
    "fp32-inner",
    "fp32-distributed",
    "tokens",
]
APART = ["tp", "tp-sequence", "pp-each", "pp-distributed-overlap", "ep-fp32-distributed"]
SCALED = ["fp16", "fp16-distributed-ungrouped"]
LAST = "ungrouped-unwrapped-released"
HOWS = [*AS_ONE, *APART, *SCALED, LAST]

LAYER_NORM = "module.decoder.final_layernorm.weight"
COLUMNS = "module.decoder.layers.0.mlp.linear_fc1.weight"
ROWS = "module.decoder.layers.0.mlp.linear_fc2.weight"


@pytest.fixture(scope="module")
def all_jobs(run_job: Callable[..., Job]) -> Job:
    """One pair of processes for every setup: importing Megatron takes longer than to train with it."""
    return run_job("megatron_run.py", 2, *HOWS)


@pytest.fixture
def job(all_jobs: Job, request: pytest.FixtureRequest) -> Job:
    return one(all_jobs, request.param)


def one(jobs: Job, how: str) -> Job:
    plain, monitored = ([told[how] for told in each] for each in (jobs.plain, jobs.monitored))
    return replace(jobs, base=jobs.base / how, plain=plain, monitored=monitored)


def each_once(job: Job, kind: str, step: int) -> float:
    """The norm over all ranks' rows, of replicas that no one claimed the first rank's."""
    squares = 0.0
    for rank in range(len(job.directories)):
        placements = {name: found.placement for (of, name), found in job.series(rank).items() if of == kind}
        rows = (row for row in job.rows(kind, rank) if row.step == step)
        squares += sum(row.values["norm"] ** 2 for row in rows if rank == min(placements[row.name].unclaimed or (rank,)))
    return math.sqrt(squares)


def rows_of(job: Job, kind: str, rank: int, step: int) -> dict[str, Row]:
    return {row.name: row for row in job.rows(kind, rank) if row.step == step}


def shape_of(row: Row) -> list[int]:
    shape: list[int] = json.loads(row.values["shape"])
    return shape


def sum_of(row: Row) -> float:
    return float(row.values["mean"] * math.prod(shape_of(row)))


def placement(job: Job, kind: str, name: str, rank: int = 0) -> Any:
    return job.series(rank)[kind, name].placement


@pytest.mark.parametrize("job", HOWS, indirect=True)
def test_training_has_the_same_bits(job: Job) -> None:
    for plain, monitored in zip(job.plain, job.monitored, strict=True):
        assert plain == monitored | {"refusal": plain["refusal"]}


def test_nothing_is_warned_of(all_jobs: Job) -> None:
    assert all_jobs.warnings == []


@pytest.mark.parametrize("job", HOWS, indirect=True)
def test_the_norm_of_all_reduced_gradients_is_what_the_step_returns(job: Job) -> None:
    for step, norm in enumerate(job.plain[0]["gradients"]):
        if norm is not None:
            assert norm == pytest.approx(each_once(job, "grad_reduced", step), rel=1e-5)


@pytest.mark.parametrize("job", HOWS, indirect=True)
def test_each_rank_has_the_norm_that_the_step_returns_as_a_number_of_the_run(job: Job) -> None:
    norms = [norm for norm in job.plain[0]["gradients"] if norm is not None]
    for rank in (0, 1):
        for number in ("grad_norm", "grad_norm_clipped"):
            assert job.numbers(number, rank) == pytest.approx(norms, rel=1e-6)


@pytest.mark.parametrize("job", [how for how in HOWS if "ungrouped" not in how], indirect=True)
def test_with_groups_nothing_is_written_twice(job: Job) -> None:
    for rank in (0, 1):
        assert {found.placement.unclaimed for found in job.series(rank).values()} == {()}


@pytest.mark.parametrize("job", HOWS, indirect=True)
def test_the_norm_of_all_weights_is_that_of_the_master_weights(job: Job) -> None:
    for step, done in enumerate(job.plain[0]["done"]):
        assert job.plain[0]["before"][step] == pytest.approx(each_once(job, "param_origin", step), rel=1e-5)
        if done:
            assert job.plain[0]["after"][step] == pytest.approx(each_once(job, "param_updated", step), rel=1e-5)


@pytest.mark.parametrize("job", [how for how in HOWS if "ep" not in how], indirect=True)
def test_the_norm_of_all_weights_is_that_of_a_gathered_copy_of_the_model(job: Job) -> None:
    """Which is rounded to the type that the model computes in, bfloat16 unless another is named."""
    within = 1e-5 if "fp32" in str(job.base) else 2**-8
    for step, done in enumerate(job.plain[0]["done"]):
        if done:
            assert job.plain[0]["gathered"][step] == pytest.approx(each_once(job, "param_updated", step), rel=within)


@pytest.mark.parametrize("job", HOWS, indirect=True)
def test_the_norm_of_all_moments_is_that_of_the_inner_optimizers(job: Job) -> None:
    for kind in ("exp_avg", "exp_avg_sq"):
        for step in (1, 2):
            assert job.plain[0][kind][step] == pytest.approx(each_once(job, kind, step), rel=1e-5)


@pytest.mark.parametrize("job", ["bf16", "distributed-overlap", "fp32-inner", "fp32-distributed", "tokens"], indirect=True)
def test_local_gradients_average_to_the_reduced_one(job: Job) -> None:
    divisor = TOKENS if "tokens" in str(job.base) else 2
    for step in STEPS:
        local = [rows_of(job, "grad_unreduced", rank, step) for rank in (0, 1)]
        reduced = [rows_of(job, "grad_reduced", rank, step) for rank in (0, 1)]
        assert sorted(local[0]) == sorted(local[1]) == sorted({**reduced[0], **reduced[1]})
        for name in local[0]:
            mean = (sum_of(local[0][name]) + sum_of(local[1][name])) / divisor
            assert sum(sum_of(rows[name]) for rows in reduced if name in rows) == pytest.approx(mean, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("job", ["bf16", "fp32-inner", "tp"], indirect=True)
def test_unreduced_gradients_are_the_sums_over_the_micro_batches_before_the_reduction(job: Job) -> None:
    for rank in (0, 1):
        for step in STEPS:
            local = job.plain[rank]["local"][3 * step + 2]
            rows = rows_of(job, "grad_unreduced", rank, step).values()
            written_elsewhere = "tp" in str(job.base) and rank == 1
            found = math.sqrt(sum(row.values["norm"] ** 2 for row in rows))
            assert found < local if written_elsewhere else found == pytest.approx(local, rel=1e-5)


def test_a_reduction_within_backward_changes_no_unreduced_row(all_jobs: Job) -> None:
    for rank in (0, 1):
        expected = one(all_jobs, "bf16").rows("grad_unreduced", rank)
        for how in ("overlap-member", "distributed-overlap"):
            found = one(all_jobs, how).rows("grad_unreduced", rank)
            assert sorted(map(repr, expected)) == sorted(map(repr, found))


def micro_step_norms(job: Job, rank: int, step: int) -> list[float]:
    rows = [row for row in job.rows("grad_unreduced", rank) if row.step == step]
    assert {row.micro_step for row in rows} == {0, 1}
    return [math.sqrt(sum(row.values["norm"] ** 2 for row in rows if row.micro_step == at)) for at in (0, 1)]


def test_after_each_micro_batch_what_has_accumulated_is_read_even_if_its_reduction_has_begun(all_jobs: Job) -> None:
    for rank in (0, 1):
        local = one(all_jobs, "bf16").plain[rank]["local"]  # the same numbers, reduced after the last micro-batch
        for step in STEPS:
            found = micro_step_norms(one(all_jobs, "distributed-overlap-each"), rank, step)
            assert local[3 * step + 1 : 3 * step + 3] == pytest.approx(found, rel=1e-5)


def test_in_a_pipeline_each_micro_batch_is_distinguished_from_the_next(all_jobs: Job) -> None:
    job = one(all_jobs, "pp-each")
    for step in STEPS:
        assert job.plain[1]["local"][3 * step + 1 : 3 * step + 3] == pytest.approx(micro_step_norms(job, 1, step), rel=1e-5)
        # The first stage has made both forwards before its first backward: only the sum is seen from outside.
        assert job.plain[0]["local"][3 * step + 2] == pytest.approx(micro_step_norms(job, 0, step)[1], rel=1e-5)


@pytest.mark.parametrize("job", ["distributed-overlap", "fp32-distributed"], indirect=True)
def test_a_distributed_optimizer_has_parts_that_cover_each_parameter_once(job: Job) -> None:
    for kind in ("grad_reduced", "param_origin", "param_updated", "exp_avg", "exp_avg_sq"):
        covered: dict[str, list[int]] = {}
        whole: dict[str, int] = {}
        for rank in (0, 1):
            for row in (row for row in job.rows(kind, rank) if row.step == 2):
                shard = placement(job, kind, row.name, rank).shard
                assert (shard.ranks, shard.flat) == ((0, 1), True)
                whole[row.name] = math.prod(shard.global_shape)
                covered.setdefault(row.name, []).extend(range(shard.offset[0], shard.offset[0] + shape_of(row)[0]))
        assert len(whole) == 28
        assert {name: list(range(size)) for name, size in whole.items()} == {n: sorted(c) for n, c in covered.items()}


def test_tensor_parallel_parts_have_their_place_in_the_whole(all_jobs: Job) -> None:
    job = one(all_jobs, "tp")
    for kind in ("grad_unreduced", "grad_reduced", "param_origin", "exp_avg"):
        for name, whole, offset in ((COLUMNS, (32, 16), (16, 0)), (ROWS, (16, 32), (0, 16))):
            shard = placement(job, kind, name, rank=1).shard
            assert (shard.ranks, shard.global_shape, shard.offset, shard.flat) == ((0, 1), whole, offset, False)
        assert placement(job, kind, LAYER_NORM).replicas == (0, 1)
        assert LAYER_NORM not in {row.name for row in job.rows(kind, 1)}


def test_gradients_that_tensor_parallel_ranks_add_up_later_are_terms(all_jobs: Job) -> None:
    job = one(all_jobs, "tp-sequence")
    for rank in (0, 1):
        assert placement(job, "grad_unreduced", LAYER_NORM, rank).partial
        assert LAYER_NORM in {row.name for row in job.rows("grad_unreduced", rank)}
    assert placement(job, "grad_reduced", LAYER_NORM).replicas == (0, 1)


@pytest.mark.parametrize("job", ["pp-each", "pp-distributed-overlap"], indirect=True)
def test_an_embedding_tied_over_stages_is_written_by_the_first(job: Job) -> None:
    for kind in ("grad_reduced", "param_origin", "param_updated", "exp_avg"):
        tied = placement(job, kind, "module.embedding.word_embeddings.weight")
        assert tied.replicas == (0, 1)
        assert "module.output_layer.weight" not in {row.name for row in job.rows(kind, 1)}
    assert "module.output_layer.weight" in {row.name for row in job.rows("grad_unreduced", 1)}


def test_each_rank_writes_its_own_experts(all_jobs: Job) -> None:
    job = one(all_jobs, "ep-fp32-distributed")
    for kind in ("grad_unreduced", "grad_reduced", "param_origin", "exp_avg"):
        for rank in (0, 1):
            experts = [row.name for row in job.rows(kind, rank) if ".local_experts." in row.name and row.step == 1]
            assert len(experts) == 4
            assert {placement(job, kind, name, rank).replicas for name in experts} == {()}


@pytest.mark.parametrize("job", SCALED, indirect=True)
def test_a_step_that_is_skipped_is_one_step_and_the_loss_scale_is_recorded(job: Job) -> None:
    assert job.plain[0]["done"] == [True, False, True]
    scales = {row.step: row.values["norm"] for row in job.rows("other", 0) if row.name == "loss_scale"}
    assert scales == {0: 1024.0, 1: 1024.0, 2: 512.0}
    assert {row.step for rank in (0, 1) for row in job.rows("param_updated", rank)} == {0, 2}
    assert {row.step for rank in (0, 1) for row in job.rows("grad_reduced", rank)} == {0, 1, 2}


def test_the_groups_stand_in_the_manifest(all_jobs: Job) -> None:
    for how, role in ((LAST, "dp"), ("tp", "tp"), ("pp-each", "pp"), ("ep-fp32-distributed", "ep")):
        groups = one(all_jobs, how).manifest(0).groups
        assert groups[role] == (0, 1)
        assert {other: groups[other] for other in ("dp", "tp", "pp") if other != role} == {
            other: (0, 1) if (role, other) == ("ep", "dp") else (0,) for other in ("dp", "tp", "pp") if other != role
        }


def test_without_groups_every_rank_writes_replicas(all_jobs: Job) -> None:
    job = one(all_jobs, LAST)
    for rank in (0, 1):
        assert len(rows_of(job, "grad_reduced", rank, 0)) == 28
        assert placement(job, "grad_reduced", LAYER_NORM, rank).unclaimed == (0, 1)


def test_the_methods_are_what_they_were_when_the_monitor_is_closed(all_jobs: Job) -> None:
    assert {tuple(told["patched"]) for rank in all_jobs.monitored for told in rank.values()} == {()}


def test_a_model_that_no_one_uses_any_more_goes(all_jobs: Job) -> None:
    assert [told[LAST]["alive"] for told in all_jobs.monitored] == [[False, False], [False, False]]


def test_a_model_without_its_wrapper_is_refused_with_advice(all_jobs: Job) -> None:
    for told in all_jobs.monitored:
        assert "pass the chunks after it has wrapped them" in told[LAST]["refusal"]
