from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recorded_job import JOB, RecordedRank, merged, table, tensors
from sink_rows import Measured, partials_of

from monitor.merge import engines, merging
from monitor.merge.errors import MergeError
from monitor.merge.output import read_merged
from monitor.placement import Placement, Shard
from monitor.ranks.history import Earlier
from monitor.ranks.records import read_manifest
from monitor.sinks.shard_names import Steps
from monitor.stats.ops import derive
from monitor.stats.partials import Partials

FORMATS = ("hdf5", "csv")
VALUES = [3.0, 4.0, -12.0, 0.0, 0.5]


def sharded(base: Path, format: str = "hdf5", cut: int = 2, steps: int = 3, **options: object) -> None:  # noqa: A002
    """Two ranks with a part each of ``w``, which grows from step to step, and a replica that the first one writes."""
    for rank, held in enumerate((VALUES[:cut], VALUES[cut:])):
        one = RecordedRank(base, rank, 2, format, {"dp": [0, 1]}, **options)
        one.place("grad_reduced", "w", Placement(shard=Shard((0, 1), (5,), (rank * cut,))))
        one.place("grad_reduced", "b", Placement(replicas=(0, 1)))
        for step in range(steps):
            rows = [Measured("w", [value * (step + 1) for value in held])]
            one.write(step, {"grad_reduced": [*rows, Measured("b", [1.0])] if rank == 0 else rows})
        one.close()


def files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


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
def test_a_complete_job_is_clean(tmp_path: Path, format: str) -> None:  # noqa: A002
    sharded(tmp_path, format)
    assert merged(tmp_path).clean


def test_every_row_of_every_rank_has_its_rank_and_coordinates(tmp_path: Path) -> None:
    sharded(tmp_path)
    merged(tmp_path)
    rows = table(tmp_path, "per_rank").to_pylist()
    assert [(row["step"], row["rank"], row["dp"], row["tp"], row["name"]) for row in rows] == [
        place for step in range(3) for place in ((step, 0, 0, None, "w"), (step, 0, 0, None, "b"), (step, 1, 1, None, "w"))
    ]


floats = st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf, -math.inf, 0.0])


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(floats, min_size=1, max_size=12), cuts=st.lists(st.integers(0, 12), max_size=3))
@pytest.mark.parametrize("format", FORMATS)
def test_how_a_tensor_is_cut_changes_no_statistic(
    tmp_path_factory: pytest.TempPathFactory,
    format: str,  # noqa: A002
    values: list[float],
    cuts: list[int],
) -> None:
    base = tmp_path_factory.mktemp("job")
    edges = [0, *sorted(min(cut, len(values)) for cut in cuts), len(values)]
    ranks = tuple(range(len(edges) - 1))
    ops = ("min", "max", "mean", "norm", "zeros", "nans", "infs", "absmax", "std")
    for rank, (first, end) in enumerate(itertools.pairwise(edges)):
        one = RecordedRank(base, rank, len(ranks), format, ops=ops)
        one.place("grad_reduced", "w", Placement(shard=Shard(ranks, (len(values),), (first,))))
        one.write(0, {"grad_reduced": [Measured("w", values[first:end])]})
        one.close()
    merged(base)
    (row,) = tensors(base)
    whole = Partials.from_rows(np.array([partials_of(values)]))
    scale = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    for op in ops:
        assert derive(op, whole)[0][0] == pytest.approx(row[op], rel=1e-6, abs=1e-7 * scale, nan_ok=True), op
    shutil.rmtree(base)


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
    row = tensors(tmp_path)[0]
    assert (row["min"], row["mean"], row["zeros"], row["std"]) == (-12.0, None, None, None)
    reasons = {one["op"]: one["reason"] for one in report.told()["not_combined"]["listed"]}
    assert reasons["mean"] == "not in the shards"
    assert report.clean


def test_terms_of_a_sum_are_listed_and_not_combined(tmp_path: Path) -> None:
    for rank in (0, 1):
        one = RecordedRank(tmp_path, rank, 2)
        one.place("grad_reduced", "w", Placement(partial=True))
        one.write(0, {"grad_reduced": [Measured("w", [float(rank + 3)])]})
        one.close()
    merged(tmp_path)
    assert [(row["ranks"], row["term"], row["norm"]) for row in tensors(tmp_path)] == [("0", True, 3.0), ("1", True, 4.0)]


