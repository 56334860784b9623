from __future__ import annotations

import math
import multiprocessing
import os
import resource
import signal
import sqlite3
import tempfile
from pathlib import Path

import pytest
from converted_job import files, job, plain, query
from recorded_job import RecordedRank
from sink_rows import SIX_OPS, Measured

from monitor.convert import ConversionError, CSV2DBConfig, csv2db, sqlite
from monitor.sinks.csv import read_csv


def converted(base: Path, output: str = "db", **options: object) -> Path:
    return csv2db(CSV2DBConfig(base, output_dirpath=base / output, **options)).output  # type: ignore[arg-type]


def in_csv(base: Path, kind: str) -> list[tuple[object, ...]]:
    """Rank, chunk, name, step, micro-step and ops of every row, as the files have them."""
    found = []
    for path in base.glob(f"*-rank*-*/{kind}_[0-9]*.csv"):
        rank = int(path.parent.name.split("-rank")[1].split("-")[0])
        for row in read_csv(path).to_pylist():
            identity = [row.pop(name, None) for name in ("vpp_stage", "name", "step", "micro_step")]
            found.append((rank, *identity, *(cell(value) for value in row.values())))
    return found


def cell(value: object) -> object:
    return "nan" if isinstance(value, float) and math.isnan(value) else value


@pytest.mark.parametrize("kind", ["actv", "grad_reduced", "other", "replica"])
def test_every_row_is_there_with_every_value(tmp_path: Path, kind: str) -> None:
    job(tmp_path, ops=(*SIX_OPS, "infs", "shape", "dtype"))
    rows = query(converted(tmp_path, step_partition=3), f"SELECT * FROM {kind}")
    expected = in_csv(tmp_path, kind)
    assert len(expected) > 6
    assert sorted(rows, key=repr) == sorted(expected, key=repr)


def test_missing_nan_and_infinity_are_three_things(tmp_path: Path) -> None:
    one = RecordedRank(tmp_path, format="csv", ops=("mean", "nans"))
    values = {"missing": [], "nan": [math.nan], "inf": [math.inf], "-inf": [-math.inf], "zero": [0.0]}
    one.write(0, {"other": [Measured(name, some) for name, some in values.items()]})
    one.close()
    assert query(converted(tmp_path), "SELECT name, mean, typeof(mean), nans FROM other") == [
        ("missing", None, "null", 0),
        ("nan", "nan", "text", 1),
        ("inf", math.inf, "real", 0),
        ("-inf", -math.inf, "real", 0),
        ("zero", 0.0, "real", 0),
    ]


def test_steps_share_a_table_by_partitions(tmp_path: Path) -> None:
    job(tmp_path, ranks=1, steps=[0, 3, 4, 11])
    path = converted(tmp_path, step_partition=4, data_type_list=["other", "grad_reduced"])
    made = [
        name
        for (name,) in query(path, "SELECT name FROM sqlite_master WHERE type = 'table' AND name LIKE 'metric\\_%' ESCAPE '\\'")
    ]
    assert made == ["metric_stats", *(f"metric_{kind}_step_{first}_{first + 3}" for kind in (1, 2) for first in (0, 4, 8))]
    assert query(path, "SELECT DISTINCT step FROM metric_1_step_0_3") == [(0,), (3,)]
    assert query(path, "SELECT * FROM monitoring_metrics") == [(1, "grad_reduced"), (2, "other")]
    assert query(path, "SELECT stat_name FROM metric_stats WHERE metric_id = 2 ORDER BY 1") == [(op,) for op in sorted(SIX_OPS)]


@pytest.mark.parametrize(
    ("condition", "index"), [("name = 'layers.0.w' AND rank = 1", "by_target"), ("step = 5 AND rank = 1", "by_step")]
)
def test_a_tensor_over_steps_and_a_step_over_tensors_are_found_without_a_scan(
    tmp_path: Path, condition: str, index: str
) -> None:
    job(tmp_path)
    path = converted(tmp_path, step_partition=4)
    plan = [
        str(row[3]) for row in query(path, f"EXPLAIN QUERY PLAN SELECT step, name, norm FROM grad_reduced WHERE {condition}")
    ]
    assert [line for line in plan if "SCAN" in line] == []
    for first in (0, 4):
        assert any(f"metric_2_step_{first}_{first + 3}_{index}" in line for line in plan)


