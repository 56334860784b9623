"""``torch.distributed.pipelining``: each rank has its own stages, and passes micro-batches through them in turns."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from jobs import Job
from watching import Row

from monitor.coordinator.pipeline_order import PipelineOrder, Spot
from monitor.coordinator.series_file import read_flow

MICRO_STEPS = range(4)
BACK = {"actv": False, "actv_grad": True}


@pytest.fixture(scope="module", params=["gpipe", "1f1b", "interleaved", "traced"])
def how(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def job(how: str, run_job: Callable[..., Job]) -> Job:
    return run_job("pipelining.py", 2, how, xy_distribution=True, all_xy=True)


def test_training_has_the_same_bits(job: Job) -> None:
    assert job.plain == job.monitored


def test_nothing_is_warned_of(job: Job) -> None:
    assert job.warnings == []


@pytest.mark.parametrize("step", range(3))
def test_the_norm_of_all_reduced_gradients_is_that_over_all_stages(job: Job, step: int) -> None:
    assert job.plain[0]["gradients"][step] == pytest.approx(job.total_norm("grad_reduced", step), rel=1e-5)


@pytest.mark.parametrize("step", range(3))
def test_the_norm_of_all_weights_is_that_over_all_stages(job: Job, step: int) -> None:
    assert job.plain[0]["before"][step] == pytest.approx(job.total_norm("param_origin", step), rel=1e-5)
    assert job.plain[0]["after"][step] == pytest.approx(job.total_norm("param_updated", step), rel=1e-5)


def test_the_norm_of_all_moments_is_that_over_all_stages(job: Job) -> None:
    for step in (1, 2):
        for kind, expected in zip(("exp_avg", "exp_avg_sq"), job.plain[0]["moments"][step], strict=True):
            assert expected == pytest.approx(job.total_norm(kind, step), rel=1e-5)


def by_place(rows: list[Row]) -> dict[tuple[int, str, int], Row]:
    found = {(row.chunk, row.name, row.step): row for row in rows}
    assert len(found) == len(rows)
    return found


def test_a_local_gradient_is_the_sum_over_micro_batches_and_the_schedule_divides_it_by_their_number(job: Job) -> None:
    for rank in (0, 1):
        local, reduced = (by_place(job.rows(kind, rank)) for kind in ("grad_unreduced", "grad_reduced"))
        assert local.keys() == reduced.keys()
        for place, row in local.items():
            for op in ("norm", "mean", "max"):
                assert row.values[op] / len(MICRO_STEPS) == pytest.approx(reduced[place].values[op], rel=1e-5, abs=1e-9)


def test_rows_bear_the_names_of_the_whole_model(job: Job, how: str) -> None:
    mine = [["0", "2"], ["1", "3"]] if how == "interleaved" else [["0", "1"], ["2", "3"]]
    for rank, layers in enumerate(mine):
        names = [f"layers.{i}.linear.{part}" for i in layers for part in ("weight", "bias")]
        rows = [row for row in job.rows("grad_reduced", rank) if row.step == 0]
        assert [row.name for row in rows] == names
        assert [row.chunk for row in rows] == ([0, 0, 1, 1] if how == "interleaved" else [0] * 4)
        modules = {row.name.rpartition(".")[0] for row in job.rows("actv", rank)}
        assert {f"layers.{i}.linear" for i in layers} <= modules


def test_every_micro_batch_has_its_own_rows(job: Job) -> None:
    for rank in (0, 1):
        for kind in BACK:
            rows = [row for row in job.rows(kind, rank) if row.step == 1]
            places = {(row.chunk, row.name) for row in rows}
            assert {(*place, m) for place in places for m in MICRO_STEPS} == {(r.chunk, r.name, r.micro_step) for r in rows}
            assert len(rows) == len(places) * len(MICRO_STEPS)


def test_what_a_stage_hands_on_is_what_the_next_one_gets(job: Job, how: str) -> None:
    """Of each micro-batch, forward and backward: its number is right on both sides."""
    ways = [((0, 0), (1, 0)), ((1, 0), (0, 1)), ((0, 1), (1, 1))] if how == "interleaved" else [((0, 0), (1, 0))]
    for kind in BACK:
        rows = {
            (rank, row.chunk, row.name, row.step, row.micro_step): row.values
            for rank in (0, 1)
            for row in job.rows(kind, rank)
            if row.name in (".input", ".output")
        }
        for source, target in ways:
            for place in ((step, m) for step in range(3) for m in MICRO_STEPS):
                assert rows[(*source, ".output", *place)] == rows[(*target, ".input", *place)]


def test_the_manifest_says_which_stages_a_rank_has(job: Job, how: str) -> None:
    for rank in (0, 1):
        pipeline = job.manifest(rank).pipeline
        assert pipeline is not None
        assert (pipeline.ranks, pipeline.stage) == ((0, 1), rank)
        assert pipeline.stages == ((rank, rank + 2) if how == "interleaved" else (rank,))
        assert job.manifest(rank).groups["pp"] == (0, 1)


def test_the_manifest_says_in_what_order_the_schedule_ran(job: Job) -> None:
    for rank in (0, 1):
        pipeline = job.manifest(rank).pipeline
        assert pipeline is not None
        passes = read_flow(job.directories[rank], job.manifest(rank)).passes
        ran = job.plain[rank]["passes"]
        assert ran[: len(ran) // 3] == [[one.forward, pipeline.stages[one.vpp_stage], one.micro_step] for one in passes]


def test_rows_of_both_ranks_can_be_ordered(job: Job) -> None:
    manifests = [job.manifest(rank) for rank in (0, 1)]
    flows = [read_flow(job.directories[rank], manifest) for rank, manifest in enumerate(manifests)]
    order = PipelineOrder.of(zip(manifests, flows, strict=True))
    for m in MICRO_STEPS:
        sent, got = Spot(0, 0, "actv", m, 0), Spot(1, 0, "actv", m, 0)
        assert order.precedes(sent, got)
        assert order.precedes(got._replace(kind="actv_grad"), sent._replace(kind="actv_grad"))