def test_of_copies_that_every_rank_writes_one_is_taken(tmp_path: Path) -> None:
    for rank in (0, 1):
        one = RecordedRank(tmp_path, rank, 2)
        one.place("grad_reduced", "w", Placement(unclaimed=(0, 1)))
        one.write(0, {"grad_reduced": [Measured("w")]})
        one.close()
    assert merged(tmp_path).clean
    assert [(row["ranks"], row["norm"]) for row in tensors(tmp_path)] == [("0", 5.0)]


@pytest.mark.parametrize("format", FORMATS)
def test_copies_that_differ_are_named(tmp_path: Path, format: str) -> None:  # noqa: A002
    for rank in (0, 1):
        one = RecordedRank(tmp_path, rank, 2, format)
        one.place("grad_reduced", "w", Placement(unclaimed=(0, 1)))
        for step in range(2):
            one.write(step, {"grad_reduced": [Measured("w", [3.0 + (rank and step), 4.0])]})
        one.close()
    report = merged(tmp_path)
    (one,) = report.told()["disagreements"]["listed"]
    assert (one["kind"], one["name"], one["step"], one["rank"], one["other_rank"]) == ("grad_reduced", "w", 1, 1, 0)
    assert one["difference"] == pytest.approx(math.sqrt(32) - 5)
    assert not report.clean


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("value", [4.0, 4.5])
def test_replicas_that_were_kept_to_be_compared_are_held_against_their_owners(
    tmp_path: Path,
    format: str,  # noqa: A002
    value: float,
) -> None:
    for rank, kind, name in ((0, "grad_reduced", "w"), (1, "replica", "grad_reduced/w")):
        one = RecordedRank(tmp_path, rank, 2, format)
        one.place(kind, name, Placement(replicas=(0, 1)))
        one.write(7, {kind: [Measured(name, [3.0, value if rank else 4.0])]})
        one.close()
    listed = merged(tmp_path).told()["disagreements"]["listed"]
    assert [(one["rank"], one["other_rank"], one["step"], one["op"]) for one in listed] == [(1, 0, 7, "norm")] * (value != 4.0)
    assert [row["norm"] for row in tensors(tmp_path)] == [5.0]
    assert table(tmp_path, "per_rank", "replica").num_rows == 1


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


def test_a_shard_that_is_torn_is_set_aside_and_its_steps_are_gaps(tmp_path: Path) -> None:
    sharded(tmp_path, steps=10)
    shard = next(tmp_path.glob("*-rank1-*")) / "metrics_5-9.h5"
    shard.write_bytes(shard.read_bytes()[:-2000])
    report = merged(tmp_path).told()
    assert [Path(one["path"]).name for one in report["set_aside"]["listed"]] == ["metrics_5-9.h5"]
    assert report["gaps"]["listed"] == [{"kind": "grad_reduced", "rank": 1, "steps": {"count": 5, "ranges": [[5, 9, 1]]}}]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("grad_reduced_5-9.csv", b"vpp_stage,name,step,norm\n0,w,5,1"),
        ("grad_reduced_5-9.csv", b"a,b\n"),
        ("metrics_5-9.h5", b"x"),
        ("metrics_9-5.h5", b"x"),
        (f"grad_reduced_0-{10**30}.csv", b"vpp_stage,name,step,norm\n"),
    ],
)
def test_a_file_that_is_not_ours_is_set_aside(tmp_path: Path, name: str, content: bytes) -> None:
    sharded(tmp_path)
    (next(tmp_path.glob("*-rank1-*")) / name).write_bytes(content)
    report = merged(tmp_path)
    assert [Path(one["path"]).name for one in report.told()["set_aside"]["listed"]] == [name]
    assert len(tensors(tmp_path)) == 6


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


