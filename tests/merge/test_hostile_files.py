"""Files that somebody else made, or made to do harm, are set aside, and what is said of them does none."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import h5py
import pyarrow as pa
import pytest
from evidence import examples
from hypothesis import HealthCheck, given, settings, strategies as st
from pyarrow.parquet import read_table, write_table
from recorded_job import RecordedRank, alone, merged, sharded, table, tensors
from sink_rows import Measured
from typer.testing import CliRunner

from monitor.merge.cli import app

SHARD = "metrics_0-4.h5"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Two ranks; tests lay hands on the second one's files."""
    sharded(tmp_path)
    return tmp_path


def of_rank_1(base: Path) -> Path:
    return next(base.glob("*-rank1-*"))


def set_aside(base: Path, output: str = "merged") -> list[tuple[str, str]]:
    """What a merge sets aside and why; what is there of the other rank is merged."""
    report = merged(base, output)
    assert {row["name"] for row in tensors(base, output=output)} >= {"b"}
    return [(Path(one["path"]).name, one["reason"]) for one in report.told()["set_aside"]["listed"]]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("grad_reduced_5-9.csv", b"vpp_stage,name,step,norm\n0,w,5,1"),
        ("grad_reduced_5-9.csv", b"a,b\n"),
        ("grad_reduced_5-9.csv", b"vpp_stage,name,step,n\xffrm\n0,w,5,1\n"),
        ("grad_reduced_5-9.csv", b"vpp_stage,name,step,norm\n0,\xff,5,1\n"),
        ("grad_reduced_5-9.csv", b"vpp_stage,name,step,norm,norm\n0,w,5,1,1\n"),
        ("metrics_5-9.h5", b"x"),
        ("metrics_9-5.h5", b"x"),
        ("metrics_5-9.parquet", b"x"),
        ("metrics_9-5.parquet", b"x"),
        (f"grad_reduced_0-{10**30}.csv", b"vpp_stage,name,step,norm\n"),
    ],
)
def test_a_file_that_is_not_ours_is_set_aside(job: Path, name: str, content: bytes) -> None:
    (of_rank_1(job) / name).write_bytes(content)
    assert [aside for aside, _ in set_aside(job)] == [name]
    assert len(tensors(job)) == 6


def test_a_shard_that_is_torn_is_set_aside_and_its_steps_are_gaps(tmp_path: Path) -> None:
    sharded(tmp_path, steps=10)
    shard = of_rank_1(tmp_path) / "metrics_5-9.h5"
    shard.write_bytes(shard.read_bytes()[:-2000])
    report = merged(tmp_path).told()
    assert [Path(one["path"]).name for one in report["set_aside"]["listed"]] == ["metrics_5-9.h5"]
    assert report["gaps"]["listed"] == [{"kind": "grad_reduced", "rank": 1, "steps": {"count": 5, "ranges": [[5, 9, 1]]}}]


# HDF5 that is valid, and not what we write.


def as_another_program_writes(file: h5py.File, _elsewhere: Path) -> None:
    file.clear()
    file.attrs.clear()
    file["temperature"] = [1.0, 2.0]


def with_a_group_that_is_in_another_file(file: h5py.File, elsewhere: Path) -> None:
    with h5py.File(elsewhere, "w") as other:
        file.copy("grad_reduced", other)
    del file["grad_reduced"]
    file["grad_reduced"] = h5py.ExternalLink(str(elsewhere), "/grad_reduced")


def with_a_column_that_is_in_another_file(file: h5py.File, elsewhere: Path) -> None:
    with h5py.File(elsewhere, "w") as other:
        file.copy("grad_reduced/sumsq", other, "secret")
    del file["grad_reduced/sumsq"]
    file["grad_reduced/sumsq"] = h5py.ExternalLink(str(elsewhere), "/secret")


def with_steps_that_are_in_another_file(file: h5py.File, elsewhere: Path) -> None:
    with h5py.File(elsewhere, "w") as other:
        file.copy("grad_reduced/step", other, "secret")
    del file["grad_reduced/step"]
    file["grad_reduced/step"] = h5py.ExternalLink(str(elsewhere), "/secret")


def with_bytes_of_another_file(file: h5py.File, elsewhere: Path) -> None:
    elsewhere.write_bytes(bytes(24))
    del file["grad_reduced/sumsq"]
    file["grad_reduced"].create_dataset("sumsq", (3,), "f8", external=[(str(elsewhere), 0, 24)])


