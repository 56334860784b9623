"""How rows stand in the files of a merged data set, and that other tools read them from there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet
import pytest
from recorded_job import JOB, RecordedRank, files, merged, sharded
from sink_rows import Measured

from monitor.merge import outputs
from monitor.merge.outputs import GLOBAL, PER_RANK, ROW_GROUP, read_merged, write_table
from monitor.merge.tables import Columns
from monitor.series import Placement, Shard

NAMES = [f"layers.{number}.é_w" for number in range(12)]
"""In this order as numbers: as text, 10 comes before 2."""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Two ranks that have recorded several names, and these in an order that is not that of text."""
    for rank in (0, 1):
        one = RecordedRank(tmp_path, rank, 2)
        one.place("grad_reduced", NAMES[0], Placement(shard=Shard((0, 1), (2,), (rank,))))
        for step in (0, 1, 3):
            rows = [Measured(name, [step + rank, float("nan")][: 1 + (name == NAMES[1])]) for name in NAMES]
            one.write(
                step, {"grad_reduced": rows, "actv": [Measured(name, [1.0], micro_step=m) for m in (1, 0) for name in NAMES]}
            )
        one.close()
    merged(tmp_path)
    return tmp_path / "merged"


def parquet_files(output: Path) -> list[Path]:
    return sorted(output.glob("*/*.parquet"))


def test_rows_stand_in_order_of_names_as_text_then_of_steps_ranks_and_micro_steps(job: Path) -> None:
    found = parquet_files(job)
    assert len(found) == 4
    for path in found:
        rows = read_merged(path).to_pylist()
        keys = [tuple(row.get(name) or 0 for name in ("name", "step", "rank")) for row in rows]
        keys = [(*key, row.get("ranks") or "", row["micro_step"] or 0) for key, row in zip(keys, rows, strict=True)]
        assert keys == sorted(keys)
        assert {row["name"] for row in rows} >= {*NAMES[1:]}


def test_what_is_missing_comes_after_all_values(tmp_path: Path) -> None:
    columns = outputs.columns_of(Columns("actv"), PER_RANK)
    values = {"kind": "actv", "rank": 0, "vpp_stage": 0, "step": 0}
    rows = [values | {"name": name, "micro_step": micro} for name in (None, "b", "a") for micro in (None, 1, 0)]
    write_table(table_of(rows, columns), tmp_path / "x.parquet")
    found = [(row["name"], row["micro_step"]) for row in read_merged(tmp_path / "x.parquet").to_pylist()]
    assert found == [(name, micro) for name in ("a", "b", None) for micro in (0, 1, None)]


def table_of(rows: list[dict[str, Any]], schema: pa.Schema) -> pa.Table:
    every = [dict.fromkeys(schema.names) | row for row in rows]
    plain = pa.schema([(f.name, pa.string() if pa.types.is_dictionary(f.type) else f.type) for f in schema])
    return pa.Table.from_pylist(every, schema=plain).cast(schema)


def test_a_file_says_its_order_and_what_it_is_about(job: Path) -> None:
    for path in parquet_files(job):
        metadata = pyarrow.parquet.read_metadata(path)
        names = metadata.schema.names
        group = metadata.row_group(0)
        keys = ["name", "step", "rank", "micro_step", "call_id"] if "rank" in names else ["name", "step", "ranks", "micro_step"]
        assert [names[one.column_index] for one in group.sorting_columns] == keys
        assert all(group.column(number).has_offset_index for number in range(metadata.num_columns))
        about = json.loads(metadata.metadata[b"monitor"])
        assert (about["schema"], about["kind"], about["folder"]) == (1, path.name.rsplit("_", 1)[0], path.parent.name)
        assert (about["job_id"], about["steps"]["count"]) == (JOB, 3)
        series = about["series"]
        facts = dict(zip(series["name"], series["elements"], strict=True))
        assert series["name"] == NAMES  # in the order of the model
        assert about["kind"] == "actv" or facts[NAMES[0]] == 2


def test_floats_are_split_by_bytes_and_text_and_whole_numbers_have_dictionaries(job: Path) -> None:
    (path,) = (job / "per_rank").glob("grad_reduced_*")
    group = pyarrow.parquet.read_metadata(path).row_group(0)
    encodings = {column["path_in_schema"]: set(column["encodings"]) for column in group.to_dict()["columns"]}
    for name, kind in zip(read_merged(path).schema.names, read_merged(path).schema.types, strict=True):
        wanted = "BYTE_STREAM_SPLIT" if pa.types.is_floating(kind) else "RLE_DICTIONARY"
        assert wanted in encodings[name], name


def test_the_same_rows_make_the_same_bytes_in_any_pieces_of_text(tmp_path: Path) -> None:
    rows = many_rows()
    write_table(rows, tmp_path / "a.parquet")
    parts = [rows.slice(0, 1000), rows.slice(1000)]
    write_table(pa.concat_tables(parts).unify_dictionaries(), tmp_path / "b.parquet")
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()


