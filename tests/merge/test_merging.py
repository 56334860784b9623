from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from recorded_job import FORMATS, JOB, VALUES, RecordedRank, alone, merged, sharded, table, tensors
from sink_rows import Measured, partials_of

from monitor.coordinator.manifest import Earlier
from monitor.coordinator.manifest_format import read_manifest
from monitor.merge.combine import NOT_JOINED, NOT_RECORDED
from monitor.merge.execution import MergeError
from monitor.merge.outputs import read_merged
from monitor.merge.report import summary
from monitor.series import Placement, Shard
from monitor.sinks.files import StepSpan
from monitor.stats.ops import derive
from monitor.stats.partials import Partials


@pytest.mark.parametrize("format", FORMATS)
def test_the_norm_of_a_tensor_that_is_cut_is_its_true_norm(tmp_path: Path, format: str) -> None:  # noqa: A002
    sharded(tmp_path, format)
    report = merged(tmp_path)
    assert report.told()["disagreements"]["count"] == 0
    found = {(row["name"], row["step"]): row for row in tensors(tmp_path)}
    for step in range(3):
        whole = [value * (step + 1) for value in VALUES]
        expected = Partials.from_rows(np.array([partials_of(whole)]))
        row = found["w", step]
        assert (row["ranks"], row["count"], row["term"]) == ("0 1", 5, False)
        for op in ("min", "max", "mean", "norm", "zeros", "nans"):
            assert derive(op, expected)[0][0] == pytest.approx(row[op], rel=1e-12), op
        assert found["b", step]["ranks"] == "0"
    assert len(found) == 6


@pytest.mark.parametrize("format", FORMATS)
def test_tensors_of_several_models_of_a_rank_have_different_names(tmp_path: Path, format: str) -> None:  # noqa: A002
    one = RecordedRank(tmp_path, format=format)
    for step in range(2):
        rows = [Measured("w", [3.0]), Measured("w", [4.0], vpp_stage=1), Measured("v", [5.0], vpp_stage=1)]
        one.write(step, {"param_origin": rows})
    one.close()
    assert merged(tmp_path).clean
    found = [(row["step"], row["name"], row["norm"]) for row in tensors(tmp_path, "param_origin")]
    assert sorted(found) == [(n, *row) for n in range(2) for row in (("chunk1:v", 5.0), ("chunk1:w", 4.0), ("w", 3.0))]
    per_rank = {(row["name"], row["global_name"]) for row in table(tmp_path, "per_rank", "param_origin").to_pylist()}
    assert per_rank == {("w", "w"), ("w", "chunk1:w"), ("v", "chunk1:v")}


@pytest.mark.parametrize("format", FORMATS)
def test_a_complete_job_is_clean(tmp_path: Path, format: str) -> None:  # noqa: A002
    sharded(tmp_path, format)
    assert merged(tmp_path).clean


def test_every_row_of_every_rank_has_its_rank_and_coordinates(tmp_path: Path) -> None:
    sharded(tmp_path)
    merged(tmp_path)
    rows = table(tmp_path, "per_rank").to_pylist()
    assert [(row["step"], row["rank"], row["dp"], row["tp"], row["name"]) for row in rows] == [
        place for step in range(3) for place in ((step, 0, 0, None, "b"), (step, 0, 0, None, "w"), (step, 1, 1, None, "w"))
    ]


def test_a_norm_does_not_overflow_when_only_norms_are_known(tmp_path: Path) -> None:
    for rank in (0, 1):
        one = RecordedRank(tmp_path, rank, 2, "csv", ops=("norm",))
        one.place("grad_reduced", "w", Placement(shard=Shard((0, 1), (2,), (rank,))))
        one.write(0, {"grad_reduced": [Measured("w", [1e150])]})
        one.close()
    merged(tmp_path)
    assert tensors(tmp_path)[0]["norm"] == pytest.approx(math.sqrt(2) * 1e150)


def test_what_cannot_be_combined_from_csv_is_missing_with_a_reason(tmp_path: Path) -> None:
    sharded(tmp_path, "csv", ops=("min", "norm"))
    report = merged(tmp_path)
    row = next(row for row in tensors(tmp_path) if row["name"] == "w")
    assert (row["min"], row["mean"], row["zeros"], row["std"]) == (-12.0, None, None, None)
    reasons = {one["op"]: one["reason"] for one in report.told()["not_combined"]["listed"]}
    assert reasons["mean"] == "not in the shards"
    assert report.clean


