"""DeepSpeed: each rank writes the part of a parameter that its optimizer steps, and its own gradients whole."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version

import pytest
from jobs import Job, shape_of, sum_of
from watching import Row

from monitor.recording.parameters import EACH_MICRO_BATCH, NOT_ACCUMULATED
from monitor.series import GRADIENT_KINDS, LOCAL, MOMENT_KINDS, PARAMETER_KINDS, Placement, Shard

ZERO_0 = ["zero0", "zero0-bf16"]
ZERO_1 = ["zero1", "zero1-bf16", "zero1-bf16-float32-sums", "zero1-each-micro-step"]
SUMS_IN_FLOAT32 = ZERO_1[2:]
ZERO_2 = ["zero2", "zero2-aligned", "zero2-bf16", "zero2-bf16-float32-sums", "zero2-offloaded"]
ZERO_3 = ["zero3", "zero3-bf16", "zero3-offloaded"]
SCALED = ["zero1-fp16", "zero3-fp16"]
WHOLE = [*ZERO_0, *ZERO_1, *ZERO_2, *ZERO_3]
ALL = [*WHOLE, *SCALED, "zero0-no-group", "zero0-bf16-flat"]
SHAPES = {
    "0.weight": (15, 7),
    "0.bias": (15,),
    "2.weight": (16, 15),
    "2.bias": (16,),
    "4.weight": (3, 16),
    "4.bias": (3,),
}
FROZEN = "2.bias"
STEPS = range(3)
close = partial(pytest.approx, rel=1e-5)


@pytest.fixture(scope="module")
def jobs(run_job: Callable[..., Job]) -> dict[str, Job]:
    """Each case as a job of its own; they have run in the same processes."""
    ran = run_job("deepspeed_zero.py", 2, *ALL, xy_distribution=True, all_xy=True)
    return {
        case: replace(
            ran, base=ran.base / case, plain=[one[case] for one in ran.plain], monitored=[one[case] for one in ran.monitored]
        )
        for case in ALL
    } | {"ran": ran}


def in_step(job: Job, kind: str, rank: int, step: int) -> dict[str, Row]:
    """The rows of a kind by name, as the model has it that was given to the engine."""
    found = [row for row in job.rows(kind, rank) if row.step == step]
    assert len({row.name for row in found}) == len(found)
    return {row.name.removeprefix("module."): row for row in found}


def by_name(job: Job, kind: str, step: int) -> dict[str, float]:
    """The norm of each parameter, of what all ranks wrote of it."""
    ranks = [in_step(job, kind, rank, step) for rank in (0, 1)]
    squares = {name: [rows[name].values["norm"] ** 2 for rows in ranks if name in rows] for rows in ranks for name in rows}
    return {name: math.sqrt(sum(of)) for name, of in squares.items()}


def placements(job: Job, kind: str, rank: int) -> dict[str, Placement]:
    return {name.removeprefix("module."): one.placement for (of, name), one in job.series(rank).items() if of == kind}


@pytest.mark.parametrize("case", ALL)
def test_training_has_the_same_bits(jobs: dict[str, Job], case: str) -> None:
    assert json.dumps(jobs[case].plain) == json.dumps(jobs[case].monitored)  # nan is not equal to itself, its text is


def test_nothing_is_warned_of(jobs: dict[str, Job]) -> None:
    assert jobs["ran"].warnings == []


@pytest.mark.parametrize("case", [case for case in WHOLE if case != "zero0"])
def test_the_norm_of_all_reduced_gradients_is_what_the_engine_reports(jobs: dict[str, Job], case: str) -> None:
    job = jobs[case]
    assert job.plain[0]["norms"] == [close(job.total_norm("grad_reduced", step)) for step in STEPS]


@pytest.mark.parametrize("case", [case for case in [*WHOLE, *SCALED] if case != "zero0"])
def test_each_rank_has_the_norm_that_the_engine_reports_as_a_number_of_the_run(jobs: dict[str, Job], case: str) -> None:
    job = jobs[case]
    for rank in (0, 1):
        expected = [close(norm) for norm in job.plain[rank]["norms"] if case not in SCALED or math.isfinite(norm)]
        assert job.numbers("grad_norm", rank) == expected


@pytest.mark.parametrize("case", [case for case in WHOLE if case != "zero1"])
def test_each_reduced_gradient_is_what_deepspeed_gathers(jobs: dict[str, Job], case: str) -> None:
    job = jobs[case]
    for step in STEPS:
        assert job.plain[0]["steps"][step]["grad_reduced"] == close(by_name(job, "grad_reduced", step))


@pytest.mark.parametrize("case", WHOLE)
@pytest.mark.parametrize("kind", PARAMETER_KINDS)
def test_each_weight_is_that_of_the_whole_model(jobs: dict[str, Job], case: str, kind: str) -> None:
    job = jobs[case]
    for step in STEPS:
        assert set(SHAPES) == set(job.plain[0]["steps"][step][kind])
        assert job.plain[0]["steps"][step][kind] == close(by_name(job, kind, step))


@pytest.mark.parametrize("case", [case for case in WHOLE if case != "zero1"])
def test_each_moment_is_that_of_the_whole_optimizer(jobs: dict[str, Job], case: str) -> None:
    job = jobs[case]
    for kind in ("exp_avg", "exp_avg_sq"):
        assert set(by_name(job, kind, 0).values()) == ({0.0} if case == "zero0-bf16" else set())  # that one has stepped zeros
        for step in (1, 2):
            assert set(SHAPES) - {FROZEN} == set(job.plain[0]["steps"][step][kind])
            assert job.plain[0]["steps"][step][kind] == close(by_name(job, kind, step), abs=1e-12)


@pytest.mark.parametrize(
    "case", ["zero0", "zero0-bf16", "zero1", "zero1-bf16-float32-sums", "zero2", "zero3", "zero3-offloaded"]
)
def test_local_gradients_average_to_the_reduced_one(jobs: dict[str, Job], case: str) -> None:
    relative = 1e-4 if "bf16" not in case else 2e-2
    for step in STEPS:
        local = [in_step(jobs[case], "grad_unreduced", rank, step) for rank in (0, 1)]
        assert set(SHAPES) - {FROZEN} == set(local[0]) == set(local[1])
        reduced = [in_step(jobs[case], "grad_reduced", rank, step) for rank in (0, 1)]
        for name in local[0]:
            total = sum(sum_of(rows[name]) for rows in reduced if name in rows)
            assert total == pytest.approx((sum_of(local[0][name]) + sum_of(local[1][name])) / 2, rel=relative, abs=relative)


@pytest.mark.parametrize("case", [case for case in WHOLE if case != "zero1-each-micro-step"])
def test_local_gradients_are_what_backward_alone_leaves(jobs: dict[str, Job], case: str) -> None:
    for rank in (0, 1):
        found = {name: row.values["norm"] for name, row in in_step(jobs[case], "grad_unreduced", rank, 0).items()}
        assert jobs[case].plain[rank]["local"][-1] == close(found)


def test_each_micro_step_has_the_sum_so_far(jobs: dict[str, Job]) -> None:
    job = jobs["zero1-each-micro-step"]
    for rank in (0, 1):
        rows = [row for row in job.rows("grad_unreduced", rank) if row.step == 0]
        found = [{row.name.removeprefix("module."): row.values["norm"] for row in rows if row.micro_step == i} for i in (0, 1)]
        assert job.plain[rank]["local"] == [close(norms) for norms in found]


@pytest.mark.parametrize("case", [case for case in ALL if case != "zero1-each-micro-step"])
def test_local_gradients_have_the_shapes_of_the_parameters(jobs: dict[str, Job], case: str) -> None:
    for rank in (0, 1):
        found = in_step(jobs[case], "grad_unreduced", rank, 0)
        assert {name: shape for name, shape in SHAPES.items() if name != FROZEN} == {
            n: shape_of(row) for n, row in found.items()
        }
        assert set(placements(jobs[case], "grad_unreduced", rank).values()) == {LOCAL}


@pytest.mark.parametrize("case", [*ZERO_1, *ZERO_2, *ZERO_3])
def test_parts_lie_side_by_side_in_the_flattened_parameter(jobs: dict[str, Job], case: str) -> None:
    for kind in ("grad_reduced", *PARAMETER_KINDS, *MOMENT_KINDS[:2]):
        if kind == "grad_reduced" and case in SUMS_IN_FLOAT32:
            continue
        placed = [placements(jobs[case], kind, rank) for rank in (0, 1)]
        rows = [in_step(jobs[case], kind, rank, 2) for rank in (0, 1)]
        for name in set(SHAPES) - {FROZEN}:
            end = 0
            for rank in (0, 1):
                if name in rows[rank]:
                    assert placed[rank][name] == Placement(shard=Shard((0, 1), SHAPES[name], (end,), flat=True))
                    end += math.prod(shape_of(rows[rank][name]))
            assert math.prod(SHAPES[name]) == end


@pytest.mark.parametrize("case", [*ZERO_0, *SUMS_IN_FLOAT32])
def test_what_is_whole_on_every_rank_is_written_by_the_first(jobs: dict[str, Job], case: str) -> None:
    kinds = ["grad_reduced"] if case.startswith("zero1") else ["grad_reduced", *PARAMETER_KINDS, "exp_avg", "exp_avg_sq"]
    for kind in kinds:
        assert {Placement(replicas=(0, 1))} == set(placements(jobs[case], kind, 0).values())
        assert not jobs[case].rows(kind, 1)


def test_copies_that_lie_one_after_the_other_are_distinguished(jobs: dict[str, Job]) -> None:
    apart, flat = jobs["zero0-bf16"], jobs["zero0-bf16-flat"]
    for kind in (*GRADIENT_KINDS, *PARAMETER_KINDS, *MOMENT_KINDS[:2]):
        for step in STEPS:
            expected = {name: (shape_of(row), row.values["norm"]) for name, row in in_step(apart, kind, 0, step).items()}
            found = {name: (shape_of(row), close(row.values["norm"])) for name, row in in_step(flat, kind, 0, step).items()}
            assert expected == found


def test_a_frozen_parameter_is_cut_up_by_zero_3_alone(jobs: dict[str, Job]) -> None:
    for case in ("zero1", "zero2"):
        assert placements(jobs[case], "param_origin", 0)[FROZEN] == Placement(replicas=(0, 1))
        assert FROZEN not in in_step(jobs[case], "param_origin", 1, 0)
    for rank in (0, 1):
        expected = Placement(shard=Shard((0, 1), SHAPES[FROZEN], (8 * rank,), flat=True))
        assert expected == placements(jobs["zero3"], "param_origin", rank)[FROZEN]


def test_without_a_group_every_rank_writes_and_the_manifest_knows_the_replicas(jobs: dict[str, Job]) -> None:
    for rank in (0, 1):
        assert in_step(jobs["zero0-no-group"], "grad_reduced", rank, 0)
        assert {Placement(unclaimed=(0, 1))} == set(placements(jobs["zero0-no-group"], "grad_reduced", rank).values())


@pytest.mark.parametrize("case", SCALED)
def test_a_step_that_overflows_is_written_as_skipped(jobs: dict[str, Job], case: str) -> None:
    for rank in (0, 1):
        steps = jobs[case].manifest(rank).steps
        assert (list(steps.written.steps()), list(steps.skipped.steps())) == ([0, 1, 2], [1])
        assert in_step(jobs[case], "param_updated", rank, 1) == {}


@pytest.mark.parametrize("case", SCALED)
def test_scaled_gradients_are_said_to_be_and_the_scale_is_a_row(jobs: dict[str, Job], case: str) -> None:
    job = jobs[case]
    for step, scale in ((0, 256.0), (2, 128.0)):
        assert {scale} == {in_step(job, "other", rank, step)["loss_scale"].values["max"] for rank in (0, 1)}
        assert job.plain[0]["norms"][step] * scale == close(job.total_norm("grad_reduced", step))
    notes = job.manifest(0).notes
    assert str(notes["grad_reduced"]).startswith("multiplied by loss_scale")
    assert "grad_unreduced" in str(notes["loss_scale"])


def test_the_manifest_says_where_gradients_are_aggregated_each_micro_batch(jobs: dict[str, Job]) -> None:
    notes = {case: jobs[case].manifest(0).notes.get("grad_unreduced") for case in ALL}
    said = {case for case, note in notes.items() if note in {NOT_ACCUMULATED, EACH_MICRO_BATCH}}
    assert {*ZERO_2, *ZERO_3, "zero3-fp16"} == said


@pytest.mark.parametrize("case", WHOLE)
def test_aggregation_after_backward_is_not_taken_for_clipping(jobs: dict[str, Job], case: str) -> None:
    assert "grad_reduced" not in jobs[case].manifest(0).notes


@pytest.mark.parametrize("case", ALL)
def test_the_manifest_knows_the_data_parallel_group(jobs: dict[str, Job], case: str) -> None:
    assert {(0, 1)} == {tuple(jobs[case].manifest(rank).groups["dp"]) for rank in (0, 1)}


@pytest.mark.parametrize(("case", "root"), [("zero1", ""), ("zero2", "module."), ("zero3", "")])
def test_names_are_those_of_the_module_that_was_handed_over(jobs: dict[str, Job], case: str, root: str) -> None:
    names = {row.name for rank in (0, 1) for row in jobs[case].rows("param_origin", rank)}
    assert {root + name for name in SHAPES} == names


@pytest.mark.parametrize("case", ZERO_3)
def test_activations_of_gathered_modules_are_recorded(jobs: dict[str, Job], case: str) -> None:
    for kind in ("actv", "actv_grad"):
        names = {row.name.removeprefix("module.") for row in jobs[case].rows(kind, 0)}
        assert {f"{layer}.output" for layer in range(5)} <= names


@pytest.mark.parametrize("case", ALL)
def test_patches_are_there_while_a_monitor_is_and_gone_afterwards(jobs: dict[str, Job], case: str) -> None:
    expected = ["_take_model_step", "allreduce_gradients"] if case in SUMS_IN_FLOAT32 else ["_take_model_step"]
    for told in jobs["ran"].monitored:
        assert told[f"patches of {case}"] == {"patched": expected, "left": []}


def test_an_engine_that_is_released_is_collected(jobs: dict[str, Job]) -> None:
    assert (
        [[True, True]] * 2 == [told["gone"] for told in jobs["ran"].plain] == [told["gone"] for told in jobs["ran"].monitored]
    )


def test_what_cannot_be_observed_is_refused_with_what_to_change(jobs: dict[str, Job]) -> None:
    for told in jobs["ran"].monitored:
        assert told["refused"] == {
            "another optimizer": "The engine of DeepSpeed does not step this optimizer: pass the engine, its "
            "`.optimizer`, or the optimizer that was given to deepspeed.initialize.",
            "a part of the model": "DeepSpeed trains the model, but the monitor cannot find its engine: call set_monitor after "
            "deepspeed.initialize, and pass the engine that it returned as the model.",
            "no optimizer": "The engine of DeepSpeed has no optimizer: give deepspeed.initialize one, or name it in the "
            "config.",
            "an unknown version": f"The monitor cannot observe the steps of DeepSpeed {version('deepspeed')}: use a version "
            "that it was tested with (0.19).",
            "two engines": "model and optimizer belong to several engines of DeepSpeed: call set_monitor once for each engine.",
        }
