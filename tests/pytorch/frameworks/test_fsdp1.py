"""FullyShardedDataParallel: every rank writes its run of each parameter's elements, and its own gradients whole."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
from jobs import Job
from watching import Row

from monitor.recording.parameters import AGGREGATED_EARLY, KEPT_BY, NOT_ACCUMULATED
from monitor.series import LOCAL, Placement, Shard

JOBS: dict[str, tuple[int, str, str, dict[str, Any]]] = {
    "full": (2, "FULL_SHARD", "plain", {"xy_distribution": True, "all_xy": True}),
    "grad-op": (2, "SHARD_GRAD_OP", "no-sync", {"monitor_mbs_grad": True}),
    "none": (2, "NO_SHARD", "no-sync", {}),
    "accumulating": (2, "FULL_SHARD", "accumulate", {}),
    "hybrid": (4, "HYBRID_SHARD", "plain", {}),
    "parts": (2, "FULL_SHARD", "parts", {}),
    "tensor-parallel": (4, "FULL_SHARD", "tensor-parallel", {}),
    "endings": (2, "NO_SHARD", "endings", {}),
}
SHAPES = {
    "0.weight": (16, 8),
    "0.bias": (16,),
    "2.0.weight": (16, 16),
    "2.0.bias": (16,),
    "2.1.weight": (5, 16),
    "2.1.bias": (5,),
    "3.weight": (3, 5),
    "3.bias": (3,),
}
AFTER_REDUCTION = ("grad_reduced", "param_origin", "param_updated", "exp_avg", "exp_avg_sq")

whole_models = pytest.mark.parametrize("name", ["full", "grad-op", "none", "accumulating", "hybrid"])
sharded_models = pytest.mark.parametrize("name", ["full", "grad-op", "accumulating", "hybrid"])
close = partial(pytest.approx, rel=1e-4, abs=1e-6)
as_bfloat16 = partial(pytest.approx, rel=2e-2, abs=2e-2)

Ran = Callable[[str], Job]


@pytest.fixture(scope="module")
def ran(run_job: Callable[..., Job]) -> Ran:
    """The job of a name, run when it is first asked for."""

    def run(name: str) -> Job:
        ranks, strategy, how, config = JOBS[name]
        return run_job("fsdp1.py", ranks, strategy, how, **config)

    return cache(run)


def rows(job: Job, kind: str, rank: int, step: int, micro_step: int | None = None) -> dict[str, Row]:
    found = [row for row in job.rows(kind, rank) if (row.step, row.micro_step) == (step, micro_step)]
    assert len({row.name for row in found}) == len(found)
    return {row.name: row for row in found}


def told(row: Row) -> list[float]:
    return [row.values[op] for op in ("min", "max", "mean", "norm")]


def elements(row: Row) -> int:
    return math.prod(map(int, row.values["shape"].strip("[]").split(",")))


def placements(job: Job, rank: int, kind: str) -> dict[str, Placement]:
    return {name: one.placement for (of, name), one in job.series(rank).items() if of == kind}


@pytest.mark.parametrize("name", JOBS)
def test_training_has_the_same_bits(ran: Ran, name: str) -> None:
    assert ran(name).plain == ran(name).monitored


@pytest.mark.parametrize("name", [name for name in JOBS if name != "endings"])
def test_nothing_is_warned_of(ran: Ran, name: str) -> None:
    assert ran(name).warnings == []


@whole_models
def test_the_norm_of_all_reduced_gradients_is_what_clipping_reports(ran: Ran, name: str) -> None:
    job = ran(name)
    norms = [job.total_norm("grad_reduced", step) for step in range(3)]
    assert job.plain[0]["gradients"] == pytest.approx(norms, rel=1e-5)


@whole_models
def test_each_rank_has_the_norm_that_clipping_reports_as_a_number_of_the_run(ran: Ran, name: str) -> None:
    job = ran(name)
    for rank in range(len(job.directories)):
        for number in ("grad_norm", "grad_norm_clipped"):
            assert job.numbers(number, rank) == pytest.approx(job.plain[rank]["gradients"], rel=1e-6)


@whole_models
def test_the_norm_of_all_weights_is_that_of_the_gathered_model(ran: Ran, name: str) -> None:
    job = ran(name)
    for kind, expected in (("param_origin", "before"), ("param_updated", "after")):
        assert job.plain[0][expected] == pytest.approx([job.total_norm(kind, step) for step in range(3)], rel=1e-5)


@whole_models
def test_the_norm_of_all_moments_is_that_of_the_optimizers(ran: Ran, name: str) -> None:
    job = ran(name)
    for step in (1, 2):
        norms = [job.total_norm(kind, step) for kind in ("exp_avg", "exp_avg_sq")]
        assert job.plain[0]["moments"][step] == pytest.approx(norms, rel=1e-5)


@sharded_models
@pytest.mark.parametrize("kind", AFTER_REDUCTION)
def test_the_runs_that_the_ranks_write_cover_each_parameter_once(ran: Ran, name: str, kind: str) -> None:
    job = ran(name)
    runs: dict[str, list[tuple[int, int]]] = {}
    for rank in range(len(job.directories)):
        for parameter, row in rows(job, kind, rank, 1).items():
            shard = placements(job, rank, kind)[parameter].shard
            assert shard is not None
            assert (shard.global_shape, shard.flat) == (SHAPES[parameter], True)
            runs.setdefault(parameter, []).append((shard.offset[0], shard.offset[0] + elements(row)))
    assert sorted(runs) == sorted(SHAPES)
    for parameter, found in runs.items():
        ends = [end for _, end in sorted(found)]
        assert [0, *ends[:-1]] == [start for start, _ in sorted(found)]
        assert ends[-1] == math.prod(SHAPES[parameter])


def test_a_parameter_of_which_a_rank_holds_no_element_has_no_row_there(ran: Ran) -> None:
    for kind in AFTER_REDUCTION:
        first, second = (rows(ran("full"), kind, rank, 1) for rank in (0, 1))
        assert sorted(first) == ["0.weight", "2.0.weight"]
        assert sorted(second) == sorted(SHAPES)


def test_the_manifest_has_shards_of_reduced_gradients_and_local_ones_whole(ran: Ran) -> None:
    shard = Placement(shard=Shard((0, 1), (16, 8), (82,), flat=True))
    assert placements(ran("full"), 1, "grad_reduced")["0.weight"] == shard
    assert set(placements(ran("full"), 1, "grad_unreduced").values()) == {LOCAL}
    assert ran("full").manifest(1).groups == {"dp": (0, 1)}


def test_under_hybrid_shard_the_first_replica_of_each_shard_writes(ran: Ran) -> None:
    job = ran("hybrid")
    for kind in AFTER_REDUCTION:
        assert [bool(job.rows(kind, rank)) for rank in range(4)] == [True, True, False, False]
    assert all(job.rows("grad_unreduced", rank) for rank in range(4))
    shard = Shard((0, 1), (16, 8), (82,), flat=True)
    assert placements(job, 1, "exp_avg")["0.weight"] == Placement(replicas=(1, 3), shard=shard)
    assert job.manifest(3).groups == {"dp_shard": (2, 3), "dp_replicate": (1, 3), "dp": (0, 1, 2, 3)}


def test_without_shards_the_first_rank_of_the_group_that_was_passed_writes(ran: Ran) -> None:
    job = ran("none")
    for kind in AFTER_REDUCTION:
        assert sorted(rows(job, kind, 0, 1)) == sorted(SHAPES)
        assert not job.rows(kind, 1)
        assert set(placements(job, 0, kind).values()) == {Placement(replicas=(0, 1))}


def test_without_shards_and_without_a_group_the_manifest_knows_the_replicas(ran: Ran) -> None:
    assert set(placements(ran("endings"), 0, "grad_reduced").values()) == {Placement(unclaimed=(0, 1))}


@whole_models
def test_local_gradients_are_those_of_the_model_in_one_piece(ran: Ran, name: str) -> None:
    job = ran(name)
    same = as_bfloat16 if name == "accumulating" else close
    for rank in range(len(job.directories)):
        for step in range(3):
            expected = job.plain[rank]["local"][step][-1]
            found = rows(job, "grad_unreduced", rank, step, 1 if name == "grad-op" else None)
            assert sorted(found) == sorted(expected)
            for parameter, row in found.items():
                assert expected[parameter] == same(told(row))


def test_each_micro_batch_has_a_row_of_what_was_accumulated_so_far(ran: Ran) -> None:
    for step in range(3):
        expected = ran("grad-op").plain[1]["local"][step][0]
        found = rows(ran("grad-op"), "grad_unreduced", 1, step, 0)
        assert {parameter: close(told(row)) for parameter, row in found.items()} == expected


@pytest.mark.parametrize("name", ["full", "grad-op", "none", "hybrid"])
def test_local_gradients_average_to_the_reduced_one(ran: Ran, name: str) -> None:
    job = ran(name)
    ranks = range(len(job.directories))
    local = [rows(job, "grad_unreduced", rank, 1, 1 if name == "grad-op" else None) for rank in ranks]
    parts = [rows(job, "grad_reduced", rank, 1) for rank in ranks]
    for parameter, shape in SHAPES.items():
        total = sum(part[parameter].values["mean"] * elements(part[parameter]) for part in parts if parameter in part)
        mean = sum(one[parameter].values["mean"] for one in local) / len(local)
        assert total / math.prod(shape) == close(mean)


def test_the_manifest_says_when_a_row_lacks_micro_batches(ran: Ran) -> None:
    notes = ran("accumulating").manifest(0).notes
    assert notes["grad_unreduced"] == NOT_ACCUMULATED + KEPT_BY.format(how="no_sync()")
    expected = "grad_unreduced has the dtype that backward leaves: torch.bfloat16, reduced in torch.float32"
    assert notes["mixed_precision"] == expected


def test_the_manifest_says_when_a_row_holds_a_mean_of_earlier_micro_batches(ran: Ran) -> None:
    said = ran("endings").manifest(0).notes["grad_unreduced"]
    assert said == AGGREGATED_EARLY


@pytest.mark.parametrize("name", ["full", "grad-op", "none"])
def test_nothing_is_said_of_gradients_that_accumulate(ran: Ran, name: str) -> None:
    assert not {"grad_unreduced", "mixed_precision"} & set(ran(name).manifest(0).notes)


def test_the_activations_of_a_wrapped_module_are_those_of_the_model_in_one_piece(ran: Ran) -> None:
    for rank in (0, 1):
        for step in range(3):
            found = rows(ran("full"), "actv", rank, step, 0)
            assert ran("full").plain[rank]["output"][step] == close(told(found["2.output"]))


def test_parameters_in_no_unit_are_written_by_every_rank(ran: Ran) -> None:
    for rank in (0, 1):
        expected = ran("parts").plain[rank]["local"][1][0]
        for kind in ("grad_unreduced", "grad_reduced"):
            found = rows(ran("parts"), kind, rank, 1)
            for parameter in ("3.weight", "3.bias"):
                assert expected[parameter] == close(told(found[parameter]))
                assert placements(ran("parts"), rank, kind)[parameter] == LOCAL


def test_a_unit_has_the_ranks_of_its_own_group(ran: Ran) -> None:
    for rank in (0, 1):
        found = placements(ran("parts"), rank, "param_origin")
        assert found["2.0.weight"] == LOCAL
        assert found["0.weight"].shard.ranks == (0, 1)
        expected = ran("parts").plain[rank]["local"][1][0]
        assert expected["2.0.weight"] == close(told(rows(ran("parts"), "grad_reduced", rank, 1)["2.0.weight"]))


def test_parts_of_tensor_parallel_parameters_are_counted_once(ran: Ran) -> None:
    job = ran("tensor-parallel")
    assert job.plain[0]["gradients"] == pytest.approx(job.total_norm("grad_reduced", 0), rel=1e-5)
    found = placements(job, 2, "grad_reduced")
    assert found["0.weight"] == Placement(shard=Shard((0, 1, 2, 3), (16, 8), flat=True))
    assert found["2.bias"] == Placement(replicas=(2, 3), shard=Shard((0, 2), (5,), (0,), flat=True))
    local = placements(job, 3, "grad_unreduced")
    assert local["0.weight"] == Placement(shard=Shard((2, 3), (16, 8), (8, 0)))


def test_frozen_parameters_have_no_gradient(ran: Ran) -> None:
    for rank in (0, 1):
        assert "0.bias" not in rows(ran("parts"), "grad_unreduced", rank, 1)
        assert "0.bias" not in rows(ran("parts"), "grad_reduced", rank, 1)
    assert any("0.bias" in rows(ran("parts"), "param_origin", rank, 1) for rank in (0, 1))


def test_torch_is_as_it_was_after_a_monitor_is_closed_or_a_model_released(ran: Ran) -> None:
    for found in ran("endings").monitored:
        assert found["patched"]
        assert (found["closed"], found["let go"], found["gone"]) == (True, True, True)


def test_what_cannot_be_observed_is_refused_in_one_sentence(ran: Ran) -> None:
    flattened, gathered, unknown = ran("endings").monitored[0]["refused"]
    assert "use_orig_params=True" in flattened
    assert "before the forward, or after the backward" in gathered
    assert "The monitor does not know how torch" in unknown