def test_an_op_that_was_recorded_is_not_called_missing_where_a_tensor_has_no_value_of_it(tmp_path: Path) -> None:
    for rank in (0, 1):
        one = RecordedRank(tmp_path, rank, 2, "csv", ops=("norm", "shape", "magnitude_histogram", "kurtosis"))
        one.place("grad_reduced", "w", Placement(shard=Shard((0, 1), (4,), (2 * rank,))))
        whole = Measured(f"of {rank}", [math.nan, math.inf], magnitudes=True)
        one.write(0, {"grad_reduced": [whole, Measured("w", [1.0, 2.0], magnitudes=True)]})
        one.close()
    told = merged(tmp_path).told()
    reasons = {one["op"]: one["reason"] for one in told["not_combined"]["listed"]}
    assert "magnitude_histogram" not in reasons
    assert reasons["kurtosis"] == NOT_JOINED  # of several parts
    assert reasons["min"] == NOT_RECORDED
    said = dict(summary(told))
    assert "kurtosis" not in said["not recorded"]


@pytest.mark.parametrize(("format", "count"), [("hdf5", 8), ("parquet", 8), ("csv", None)])
@pytest.mark.parametrize("micro_steps", [(), ("actv",)], ids=["combined", "each"])
def test_micro_steps_that_were_combined_are_rows_of_whole_tensors(
    tmp_path: Path,
    format: str,  # noqa: A002
    count: int | None,
    micro_steps: tuple[str, ...],
) -> None:
    """Of more elements than the shape says, which of CSV is all that is known."""
    one = RecordedRank(tmp_path, format=format, ops=("norm", "shape"), micro_step_kinds=micro_steps)
    if micro_steps:
        one.write(0, {"actv": [Measured("l.output", [3.0] * 4, micro_step=index) for index in (0, 1)]})
    else:
        one.write(0, {"actv": [Measured("l.output", [3.0] * 8, shape=(4,))]})
    one.close()
    assert merged(tmp_path).clean
    found = [(row["name"], row["count"]) for row in tensors(tmp_path, "actv")]
    assert found == ([("l.output", 4)] * 2 if micro_steps else [("l.output", count)])


@pytest.mark.parametrize("kind", ["grad_reduced", "grad_unreduced"])
def test_terms_of_the_gradient_of_a_parameter_have_no_global_row_and_the_report_says_why(tmp_path: Path, kind: str) -> None:
    for rank in (0, 1):
        one = RecordedRank(tmp_path, rank, 2)
        one.place(kind, "w", Placement(partial=True))
        one.write(0, {kind: [Measured("w", [float(rank + 3)]), Measured(f"own-{rank}")]})
        one.close()
    report = merged(tmp_path)
    assert [row["name"] for row in tensors(tmp_path, kind)] == ["own-0", "own-1"]
    assert [(row["rank"], row["norm"]) for row in table(tmp_path, "per_rank", kind).to_pylist() if row["name"] == "w"] == [
        (0, 3.0),
        (1, 4.0),
    ]
    (one,) = report.told()["without_global"]["listed"]
    assert (one["kind"], one["name"], one["steps"]["ranges"]) == (kind, "w", [[0, 0, 1]])
    assert "term of a sum" in one["reason"]
    assert not report.clean


def test_terms_of_the_gradient_of_an_activation_are_listed_rank_by_rank(tmp_path: Path) -> None:
    for rank in (0, 1):
        one = RecordedRank(tmp_path, rank, 2)
        one.place("actv_grad", "up.input", Placement(partial=True))
        one.write(0, {"actv_grad": [Measured("up.input", [float(rank + 3)], micro_step=0)]})
        one.close()
    assert merged(tmp_path).clean
    found = [(row["ranks"], row["term"], row["norm"]) for row in tensors(tmp_path, "actv_grad")]
    assert found == [("0", True, 3.0), ("1", True, 4.0)]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("replicas", [True, False])
def test_what_a_mesh_suggests_to_be_replicas_is_one_tensor_only_while_the_numbers_agree(
    tmp_path: Path,
    format: str,  # noqa: A002
    replicas: bool,
) -> None:
    for rank in (0, 1):
        one = RecordedRank(tmp_path, rank, 2, format)
        one.place("grad_reduced", "w", Placement(unclaimed=(0, 1), assumed=True))
        for step in range(2):
            one.write(step, {"grad_reduced": [Measured("w", [3.0 if replicas or step else 3.0 + rank, 4.0])]})
        one.close()
    report = merged(tmp_path)
    found = [(row["step"], row["ranks"], row["norm"]) for row in tensors(tmp_path)]
    assert found == [(0, "0", 5.0), (1, "0", 5.0)][not replicas :]
    listed = [(one["name"], one["steps"]["ranges"]) for one in report.told()["without_global"]["listed"]]
    assert listed == ([] if replicas else [("w", [[0, 0, 1]])])
    assert report.told()["disagreements"]["count"] == 0
    assert report.clean is replicas


