"""Whatever the format, a run converts to the same as its CSV, and so does a merged set of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from converted_job import curves, files, job, query
from evidence import PROVES
from recorded_job import RecordedRank, merged
from sink_rows import Measured
from typer.testing import CliRunner

from monitor.convert import CSV2DBConfig, csv2db, csv2tensorboard_by_step, sqlite, tensorboard
from monitor.convert.cli import app, database_app, tensorboard_app
from monitor.stats.partials import COUNT, MAX, SMALLS, SUM, SUMSQ

FORMATS = ("csv", "hdf5", "parquet")
OPS = ("norm", "nans", "mean", "shape", "magnitude_histogram")
ROWS = {
    "actv": [Measured(name, [3.0, -4.0], micro_step=micro) for micro in (0, 1) for name in ("b.output", "a.output")],
    "grad_reduced": [Measured("w", [0.5, float("nan")]), Measured("empty", []), Measured("b", [8.0, 2.0], vpp_stage=1)],
    "other": [Measured("all_reduce.post_0", [2.0, 2.0], calls=3), Measured("loss_scale", [65536.0])],
    "mg_direction": [Measured("w", numbers={COUNT: 8, SUM: 6.0}), Measured("b", numbers={COUNT: 2})],
    "linear_hook": [Measured("h.0.weight", numbers={COUNT: 20, SMALLS: 1, SUMSQ: 25.0, MAX: 2.0})],
    "replica": [Measured("grad_reduced/w", [2.0])],
}
"""Every sort of kind."""


def recorded(base: Path, format: str | Sequence[str], ranks: int = 2, steps: int = 7, **options: object) -> Path:  # noqa: A002
    for rank in range(ranks):
        one = RecordedRank(base, rank, ranks, format, ops=OPS, counted_kinds=["other"], **options)  # type: ignore[arg-type]
        for step in range(steps):
            one.write(step, ROWS)
        one.close()
    return base


def database(base: Path, **options: object) -> Path:
    return csv2db(CSV2DBConfig(base, output_dirpath=base / "db", **options)).output  # type: ignore[arg-type]


def views(path: Path) -> dict[str, list[dict[str, object]]]:
    """The rows of each kind, as they come, by column."""
    found = {}
    for (kind,) in query(path, "SELECT name FROM sqlite_master WHERE type = 'view' ORDER BY name"):
        columns = [name for (name,) in query(path, f"SELECT name FROM pragma_table_info('{kind}')")]
        rows = query(path, f"SELECT * FROM {kind} ORDER BY rank, step")
        found[str(kind)] = [dict(zip(map(str, columns), row, strict=True)) for row in rows]
    return found


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, object]]]:
    return views(database(recorded(tmp_path_factory.mktemp("csv"), "csv")))


@pytest.mark.parametrize("format", ["hdf5", "parquet"])
def test_every_format_gives_the_database_of_csv(
    tmp_path: Path,
    format: str,  # noqa: A002
    expected: dict[str, list[dict[str, object]]],
) -> None:
    assert list(expected) == ["actv", "grad_reduced", "linear_hook", "other", "replica"]
    assert views(database(recorded(tmp_path, format))) == expected


@pytest.mark.parametrize("of", FORMATS)
@pytest.mark.parametrize("into", FORMATS)
def test_a_merged_set_gives_the_rows_of_its_ranks(
    tmp_path: Path, of: str, into: str, expected: dict[str, list[dict[str, object]]]
) -> None:
    merged(recorded(tmp_path, of), format=into)
    found = views(database(tmp_path / "merged"))
    assert list(found) == list(expected)
    for kind, rows in expected.items():
        names = [name for name in rows[0] if any(row[name] is not None for row in rows)]
        known, whole = ([[row[name] for name in names] for row in each] for each in (found[kind], rows))
        if (of, into) != ("csv", "parquet"):  # which says nothing about the order of measurement
            assert known == whole
        assert sorted(map(repr, known)) == sorted(map(repr, whole))


@pytest.mark.parametrize("format", ["hdf5", "parquet"])
def test_the_curves_are_those_that_the_format_tensorboard_writes(tmp_path: Path, format: str) -> None:  # noqa: A002
    job(tmp_path, format=[format, "tensorboard"])
    csv2tensorboard_by_step(tmp_path, output_dirpath=tmp_path / "curves")
    merged(tmp_path)
    csv2tensorboard_by_step(tmp_path / "merged", data_type_list=["grad_reduced"], output_dirpath=tmp_path / "of-merged")
    for rank in range(2):
        (own,) = tmp_path.glob(f"*-rank{rank}-*")
        found = [point for run in (tmp_path / "curves" / f"rank{rank}").iterdir() for point in curves(run).items()]
        assert repr(sorted(found)) == repr(sorted(curves(own).items()))  # NaN is not itself
        of_merged = curves(tmp_path / "of-merged" / f"rank{rank}" / "grad_reduced")
        assert {repr(one) for one in curves(own).items() if "/grad_reduced_" in one[0]} <= {
            repr(one) for one in of_merged.items()
        }


@pytest.mark.skipif(not PROVES, reason="databases and events have a case of it each: make prove runs it")
@pytest.mark.parametrize("source", ["hdf5", "parquet", "merged"])
def test_neither_processes_nor_batches_of_ranks_change_a_byte(
    tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = recorded(tmp_path, "hdf5" if source == "merged" else source)
    if source == "merged":
        merged(base, format="parquet", rows=20)
        base /= "merged"
    made = []
    for number, (rows, processes) in enumerate(((10**6, 1), (10, 1), (10, 2 if source == "merged" or PROVES else 1))):
        for room in (sqlite, tensorboard):
            monkeypatch.setattr(room, "BATCH_ROWS", rows)
        output = tmp_path / f"out-{number}"
        csv2db(CSV2DBConfig(base, process_num=processes, data_type_list=["actv", "grad_reduced"], output_dirpath=output / "db"))
        csv2tensorboard_by_step(base, process_num=processes, output_dirpath=output / "curves")
        made.append(files(output))
    assert made[1] == made[2]
    assert made[0] == made[1] or source == "merged"  # whose rows are in order of files, and then of ranks


def test_where_a_rank_has_both_the_numbers_are_the_exact_ones(tmp_path: Path) -> None:
    one = RecordedRank(tmp_path, format=["csv", "hdf5"], ops=("norm",), ndigits=2)
    one.write(0, {"grad_reduced": [Measured("w", [1 / 3])]})
    one.close()
    assert query(database(tmp_path), "SELECT norm FROM grad_reduced") == [(1 / 3,)]


def test_what_the_report_of_a_merge_says_is_missing_is_said_again(tmp_path: Path) -> None:
    one = RecordedRank(tmp_path, 0, 3)
    one.write(0, {"grad_reduced": [Measured("w")]})
    one.manifest.dropped(1, "queue full")
    one.close()
    merged(tmp_path)
    result = csv2db(CSV2DBConfig(tmp_path / "merged"))
    assert result.absent == ("missing ranks: 1, 2", "dropped: rank 0, step 1: queue full")
    assert result.set_aside == ()


def test_the_old_commands_are_convert_with_a_target(tmp_path: Path) -> None:
    base = recorded(tmp_path, "parquet", ranks=1)
    for to, old in (("sqlite", database_app), ("tensorboard", tensorboard_app)):
        for command, more in ((app, ["--to", to]), (old, [])):
            ended = CliRunner().invoke(command, [str(base), "-o", str(tmp_path / f"{to}-{len(more)}"), *more])
            assert ended.exit_code == 0, ended.output
        assert files(tmp_path / f"{to}-0") == files(tmp_path / f"{to}-2")
        assert "--to" not in CliRunner().invoke(old, ["--help"]).output
    assert CliRunner().invoke(app, [str(base)]).exit_code == 2