def with_a_view_of_another_file(file: h5py.File, elsewhere: Path) -> None:
    with h5py.File(elsewhere, "w") as other:
        other["secret"] = [1.0, 2.0, 3.0]
    layout = h5py.VirtualLayout((3,), "f8")
    layout[:] = h5py.VirtualSource(str(elsewhere), "secret", (3,))
    del file["grad_reduced/sumsq"]
    file["grad_reduced"].create_virtual_dataset("sumsq", layout)


def with_a_column_that_is_a_link(file: h5py.File, _elsewhere: Path) -> None:
    file.move("grad_reduced/sumsq", "grad_reduced/elsewhere")
    file["grad_reduced/sumsq"] = h5py.SoftLink("/grad_reduced/elsewhere")


def with_more_rows_than_bytes(file: h5py.File, _elsewhere: Path) -> None:
    del file["grad_reduced/step"]
    file["grad_reduced"].create_dataset("step", (2**50,), "i8", chunks=(1000,))


def with_a_column_too_short(file: h5py.File, _elsewhere: Path) -> None:
    del file["grad_reduced/sumsq"]
    file["grad_reduced/sumsq"] = [1.0]


def with_a_group_in_place_of_a_column(file: h5py.File, _elsewhere: Path) -> None:
    del file["grad_reduced/step"]
    file.create_group("grad_reduced/step")


def with_a_kind_that_cannot_be_a_name(file: h5py.File, _elsewhere: Path) -> None:
    file.move("grad_reduced", "..%2f..%2fetc")


def of_another_rank(file: h5py.File, _elsewhere: Path) -> None:
    file.attrs["rank"] = 0


@pytest.mark.parametrize(
    "made",
    [
        as_another_program_writes,
        with_a_group_that_is_in_another_file,
        with_a_column_that_is_in_another_file,
        with_steps_that_are_in_another_file,
        with_bytes_of_another_file,
        with_a_view_of_another_file,
        with_a_column_that_is_a_link,
        with_more_rows_than_bytes,
        with_a_column_too_short,
        with_a_group_in_place_of_a_column,
        with_a_kind_that_cannot_be_a_name,
        of_another_rank,
    ],
)
def test_a_shard_that_holds_what_no_shard_holds_is_set_aside(
    job: Path, tmp_path_factory: pytest.TempPathFactory, made: Callable[[h5py.File, Path], None]
) -> None:
    with h5py.File(of_rank_1(job) / SHARD, "r+") as file:
        made(file, tmp_path_factory.mktemp("elsewhere") / "other.h5")
    assert [name for name, _ in set_aside(job)] == [SHARD]


def test_parquet_of_another_rank_or_another_program_is_set_aside(tmp_path: Path) -> None:
    sharded(tmp_path, "parquet")
    (theirs,) = next(tmp_path.glob("*-rank0-*")).glob("metrics_*.parquet")
    shutil.copy(theirs, of_rank_1(tmp_path) / "metrics_5-9.parquet")
    write_table(pa.table({"temperature": [1.0, 2.0]}), of_rank_1(tmp_path) / "metrics_10-14.parquet")
    rows = read_table(theirs)
    other = rows.set_column(0, "kind", pa.array(["../etc"] * len(rows)).dictionary_encode())
    write_table(other, of_rank_1(tmp_path) / "metrics_15-19.parquet")
    own = rows.schema.metadata[b"monitor"].replace(b'"rank": 0', b'"rank": 1')
    write_table(other.replace_schema_metadata({"monitor": own}), of_rank_1(tmp_path) / "metrics_20-24.parquet")
    assert dict(set_aside(tmp_path)) == {
        "metrics_5-9.parquet": "it is of rank 0",
        "metrics_10-14.parquet": 'Field "kind" does not exist in schema',
        "metrics_15-19.parquet": "it is of rank 0",
        "metrics_20-24.parquet": "'../etc' is not a kind",
    }


# What has the name of a file of ours and is none.


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_directory(path: Path) -> None:
    path.mkdir()


def a_link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def a_link_to_nothing(path: Path) -> None:
    path.symlink_to("nothing")