def test_shards_of_which_the_copies_differ_make_no_global_row_and_are_not_incomplete(tmp_path: Path) -> None:
    """Two by two ranks: cut over data-parallel ranks, and perhaps replicas over tensor-parallel ones."""
    for rank in range(4):
        one = RecordedRank(tmp_path, rank, 4)
        pair, mates = ((0, 2), (1, 3))[rank % 2], ((0, 1), (2, 3))[rank // 2]
        shard = Shard(pair, (4,), (2 * (rank // 2),))
        one.place("grad_reduced", "w", Placement(unclaimed=mates, shard=shard, assumed=True))
        one.write(0, {"grad_reduced": [Measured("w", [3.0, 4.0 + (rank == 3)])]})
        one.close()
    report = merged(tmp_path).told()
    assert [one["name"] for one in report["without_global"]["listed"]] == ["w"]
    assert (report["incomplete"]["count"], report["tensors"]) == (0, {"grad_reduced": 0})


def test_layers_of_pipeline_stages_are_numbered_through(tmp_path: Path) -> None:
    for rank in (0, 1):
        one = RecordedRank(tmp_path, rank, 2, groups={"pp": [0, 1]})
        one.write(0, {"grad_reduced": [Measured(f"layers.{layer}.w", [10.0 * rank + layer]) for layer in range(2)]})
        one.close()
    merged(tmp_path)
    assert [(row["stage"], row["name"], row["max"]) for row in tensors(tmp_path)] == [
        (0, "layers.0.w", 0.0),
        (0, "layers.1.w", 1.0),
        (1, "layers.2.w", 10.0),
        (1, "layers.3.w", 11.0),
    ]


def test_a_tensor_with_a_part_missing_has_no_row(tmp_path: Path) -> None:
    sharded(tmp_path)
    shutil.rmtree(next(tmp_path.glob("*-rank1-*")))
    report = merged(tmp_path)
    assert {row["name"] for row in tensors(tmp_path)} == {"b"}
    assert report.told()["missing_ranks"] == [1]
    assert [one["name"] for one in report.told()["incomplete"]["listed"]] == ["w"]


def test_a_step_that_stands_in_two_files_is_taken_once(tmp_path: Path) -> None:
    sharded(tmp_path)
    directory = next(tmp_path.glob("*-rank0-*"))
    shutil.copy(directory / "metrics_0-4.h5", directory / "metrics_0-2.h5")
    report = merged(tmp_path)
    assert [(one["rank"], one["steps"]["ranges"]) for one in report.told()["duplicate_steps"]["listed"]] == [(0, [[0, 2, 1]])]
    assert len(tensors(tmp_path)) == 6


def test_a_step_that_a_resumed_run_has_done_again_is_that_of_the_later_run(tmp_path: Path) -> None:
    one = RecordedRank(tmp_path)
    for step in range(4):
        one.write(step, {"grad_reduced": [Measured("w", [1.0])]})
    one.close()
    earlier = Earlier.of(read_manifest(one.directory / "manifest.json"))
    other = RecordedRank(tmp_path, job="f" * 32, suffix="f" * 8, earlier=earlier)
    other.write(2, {"grad_reduced": [Measured("w", [2.0])]})
    other.close()
    report = merged(tmp_path)
    assert [(row["step"], row["norm"]) for row in tensors(tmp_path)] == [(0, 1.0), (1, 1.0), (2, 2.0)]
    assert report.job == "f" * 32


def test_of_several_jobs_one_must_be_chosen(tmp_path: Path) -> None:
    for job in ("a" * 32, "b" * 32):
        one = RecordedRank(tmp_path, job=job, suffix=job[:8])
        one.write(0, {"grad_reduced": [Measured("w", [float(job < "b")])]})
        one.close()
    with pytest.raises(MergeError, match=f"2 jobs.*\n.*--job {'a' * 32}.*\n.*--job {'b' * 32}"):
        merged(tmp_path)
    merged(tmp_path, job="bb")
    assert [row["max"] for row in tensors(tmp_path)] == [0.0]


@pytest.mark.parametrize(("groups", "missing"), [({"dp": [0, 1]}, [1]), ({}, [])], ids=["in-a-group-of-it", "in-none"])
def test_a_rank_that_recorded_another_model_is_missing_where_a_group_of_this_model_has_it(
    tmp_path: Path, groups: dict[str, list[int]], missing: list[int]
) -> None:
    alone(tmp_path, world_size=2, launch="f" * 32, groups=groups)
    alone(tmp_path, rank=1, world_size=2, launch="f" * 32, job="2" * 32)
    assert merged(tmp_path, job=JOB).told()["missing_ranks"] == missing


def test_the_three_formats_hold_the_same(tmp_path: Path) -> None:
    sharded(tmp_path)
    one = RecordedRank(tmp_path, 5, 8, "csv", job="f" * 32, ops=("norm", "mean"))
    one.write(0, {"actv": [Measured("a", [math.nan, 1.0], 0), Measured("b", [], 1), Measured("c", [math.inf], 2)]})
    one.close()
    for job in (JOB, "f" * 32):
        for format in ("hdf5", "csv", "parquet"):  # noqa: A001
            merged(tmp_path, f"{job[0]}-{format}", format=format, job=job)
        kind = "actv" if job != JOB else "grad_reduced"
        for folder in ("per_rank", "global"):
            spelled = {
                str(sorted(map(str, table(tmp_path, folder, kind, f"{job[0]}-{form}").to_pylist())))
                for form in ("hdf5", "csv", "parquet")
            }
            assert len(spelled) == 1


COMBINATIONS = (
    *("csv", "hdf5", "parquet", "csv hdf5", "csv parquet", "hdf5 parquet"),
    *("hdf5 tensorboard", "csv tensorboard", "csv hdf5 tensorboard", "csv hdf5 parquet tensorboard"),
)


@pytest.mark.parametrize("formats", [one.split() for one in COMBINATIONS], ids=COMBINATIONS)
def test_of_formats_that_were_recorded_side_by_side_each_row_is_taken_once(tmp_path: Path, formats: list[str]) -> None:
    sharded(tmp_path, formats)
    report = merged(tmp_path)
    assert (report.clean, report.told()["duplicate_steps"]["count"]) == (True, 0)
    found = {(row["name"], row["step"]): row["norm"] for row in tensors(tmp_path)}
    norm = math.hypot(*VALUES)
    expected = {(name, step): value for step in range(3) for name, value in (("w", norm * (step + 1)), ("b", 1.0))}
    assert expected == pytest.approx(found, rel=1e-12)
    assert table(tmp_path, "per_rank").num_rows == 9
    assert {row["std"] is None for row in tensors(tmp_path)} == {{"hdf5", "parquet"}.isdisjoint(formats)}


@pytest.mark.parametrize("others", [["csv", "hdf5"], ["parquet", "hdf5"]], ids=str)
def test_of_formats_side_by_side_the_one_has_the_steps_that_the_other_lacks(tmp_path: Path, others: list[str]) -> None:
    one = RecordedRank(tmp_path, format=others)
    for step in range(5):
        one.write(step, {"grad_reduced": [Measured("w", [float(step)])]})
        if step == 1:
            one.flush()
            (shard,) = one.directory.glob("*.h5")
            of_two_steps = shard.read_bytes()
    one.close()
    shard.write_bytes(of_two_steps)
    merged(tmp_path)
    assert [(row["step"], row["max"]) for row in tensors(tmp_path)] == [(step, float(step)) for step in range(5)]


def test_of_tensorboard_alone_nothing_can_be_merged_and_that_is_said(tmp_path: Path) -> None:
    one = alone(tmp_path, format="tensorboard")
    said = f"no rows of what was asked for\n  {one.directory.name}: rank 0 recorded tensorboard alone, which cannot be merged"
    with pytest.raises(MergeError, match=said):
        merged(tmp_path)
    assert not (tmp_path / "merged").exists()


def test_a_rank_that_recorded_to_tensorboard_alone_is_named(tmp_path: Path) -> None:
    for rank, format in enumerate(("hdf5", "tensorboard")):  # noqa: A001
        one = RecordedRank(tmp_path, rank, 2, format)
        one.write(0, {"grad_reduced": [Measured("w")]})
        one.close()
    report = merged(tmp_path)
    ((name, reason),) = [(one.path, one.reason) for one in report.set_aside]
    assert name == one.directory.name
    assert reason.endswith("add parquet, hdf5 or csv to `format`")
    assert not report.clean


def test_only_the_kinds_and_steps_asked_for_are_merged(tmp_path: Path) -> None:
    sharded(tmp_path)
    merged(tmp_path, steps=StepSpan(1, 1), kinds=["grad_reduced"])
    assert {row["step"] for row in tensors(tmp_path)} == {1}
    with pytest.raises(MergeError, match=r"'actv'.* has recorded: grad_reduced"):
        merged(tmp_path, "none", kinds=["actv"])
    assert not (tmp_path / "none").exists()


def test_the_report_says_what_the_merge_found(tmp_path: Path) -> None:
    sharded(tmp_path)
    report = merged(tmp_path)
    told = json.loads((tmp_path / "merged" / "report.json").read_text())
    assert told == json.loads(report.spelled())
    assert (told["ranks"], told["steps"]["ranges"], told["rows"], told["tensors"]) == (
        [0, 1],
        [[0, 2, 1]],
        {"grad_reduced": 9},
        {"grad_reduced": 6},
    )
    assert read_merged(next((tmp_path / "merged" / "global").iterdir())).num_rows == 6
