"""``open_run(...).rows``: the same rows from ranks' directories and from a merged set of any format."""

from __future__ import annotations

import gc
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet
import pytest
from queried_job import STEPS, merged_into, record
from recorded_job import JOB, RecordedRank, alone, sharded
from sink_rows import Measured

from monitor import QueryError, open_run, read_hdf5
from monitor.query.opened import OpenedRun, steps_of
from monitor.query.sources import NameFilter

SOURCES = ("hdf5", "csv", "parquet")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job recorded in HDF5, and merged into every format."""
    directory = record(tmp_path_factory.mktemp("job"))
    for each in SOURCES:
        merged_into(directory, each)
    return directory


@pytest.fixture(scope="module", params=["ranks", *SOURCES])
def run(request: pytest.FixtureRequest, base: Path) -> OpenedRun:
    return open_run(base if request.param == "ranks" else base / f"merged-{request.param}")


def sorted_rows(table: pa.Table) -> list[dict[str, Any]]:
    return sorted(
        table.to_pylist(), key=lambda row: [(value is None, value) for value in row.values() if value is not None].__repr__()
    )


@pytest.mark.parametrize("kind", ["actv", "grad_reduced"])
@pytest.mark.parametrize("per_rank", [True, False])
def test_every_source_has_the_same_rows_and_columns(base: Path, run: OpenedRun, kind: str, per_rank: bool) -> None:
    expected = open_run(base / "merged-hdf5").rows(kind, per_rank=per_rank)
    found = run.rows(kind, per_rank=per_rank)
    assert found.schema.equals(expected.schema)
    assert sorted_rows(found) == sorted_rows(expected)
    assert found["step"].to_pylist() == sorted(found["step"].to_pylist())


def test_what_there_is_is_said_by_every_source_alike(run: OpenedRun) -> None:
    assert run.kinds == ["actv", "grad_reduced"]
    assert run.ranks == [0, 1]
    assert run.steps == {"actv": [range(STEPS)], "grad_reduced": [range(STEPS)]}
    assert run.missing == []
    series = [tuple(row.values())[:4] for row in run.series.to_pylist()]
    activations = [("actv", rank, 0, name) for rank in (0, 1) for name in ("a.output", "b.output")]
    assert sorted(series) == sorted(
        [*activations, ("grad_reduced", 0, 0, "w"), ("grad_reduced", 0, 0, "b"), ("grad_reduced", 1, 0, "w")]
    )
    assert {(row["name"], row["rank"]): row["shape"] for row in run.series.to_pylist() if row["name"] == "w"} == {
        ("w", 0): "[2]",
        ("w", 1): "[3]",
    }


CHOICES: list[tuple[dict[str, Any], Callable[[dict[str, Any]], bool]]] = [
    ({"name": "a.output"}, lambda row: row["name"] == "a.output"),
    ({"name": ["a.output", "b.output"]}, lambda _: True),
    ({"name": "b.*"}, lambda row: row["name"] == "b.output"),
    ({"name": "?.out*"}, lambda _: True),
    ({"steps": 3}, lambda row: row["step"] == 3),
    ({"steps": (1, 2)}, lambda row: row["step"] in (1, 2)),
    ({"steps": range(1, 6, 2)}, lambda row: row["step"] in (1, 3, 5)),
    ({"steps": slice(4, None)}, lambda row: row["step"] >= 4),
    ({"ranks": 1}, lambda row: row["rank"] == 1),
    ({"ranks": range(2), "steps": (5, 900), "name": "a.*"}, lambda row: row["step"] == 5 and row["name"] == "a.output"),
    ({"steps": 900}, lambda _: False),
]


@pytest.mark.parametrize(("choice", "is_chosen"), CHOICES, ids=[str(choice) for choice, _ in CHOICES])
def test_a_choice_gives_the_rows_that_a_filter_of_all_rows_gives(
    run: OpenedRun, choice: dict[str, Any], is_chosen: Callable[[dict[str, Any]], bool]
) -> None:
    every = run.rows("actv").to_pylist()
    assert run.rows("actv", **choice).to_pylist() == [row for row in every if is_chosen(row)]


def test_columns_are_those_asked_for_in_their_order(run: OpenedRun) -> None:
    found = run.rows("grad_reduced", name="w", steps=0, columns=["norm", "rank"])
    assert found.column_names == ["norm", "rank"]
    assert found.to_pylist() == [{"norm": 5.0, "rank": 0}, {"norm": pytest.approx(144.25**0.5), "rank": 1}]
    assert run.rows("grad_reduced", steps=900, columns=["norm"]).column_names == ["norm"]


def test_rows_of_whole_tensors_have_shards_combined(run: OpenedRun) -> None:
    found = run.rows("grad_reduced", name="w", steps=(0, 1), columns=["step", "ranks", "norm"], per_rank=False)
    norm = 169.25**0.5
    assert found.to_pylist() == [
        {"step": step, "ranks": "0 1", "norm": pytest.approx(norm * (step + 1), rel=1e-14)} for step in (0, 1)
    ]
    assert run.rows("grad_reduced", steps=900, per_rank=False).num_rows == 0


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"kind": "grad"}, "there are no rows of ranks of kind 'grad'. There are rows of ranks of actv, grad_reduced."),
        ({"name": "c.output"}, "actv has no tensor 'c.output' among its 2. Close to it: "),
        ({"name": ["a.output", "x*"]}, "actv has no tensor 'x\\*' among its 2. It has a.output, b.output."),
        ({"columns": ["norm", "nrm"]}, "actv has no column 'nrm'. It has kind, rank, dp,"),
        ({"ranks": [0, 7]}, "there is no rank 7. There are 0, 1."),
        ({"ranks": 0, "per_rank": False}, "a row of a whole tensor belongs to no single rank"),
        ({"steps": (4, 1)}, "steps is \\(4, 1\\). Give a step"),
        ({"steps": "1"}, "steps is '1'"),
        ({"steps": -1}, "steps is -1"),
        ({"steps": range(9, 0, -1)}, "steps is range"),
        ({"steps": slice("a", None)}, "steps is slice"),
        ({"steps": slice(0, 3, 0)}, "steps is slice"),
        ({"name": 5}, "name is 5"),
        ({"name": [5]}, r"name is \[5\]"),
        ({"ranks": "0"}, "ranks is '0'"),
        ({"ranks": 1.0}, "ranks is 1.0"),
    ],
    ids=str,
)
def test_what_there_is_not_is_refused_with_what_there_is(run: OpenedRun, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(QueryError, match=said):
        run.rows(**{"kind": "actv", **asked})


def test_a_name_that_exists_in_other_steps_is_not_refused(tmp_path: Path) -> None:
    one = RecordedRank(tmp_path)
    for step, name in enumerate("ab"):
        one.write(step, {"grad_reduced": [Measured(name)]})
    one.close()
    assert open_run(tmp_path).rows("grad_reduced", name="a", steps=1).num_rows == 0


def test_the_result_is_an_arrow_table_that_polars_takes(run: OpenedRun) -> None:
    rows = run.rows("grad_reduced", name="b", columns=["step", "norm"])
    assert polars.DataFrame(rows).to_dicts() == rows.to_pylist()


def test_the_result_becomes_a_frame_of_pandas(run: OpenedRun) -> None:
    pytest.importorskip("pandas")
    rows = run.rows("grad_reduced", columns=["name", "step", "norm"])
    assert rows.to_pandas().to_dict("records") == rows.to_pylist()


@pytest.mark.parametrize("format", ["csv", ["csv", "hdf5"]])
def test_ranks_that_wrote_csv_have_the_rows_of_their_merged_set(tmp_path: Path, format: Any) -> None:  # noqa: A002
    record(tmp_path, format)
    expected = open_run(merged_into(tmp_path, "hdf5"))
    for kind in expected.kinds:
        assert sorted_rows(open_run(tmp_path).rows(kind)) == sorted_rows(expected.rows(kind))


@pytest.mark.parametrize("format", ["csv", "hdf5"])
def test_shares_of_agreeing_signs_are_not_among_calls(tmp_path: Path, format: str) -> None:  # noqa: A002
    one = RecordedRank(tmp_path, format=format, counted_kinds=("other",))
    one.write(0, {"other": [Measured("all_reduce:0", [1.0, 2.0])], "mg_direction": [Measured("w", [1.0, 1.0])]})
    one.close()
    run = open_run(tmp_path)
    assert run.rows("other")["name"].to_pylist() == ["all_reduce:0"]
    assert run.rows("mg_direction")["name"].to_pylist() == ["w"]


def test_opening_reads_no_rows_and_a_question_reads_only_the_files_that_it_needs(tmp_path: Path) -> None:
    record(tmp_path, "csv")
    torn = [*tmp_path.glob("*-rank1-*/actv_*.csv"), *tmp_path.glob("*/actv_4-5.csv")]
    for path in torn:
        path.write_text("torn")
    run = open_run(tmp_path)
    assert run.rows("actv", ranks=0, steps=(0, 3)).num_rows == 16
    assert run.missing == []
    assert run.rows("actv").num_rows == 16
    assert [re.sub(r"/\S*/(?=Dec)", "", one) for one in run.missing] == [
        "set aside: Dec03_21-34-40-rank0-00000000/actv_4-5.csv: it does not begin with the header of a shard",
        "set aside: Dec03_21-34-40-rank1-00000001/actv_0-1.csv and 2 more: it does not begin with the header of a shard",
    ]


def test_of_a_parquet_file_only_row_groups_that_may_match_are_read(tmp_path: Path) -> None:
    path = merged_into(sharded_names(tmp_path), "parquet")
    (file,) = (path / "per_rank").iterdir()
    rows = pyarrow.parquet.read_table(file)
    keys = pa.table({"name": rows["name"].cast(pa.string()), "step": rows["step"]})
    in_order = pyarrow.compute.sort_indices(keys, [("name", "ascending"), ("step", "ascending")])
    pyarrow.parquet.write_table(rows.take(in_order), file, row_group_size=4)
    whole = open_run(path)
    expected = whole.rows("grad_reduced", name="c")
    assert expected["step"].to_pylist() == [0, 1, 2, 3]
    damage_all_row_groups_but(file, 2)
    run = open_run(path)
    assert run.rows("grad_reduced", name="c").equals(expected)
    assert run.rows("grad_reduced", name="c*").equals(expected)
    with pytest.raises(OSError, match=r".+"):
        run.rows("grad_reduced", name="b")


def sharded_names(base: Path) -> Path:
    one = RecordedRank(base, steps_per_record=10)
    for step in range(4):
        one.write(step, {"grad_reduced": [Measured(name, [float(step)]) for name in "abcd"]})
    one.close()
    return base


def damage_all_row_groups_but(file: Path, kept: int) -> None:
    content = bytearray(file.read_bytes())
    metadata = pyarrow.parquet.read_metadata(file)
    for number in range(metadata.num_row_groups):
        for place in range(metadata.num_columns):
            column = metadata.row_group(number).column(place)
            begin = column.dictionary_page_offset or column.data_page_offset
            if number != kept:
                content[begin : begin + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    file.write_bytes(content)


def test_a_merged_set_of_any_format_opens_behind_a_url(base: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    for each in SOURCES:
        memory.put(str(base / f"merged-{each}"), f"/runs/{each}", recursive=True)
        run, here = open_run(f"memory://runs/{each}"), open_run(base / f"merged-{each}")
        assert run.rows("grad_reduced", name="w").equals(here.rows("grad_reduced", name="w"))
        assert run.total_norm("grad_reduced").equals(here.total_norm("grad_reduced"))
    with pytest.raises(QueryError, match=r"is not a merged set\. Directories of ranks are read from this machine only"):
        open_run("memory://runs")


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(QueryError, match="there is no directory of a rank in"):
        open_run(tmp_path)
    with pytest.raises(QueryError, match="cannot be read"):
        open_run(tmp_path / "nowhere")
    (tmp_path / "per_rank").mkdir()
    (tmp_path / "report.json").write_text("{")
    with pytest.raises(QueryError, match=r"report\.json is damaged"):
        open_run(tmp_path)


def test_one_of_several_jobs_is_chosen_by_its_id(tmp_path: Path) -> None:
    alone(tmp_path, "first", suffix="0000000a", job="a" * 32)
    alone(tmp_path, "second", suffix="0000000b", job="b" * 32)
    with pytest.raises(QueryError, match="there are 2 jobs here"):
        open_run(tmp_path)
    assert open_run(tmp_path, job="b").rows("grad_reduced")["name"].to_pylist() == ["second"]
    assert open_run(tmp_path, job="b").rows("grad_reduced", per_rank=False)["name"].to_pylist() == ["second"]


def test_a_merged_set_of_another_job_is_refused(base: Path) -> None:
    assert open_run(base / "merged-csv", job=JOB[:4]).kinds == ["actv", "grad_reduced"]
    with pytest.raises(QueryError, match=f"is a merged set of job {JOB}: it has no other job"):
        open_run(base / "merged-csv", job="f")


def test_directories_without_a_manifest_are_read_if_none_has_one(tmp_path: Path) -> None:
    for path in record(tmp_path, "csv").glob("*/*"):
        if path.suffix != ".csv":
            path.unlink()
    run = open_run(tmp_path)
    assert (run.ranks, run.kinds, run.missing) == ([0, 1], ["actv", "grad_reduced"], [])
    assert run.rows("grad_reduced", name="w", steps=0, columns=["rank", "norm"])["norm"].to_pylist()[0] == 5.0
    with pytest.raises(QueryError, match="there are no rows of whole tensors"):
        run.rows("grad_reduced", per_rank=False)
    (next(tmp_path.iterdir()) / "manifest.json").write_text("{}")
    assert len(open_run(tmp_path).ranks) == 1


def test_what_is_missing_is_said_as_the_merge_says_it(tmp_path: Path) -> None:
    record(tmp_path, without=[(1, 2)])
    path = merged_into(tmp_path, "parquet")
    assert open_run(path).missing == [
        "gaps: rank 1 has no actv at step 2",
        "gaps: rank 1 has no grad_reduced at step 2",
        "incomplete: grad_reduced w has not all its parts at step 2",
    ]
    one = RecordedRank(tmp_path / "other", 0, 3, "csv")
    one.write(0, {"grad_reduced": [Measured("w")]})
    one.manifest.dropped(1, "queue full")
    one.close()
    assert open_run(tmp_path / "other").missing == ["missing ranks: 1, 2", "dropped: rank 0, step 1: queue full"]


def test_rows_of_a_name_are_found_in_files_that_are_not_in_order_of_names(tmp_path: Path) -> None:
    path = merged_into(record(tmp_path), "parquet")
    expected = open_run(path).rows("grad_reduced", name="w").num_rows
    for file in path.glob("per_rank/grad_reduced_*.parquet"):
        rows = pyarrow.parquet.read_table(file).sort_by([("step", "descending"), ("rank", "descending")])
        pyarrow.parquet.write_table(rows, file, row_group_size=2)
    assert open_run(path).rows("grad_reduced", name="w").num_rows == expected > 0


def test_a_name_with_the_characters_of_a_glob_matches_itself() -> None:
    assert NameFilter(["a[0]"]).matches("a[0]")
    assert NameFilter(["a[0]"]).meets("a", "b")
    assert not NameFilter(["a[0]"]).meets("b", "c")
    assert NameFilter(["a*"]).meets("aa", "aa")


def test_steps_mean_what_python_means_by_them() -> None:
    assert steps_of(7) == range(7, 8)
    assert steps_of((7, 9)) == range(7, 10)
    assert steps_of(slice(2, 8, 3)) == range(2, 8, 3)


def test_manifests_are_those_of_the_ranks(tmp_path: Path) -> None:
    sharded(tmp_path)
    manifests = open_run(tmp_path).manifest
    assert {rank: manifest.rank for rank, manifest in manifests.items()} == {0: 0, 1: 1}
    (shard,) = tmp_path.glob("*-rank0-*/*.h5")
    assert read_hdf5(shard).num_rows == open_run(tmp_path).rows("grad_reduced", ranks=0).num_rows


def test_a_changed_bit_of_a_merged_file_is_never_another_number(tmp_path: Path) -> None:
    merged_set = merged_into(record(tmp_path, steps=2), "parquet")
    (path,) = (merged_set / "per_rank").glob("grad_reduced_*.parquet")
    content, expected = path.read_bytes(), str(open_run(merged_set).rows("grad_reduced").to_pylist())
    data = content[: -8 - int.from_bytes(content[-8:-4], "little")]  # without the footer, which has no checksum
    for place in range(4, len(data), max(1, len(data) // 40)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 16]) + content[place + 1 :])
        try:
            found = open_run(merged_set).rows("grad_reduced")
        except (pa.ArrowException, OSError, QueryError):
            continue
        assert str(found.to_pylist()) == expected


def test_a_merged_file_that_was_replaced_is_read_by_its_own_footer(tmp_path: Path) -> None:
    alone(tmp_path / "a", "old")
    alone(tmp_path / "b", "new")
    first, second = (merged_into(tmp_path / one, "parquet") for one in "ab")
    run = open_run(first)
    assert run.rows("grad_reduced", name="old").num_rows
    for path in (second / "per_rank").iterdir():
        path.replace(first / "per_rank" / path.name)
    assert run.rows("grad_reduced", name="new").num_rows


@pytest.mark.parametrize("format_", SOURCES)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_not_opened_and_the_error_names_it(
    format_: str, make: Callable[[Path], None], base: Path, tmp_path: Path
) -> None:
    """To open a pipe would wait for somebody to write to it."""
    merged = tmp_path / "merged"
    shutil.copytree(base / f"merged-{format_}", merged)
    (file,) = (merged / "per_rank").glob("actv_[0-9]*")
    file.unlink()
    make(file)

    with pytest.raises((QueryError, OSError), match=f"{re.escape(file.name)}.* (is not a file|was damaged)"):
        open_run(merged).rows("actv", per_rank=True)
    with pytest.raises((QueryError, OSError), match=re.escape(file.name)):
        open_run(merged).sql("select count(*) from actv")


def footers() -> int:
    return sum(type(one) is pyarrow.parquet.FileMetaData for one in gc.get_objects())


def test_footers_of_a_run_are_freed_with_it_and_wait_for_no_collection(base: Path) -> None:
    gc.collect()
    before = footers()
    gc.disable()
    try:
        run = open_run(base / "merged-parquet")
        assert run.rows("actv", name="*").num_rows
        assert footers() > before
        del run
        assert footers() == before
    finally:
        gc.enable()


@pytest.mark.parametrize("format", ["csv", "hdf5", "parquet"])
def test_the_steps_of_a_run_that_was_killed_are_those_of_its_rows(tmp_path: Path, format: str) -> None:  # noqa: A002
    """Its manifest was saved last when the first step was written."""
    one = RecordedRank(tmp_path, format=format, steps_per_record=5)
    for step in (*range(0, 12, 2), *range(12, 17)):
        one.write(step, {"grad_reduced": [Measured("w")]})
        if step == 0:
            one.flush()
            one.manifest.save()
    del one
    run = open_run(tmp_path)
    rows = run.rows("grad_reduced")["step"].unique().to_pylist()
    assert len(rows) > 5
    assert [step for each in run.steps["grad_reduced"] for step in each] == rows
