"""The comparison as a gate: what healthy repeats teach, a baseline in a repository, and a report for build servers."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from recorded_job import RecordedRank, merged
from sink_rows import Measured
from typer.testing import CliRunner

from monitor.compare.cli import app
from monitor.sinks.files import StepSpan
from monitor.stats.partials import COUNT, SUM

STEPS = 6


def compared(*arguments: object) -> tuple[int, str]:
    outcome = CliRunner().invoke(app, [str(one) for one in arguments], env={"COLUMNS": "300"})
    return outcome.exit_code, outcome.output


def recorded(base: Path, noise: float = 0.0, tokens: float = 100.0, fault: float = 0.0) -> Path:
    """A run whose tensors differ by ``noise`` times ε from those of others, which is as large in step 0.

    Args:
        fault: What is added to one weight in step 3, relative to it.
    """
    one = RecordedRank(base, format="parquet", ops=("norm",))
    for step in range(STEPS):
        off = 1 + noise * 2.0**-23
        names = [Measured(f"{layer}.weight", [off + (fault if (step, layer) == (3, 2) else 0.0)]) for layer in range(4)]
        actv = [Measured("0.output", [2.0 * off], micro) for micro in range(2)]
        run = [Measured("tokens_per_second", [tokens + step], numbers={COUNT: 1, SUM: tokens + step})]
        one.write(step, {"actv": actv, "grad_reduced": names, "run": run})
    one.close()
    return base


@pytest.fixture
def noise(tmp_path: Path) -> Path:
    """What three healthy runs teach: up to 80 times ε."""
    runs = [recorded(tmp_path / f"healthy{at}", noise=40.0 * at, tokens=100.0 + 7 * at) for at in range(3)]
    status, said = compared("--calibrate", tmp_path / "noise.json", *runs)
    assert (status, "entries, from steps 0 to 5 of 3 runs" in said) == (0, True)
    assert "largest: run/tokens_per_second: " in said
    return tmp_path / "noise.json"


def test_what_healthy_repeats_differ_by_is_allowed_and_nothing_else(tmp_path: Path, noise: Path) -> None:
    sides = recorded(tmp_path / "a"), recorded(tmp_path / "b", noise=80.0, tokens=90.0)
    assert compared(*sides)[0] == 1
    assert compared("--tolerances", noise, *sides)[0] == 0
    status, said = compared("--tolerances", noise, sides[0], recorded(tmp_path / "c", noise=40.0, fault=1e-3))
    assert status == 1
    assert "first: step 3, rank0: grad_reduced/0:2.weight" in said
    assert compared("--tolerances", noise, sides[0], recorded(tmp_path / "d", tokens=1000.0))[0] == 1


def test_limits_are_by_kind_and_numbers_of_the_run_by_name(noise: Path) -> None:
    found = json.loads(noise.read_text())
    assert (found["runs"], found["first"], found["last"]) == (3, 0, STEPS - 1)
    assert list(found["allowed"]) == ["actv", "grad_reduced", "run", "run/tokens_per_second"]
    assert found["allowed"]["grad_reduced"]["first"] == pytest.approx(2 * 80 / (1 + 8), rel=0.6)


def test_limits_of_runs_with_the_same_bits_allow_no_other_bit(tmp_path: Path) -> None:
    runs = [recorded(tmp_path / side) for side in "ab"]
    compared("--calibrate", tmp_path / "none.json", *runs)
    other = recorded(tmp_path / "c", noise=1.0)
    assert compared(runs[0], other)[0] == 0
    assert compared("--tolerances", tmp_path / "none.json", runs[0], other)[0] == 1
    assert compared("--tolerances", tmp_path / "none.json", *runs)[0] == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no limits that can be used: the file: "),
        ("[]", "has no limits that can be used: the file: "),
        ('{"allowed": {"actv": {"first": -1, "later": 2}}}', "allowed.actv.first: "),
        ('{"allowed": {"actv": {"first": 1}}}', "allowed.actv.later: "),
        ('{"allowed": {"actv": {"first": 1, "later": NaN}}}', "allowed.actv.later: "),
        ('{"allowed": {}, "more": 1}', "more: "),
    ],
)
def test_a_damaged_file_of_limits_is_refused_and_the_entry_is_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "limits.json").write_text(text)
    sides = recorded(tmp_path / "a"), recorded(tmp_path / "b")
    status, output = compared("--tolerances", tmp_path / "limits.json", *sides)
    assert status == 2
    assert said in output


def test_limits_that_somebody_has_written_hold_for_patterns_of_names(tmp_path: Path) -> None:
    sides = recorded(tmp_path / "a"), recorded(tmp_path / "b", fault=0.5)
    limits = tmp_path / "limits.json"
    limits.write_text('{"allowed": {"grad_reduced/2.*": {"first": 0, "later": 1e7}}}')
    assert compared("--tolerances", limits, *sides)[0] == 0
    limits.write_text('{"allowed": {"grad_reduced/3.*": {"first": 0, "later": 1e7}, "grad_reducd": {"first": 0, "later": 0}}}')
    status, said = compared("--tolerances", limits, *sides)
    assert (status, "Entries of --tolerances that no row fits: grad_reducd" in said) == (1, True), said
    limits.write_text('{"allowed": {"grad_reduced/0:2.weight": {"first": 0, "later": 1e7}}}')  # as findings name it
    assert compared("--tolerances", limits, *sides)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a"], "1 directories are named"),
        (["a", "b", "a"], "3 directories are named"),
        (["a", "b", "--tolerance", "0", "--tolerances", "noise.json"], "exclude each other. Choose one"),
        (["a", "b", "--calibrate", "c.json", "--tolerance", "0"], "exclude each other. Choose one"),
        (["a", "b", "--calibrate", "c.json", "--junit", "report.xml"], "--calibrate judges nothing"),
        (["a", "b", "--tolerance", "inf"], "--tolerance is inf. Give a finite number"),
        (["a", "b", "--junit", "no/report.xml"], "there is no directory for"),
        (["a", "b", "--junit", "."], ". is a directory. Name a file"),
        (["a", "b", "--tolerances", "none.json"], "none.json"),
    ],
)
def test_what_cannot_be_done_is_refused(
    tmp_path: Path, arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for side in "ab":
        recorded(tmp_path / side)
    status, output = compared(*arguments)
    assert status == 2
    assert said in output


# --- Baselines.


def test_a_merged_set_of_some_kinds_and_steps_is_a_baseline_for_whole_runs(tmp_path: Path) -> None:
    recorded(tmp_path / "a")
    merged(tmp_path / "a", kinds=["grad_reduced"], steps=StepSpan(2, 4))
    baseline = tmp_path / "a" / "merged"
    rows = 3 * 4
    for pair in ([baseline, recorded(tmp_path / "b")], [tmp_path / "b", baseline], [baseline, baseline]):
        assert compared(*pair) == (0, f"the same: {rows} rows\n")
    status, said = compared(baseline, recorded(tmp_path / "c", fault=1e-2))
    assert status == 1
    assert "first: step 3, rank0: grad_reduced/0:2.weight" in said


def test_rounding_may_have_grown_before_the_first_step_of_a_baseline(tmp_path: Path) -> None:
    recorded(tmp_path / "a")
    merged(tmp_path / "a", kinds=["grad_reduced"], steps=StepSpan(2, 4))
    other = recorded(tmp_path / "b", noise=60.0)
    assert compared(tmp_path / "a", other)[0] == 1
    assert compared(tmp_path / "a" / "merged", other)[0] == 0


def test_a_baseline_that_a_run_does_not_reach_is_missing(tmp_path: Path) -> None:
    recorded(tmp_path / "a")
    merged(tmp_path / "a", kinds=["grad_reduced"], steps=StepSpan(2, 4))
    one = RecordedRank(tmp_path / "b", format="parquet", ops=("norm",))
    for step in range(4):
        one.write(step, {"grad_reduced": [Measured(f"{layer}.weight", [1.0]) for layer in range(4)]})
    one.close()
    status, said = compared(tmp_path / "a" / "merged", tmp_path / "b")
    assert status == 1
    assert "merged alone has grad_reduced of rank 0 at step 4" in said


# --- Reports for build servers.


def cases(path: Path) -> dict[str, str | None]:
    """By name, the message of a case that failed."""
    suite = ElementTree.parse(path).getroot()
    failed = [case for case in suite if len(case)]
    assert (suite.tag, suite.attrib["tests"], suite.attrib["failures"]) == ("testsuite", str(len(suite)), str(len(failed)))
    return {case.attrib["name"]: case[0].attrib["message"] if len(case) else None for case in suite}


def test_a_junit_report_has_a_case_for_each_kind(tmp_path: Path) -> None:
    sides = recorded(tmp_path / "a"), recorded(tmp_path / "b", fault=1e-2)
    assert compared("--junit", tmp_path / "report.xml", sides[0], sides[0])[0] == 0
    assert set(cases(tmp_path / "report.xml").values()) == {None}
    assert compared("--junit", tmp_path / "report.xml", *sides)[0] == 1
    found = cases(tmp_path / "report.xml")
    assert list(found) == ["grad_reduced", "actv", "run", "everything is there"]
    assert [name for name, message in found.items() if message] == ["grad_reduced"]
    assert str(found["grad_reduced"]).startswith("step 3, rank0: grad_reduced/0:2.weight: norm: absolute error 0.01")


def test_a_junit_report_fails_where_something_is_missing_or_nothing_was_compared(tmp_path: Path) -> None:
    recorded(tmp_path / "a")
    short = RecordedRank(tmp_path / "b", format="parquet", ops=("norm",))
    short.write(0, {"grad_reduced": [Measured("\x0bname\ud800", [1.0])]})
    short.close()
    assert compared("--junit", tmp_path / "report.xml", tmp_path / "a", tmp_path / "b")[0] == 1
    assert cases(tmp_path / "report.xml")["everything is there"] == f"{tmp_path / 'a'} alone has actv of rank 0"
    assert "alone has grad_reduced of rank 0 at steps 1 to 5" in (tmp_path / "report.xml").read_text()
    for side in ("c", "d"):
        RecordedRank(tmp_path / side, format="parquet").close()
    assert compared("--junit", tmp_path / "report.xml", tmp_path / "c", tmp_path / "d")[0] == 1
    assert cases(tmp_path / "report.xml")["something was compared"] is not None
