"""``trainermon query``, and ``run.sql`` behind it."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from queried_job import merged_into, record
from recorded_job import RecordedRank, alone
from sink_rows import Measured
from typer.testing import CliRunner

from monitor import QueryError, open_run
from monitor.query.cli import app

CURVE = "select step, rank, norm from grad_reduced where name = 'w' order by step, rank"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = record(tmp_path_factory.mktemp("job"), steps=2)
    merged_into(directory, "parquet")
    merged_into(directory, "csv")
    return directory


def ran(*arguments: object) -> tuple[int, str, str]:
    """Exit status, output and errors."""
    result = CliRunner().invoke(app, [str(one) for one in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code, result.stdout, result.stderr


def test_without_a_query_it_lists_what_there_is_and_queries_that_work(base: Path) -> None:
    status, said, _ = ran(base)
    assert status == 0
    assert said.splitlines()[:4] == [
        "ranks  0 to 1",
        "kinds",
        "  actv          2 steps: 0 to 1",
        "  grad_reduced  2 steps: 0 to 1",
    ]
    pytest.importorskip("duckdb")
    queries = [line.strip() for line in said.splitlines() if line.strip().startswith("select ")]
    assert len(queries) == 3
    assert [ran(base, one)[0] for one in queries] == [0, 0, 0]


@pytest.mark.parametrize("of", ["", "merged-parquet", "merged-csv"])
def test_an_answer_is_a_table_csv_or_json(base: Path, of: str) -> None:
    pytest.importorskip("duckdb")
    status, said, _ = ran(base / of, CURVE)
    assert (status, said.splitlines()[:2]) == (0, ["step  rank     norm", "   0     0        5"])
    lines = list(csv.reader(ran(base / of, CURVE, "--csv")[1].splitlines()))
    assert lines[:2] == [["step", "rank", "norm"], ["0", "0", "5.0"]]
    rows = json.loads(ran(base / of, CURVE, "--json")[1])
    assert rows == open_run(base / of).sql(CURVE).to_pylist()
    assert [row["step"] for row in rows] == [0, 0, 1, 1]


def test_tables_are_the_kinds_by_rank_and_whole(base: Path) -> None:
    pytest.importorskip("duckdb")
    for run in (open_run(base), open_run(base / "merged-parquet")):
        names = [*run.kinds, *(f"{which}_{kind}" for which in ("per_rank", "global") for kind in run.kinds)]
        assert run.tables == names
        for name in names:
            kind = name.removeprefix("per_rank_").removeprefix("global_")
            rows = run.rows(kind, per_rank=not name.startswith("global_"))
            assert run.sql(f"select count(*) as rows from {name.upper()}").to_pylist() == [{"rows": rows.num_rows}]


def test_text_of_json_and_csv_keeps_nan_apart_from_nothing(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    one = RecordedRank(tmp_path)
    one.write(0, {"grad_reduced": [Measured("w", [float("nan")]), Measured("x", [])]})
    one.close()
    query = "select name, norm, mean from grad_reduced order by name"
    assert json.loads(ran(tmp_path, query, "--json")[1]) == [
        {"name": "w", "norm": "nan", "mean": "nan"},
        {"name": "x", "norm": 0.0, "mean": None},
    ]
    assert ran(tmp_path, query, "--csv")[1].splitlines()[1:] == ["w,nan,nan", "x,0.0,"]
    assert ran(tmp_path, "select * from grad_reduced where false", "--json")[1] == "[]\n"


def test_a_name_cannot_steer_the_terminal(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    alone(tmp_path, "\x1b]0;title\x07")
    assert "\\x1b]0;title\\x07" in ran(tmp_path, "select name from grad_reduced")[1]


def test_a_long_table_says_how_many_rows_it_leaves_out(base: Path) -> None:
    pytest.importorskip("duckdb")
    said = ran(base, "select * from range(250), (select 1 from actv limit 1)")[1].splitlines()
    assert said[-1] == "and 150 more rows: --csv and --json print all"


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("select * from grads", "The tables are actv, grad_reduced, per_rank_actv,"),
        ("selec", "syntax error"),
    ],
)
def test_a_query_that_cannot_be_answered_ends_with_2_and_the_tables(base: Path, query: str, said: str) -> None:
    pytest.importorskip("duckdb")
    status, out, errors = ran(base, query)
    assert (status, out) == (2, "")
    assert errors.startswith("Nothing was answered: ")
    assert said in errors


def test_what_is_missing_is_said_and_ends_with_1(tmp_path: Path) -> None:
    path = merged_into(record(tmp_path, steps=3, without=[(1, 1)]), "parquet")
    status, _, errors = ran(path)
    assert status == 1
    assert "gaps: rank 1 has no actv at step 1" in errors.splitlines()


def test_what_ranks_note_about_numbers_is_listed(tmp_path: Path) -> None:
    one = RecordedRank(tmp_path)
    one.write(0, {"grad_reduced": [Measured("w")]})
    one.manifest.note("grad_reduced", "after clipping")
    one.close()
    for path in (tmp_path, merged_into(tmp_path, "parquet")):
        assert open_run(path).notes == ["grad_reduced: after clipping"]
        assert "note  grad_reduced: after clipping" in ran(path)[1].splitlines()


def test_without_duckdb_the_error_names_the_extra_to_install(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(QueryError, match=r"pip install 'trainermon\[sql\]'"):
        open_run(base).sql(CURVE)
    assert ran(base, CURVE)[0] == 2
    assert ran(base)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "said"), [(["--csv", "--json"], "exclude each other"), (["--job", "zz"], "begins the ids of 0 jobs")]
)
def test_arguments_that_cannot_be_meant_end_with_2(base: Path, arguments: Sequence[str], said: str) -> None:
    status, _, errors = ran(base, *arguments)
    assert (status, said in errors) == (2, True)