def test_the_number_of_workers_does_not_change_the_bytes(tmp_path: Path) -> None:
    sharded(tmp_path, steps=6)
    for workers in (1, 2):
        merged(tmp_path, str(workers), workers=workers, rows=4)
    assert files(tmp_path / "1") == files(tmp_path / "2")


def many_rows(names: int = 40, steps: int = 50, ranks: int = 40) -> pa.Table:
    """Rows of steps, in each of them of ranks, in each of these of names, as a merge has them before they are sorted."""
    count = names * steps * ranks
    name, number = np.arange(count) % names, np.arange(count)
    columns = {
        "kind": pa.array(["grad_reduced"] * count).dictionary_encode(),
        "rank": pa.array(number // names % ranks),
        "vpp_stage": pa.array(np.zeros(count, dtype=np.int64)),
        "name": pa.DictionaryArray.from_arrays(pa.array(name.astype(np.int32)), [f"w{number}" for number in range(names)]),
        "step": pa.array(number // (names * ranks)),
        "norm": pa.array(np.random.default_rng(0).random(count)),
    }
    schema = outputs.columns_of(Columns("grad_reduced"), PER_RANK)
    return pa.table([columns.get(one.name, pa.nulls(count, one.type)) for one in schema], schema=schema)


def test_a_question_about_one_name_touches_few_row_groups(tmp_path: Path) -> None:
    write_table(many_rows(), tmp_path / "x.parquet")
    metadata = pyarrow.parquet.read_metadata(tmp_path / "x.parquet")
    assert metadata.num_row_groups == -(-metadata.num_rows // ROW_GROUP) == 5
    column = metadata.schema.names.index("name")
    statistics = [metadata.row_group(number).column(column).statistics for number in range(5)]
    for name in ("w7", "w30"):
        assert sum(one.min <= name <= one.max for one in statistics) <= 2
    (fragment,) = pyarrow.dataset.dataset(tmp_path / "x.parquet").get_fragments()
    assert len(fragment.split_by_row_group(pyarrow.dataset.field("name") == "w7")) <= 2


def test_each_row_group_has_no_other_names_than_its_own(tmp_path: Path) -> None:
    write_table(many_rows(), tmp_path / "x.parquet")
    file = pyarrow.parquet.ParquetFile(tmp_path / "x.parquet", read_dictionary=["name"])
    for number in range(file.num_row_groups):
        (chunk,) = file.read_row_group(number, ["name"])["name"].chunks
        assert len(chunk.dictionary) == len(chunk.unique()) < 40


def test_no_rows_make_a_file_without_any(tmp_path: Path) -> None:
    schema = outputs.columns_of(Columns("actv"), GLOBAL)
    write_table(schema.empty_table(), tmp_path / "x.parquet")
    assert read_merged(tmp_path / "x.parquet").schema.remove_metadata() == schema
    assert read_merged(tmp_path / "x.parquet").num_rows == 0


@pytest.mark.parametrize(
    "kept",
    [Columns("actv"), Columns("other"), Columns.of("grad_reduced", asked=("rms", "abs_p50"), histograms=True, checksums=True)],
    ids=lambda k: k.kind,
)
def test_what_is_read_has_the_columns_and_types_of_its_kind(tmp_path: Path, kept: Columns) -> None:
    for rows in (PER_RANK, GLOBAL):
        schema = outputs.columns_of(kept, rows)
        write_table(table_of([{"kind": kept.kind, "name": "w", "step": 1}], schema), tmp_path / f"{len(schema)}.parquet")
        assert read_merged(tmp_path / f"{len(schema)}.parquet").schema.remove_metadata() == schema


def by_pyarrow(path: Path) -> list[dict[str, Any]]:
    return pyarrow.parquet.read_table(path).to_pylist()


def by_polars(path: Path) -> list[dict[str, Any]]:
    return polars.scan_parquet(path).collect().to_dicts()


def by_pandas(path: Path) -> list[dict[str, Any]]:
    frame = pytest.importorskip("pandas").read_parquet(path, dtype_backend="pyarrow")
    return pa.Table.from_pandas(frame, preserve_index=False).to_pylist()


def by_duckdb(path: Path) -> list[dict[str, Any]]:
    return pytest.importorskip("duckdb").sql(f"select * from '{path}'").to_arrow_table().to_pylist()


@pytest.mark.parametrize("read", [by_pyarrow, by_polars, by_pandas, by_duckdb])
def test_other_tools_read_the_same_rows(job: Path, read: Callable[[Path], list[dict[str, Any]]]) -> None:
    for path in parquet_files(job):
        assert str(read(path)) == str(read_merged(path).to_pylist())


def test_polars_takes_text_for_text_and_finds_one_name_in_all_files(job: Path) -> None:
    rows = polars.scan_parquet(job / "per_rank" / "grad_reduced_*.parquet").filter(polars.col("name") == NAMES[3]).collect()
    assert rows.schema["name"] == polars.String
    assert rows["step"].to_list() == [0, 0, 1, 1, 3, 3]
    assert rows["rank"].to_list() == [0, 1] * 3