def test_rows_of_a_step_stand_as_they_were_measured(tmp_path: Path) -> None:
    names = ["z", "a", "m", "b"]
    one = RecordedRank(tmp_path, format="csv")
    for step in range(3):
        one.write(step, {"grad_reduced": [Measured(name) for name in names[step:] + names[:step]]})
    one.close()
    rows = query(converted(tmp_path), "SELECT name FROM grad_reduced WHERE step = 2 AND rank = 0")
    assert rows == [("m",), ("b",), ("z",), ("a",)]


def test_a_row_about_the_whole_step_is_not_one_of_micro_step_0(tmp_path: Path) -> None:
    job(tmp_path, ranks=1, steps=[0])
    path = converted(tmp_path)
    assert query(path, "SELECT DISTINCT micro_step FROM actv ORDER BY 1") == [(None,), (0,), (12,)]
    assert query(path, "SELECT DISTINCT micro_step FROM grad_reduced") == [(None,)]


def test_an_op_that_was_added_later_is_missing_before(tmp_path: Path) -> None:
    plain(tmp_path, ops=("norm",))
    plain(tmp_path, rank=1, ops=("max", "norm"), value=2.0)
    rows = query(converted(tmp_path), "SELECT DISTINCT rank, norm, max FROM grad_reduced")
    assert rows == [(0, 1.0, None), (1, 2.0, 2.0)]


def test_it_says_how_far_it_goes(tmp_path: Path) -> None:
    job(tmp_path, steps=[2, 9])
    assert dict(query(converted(tmp_path), "SELECT * FROM global_stats")) == {
        "max_rank": 1,
        "min_step": 2,
        "max_step": 9,
        "step_partition_size": 500,
    }


def test_the_number_of_processes_and_the_moment_change_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job(tmp_path)
    monkeypatch.setattr(sqlite, "BATCH_ROWS", 50)
    one, again, many = (converted(tmp_path, str(i), process_num=n) for i, n in enumerate((1, 1, 2)))
    assert one.read_bytes() == again.read_bytes() == many.read_bytes()


def test_how_rows_are_cut_into_tasks_changes_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job(tmp_path)
    whole = converted(tmp_path, "whole").read_bytes()
    monkeypatch.setattr(sqlite, "BATCH_ROWS", 1)
    assert converted(tmp_path, "cut").read_bytes() == whole


def test_more_tables_than_a_view_can_join_have_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "MOST_JOINED", 2)
    plain(tmp_path, steps=range(3))
    path = converted(tmp_path, step_partition=1)
    assert query(path, "SELECT count(*) FROM sqlite_master WHERE type = 'view'") == [(0,)]
    assert query(path, "SELECT norm FROM metric_1_step_2_2") == [(1.0,)]


def test_a_view_joins_as_many_tables_as_sqlite_takes(tmp_path: Path) -> None:
    plain(tmp_path, steps=range(sqlite.MOST_JOINED), steps_per_record=1000)
    assert query(converted(tmp_path, step_partition=1), "SELECT norm FROM grad_reduced WHERE step = 499") == [(1.0,)]


def test_the_database_joins_what_is_in_a_directory_and_replaces_nothing(tmp_path: Path) -> None:
    plain(tmp_path)
    before = files(tmp_path)
    path = csv2db(CSV2DBConfig(tmp_path, output_dirpath=tmp_path)).output
    assert files(tmp_path) == before | {"monitor_metrics.db": path.read_bytes()}
    with pytest.raises(ConversionError, match=r"monitor_metrics\.db exists"):
        csv2db(CSV2DBConfig(tmp_path, output_dirpath=tmp_path))


def test_a_full_disk_leaves_nothing_and_is_said_in_one_sentence(tmp_path: Path) -> None:
    job(tmp_path)
    before = files(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(ConversionError, match="the database cannot be written"):
            converted(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files(tmp_path) == before


def _killed_in_the_middle(base: Path, temporary: Path) -> None:
    tempfile.tempdir = str(temporary)  # a process that is killed leaves what it has there
    sqlite.MetricTables.make = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    converted(base)


def test_a_conversion_that_is_killed_leaves_nothing_under_the_name_and_the_next_one_succeeds(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    plain(tmp_path)
    arguments = (tmp_path, tmp_path_factory.mktemp("temporary"))
    process = multiprocessing.get_context("spawn").Process(target=_killed_in_the_middle, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not (tmp_path / "db").exists()
    converted(tmp_path)
    assert {path.name for path in tmp_path.iterdir() if "rank" not in path.name} == {"db"}


def test_the_file_is_sound(tmp_path: Path) -> None:
    job(tmp_path)
    path = converted(tmp_path, step_partition=2)
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    connection.close()
