from __future__ import annotations

from pathlib import Path

import pytest
from converted_job import curves, plain, query
from typer import Typer
from typer.testing import CliRunner

from monitor.convert.cli import database_app, tensorboard_app
from monitor.query.batches import SHOWN_KINDS

APPS = pytest.mark.parametrize("app", [tensorboard_app, database_app], ids=["tensorboard", "db"])


@pytest.fixture
def job(tmp_path: Path) -> Path:
    plain(tmp_path, steps=range(10), world=1)
    return tmp_path


@APPS
def test_a_clean_conversion_ends_with_0_and_says_where_the_result_is(job: Path, app: Typer) -> None:
    result = CliRunner().invoke(app, [str(job), "-o", str(job / "out")])
    assert result.exit_code == 0, result.output
    assert f"10 rows of 1 rank written to {job / 'out'}" in result.output


@APPS
def test_one_with_files_set_aside_ends_with_1_and_names_them(job: Path, app: Typer) -> None:
    torn = next(job.iterdir()) / "grad_reduced_20-24.csv"
    torn.write_text("[bold]torn")
    result = CliRunner().invoke(app, [str(job)])
    assert result.exit_code == 1
    assert f"set aside: {torn}" in result.output


@APPS
def test_one_of_a_job_whose_other_ranks_left_no_directory_ends_with_1_and_names_them(tmp_path: Path, app: Typer) -> None:
    plain(tmp_path, rank=1, world=3)
    result = CliRunner().invoke(app, [str(tmp_path), "-o", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert "missing ranks: 0, 2" in result.output


@APPS
def test_ranks_that_recorded_no_row_end_with_1_as_not_looked_at(tmp_path: Path, app: Typer) -> None:
    plain(tmp_path, steps=(), world=1)
    result = CliRunner().invoke(app, [str(tmp_path), "-o", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert result.output.startswith("Nothing was converted and not looked at: ")
    assert not (tmp_path / "out").exists()


@APPS
@pytest.mark.parametrize(
    "arguments",
    [["--kinds", "actv"], ["--kinds", "nonsense"], ["--time-end", "Jan01_00-00-00"], ["--time-start", "now"]],
)
def test_where_nothing_is_converted_it_ends_with_2_one_line_and_nothing_left(
    job: Path, app: Typer, arguments: list[str]
) -> None:
    before = {path.name for path in job.iterdir()}
    result = CliRunner().invoke(app, [str(job), *arguments])
    assert result.exit_code == 2
    assert result.output.startswith("Nothing was converted: ")
    assert result.output.count("\n") == 1
    assert {path.name for path in job.iterdir()} == before


@APPS
def test_an_option_that_is_wrong_ends_with_2(job: Path, app: Typer) -> None:
    assert CliRunner().invoke(app, [str(job), "--workers", "0"]).exit_code == 2


@APPS
def test_the_help_says_what_to_do_with_the_result(app: Typer) -> None:
    said = " ".join(CliRunner().invoke(app, ["--help"]).output.split())
    assert "sqlite3 OUTPUT/monitor_metrics.db" in said or "tensorboard --logdir OUTPUT" in said
    assert all(kind in said for kind in SHOWN_KINDS)
    assert "Exit status" in said
    assert "default: (DIR/{time}_csv2" in said


def test_all_options_reach_the_database(job: Path) -> None:
    plain(job, job="f" * 32, suffix="f" * 8, value=2.0, world=1)
    options = ["--job", "f", "--time-start", "Dec03_21-34-40", "--time-end", "Dec03_21-34-40", "--kinds", "grad_reduced, other"]
    output = job / "new" / "out"
    result = CliRunner().invoke(
        database_app, [str(job), "-o", str(output), "--step-partition", "2", "--workers", "2", *options]
    )
    assert result.exit_code == 0, result.output
    assert query(output / "monitor_metrics.db", "SELECT norm FROM metric_1_step_2_3") == [(2.0,)]


def test_all_options_reach_the_curves(job: Path) -> None:
    plain(job, job="f" * 32, suffix="f" * 8, value=2.0, world=1)
    options = ["--job", "f", "--time-start", "Dec03_21-34-40", "--time-end", "Dec03_21-34-40", "--kinds", "grad_reduced"]
    result = CliRunner().invoke(tensorboard_app, [str(job), "-o", str(job / "out"), "--workers", "2", *options])
    assert result.exit_code == 0, result.output
    assert curves(job / "out" / "rank0" / "grad_reduced")["0:w/rank0/grad_reduced_max"][0] == (0, 2.0)
