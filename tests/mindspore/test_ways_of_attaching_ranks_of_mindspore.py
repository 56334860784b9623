"""Two ranks of MindSpore that attach early, in part, in stages, or through ``Model``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import Ranks, ended_job
from reading_back import Output
from typer.testing import CliRunner

from monitor.anomalies.ranking.cli import app as rank_anomalies
from monitor.coordinator.manifest_format import PipelineRecord, read_manifest
from monitor.merge.cli import app as monitor_merge

PARTS = ("before", "none", "second", "stages", "model")
MODEL_STEPS, STAGE_STEPS, FAULTY_STEP = 3, 4, 2
EXPECTED = "expected the name of a communication group, as create_group takes it or new_group returns it"


@pytest.fixture(scope="module")
def job(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return ended_job("ways_of_attaching.py", tmp_path_factory.mktemp("job"), base, len(PARTS))


def told(job: Ranks, part: str) -> list[dict[str, Any]]:
    """What each rank told of a part."""
    return [rank.told[PARTS.index(part)] for rank in job.ranks]


@pytest.fixture
def outputs(job: Ranks, base: Path) -> dict[str, Output]:  # noqa: ARG001
    return {part: Output(base / part / "output") for part in PARTS}


def names_of(output: Output, kind: str) -> list[set[str]]:
    """What each rank that records has rows of."""
    return [{row.name for row in output.rows(kind, directory)} for directory in output.directories()]


def norms(output: Output, kind: str) -> list[dict[tuple[str, int], float]]:
    """Of each rank that records."""
    return [
        {(row.name, row.step): row.values["norm"] for row in output.rows(kind, directory)} for directory in output.directories()
    ]


def manifests(output: Output) -> list[Any]:
    return [read_manifest(directory / "manifest.json") for directory in output.directories()]


def test_ranks_end_well_and_nothing_fails(job: Ranks, outputs: dict[str, Output]) -> None:
    assert (job.status, [rank.status for rank in job.ranks]) == (0, [0, 0])
    expected = ("AnomalyNan", "replica_check does not see a wrong weight")
    said = [line for rank in (*job.ranks, job.scheduler) for line in rank.warnings]
    assert [line for line in said if not any(one in line for one in expected)] == []
    for output in outputs.values():
        assert [(one.failures, one.dropped, one.lost, one.closed) for one in manifests(output)] == [({}, {}, {}, True)] * len(
            output.directories()
        )


def test_ranks_that_attached_before_communication_was_there_are_in_one_job(outputs: dict[str, Output]) -> None:
    first, second = manifests(outputs["before"])
    assert (first.job_id, first.timestamp) == (second.job_id, second.timestamp)
    assert [(one.rank, one.world_size, one.job_agreed) for one in (first, second)] == [(0, 2, True), (1, 2, True)]


def test_and_their_first_step_is_recorded_with_what_was_communicated_in_it(outputs: dict[str, Output]) -> None:
    calls = {("all_reduce.post_0", step) for step in range(3)}
    assert [set(rows) for rows in norms(outputs["before"], "other")] == [calls, calls]
    gradients = {(f"dense.{name}", step) for name in ("weight", "bias") for step in range(3)}
    assert [set(rows) for rows in norms(outputs["before"], "grad_reduced")] == [gradients, gradients]


def test_the_scheduler_which_attaches_too_records_nothing(job: Ranks, outputs: dict[str, Output]) -> None:
    assert job.scheduler.told == []
    assert "recording to" not in job.scheduler.said
    assert len(outputs["before"].directories()) == 2


def test_a_group_that_is_not_there_yet_is_refused_and_the_reason_is_said(job: Ranks) -> None:
    said = f"ValueError: dp_group is 'mccl_world_group', but communication was not initialised yet: {EXPECTED}"
    assert all(one["refused"].startswith(said) for one in told(job, "before"))


def test_what_is_no_group_or_no_optimizer_is_refused_before_anything_is_made(job: Ranks, outputs: dict[str, Output]) -> None:
    optimizer = "an optimizer of mindspore.nn, mindspore.mint.optim or mindspore.experimental.optim"
    for one in told(job, "none"):
        assert one["optimizer"] == f"TypeError: optimizer is a NoneType: expected {optimizer}."
        assert one["group"].startswith("ValueError: dp_group is 'stage', but this rank belongs to no group of that name: ")
        assert one["ranks"] == f"TypeError: dp_group is a list: {EXPECTED}."
    assert outputs["none"].directories() == []


def test_where_the_first_rank_is_not_monitored_the_second_writes_what_both_hold(outputs: dict[str, Output]) -> None:
    (manifest,) = manifests(outputs["second"])
    assert (manifest.rank, manifest.job_agreed, manifest.groups) == (1, True, {"dp": (0, 1)})
    assert names_of(outputs["second"], "grad_reduced") == [{"dense.weight", "dense.bias"}]
    assert names_of(outputs["second"], "other") == [{"all_reduce.post_0"}]
    assert names_of(outputs["second"], "replica") == [set()]


def test_stages_with_cells_of_their_own_are_in_one_pipeline_in_order(outputs: dict[str, Output]) -> None:
    found = manifests(outputs["stages"])
    assert [one.pipeline for one in found] == [PipelineRecord(ranks=(0, 1), stage=stage, stages=(stage,)) for stage in (0, 1)]
    assert [one.groups for one in found] == [{"pp": (0, 1), "tp": (rank,)} for rank in (0, 1)]
    assert names_of(outputs["stages"], "grad_reduced") == [
        {"layer.dense.weight", "layer.dense.bias", "scale"},
        {"dense.weight", "dense.bias"},
    ]


def test_a_forward_that_only_computes_what_is_sent_has_no_rows(outputs: dict[str, Output]) -> None:
    rows = outputs["stages"].rows("actv", outputs["stages"].directories()[0])
    assert [(row.step, row.micro_step) for row in rows if row.name == ".output"] == [(step, 0) for step in range(STAGE_STEPS)]


def test_what_one_stage_gives_is_what_the_next_one_gets_and_so_are_gradients(outputs: dict[str, Output]) -> None:
    forward, backward = norms(outputs["stages"], "actv"), norms(outputs["stages"], "actv_grad")
    for step in range(FAULTY_STEP):
        assert forward[0][".output", step] == forward[1][".input", step]
        assert backward[0][".output", step] == backward[1][".input", step]


def test_weights_of_both_stages_are_those_of_unmonitored_ones_in_every_bit(job: Ranks) -> None:
    for one in told(job, "stages"):
        assert len(one["plain"]) >= 2
        assert one["plain"] == one["monitored"]


def test_of_a_fault_in_the_first_stage_the_ranking_names_its_output_first(outputs: dict[str, Output], tmp_path: Path) -> None:
    found = tmp_path / "first.json"
    result = CliRunner().invoke(rank_anomalies, ["-d", str(outputs["stages"].base), "-k", "2", "-o", str(found)])
    assert result.exit_code == 1, result.output
    first, second = json.loads(found.read_text()).values()
    assert (first["tag_name"], first["step"], first["pp_stage"]) == ("0:.output:0/rank0/actv", FAULTY_STEP, 0)
    assert (second["tag_name"], second["step"], second["pp_stage"]) == ("0:.input:0/rank1/actv", FAULTY_STEP, 1)


@pytest.mark.parametrize("part", ["before", "stages", "model"])
def test_what_they_recorded_merges_without_a_flaw(outputs: dict[str, Output], tmp_path: Path, part: str) -> None:
    result = CliRunner().invoke(monitor_merge, [str(outputs[part].base), "-o", str(tmp_path / "merged")])
    assert result.exit_code == 0, result.output


def test_where_model_trains_the_first_rank_alone_writes_what_both_hold(outputs: dict[str, Output]) -> None:
    reduced, unreduced = (norms(outputs["model"], kind) for kind in ("grad_reduced", "grad_unreduced"))
    expected = {(f"dense.{name}", step) for name in ("weight", "bias") for step in range(MODEL_STEPS)}
    assert [set(rows) for rows in reduced] == [expected, set()]
    assert [set(rows) for rows in unreduced] == [expected, expected]
    assert names_of(outputs["model"], "param_updated")[1] == set()


def test_without_a_group_the_manifest_has_the_ranks_of_the_data_parallel_mode(job: Ranks, base: Path) -> None:  # noqa: ARG001
    output = Output(base / "shown" / "output")
    assert [one.groups for one in manifests(output)] == [{"dp": (0, 1)}] * 2
    assert [bool(rows) for rows in norms(output, "grad_reduced")] == [True, True]


def test_where_model_trains_gradients_are_reduced_between_both_rows(outputs: dict[str, Output]) -> None:
    (reduced, _), (one, other) = (norms(outputs["model"], kind) for kind in ("grad_reduced", "grad_unreduced"))
    for key, norm in reduced.items():
        assert abs(one[key] - other[key]) / 2 < norm < (one[key] + other[key]) / 2


def test_where_model_trains_weights_are_those_of_unmonitored_ranks_in_every_bit(job: Ranks) -> None:
    one, other = told(job, "model")
    assert one["plain"] == one["monitored"] == other["plain"] == other["monitored"]
    assert not np.isnan(np.frombuffer(bytes.fromhex("".join(one["plain"])), np.float32)).any()