def a_link_out(path: Path) -> None:
    kept = path.parent.parent / f"kept-{path.name}"
    shutil.copy(next(path.parent.parent.glob("*-rank0-*")) / "manifest.json", kept)
    path.symlink_to(kept)


@pytest.mark.parametrize("made", [a_pipe, a_directory, a_link_to_itself, a_link_to_nothing, a_link_out])
@pytest.mark.parametrize("name", ["manifest.json", "series", SHARD, "grad_reduced_5-9.csv"])
def test_what_is_not_a_plain_file_is_not_opened(job: Path, name: str, made: Callable[[Path], None]) -> None:
    directory = of_rank_1(job)
    path = next(directory.glob("series-*")) if name == "series" else directory / name
    path.unlink(missing_ok=True)
    made(path)
    ((aside, reason),) = set_aside(job)
    assert aside == (directory.name if name in ("manifest.json", "series") else name)
    assert "leads to another directory" in reason if made is a_link_out else reason.endswith("is not a file")


# Manifests.


def rewrite(manifest: Path, **fields: Any) -> None:
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | fields))


@pytest.mark.parametrize("file", ["../series-0000000000000000.json.gz", "/etc/passwd", "series-0000000000000000.json.gz/../x"])
def test_a_manifest_that_points_outside_is_refused(job: Path, file: str) -> None:
    rewrite(of_rank_1(job) / "manifest.json", series={"file": file, "count": 1})
    ((name, reason),) = set_aside(job)
    assert name == of_rank_1(job).name
    assert "series.file: String should match pattern" in reason


def test_a_manifest_of_100_megabytes_is_not_read(job: Path) -> None:
    with open(of_rank_1(job) / "manifest.json", "ab") as file:
        file.truncate(100 * 2**20)
    ((name, reason),) = set_aside(job)
    assert name == of_rank_1(job).name
    assert "larger than any manifest" in reason


@pytest.mark.parametrize("deep", ["[" * 200_000, '{"a":' * 100_000, '{"config": ' + "[" * 100_000 + "]" * 100_000 + "}"])
def test_a_manifest_that_is_nested_deeply_is_refused(job: Path, deep: str) -> None:
    (of_rank_1(job) / "manifest.json").write_text(deep)
    ((name, reason),) = set_aside(job)
    assert name == of_rank_1(job).name
    assert "is damaged" in reason


@pytest.mark.parametrize(
    "fields",
    [
        {"world_size": 10**12},
        {"started": "0001-01-01T00:00:00"},
        {"started": "yesterday"},
        {"config": {"module_ranks": [[1]]}},
        {"config": {"module_ranks": 3}},
        {"config": {"ndigits": -400}},
        {"config": {"targets": "all"}},
    ],
)
def test_a_manifest_of_what_cannot_be_is_refused(job: Path, fields: dict[str, Any]) -> None:
    rewrite(of_rank_1(job) / "manifest.json", **fields)
    assert [name for name, _ in set_aside(job)] == [of_rank_1(job).name]


def test_a_manifest_that_tells_of_very_many_steps_is_merged_as_fast_as_any(tmp_path: Path) -> None:
    sharded(tmp_path, ["csv", "hdf5"])
    steps = {"count": 10**15, "ranges": [[0, 10**15 - 1, 1]]}
    none = {"count": 0, "ranges": []}
    rewrite(
        of_rank_1(tmp_path) / "manifest.json", steps={"written": steps, "skipped": steps, "incomplete": none, "abandoned": none}
    )
    assert merged(tmp_path).told()["skipped_steps"]["ranges"] == [[0, 2, 1]]


def test_jobs_that_say_they_carry_each_other_on_are_listed(tmp_path: Path) -> None:
    earlier = {"timestamp": "", "started": "", "saved": "", "closed": True, "first_step": 0, "series": None}
    for job, other in (("a", "b"), ("b", "a")):
        one = alone(tmp_path, job=job * 32, suffix=job * 8)
        rewrite(one.directory / "manifest.json", resumed=[earlier | {"job_id": other * 32}])
    assert "2 jobs" in said(tmp_path)[1]


