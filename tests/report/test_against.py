"""A report says how its run differs from another one, and shows the curves and ratios of both."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded_job import RecordedRank, sharded
from reported_job import NAMES, STEPS, WHEN, Fault, none, record
from sink_rows import Measured
from typer.testing import CliRunner

from monitor.compare.runs import How
from monitor.query.opened import open_run
from monitor.report import aligned
from monitor.report.against import OtherRun
from monitor.report.aligned import AlignedNumbers
from monitor.report.checks import CheckResult
from monitor.report.cli import app
from monitor.report.facts import facts_of
from monitor.report.findings import BAD, GOOD, NOT_LOOKED_AT, Place
from monitor.report.history import Axis
from monitor.report.model import Model
from monitor.stats.partials import COUNT, SUM

NAME = NAMES["actv"][2]


def doubled(kind: str = "actv", name: str = NAME, ranks: tuple[int, ...] = (0, 1), factor: float = 2.0) -> Fault:
    """A tensor is larger from a step on."""

    def fault(rank: int, step: int, of: str, one: str, values: np.ndarray) -> np.ndarray:
        return values * factor if (of, one) == (kind, name) and step >= WHEN and rank in ranks else values

    return fault


def pair(folder: Path, fault: Fault = none, **options: Any) -> tuple[Path, Path]:
    """The other run, and the run with a fault."""
    return record(folder / "other"), record(folder / "run", fault, **options)


def constant(base: Path, names: Mapping[str, list[str]], loss: float | None = None, **of: list[float]) -> Path:
    """One rank whose tensors stay the same for four steps.

    Args:
        loss: In the first step; it falls.
        of: The elements of tensors, by step.
    """
    one = RecordedRank(base, 0, 1, "parquet", ops=("norm", "mean"))
    for step in range(4):
        rows = {kind: [Measured(name, of.get(f"{name}{step}", [1.0, 2.0])) for name in each] for kind, each in names.items()}
        if loss is not None:
            rows["run"] = [Measured("loss", numbers={COUNT: 1.0, SUM: loss / (step + 1)})]
        one.write(step, rows)
    one.close()
    return base


def against(other: Path, run: Path, how: How = How()) -> tuple[dict[str, Any], CheckResult, Model]:  # noqa: B008 - it is frozen
    """The section of the page, the check, and the model with both arrays."""
    model = Model({})
    with facts_of(str(run)) as facts:
        found = OtherRun(str(other), how).compared_with(facts)
    found.show_in(model)
    return model.data["against"], found.check, model


def row_of(section: Mapping[str, Any], kind: str, name: str) -> int:
    return [one[:2] for one in section["tensors"]].index([section["kinds"].index(kind), name])


def numbers(section: Mapping[str, Any], model: Model, offset: int | None = None) -> np.ndarray:
    """Of all rows of the heat map, shape ``(rows, 2, columns)``, or of one place."""
    shape = (len(section["tensors"]) if offset is None else 1, 2, len(section["first"]))
    start = section["numbers"] if offset is None else offset
    return np.frombuffer(bytes(model.arrays), "<f4", int(np.prod(shape)), start).reshape(shape)


def cells(section: Mapping[str, Any], model: Model) -> np.ndarray:
    shape = len(section["tensors"]), len(section["first"])
    return np.frombuffer(bytes(model.arrays), np.uint8, shape[0] * shape[1], section["cells"]).reshape(shape)


def norms(run: Path, rank: int, kind: str = "actv", name: str = NAME, op: str = "norm") -> list[float]:
    rows = open_run(run).rows(kind, name=name, ranks=rank, columns=["step", op]).sort_by("step")
    return [float(np.float32(one)) for one in rows[op].to_pylist()]


def reported(*arguments: object) -> tuple[int, str]:
    outcome = CliRunner().invoke(app, [str(one) for one in arguments])
    assert outcome.exception is None or isinstance(outcome.exception, SystemExit)
    return outcome.exit_code, outcome.output.replace("\n", " ")


# --- The check and its sentence.


def test_the_first_step_and_tensor_beyond_tolerance_is_named_with_its_op(tmp_path: Path) -> None:
    other, run = pair(tmp_path, doubled())
    section, check, _ = against(other, run)
    assert (check.name, check.state) == (f"Against {other}", BAD)
    assert check.finding.place == Place(WHEN, 0, "actv", NAME)
    assert check.finding.says.startswith(
        f"The run differs from {other} first in step {WHEN}: actv {NAME} on rank 0, whose norm is off by "
    )
    assert section["says"] == check.finding.says
    assert (section["atStep"], section["at"]) == (WHEN, WHEN)


def test_runs_that_recorded_the_same_are_good(tmp_path: Path) -> None:
    other, run = pair(tmp_path)
    section, check, model = against(other, run)
    rows = sum(len(open_run(run).rows(kind)) for kind in [*NAMES, "replica"])
    assert (check.state, check.finding.says) == (GOOD, f"The same as {other}: {rows:,} rows.")
    assert (section["places"], section["lines"], section["atStep"]) == ([], [], None)
    assert set(cells(section, model).ravel().tolist()) == {aligned.LEAST}


def test_what_differs_by_rounding_is_good_and_counted(tmp_path: Path) -> None:
    other, run = pair(tmp_path, doubled(factor=1 + 1e-7))
    section, check, _ = against(other, run)
    assert check.state == GOOD
    assert f"{2 * (STEPS - WHEN)} of them differ by rounding, by at most 0." in section["says"]


def test_limits_of_healthy_runs_allow_a_difference(tmp_path: Path) -> None:
    other, run = pair(tmp_path, doubled())
    limits = tmp_path / "limits.json"
    limits.write_text(json.dumps({"allowed": {"actv": {"first": 1e9, "later": 1e9}}}))
    status, said = reported(run, "--against", other, "--tolerances", limits, "-o", tmp_path / "page.html")
    assert (status, f"good           Against {other}: The same as {other}" in said) == (0, True)


def test_a_tensor_that_one_run_alone_has_is_named_and_striped(tmp_path: Path) -> None:
    other = constant(tmp_path / "other", {"grad_reduced": ["v", "w"]})
    section, check, model = against(other, constant(tmp_path / "run", {"grad_reduced": ["w"]}))
    assert check.state == BAD
    assert check.finding.says == (
        f"The run differs from {other} first in step 0: grad_reduced v on rank 0 is there in {other} alone."
    )
    (place,) = section["places"]
    assert (place["tensor"], place["what"]) == ("v", f"in {other} alone")
    assert cells(section, model).tolist() == [[aligned.ALONE] * 4, [aligned.LEAST] * 4]


def test_a_kind_that_one_run_alone_has_is_said_and_is_not_good(tmp_path: Path) -> None:
    other = constant(tmp_path / "other", {"grad_reduced": ["w"], "actv": ["w.output"]})
    section, check, _ = against(other, constant(tmp_path / "run", {"grad_reduced": ["w"]}))
    same = f"The same as {other}: 4 rows that both runs have. Something is on one side alone."
    assert (check.state, check.finding.says) == (NOT_LOOKED_AT, same)
    assert section["lines"] == [["Not compared", f"{other} alone has actv of rank 0"]]


def test_nothing_in_common_is_not_looked_at_and_not_healthy(tmp_path: Path) -> None:
    for name, first in (("other", 0), ("run", 40)):
        one = RecordedRank(tmp_path / name, 0, 1, "parquet", ops=("norm",))
        for step in range(first, first + 20):
            one.write(step, {"grad_reduced": [Measured("w")]})
        one.close()
    _, check, _ = against(tmp_path / "other", tmp_path / "run")
    assert check.state == NOT_LOOKED_AT
    status, said = reported(tmp_path / "run", "--against", tmp_path / "other")
    assert status == 1
    assert "There is no tensor that both runs have in the same step." in said


# --- Numbers.


def test_curves_have_the_numbers_that_open_run_gives(tmp_path: Path) -> None:
    other, run = pair(tmp_path, doubled(ranks=(1,)))
    section, _, model = against(other, run)
    found = numbers(section, model)[row_of(section, "actv", NAME)]
    for side, path in enumerate((other, run)):
        assert found[side, WHEN:].tolist() == norms(path, 1)[WHEN:]  # of the rank that differs
        assert all(
            one in both
            for one, both in zip(found[side].tolist(), zip(norms(path, 0), norms(path, 1), strict=True), strict=True)
        )


def test_a_ratio_is_a_colour_by_its_logarithm_and_its_side(tmp_path: Path) -> None:
    other, run = pair(tmp_path, doubled(factor=0.99))
    section, _, model = against(other, run)
    found = cells(section, model)[row_of(section, "actv", NAME)]
    level = round(aligned.LEVELS * (1 - np.log(-np.log2(0.99)) / np.log(aligned.SAME)))
    assert found[:WHEN].tolist() == [aligned.LEAST] * WHEN
    assert found[WHEN:].tolist() == [aligned.LEAST + 2 * level + 1] * (STEPS - WHEN)


def test_a_column_keeps_the_pair_of_its_steps_that_is_furthest_apart() -> None:
    watcher = AlignedNumbers(Axis(np.arange(10), 5))
    for step, (left, right) in enumerate([(1.0, 1.0), (1.0, 0.5), (2.0, 2.5), (2.0, 2.0), (0.0, 0.0), (3.0, 0.0)]):
        rows = ({"vpp_stage": 0, "name": "w", "step": step, "call_id": 0, "norm": one} for one in (left, right))
        watcher.pair("actv", 0, *rows)
    grid = watcher.kinds["actv"].grids["norm"]
    assert grid.numbers[0, :, :3].T.tolist() == [[1.0, 0.5], [2.0, 2.5], [3.0, 0.0]]
    assert np.isnan(grid.numbers[0, :, 3:]).all()
    codes = aligned.codes_of(grid, np.zeros((len(grid.apart), 5), bool), aligned.SAME)[0].tolist()
    most = aligned.LEAST + 2 * aligned.LEVELS
    assert (codes[0], codes[2], codes[3:]) == (most + 1, most + 1, [aligned.NOT_COMPARED] * 2)
    assert aligned.LEAST < codes[1] < most


def test_nan_on_a_side_is_a_colour_of_its_own(tmp_path: Path) -> None:
    other, run = pair(tmp_path, doubled(factor=np.nan))
    section, check, model = against(other, run)
    assert check.state == BAD
    found = cells(section, model)[row_of(section, "actv", NAME)]
    assert found.tolist() == [aligned.LEAST] * WHEN + [aligned.NOT_FINITE] * (STEPS - WHEN)


def test_a_place_whose_op_is_not_that_of_the_heat_map_has_curves_of_its_own(tmp_path: Path) -> None:
    other = constant(tmp_path / "other", {"grad_reduced": ["w"]})
    run = constant(tmp_path / "run", {"grad_reduced": ["w"]}, w3=[1.0, -2.0])
    section, _, model = against(other, run)
    (place,) = section["places"]
    assert (place["step"], place["op"]) == (3, "mean")
    assert numbers(section, model, place["lines"])[0].tolist() == [[1.5] * 4, [1.5] * 3 + [-0.5]]


def test_rows_stand_in_order_of_execution(tmp_path: Path) -> None:
    section, _, _ = against(*pair(tmp_path, doubled()))
    of = [section["kinds"][kind] for kind, _, _ in section["tensors"]]
    assert (of[0], of[-1]) == ("param_origin", "grad_reduced")
    assert [name for kind, name, _ in section["tensors"] if section["kinds"][kind] == "actv"] == NAMES["actv"]


def test_the_loss_of_both_runs_is_there_where_both_have_it(tmp_path: Path) -> None:
    runs = [constant(tmp_path / name, {"grad_reduced": ["w"]}, loss) for name, loss in (("other", 1.0), ("run", 3.0))]
    section, _, model = against(*runs)
    row = section["loss"]
    expected = [norms(run, 0, "run", "loss", "value") for run in runs]
    assert section["tensors"][row][1:] == ["loss", "value"]
    assert numbers(section, model)[row].tolist() == expected
    section, _, _ = against(constant(tmp_path / "without", {"grad_reduced": ["w"]}), runs[1])
    assert section["loss"] is None or np.isnan(numbers(section, model)[section["loss"], 0]).all()


def test_another_layout_is_compared_by_whole_tensors(tmp_path: Path) -> None:
    sharded(tmp_path / "run")
    one = RecordedRank(tmp_path / "other")
    for step in range(3):
        whole = [value * (step + 1) for value in (3.0, 4.0, -12.0, 0.0, 0.5)]
        one.write(step, {"grad_reduced": [Measured("w", whole), Measured("b", [1.0 + (step == 2)])]})
    one.close()
    section, check, model = against(tmp_path / "other", tmp_path / "run")
    assert check.finding.place == Place(2, None, "grad_reduced", "b")
    found = numbers(section, model)
    norm = np.sqrt(9 + 16 + 144 + 0.25)
    assert found[row_of(section, "grad_reduced", "w"), 1] == pytest.approx([norm, 2 * norm, 3 * norm])
    assert found[row_of(section, "grad_reduced", "b")].tolist() == [[1.0, 1.0, 2.0], [1.0, 1.0, 1.0]]
    assert [one["rank"] for one in section["places"]] == [None]


def test_names_of_the_other_run_are_mapped(tmp_path: Path) -> None:
    names = {kind: [f"model.{one}" for one in each] for kind, each in NAMES.items()}
    other = record(tmp_path / "other", names=names)
    run = record(tmp_path / "run", doubled())
    section, check, _ = against(other, run, How(names=["model.*=*", "*/model.*=*/*"], whole=False))
    assert check.finding.place == Place(WHEN, 0, "actv", NAME)
    assert section["differing"] == 1


# --- The command.


def test_exit_status_and_json_have_the_comparison(tmp_path: Path) -> None:
    other, run = pair(tmp_path, doubled("grad_unreduced", NAMES["grad_unreduced"][1], factor=1.01))
    assert reported(run, "--json")[0] == 0
    outcome = CliRunner().invoke(app, [str(run), "--against", str(other), "--json"])
    said = json.loads(outcome.output)
    check = next(one for one in said["checks"] if one["name"] == f"Against {other}")
    assert (outcome.exit_code, said["state"], check["state"]) == (1, "unhealthy", BAD)
    assert said["verdict"] == check["says"] == said["against"]["says"]
    assert said["place"] == {"step": WHEN, "rank": 0, "kind": "grad_unreduced", "name": NAMES["grad_unreduced"][1]}
    (differing,) = said["against"]["differing"]
    assert (differing["step"], differing["tensor"], differing["what"]) == (WHEN, NAMES["grad_unreduced"][1], "norm")
    assert differing["relative"] == pytest.approx(0.01 / 1.01)
    assert not (run / "report.html").exists()


def test_two_jobs_of_one_directory_are_compared(tmp_path: Path) -> None:
    for job, value in (("1" * 32, 1.0), ("2" * 32, 2.0)):
        one = RecordedRank(tmp_path, 0, 1, "parquet", job=job, suffix=job[:8])
        for step in range(20):
            one.write(step, {"grad_reduced": [Measured("w", [value])]})
        one.close()
    both = tmp_path, "--job", "22", "--against", tmp_path
    assert reported(*both)[0] == 2
    outcome = CliRunner().invoke(app, [*map(str, both), "--against-job", "11", "--json"])
    (differing,) = json.loads(outcome.output)["against"]["differing"]
    assert (outcome.exit_code, differing["step"], differing["relative"]) == (1, 0, 0.5)
    for job in ("11", "22"):
        reported(tmp_path, "--job", job)
    assert sorted(page.name for page in tmp_path.glob("*.html")) == ["report-11.html", "report-22.html"]


def test_rounding_of_the_precision_has_the_colour_of_the_same() -> None:
    grid = aligned.PairGrid(np.array([[[1.0, 1.0], [1.001, 1.01]]]), np.zeros((1, 2), np.float32))
    alone = np.zeros((1, 2), bool)
    assert [aligned.codes_of(grid, alone, aligned.same_of(2.0**-7))[0, at] > aligned.LEAST for at in (0, 1)] == [False, True]
    assert (aligned.codes_of(grid, alone, aligned.same_of(2.0**-23)) > aligned.LEAST).all()


def test_a_run_that_is_the_same_as_a_healthy_one_is_healthy(tmp_path: Path) -> None:
    other, run = pair(tmp_path)
    status, said = reported(run, "--against", other)
    assert status == 0
    assert f"good           Against {other}: The same as" in said
    assert (run / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--against", "nowhere"], "nowhere is no directory. Name the output of a run, or a merged set: --against DIR."),
        (["--against", "run"], "run is the run itself. Name another one"),
        (["--against", "empty"], "empty holds neither a precision dump nor a monitored run"),
        (["--against", "other", "--map", "nothing"], "--map is 'nothing'"),
        (["--against", "other", "--tolerances", "bad.json"], "bad.json has no limits that can be used"),
        (["--map", "a=b"], "Name a run: --against OTHER."),
        (["--whole"], "Name a run: --against OTHER."),
    ],
)
def test_what_cannot_be_compared_ends_with_2_and_writes_no_page(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("bad.json").write_text("{}")
    record(Path("run"), steps=3)
    record(Path("other"), steps=3)
    status, said = reported("run", *arguments)
    assert (status, says in said) == (2, True), said
    assert not Path("run/report.html").exists()
