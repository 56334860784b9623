"""Megatron-core on four ranks: two kinds of parallelism at once, each number written once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from jobs import Job

HOWS = ["tp", "tp-distributed", "pp-distributed", "ep", "ep-distributed", "ep-tp-sequence-distributed", "distributed-instances"]
COLUMNS = "module.decoder.layers.0.mlp.linear_fc1.weight"
ROWS = "module.decoder.layers.0.mlp.linear_fc2.weight"
EXPERT = "module.decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight"
LAYER_NORM = "module.decoder.final_layernorm.weight"


@pytest.fixture(scope="module")
def all_jobs(run_job: Callable[..., Job]) -> Job:
    return run_job("megatron_run.py", 4, *HOWS)


@pytest.fixture(params=HOWS)
def job(all_jobs: Job, request: pytest.FixtureRequest) -> Job:
    return one(all_jobs, request.param)


def one(jobs: Job, how: str) -> Job:
    plain, monitored = ([told[how] for told in each] for each in (jobs.plain, jobs.monitored))
    return replace(jobs, base=jobs.base / how, plain=plain, monitored=monitored)


def test_training_has_the_same_bits(job: Job) -> None:
    assert job.plain == job.monitored


def test_nothing_is_warned_of(all_jobs: Job) -> None:
    assert all_jobs.warnings == []


@pytest.mark.parametrize(
    ("kind", "truth"),
    [
        ("grad_reduced", "gradients"),
        ("param_origin", "before"),
        ("param_updated", "after"),
        ("exp_avg", "exp_avg"),
        ("exp_avg_sq", "exp_avg_sq"),
    ],
)
def test_the_rows_of_all_ranks_hold_each_number_once(job: Job, kind: str, truth: str) -> None:
    for step in (1, 2):
        assert job.plain[0][truth][step] == pytest.approx(job.total_norm(kind, step), rel=1e-5)


def test_a_part_of_a_part_is_flat_and_has_a_place_where_it_is_one_run(all_jobs: Job) -> None:
    job = one(all_jobs, "tp-distributed")
    begins = set()
    for rank in range(4):
        for name in {row.name for row in job.rows("grad_reduced", rank)} & {COLUMNS, ROWS}:
            shard = job.series(rank)["grad_reduced", name].placement.shard
            assert shard is not None
            assert (shard.ranks, shard.flat) == ((0, 1, 2, 3), True)
            assert shard.offset == () if name == ROWS else len(shard.offset) == 1
            begins.update(shard.offset)
    assert begins & set(range(math.prod((16, 16)))), "a part in the first tensor-parallel half"
    assert begins & set(range(math.prod((16, 16)), math.prod((32, 16)))), "and one in the second"


def test_what_tensor_parallel_ranks_hold_alike_is_written_once_for_each_data_parallel_part(all_jobs: Job) -> None:
    job = one(all_jobs, "tp-distributed")
    writers = [rank for rank in range(4) if LAYER_NORM in {row.name for row in job.rows("grad_reduced", rank)}]
    assert set(writers) <= {0, 2}
    assert {job.series(rank)["grad_reduced", LAYER_NORM].placement.replicas for rank in writers} <= {(0, 1), (2, 3)}


def test_an_expert_is_written_once_by_the_ranks_that_have_it(all_jobs: Job) -> None:
    job = one(all_jobs, "ep")
    writers = [rank for rank in range(4) if EXPERT in {row.name for row in job.rows("grad_reduced", rank)}]
    assert writers == [0, 1]
    assert [job.series(rank)["grad_reduced", EXPERT].placement.replicas for rank in writers] == [(0, 2), (1, 3)]
    assert job.series(0)["grad_reduced", LAYER_NORM].placement.replicas == (0, 1, 2, 3)
