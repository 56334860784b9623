from __future__ import annotations

import json
from pathlib import Path

import pytest
from recorded_job import JOB, RecordedRank
from sink_rows import Measured
from typer.testing import CliRunner

from monitor.merge.cli import app


@pytest.fixture
def job(tmp_path: Path) -> Path:
    one = RecordedRank(tmp_path)
    for step in range(10):
        one.write(step, {"grad_reduced": [Measured("[bold]w", [float(step)])]})
    one.close()
    return tmp_path


def test_a_clean_merge_ends_with_0_and_says_where_the_result_is(job: Path) -> None:
    result = CliRunner().invoke(app, [str(job)])
    assert result.exit_code == 0, result.output
    assert str(job / "merged") in result.output
    assert (job / "merged" / "report.json").exists()


def test_a_merge_with_a_rank_missing_ends_with_1_and_names_it(tmp_path: Path) -> None:
    one = RecordedRank(tmp_path, rank=1, world_size=2)
    one.write(0, {"grad_reduced": [Measured("w")]})
    one.close()
    result = CliRunner().invoke(app, [str(tmp_path)])
    assert result.exit_code == 1
    assert "missing ranks  0" in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["--job", "no"],
        ["--steps", "5"],
        ["--steps", "9:1"],
        ["--time-start", "yesterday"],
        ["--kinds", "actv"],
        ["--kinds", "grad_reduced,grad_reducd"],
        ["--time-end", "Jan01_00-00-00"],
    ],
)
def test_where_nothing_is_merged_it_ends_with_2_and_leaves_nothing(job: Path, arguments: list[str]) -> None:
    before = {path.name for path in job.iterdir()}
    result = CliRunner().invoke(app, [str(job), *arguments])
    assert result.exit_code == 2
    assert "Nothing was merged" in result.output
    assert {path.name for path in job.iterdir()} - before <= {".merged.lock"}


def test_a_kind_that_the_job_has_not_recorded_is_named_beside_those_that_it_has(job: Path) -> None:
    result = CliRunner().invoke(app, [str(job), "--kinds", "grad_reduced,grad_reducd"], env={"COLUMNS": "400"})
    assert f"--kinds names 'grad_reducd'. Job {JOB} has recorded: grad_reduced." in result.output


def test_only_what_was_asked_for_is_merged(job: Path) -> None:
    options = ["-o", str(job / "few"), "--steps", "3:6", "--kinds", "grad_reduced", "--format", "parquet", "--workers", "2"]
    result = CliRunner().invoke(app, [str(job), *options, "--time-start", "Dec01_00-00-00"])
    assert result.exit_code == 0, result.output
    assert json.loads((job / "few" / "report.json").read_text())["steps"]["ranges"] == [[3, 6, 1]]
    assert {path.suffix for path in (job / "few" / "global").iterdir()} == {".parquet"}


def test_of_a_killed_run_the_steps_that_its_files_have_are_not_said_to_be_missing(tmp_path: Path) -> None:
    one = RecordedRank(tmp_path)
    for step in (0, *range(10, 16)):
        one.write(step, {"grad_reduced": [Measured("w", [float(step)])]})
    one.close()
    for path in tmp_path.glob("*/manifest.json"):  # as of a kill after its first save
        known = json.loads(path.read_text())
        known["steps"]["written"] = {"count": 1, "ranges": [[0, 0, 1]]}
        path.write_text(json.dumps({**known, "closed": False}))
    for number in range(3):
        (path.parent / f".grad_reduced_{20 + number}-{20 + number}.csv.part").write_text("")
    said = CliRunner().invoke(app, [str(tmp_path)], env={"COLUMNS": "400"}).output
    assert "steps 0, 10 to 15" in said
    assert "steps after 15 may be missing" in said
    assert (
        " and 2 more: unfinished: the run still writes it, or was killed. A run that continues in its directory (append_output"
        in said
    )


def test_ops_that_were_not_recorded_are_named_in_one_line_with_the_remedy(tmp_path: Path) -> None:
    one = RecordedRank(tmp_path, format="csv", ops=("norm",))
    one.write(0, {kind: [Measured("w", [1.0])] for kind in ("grad_reduced", "param_origin")})
    one.close()
    said = CliRunner().invoke(app, [str(tmp_path)], env={"COLUMNS": "400"}).output
    lines = [line for line in said.splitlines() if "`ops`" in line]
    assert len(lines) == 1
    assert lines[0].startswith("not recorded  ")
    assert "not combined" not in said


@pytest.mark.parametrize(
    ("steps", "advice"), [((), "No collected step has ended: see start_step"), ((0, 1), "Switch a kind on, such as")]
)
def test_a_job_that_recorded_no_rows_is_reported_in_one_sentence(steps: tuple[int, ...], advice: str, tmp_path: Path) -> None:
    rank = RecordedRank(tmp_path)
    for step in steps:
        rank.write(step, {})
    rank.close()
    result = CliRunner().invoke(app, [str(tmp_path)], env={"COLUMNS": "400"})
    assert result.exit_code == 1
    assert f"recorded no rows, so there is nothing to merge. {advice}" in " ".join(result.output.split())
    assert "not looked at" not in result.output