def test_a_manifest_that_points_outside_or_is_huge_is_refused(tmp_path: Path) -> None:
    sharded(tmp_path)
    manifest = next(tmp_path.glob("*-rank1-*")) / "manifest.json"
    told = json.loads(manifest.read_text())
    told["series"]["file"] = "../series-0000000000000000.json.gz"
    manifest.write_text(json.dumps(told))
    assert [one.path for one in merged(tmp_path).set_aside] == [manifest.parent.name]
    with open(manifest, "ab") as file:
        file.truncate(100 * 2**20)
    assert "larger than any manifest" in merged(tmp_path, "again").set_aside[0].reason


def test_a_series_file_that_is_a_link_to_elsewhere_is_not_followed(tmp_path: Path) -> None:
    sharded(tmp_path)
    series = next(next(tmp_path.glob("*-rank1-*")).glob("series-*"))
    series.rename(tmp_path / series.name)
    series.symlink_to(tmp_path / series.name)
    assert "leads to another directory" in merged(tmp_path).set_aside[0].reason


def test_a_name_that_a_spreadsheet_would_run_is_neutralised(tmp_path: Path) -> None:
    one = RecordedRank(tmp_path)
    one.write(0, {"grad_reduced": [Measured(name) for name in ("=cmd()", "+1", "-1", "@a", "w=1")]})
    one.close()
    merged(tmp_path, format="csv")
    assert [row["name"] for row in tensors(tmp_path)] == ["'=cmd()", "'+1", "'-1", "'@a", "w=1"]


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
                str(table(tmp_path, folder, kind, f"{job[0]}-{form}").to_pylist()) for form in ("hdf5", "csv", "parquet")
            }
            assert len(spelled) == 1


@pytest.mark.parametrize("format", ["hdf5", "csv", "parquet"])
def test_the_bytes_do_not_depend_on_engine_or_workers(tmp_path: Path, format: str) -> None:  # noqa: A002
    sharded(tmp_path, steps=20)
    merged(tmp_path, "here", format=format, rows=20)
    merged(tmp_path, "pool", format=format, rows=20, workers=2)
    assert files(tmp_path / "here") == files(tmp_path / "pool")
    assert len(files(tmp_path / "here")) > 5


def test_any_executor_will_do() -> None:
    with ThreadPoolExecutor(2) as pool:
        done = dict(engines.run(pool, 2, str, range(50)))
    assert done == {number: str(number) for number in range(50)}


def test_how_the_work_is_cut_does_not_change_a_row(tmp_path: Path) -> None:
    sharded(tmp_path, "csv", steps=20)
    merged(tmp_path, "one")
    merged(tmp_path, "many", rows=7)
    assert tensors(tmp_path, output="one") == tensors(tmp_path, output="many")
    assert len(files(tmp_path / "one")) < len(files(tmp_path / "many"))


def test_only_the_kinds_and_steps_asked_for_are_merged(tmp_path: Path) -> None:
    sharded(tmp_path)
    merged(tmp_path, steps=Steps(1, 1), kinds=["grad_reduced"])
    assert {row["step"] for row in tensors(tmp_path)} == {1}
    with pytest.raises(MergeError, match="no rows"):
        merged(tmp_path, "none", kinds=["actv"])
    assert not (tmp_path / "none").exists()


def test_what_is_there_is_not_overwritten_and_two_merges_do_not_meet(tmp_path: Path) -> None:
    sharded(tmp_path)
    with FileLock(tmp_path / ".merged.lock"), pytest.raises(MergeError, match="another merge"):
        merged(tmp_path)
    merged(tmp_path)
    with pytest.raises(MergeError, match="exists"):
        merged(tmp_path)


def _killed_in_the_middle(base: Path) -> None:
    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    merging.merge(merging.Wanted(base, base / "merged", rows=3), die)


def test_a_merge_that_is_killed_leaves_nothing_under_the_name_and_the_next_one_succeeds(tmp_path: Path) -> None:
    sharded(tmp_path, steps=10)
    process = multiprocessing.get_context("spawn").Process(target=_killed_in_the_middle, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not (tmp_path / "merged").exists()
    merged(tmp_path)
    assert len(tensors(tmp_path)) == 20
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".draft")] == []


def test_without_the_package_for_clusters_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "distributed", None)
    sharded(tmp_path)
    with pytest.raises(MergeError, match=r"trainermon\[dask\]"):
        merged(tmp_path, dask="tcp://127.0.0.1:1")


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
