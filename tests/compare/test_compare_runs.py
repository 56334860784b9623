"""Two monitored runs against each other."""

from __future__ import annotations

import csv
from pathlib import Path

from converted_job import job, plain
from typer.testing import CliRunner

from monitor.compare.cli import app


def compared(*arguments: object) -> tuple[int, str]:
    outcome = CliRunner().invoke(app, [str(one) for one in arguments])
    return outcome.exit_code, outcome.output


def test_two_runs_that_recorded_the_same_are_the_same(tmp_path: Path) -> None:
    for side in "ab":
        job(tmp_path / side)
    status, said = compared(tmp_path / "a", tmp_path / "b")
    assert (status, said.startswith("the same: ")) == (0, True)


def test_the_first_step_that_differs_comes_first(tmp_path: Path) -> None:
    plain(tmp_path / "a", value=1.0)
    plain(tmp_path / "b", value=2.0)
    status, said = compared(tmp_path / "a", tmp_path / "b", "-o", tmp_path / "found.csv")
    first = next(csv.DictReader((tmp_path / "found.csv").open()))
    assert status == 1
    assert (first["step"], first["rank"], first["what"], first["relative_error"]) == ("0", "rank0", "values", "0.5")
    assert f"first: step 0, rank0: {first['name']}" in said


def test_runs_of_other_ranks_have_nothing_in_common(tmp_path: Path) -> None:
    plain(tmp_path / "a", rank=0)
    plain(tmp_path / "b", rank=1)
    status, said = compared(tmp_path / "a", tmp_path / "b")
    assert status == 2
    assert "no kind of rows and no rank in common" in said.replace("\n", " ")
