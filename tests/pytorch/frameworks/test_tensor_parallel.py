"""Tensor parallelism with DTensors: shards are written by every rank, replicas by one, and terms of a sum are marked."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
from jobs import Job, shape_of, sum_of
from watching import Row

from monitor.series import LOCAL, Placement, Shard

JOBS: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor": (2, {"xy_distribution": True, "all_xy": True}),
    "no-group": (2, {}),
    "accumulated": (2, {}),
    "plain-norm": (2, {}),
    "sequence": (2, {"xy_distribution": True, "all_xy": True}),
    "by-hand": (4, {}),
    "fully-sharded": (4, {}),
    "fully-sharded-sequence": (4, {"monitor_mbs_grad": True}),
}
SHAPES = {
    "embedding.weight": (10, 8),
    "norm.weight": (8,),
    "norm.bias": (8,),
    "up.weight": (12, 8),
    "up.bias": (12,),
    "down.weight": (8, 12),
    "down.bias": (8,),
    "head.weight": (10, 8),
    "head.bias": (10,),
}
WEIGHTS_AND_MOMENTS = ("param_origin", "param_updated", "exp_avg", "exp_avg_sq")
WHOLE = Placement(replicas=(0, 1))

Ran = Callable[[str], Job]

every_job = pytest.mark.parametrize("how", list(JOBS))
close = partial(pytest.approx, rel=1e-4, abs=1e-4)


@pytest.fixture(scope="module")
def ran(run_job: Callable[..., Job]) -> Ran:
    """The job of a name, run when it is first asked for."""

    def run(how: str) -> Job:
        ranks, config = JOBS[how]
        return run_job("tensor_parallel.py", ranks, how, **config)

    return cache(run)


def rows(job: Job, kind: str, rank: int, step: int, micro_step: int | None = None) -> dict[str, Row]:
    found = [row for row in job.rows(kind, rank) if (row.step, row.micro_step) == (step, micro_step)]
    assert len({row.name for row in found}) == len(found)
    return {row.name: row for row in found}


def sums(job: Job, kind: str, step: int, micro_step: int | None = None) -> dict[str, float]:
    """The sum of all elements that the ranks wrote of each parameter."""
    found = dict.fromkeys(SHAPES, 0.0)
    for rank in range(len(job.directories)):
        for name, row in rows(job, kind, rank, step, micro_step).items():
            found[name] += sum_of(row)
    return found


def placements(job: Job, kind: str, rank: int) -> dict[str, Placement]:
    return {name: one.placement for (of, name), one in job.series(rank).items() if of == kind}


@every_job
def test_training_has_the_same_bits(ran: Ran, how: str) -> None:
    assert ran(how).plain == ran(how).monitored


@every_job
def test_nothing_is_warned_of(ran: Ran, how: str) -> None:
    assert ran(how).warnings == []


@pytest.mark.parametrize("how", [how for how in JOBS if how != "sequence"])
@pytest.mark.parametrize("step", range(3))
def test_the_norm_of_all_reduced_gradients_is_the_true_one_fault_21(ran: Ran, how: str, step: int) -> None:
    assert ran(how).plain[0]["gradients"][step] == pytest.approx(ran(how).total_norm("grad_reduced", step), rel=1e-5)


@every_job
@pytest.mark.parametrize("step", range(3))
def test_the_norm_of_all_weights_is_that_of_the_gathered_model(ran: Ran, how: str, step: int) -> None:
    assert ran(how).plain[0]["before"][step] == pytest.approx(ran(how).total_norm("param_origin", step), rel=1e-5)
    assert ran(how).plain[0]["after"][step] == pytest.approx(ran(how).total_norm("param_updated", step), rel=1e-5)


@every_job
def test_the_norm_of_all_moments_is_that_of_the_gathered_optimizer(ran: Ran, how: str) -> None:
    for step in (1, 2):
        for kind, expected in zip(("exp_avg", "exp_avg_sq"), ran(how).plain[0]["moments"][step], strict=True):
            assert expected == pytest.approx(ran(how).total_norm(kind, step), rel=1e-5)


@every_job
@pytest.mark.parametrize("step", range(3))
def test_the_elements_of_each_reduced_gradient_are_written_once(ran: Ran, how: str, step: int) -> None:
    assert ran(how).plain[0]["sums"][step] == close(sums(ran(how), "grad_reduced", step))


@pytest.mark.parametrize("how", ["by-hand", "fully-sharded", "fully-sharded-sequence"])
@pytest.mark.parametrize("step", range(3))
def test_local_gradients_of_the_data_parallel_ranks_average_to_the_reduced_one(ran: Ran, how: str, step: int) -> None:
    micro_step = 1 if how == "fully-sharded-sequence" else None
    local = sums(ran(how), "grad_unreduced", step, micro_step)
    assert {name: both / 2 for name, both in local.items()} == close(sums(ran(how), "grad_reduced", step))


@pytest.mark.parametrize("how", ["tensor", "no-group"])
@pytest.mark.parametrize("kind", WEIGHTS_AND_MOMENTS)
def test_shards_are_written_by_every_rank_and_replicas_by_the_first_fault_21(ran: Ran, how: str, kind: str) -> None:
    halves = {
        "embedding.weight": ((5, 8), (5, 0)),
        "up.weight": ((6, 8), (6, 0)),
        "up.bias": ((6,), (6,)),
        "down.weight": ((8, 6), (0, 6)),
        "head.weight": ((5, 8), (5, 0)),
        "head.bias": ((5,), (5,)),
    }
    found = {name: shape_of(row) for name, row in rows(ran(how), kind, 1, 2).items()}
    assert found == {name: shape for name, (shape, _) in halves.items()}
    shards = {name: Shard((0, 1), SHAPES[name], offset) for name, (_, offset) in halves.items()}
    assert placements(ran(how), kind, 1) == {name: Placement(shard=shard) for name, shard in shards.items()}
    whole = {name: placement for name, placement in placements(ran(how), kind, 0).items() if name not in halves}
    assert whole == dict.fromkeys(["norm.weight", "norm.bias", "down.bias"], WHOLE)


def test_a_gradient_that_every_rank_has_whole_is_written_once_though_its_parameter_is_cut(ran: Ran) -> None:
    for kind in ("grad_unreduced", "grad_reduced"):
        assert placements(ran("tensor"), kind, 0)["embedding.weight"] == WHOLE
        assert "embedding.weight" not in placements(ran("tensor"), kind, 1)
        assert shape_of(rows(ran("tensor"), kind, 0, 2)["embedding.weight"]) == (10, 8)


def test_terms_of_a_gradient_that_no_one_adds_up_are_written_by_every_rank_and_marked(ran: Ran) -> None:
    for rank in (0, 1):
        for kind in ("grad_unreduced", "grad_reduced"):
            marked = {name for name, placement in placements(ran("sequence"), kind, rank).items() if placement.partial}
            assert marked == {"norm.weight", "norm.bias"}
        assert not any(placement.partial for placement in placements(ran("sequence"), "exp_avg", rank).values())


def test_without_the_terms_the_norm_is_that_of_the_other_gradients(ran: Ran) -> None:
    for step in range(3):
        found = [row for rank in (0, 1) for row in rows(ran("sequence"), "grad_reduced", rank, step).values()]
        norms = [row.values["norm"] for row in found if "norm" not in row.name]
        assert ran("sequence").plain[0]["without_terms"][step] == pytest.approx(math.hypot(*norms), rel=1e-5)


def test_what_fsdp_cuts_once_more_lies_where_the_manifest_says(ran: Ran) -> None:
    job = ran("fully-sharded")
    offsets = {rank: placements(job, "param_origin", rank)["up.weight"] for rank in range(4)}
    everybody = (0, 1, 2, 3)
    rows_of = {0: 0, 2: 3, 1: 6, 3: 9}  # ranks 0 and 2 share what tensor parallelism gave the first
    assert offsets == {rank: Placement(shard=Shard(everybody, (12, 8), (row, 0))) for rank, row in rows_of.items()}
    assert placements(job, "param_origin", 2)["norm.weight"] == Placement(replicas=(2, 3), shard=Shard((0, 2), (8,), (4,)))


def test_parts_that_data_parallelism_keeps_as_local_tensors_are_no_replicas(run_job: Callable[..., Job]) -> None:
    job = run_job("tensor_parallel.py", 4, "wrapped")
    assert job.plain == job.monitored
    assert job.total_norm("grad_reduced", 0) == pytest.approx(job.plain[0]["gradients"], rel=1e-5)
    assert job.total_norm("param_origin", 0) == pytest.approx(job.plain[0]["before"], rel=1e-5)
    found = placements(job, "grad_reduced", 0)
    assert found["module.up.weight"] == Placement(replicas=(0, 2), shard=Shard((0, 1), (12, 8), (0, 0)))
    assert found["module.norm.weight"] == Placement(replicas=(0, 1, 2, 3))


def test_before_fsdp_reduces_them_gradients_are_cut_by_tensor_parallelism_alone(ran: Ran) -> None:
    for how, rank, pair in (("fully-sharded", 3, (2, 3)), ("fully-sharded-sequence", 1, (0, 1))):
        found = placements(ran(how), "grad_unreduced", rank)
        assert found["up.weight"] == Placement(shard=Shard(pair, (12, 8), (6, 0)))
        assert "norm.weight" not in found
        assert placements(ran(how), "grad_unreduced", rank - 1)["norm.weight"] == Placement(replicas=pair)


def test_a_gradient_so_far_that_is_laid_out_in_another_way_has_no_row_until_it_is_reduced(ran: Ran) -> None:
    job = ran("fully-sharded-sequence")
    every, last = (rows(job, "grad_unreduced", 0, 1, micro_step) for micro_step in (0, 1))
    assert set(last) - set(every) == {"embedding.weight", "norm.weight", "norm.bias"}
    assert set(last) == set(SHAPES)


def test_in_a_grid_one_rank_writes_what_all_hold(ran: Ran) -> None:
    job = ran("by-hand")
    assert placements(job, "grad_reduced", 0)["norm.weight"] == Placement(replicas=(0, 1, 2, 3))
    assert placements(job, "grad_reduced", 1)["up.bias"] == Placement(replicas=(1, 3), shard=Shard((0, 1), (12,), (6,)))
    assert not any(job.rows(kind, rank) for kind in ("grad_reduced", *WEIGHTS_AND_MOMENTS) for rank in (2, 3))
    assert placements(job, "grad_unreduced", 3)["up.bias"] == Placement(shard=Shard((2, 3), (12,), (6,)))


def test_the_manifest_has_the_groups_of_the_mesh(ran: Ran) -> None:
    assert ran("tensor").manifest(1).groups == {"tp": (0, 1)}
    assert ran("fully-sharded").manifest(1).groups == {"dp": (1, 3), "tp": (0, 1)}


def test_of_an_activation_the_local_part_is_read(ran: Ran) -> None:
    shapes = {row.name: shape_of(row) for row in ran("sequence").rows("actv", 1)}
    assert {name: shapes[name] for name in ("embedding.output", "norm.output", "up.output", "down.output", "head.output")} == {
        "embedding.output": (4, 3, 8),  # still on its way when the module returns it
        "norm.output": (4, 3, 8),  # a DTensor
        "up.output": (4, 6, 6),
        "down.output": (4, 3, 8),
        "head.output": (4, 6, 10),
    }


def test_an_activation_says_where_it_is_and_is_written_by_every_rank(ran: Ran) -> None:
    for rank in (0, 1):
        forward, backward = (placements(ran("sequence"), kind, rank) for kind in ("actv", "actv_grad"))
        assert forward["norm.output"] == Placement(shard=Shard((0, 1), (4, 6, 8), (0, 3 * rank, 0)))
        assert forward["up.input"] == Placement(unclaimed=(0, 1))
        assert backward["up.input"] == Placement(partial=True)
        assert forward["up.output"] == LOCAL


def test_a_warning_says_that_terms_of_a_sum_have_no_direction(run_job: Callable[..., Job]) -> None:
    job = run_job("tensor_parallel.py", 2, "sequence", mg_direction=True)
    names = {row.name for rank in (0, 1) for row in job.rows("other", rank)}
    assert names == SHAPES.keys() - {"norm.weight", "norm.bias"}
    (warning,) = job.warnings  # of rank 0, which writes replicas
    assert "mg_direction: gradients that are terms of a sum over ranks" in warning
    assert "(first: norm.weight)" in warning