numbers = (
    st.integers() | st.sampled_from([-1, 2**31, 2**63 - 1, 2**63, 10**40]) | st.floats(allow_nan=False, allow_infinity=False)
)
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def places(told: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Of everything in a JSON document, the way to it."""
    within = told.items() if isinstance(told, dict) else enumerate(told) if isinstance(told, list) else ()
    return [*([path] if path else []), *(place for key, inner in within for place in places(inner, (*path, key)))]


def replaced(told: Any, path: tuple[Any, ...], value: Any) -> Any:
    holder = told
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return told


def said(base: Path) -> tuple[int, str]:
    """The exit status of the command and what it said."""
    result = CliRunner().invoke(app, [str(base)])
    assert result.exit_code in (0, 1, 2), result.exc_info
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result.exit_code, result.output


def check_rank_0(base: Path) -> None:
    """Whatever stands in the other rank's manifest, it is merged as if that were not there, or nothing is and that is said."""
    status, output = said(base)
    if status == 2:
        assert "Nothing was merged: " in output
        return
    rows = [row for row in table(base, "per_rank").to_pylist() if row["rank"] == 0]
    assert [(row["name"], row["step"], row["norm"]) for row in rows] == [
        found for step in range(3) for found in (("b", step, 1.0), ("w", step, 5.0 * (step + 1)))
    ]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("sound")
    sharded(base, groups={"dp": [0, 1], "pp": [0, 1]})
    return base


@pytest.mark.parametrize("ops", [["norm", []], 5, {"norm": 1}, None])
def test_ops_that_cannot_be_are_borne(sound: Path, tmp_path: Path, ops: Any) -> None:
    base = shutil.copytree(sound, tmp_path / "job")
    manifest = of_rank_1(base) / "manifest.json"
    rewrite(manifest, config={**json.loads(manifest.read_text())["config"], "ops": ops})
    check_rank_0(base)


@settings(max_examples=examples(8, 20), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), value=values)
def test_any_value_anywhere_in_a_manifest_is_borne(
    sound: Path, tmp_path_factory: pytest.TempPathFactory, place: float, value: Any
) -> None:
    base = shutil.copytree(sound, tmp_path_factory.mktemp("job") / "job")
    told = json.loads((of_rank_1(base) / "manifest.json").read_text())
    ways = places(told)
    (of_rank_1(base) / "manifest.json").write_text(json.dumps(replaced(told, ways[int(place * len(ways))], value)))
    check_rank_0(base)
    shutil.rmtree(base)


@settings(max_examples=examples(8, 20), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), value=values)
def test_any_value_anywhere_in_a_table_of_series_is_borne(
    sound: Path, tmp_path_factory: pytest.TempPathFactory, place: float, value: Any
) -> None:
    base = shutil.copytree(sound, tmp_path_factory.mktemp("job") / "job")
    (path,) = of_rank_1(base).glob("series-*")
    told = json.loads(gzip.decompress(path.read_bytes()))
    ways = places(told)
    content = json.dumps(replaced(told, ways[int(place * len(ways))], value)).encode()
    name = f"series-{sha256(content).hexdigest()[:16]}.json.gz"
    (path.parent / name).write_bytes(gzip.compress(content))
    rewrite(path.parent / "manifest.json", series={"file": name, "count": 1})
    check_rank_0(base)
    shutil.rmtree(base)


# What is said and written of names.


@pytest.mark.parametrize("folder", ["global", "per_rank"])
def test_a_name_that_a_spreadsheet_would_run_is_neutralised(tmp_path: Path, folder: str) -> None:
    alone(tmp_path, "=cmd()", "+1", "-1", "@a", "\t=1", "\r=1", "w=1")
    merged(tmp_path, format="csv")
    neutralised = ["'=cmd()", "'+1", "'-1", "'@a", "'\t=1", "'\r=1", "w=1"]
    assert table(tmp_path, folder)["name"].to_pylist() == neutralised


def test_a_name_does_not_steer_the_terminal(tmp_path: Path) -> None:
    name = "w\x1b]0;title\x07\x1b[2J\u202e[bold]"
    for rank in (0, 1):
        one = RecordedRank(tmp_path, rank, 2)
        one.write(rank, {"grad_reduced": [Measured(name)]})
        one.close()
    (of_rank_1(tmp_path) / "metrics_5-9\x1b[2J.h5").touch()
    (of_rank_1(tmp_path) / "manifest.json").unlink()
    status, output = said(tmp_path)
    assert status == 1
    assert [c for c in output if not c.isprintable() and c != "\n"] == []
