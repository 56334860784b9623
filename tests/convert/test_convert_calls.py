"""How many calls a row combines comes through the converters."""

from __future__ import annotations

from pathlib import Path

import pytest
from converted_job import curves, query
from recorded_job import RecordedRank
from sink_rows import Measured

from monitor.convert import CSV2DBConfig, csv2db, csv2tensorboard_by_step


def communicating(base: Path, *ranks: int, counted: bool = True) -> None:
    """Ranks that call an operator three times in a step, and have a loss scale."""
    for rank in ranks:
        one = RecordedRank(base, rank, 2, "csv", ops=("norm",), counted_kinds=["other"] if counted else [])
        for step in range(2):
            rows = [Measured("all_reduce.post_0", calls=3), Measured("loss_scale", [65536.0])]
            one.write(step, {"other": rows, "grad_reduced": [Measured("w")]})
        one.close()


def database(base: Path) -> Path:
    return csv2db(CSV2DBConfig(base, output_dirpath=base / "db")).output


def test_the_database_has_them_as_integers_and_null_where_a_row_is_not_of_calls(tmp_path: Path) -> None:
    communicating(tmp_path, 0)
    path = database(tmp_path)
    found = query(path, "SELECT step, name, norm, calls, typeof(calls) FROM other")
    rows = (("all_reduce.post_0", 5.0, 3, "integer"), ("loss_scale", 65536.0, None, "null"))
    assert found == [(step, *row) for step in range(2) for row in rows]
    assert query(path, "SELECT sum(calls) FROM other") == [(6,)]


def test_a_kind_that_counts_no_calls_has_no_such_column_in_the_database(tmp_path: Path) -> None:
    communicating(tmp_path, 0)
    of_kinds = "SELECT metric_name, stat_name FROM metric_stats JOIN monitoring_metrics USING (metric_id) ORDER BY 1, 2"
    assert query(database(tmp_path), of_kinds) == [("grad_reduced", "norm"), ("other", "calls"), ("other", "norm")]


@pytest.mark.parametrize("first", [True, False])
def test_files_from_before_calls_were_counted_are_null_beside_those_that_have_them(tmp_path: Path, first: bool) -> None:
    communicating(tmp_path, 0, counted=first)
    communicating(tmp_path, 1, counted=not first)
    found = query(database(tmp_path), "SELECT DISTINCT rank, calls FROM other WHERE name = 'all_reduce.post_0' ORDER BY 1")
    assert found == [(0, 3 if first else None), (1, None if first else 3)]


def test_the_curves_are_those_that_the_format_tensorboard_writes(tmp_path: Path) -> None:
    communicating(tmp_path, 0)
    csv2tensorboard_by_step(str(tmp_path), None, None, output_dirpath=tmp_path / "curves")
    own = RecordedRank(tmp_path / "recorded", 0, 1, "tensorboard", ops=("norm",), counted_kinds=["other"])
    for step in range(2):
        own.write(step, {"other": [Measured("all_reduce.post_0", calls=3), Measured("loss_scale", [65536.0])]})
    own.close()
    found = curves(tmp_path / "curves" / "rank0" / "other")
    assert found == curves(own.directory)
    assert found["0:all_reduce.post_0/rank0/other_calls"] == [(0, 3.0), (1, 3.0)]
    assert [tag for tag in found if tag.endswith("calls")] == ["0:all_reduce.post_0/rank0/other_calls"]
