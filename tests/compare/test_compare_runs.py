"""Two monitored runs against each other."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from converted_job import job, plain
from recorded_job import RecordedRank, merged
from sink_rows import Measured
from typer.testing import CliRunner

from monitor.compare import runs
from monitor.compare.cli import app
from monitor.stats.partials import COUNT, SUM


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


def test_progress_is_told_to_the_end_of_each_kind(tmp_path: Path) -> None:
    for side in "ab":
        trained(tmp_path / side, "parquet")
    for whole in (False, True):
        told: dict[str, list[tuple[int, int]]] = {}

        def progress(what: str, done: int, total: int, told: dict[str, list[tuple[int, int]]] = told) -> None:
            told.setdefault(what, []).append((done, total))

        found = runs.compare(tmp_path / "a", tmp_path / "b", runs.How(whole=whole), progress=progress)
        assert set(told) == set(found.counted)
        for done in told.values():
            assert done == sorted(done)
            assert done[-1][0] == done[-1][1] > 0


def trained(base: Path, format: str, last: float = 1 / 3, **options: object) -> Path:  # noqa: A002
    """A run whose last number is as given."""
    one = RecordedRank(base, format=format, **{"ops": ("norm", "mean", "nans", "shape"), "ndigits": 6, **options})  # type: ignore[arg-type]
    for step in range(7):
        values = [1 / 7 + step, 2e-9], [float("nan")], [], [1e17 / 3], [last if step == 6 else 1 / 3]
        rows = [Measured(name, some) for name, some in zip("abcde", values, strict=True)]
        one.write(step, {"actv": [Measured("x", [step / 9], micro) for micro in (0, 1)], "grad_reduced": rows})
    one.close()
    return base


FORMATS = ("csv", "hdf5", "parquet")


@pytest.mark.parametrize("left", FORMATS)
@pytest.mark.parametrize("right", FORMATS)
def test_runs_that_trained_alike_are_the_same_in_any_formats(tmp_path: Path, left: str, right: str) -> None:
    sides = trained(tmp_path / "a", left), trained(tmp_path / "b", right)
    assert compared(*sides) == (0, "the same: 49 rows\n")


@pytest.mark.parametrize("left", FORMATS)
@pytest.mark.parametrize("right", FORMATS)
def test_a_merged_set_is_compared_with_the_ranks_of_another_run(tmp_path: Path, left: str, right: str) -> None:
    sides = trained(tmp_path / "a", left), trained(tmp_path / "b", right)
    merged(sides[0], format="parquet")
    assert compared(sides[0] / "merged", sides[1]) == (0, "the same: 49 rows\n")
    assert compared(sides[1], sides[0] / "merged") == (0, "the same: 49 rows\n")


def test_a_merged_set_has_a_kind_of_the_ranks_that_wrote_it_alone(tmp_path: Path) -> None:
    for rank in range(3):
        one = RecordedRank(tmp_path, rank, 3, "parquet")
        for step in range(2):
            kinds = ("grad_unreduced", *(("grad_reduced",) if rank == 0 else ()))
            one.write(step, {kind: [Measured("w", [1.0, 2.0])] for kind in kinds})
        one.close()
    merged(tmp_path, format="parquet")
    for pair in ((tmp_path, tmp_path / "merged"), (tmp_path / "merged", tmp_path)):
        assert compared(*pair) == (0, "the same: 8 rows\n")


@pytest.mark.parametrize("form", FORMATS)
def test_an_op_without_values_is_not_said_to_be_unrecorded(tmp_path: Path, form: str) -> None:
    """Both sides have recorded kurtosis, and a tensor of NaN has none. Its mean magnitude is NaN."""
    for side, values in (("a", [1.0, 2.0, 4.0]), ("b", [float("nan")] * 3)):
        one = RecordedRank(tmp_path / side, format=form, ops=("norm", "absmean", "kurtosis"))
        one.write(0, {"grad_reduced": [Measured("w", values)]})
        one.close()
    status, said = compared(tmp_path / "a", tmp_path / "b")
    assert (status, "1 difference among 1 row\n" in said) == (1, True)
    (line,) = [one for one in said.splitlines() if one.startswith("Not compared")]
    assert line == f"Not compared: {tmp_path / 'a'} alone has values of kurtosis of grad_reduced"


@pytest.mark.parametrize(("left", "right"), [("csv", "hdf5"), ("hdf5", "csv"), ("parquet", "hdf5")])
def test_a_difference_that_csv_shows_is_found_in_any_formats(tmp_path: Path, left: str, right: str) -> None:
    sides = trained(tmp_path / "a", left), trained(tmp_path / "b", right, last=1 / 3 + 1e-5)
    status, said = compared(*sides, "--tolerance", 0)
    assert status == 1
    assert said.startswith("1 difference among 49 rows\nfirst: step 6, rank0: grad_reduced/0:e")


def test_a_difference_below_the_last_digit_of_csv_is_one_between_exact_formats_alone(tmp_path: Path) -> None:
    exact = trained(tmp_path / "exact", "hdf5")
    near = [trained(tmp_path / one, one, last=1 / 3 + 1e-9) for one in ("csv", "parquet")]
    assert [compared(exact, one, "--tolerance", 0)[0] for one in near] == [0, 1]
    assert [compared(exact, one)[0] for one in near] == [0, 0]


@pytest.mark.parametrize(("left", "right"), [("csv", "csv"), ("csv", "hdf5"), ("hdf5", "parquet")])
def test_how_many_rows_are_compared_at_a_time_changes_nothing(
    tmp_path: Path, left: str, right: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = trained(tmp_path / "a", left), trained(tmp_path / "b", right, last=0.5)
    whole = compared(*sides, "-o", tmp_path / "whole.csv")
    monkeypatch.setattr(runs, "BATCH_ROWS", 1)
    assert compared(*sides, "-o", tmp_path / "cut.csv") == whole
    assert (tmp_path / "cut.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()


def test_steps_of_one_side_alone_are_left_out_and_rows_of_one_side_alone_are_named(tmp_path: Path) -> None:
    for side, steps, names in (("a", range(2, 9), "vw"), ("b", range(7), "wx")):
        one = RecordedRank(tmp_path / side, format="hdf5", ops=("norm",))
        for step in steps:
            one.write(step, {"grad_reduced": [Measured(name) for name in (names if step == 3 else "w")]})
        one.close()
    compared(tmp_path / "a", tmp_path / "b", "-o", tmp_path / "found.csv")
    found = [(row["step"], row["name"], row["what"]) for row in csv.DictReader((tmp_path / "found.csv").open())]
    assert found == [("3", "grad_reduced/0:v", "missing"), ("3", "grad_reduced/0:x", "added")]


def recorded(base: Path, steps: range, kinds: tuple[str, ...] = ("grad_reduced",), ranks: range = range(1)) -> Path:
    for rank in ranks:
        one = RecordedRank(base, rank=rank, world_size=2, format="parquet", ops=("norm",))
        for step in steps:
            one.write(step, {kind: [Measured("w", [float(step)])] for kind in kinds})
        one.close()
    return base


ALIKE = {"steps": range(2, 6), "kinds": ("grad_reduced",), "ranks": range(2)}


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"steps": range(2, 9)}, "b alone has grad_reduced of ranks 0 to 1 at steps 6 to 8"),
        ({"steps": range(6)}, "b alone has grad_reduced of ranks 0 to 1 at steps 0 to 1"),
        ({"steps": range(3, 6)}, "a alone has grad_reduced of ranks 0 to 1 at step 2"),
        ({"kinds": ("grad_reduced", "param_updated")}, "b alone has param_updated of ranks 0 to 1"),
        ({"ranks": range(1)}, "a alone has grad_reduced of rank 1"),
        ({"ranks": range(1)}, "b: missing ranks 1"),
    ],
)
@pytest.mark.parametrize("merges", [False, True])
def test_what_one_side_alone_has_is_said_and_is_not_the_same(
    tmp_path: Path, merges: bool, other: dict[str, object], said: str
) -> None:
    sides = recorded(tmp_path / "a", **ALIKE), recorded(tmp_path / "b", **{**ALIKE, **other})  # type: ignore[arg-type]
    if merges:
        merged(sides[1], format="parquet")
    status, output = compared(sides[0], sides[1] / "merged" if merges else sides[1])
    assert status == 1
    assert said.replace(" ", "") in "".join(output.split()).replace("/merged", "")
    assert "the same: " in output


@pytest.mark.parametrize("damaged", [b"", bytes(200), b"PAR1" + bytes(200) + b"PAR1"])
def test_a_merged_set_with_a_damaged_file_is_not_compared_and_the_file_is_named(tmp_path: Path, damaged: bytes) -> None:
    for side in "ab":
        plain(tmp_path / side)
    merged(tmp_path / "b", format="parquet")
    path = next((tmp_path / "b" / "merged" / "per_rank").glob("*.parquet"))
    path.write_bytes(damaged)
    status, said = compared(tmp_path / "a", tmp_path / "b" / "merged")
    assert status == 2
    assert path.name in "".join(said.split())
    assert "Nothing was compared" in said


KINDS = ("grad_reduced", "actv_grad", "param_updated", "actv", "param_origin")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("other", "first"),
    [
        (KINDS, "param_origin"),
        (KINDS[:4], "actv"),
        (KINDS[:3], "actv_grad"),
        (("param_updated", "grad_reduced"), "grad_reduced"),
    ],
)
def test_the_first_difference_is_the_first_in_the_order_of_a_step(
    tmp_path: Path,
    other: tuple[str, ...],
    first: str,
    format: str,  # noqa: A002
) -> None:
    """As a step has them: weights, forward, backward, reduced gradients, new weights."""
    for side in "ab":
        one = RecordedRank(tmp_path / side, format=format, ops=("norm",))
        for step in range(2):
            order = ("actv", "actv_grad", "param_origin", "grad_reduced", "param_updated")  # as they are measured
            rows = {kind: [Measured("w", [2.0 if side == "b" and kind in other else 1.0])] for kind in order}
            one.write(step, rows)
        one.close()
    status, said = compared(tmp_path / "a", tmp_path / "b")
    assert status == 1
    assert f"first: step 0, rank0: {first}/0:w" in said


def test_jobs_of_one_directory_are_chosen_by_the_beginnings_of_their_ids(tmp_path: Path) -> None:
    for letter, value in (("a", 1.0), ("b", 2.0)):
        one = RecordedRank(tmp_path, format="parquet", ops=("norm",), job=letter * 32, suffix=letter * 8)
        one.write(0, {"grad_reduced": [Measured("w", [value])]})
        one.close()
    status, said = compared(tmp_path, tmp_path)
    assert (status, "--job" in said) == (2, True), said
    assert compared(tmp_path, tmp_path, "--job", "aa", "--job", "bb")[0] == 1
    for jobs in (["bb"], ["bb", "b"], ["aa", "cc"], ["cc", "aa"]):
        status, said = compared(tmp_path, tmp_path, *(word for job in jobs for word in ("--job", job)))
        assert (status, "--job" in said) == (2, True), said


@pytest.mark.parametrize(("lacks", "said"), [("b", "on the left side alone"), ("a", "on the right side alone")])
def test_a_kind_that_is_lost_in_the_middle_is_a_difference_where_it_is_lost(tmp_path: Path, lacks: str, said: str) -> None:
    for side in "ab":
        one = RecordedRank(tmp_path / side, format="parquet", ops=("norm",))
        for step in range(4):
            moments = {"exp_avg": [Measured("w")]} if (side, step) != (lacks, 2) else {}
            one.write(step, {"grad_reduced": [Measured("w")], **moments})
        one.close()
    status, output = compared(tmp_path / "a", tmp_path / "b")
    assert status == 1
    assert f"first: step 2, rank0: exp_avg/*: {said}" in output


@pytest.mark.parametrize("how", [[], ["--whole"]])
def test_a_damaged_file_of_a_rank_is_named(tmp_path: Path, how: list[str]) -> None:
    sides = [recorded(tmp_path / side, range(4), ranks=range(2)) for side in "ab"]
    file = next(sides[1].glob("*rank1*/*.parquet"))
    content = bytearray(file.read_bytes())
    content[4 : len(content) // 2] = bytes(len(content) // 2 - 4)  # what comes first is data
    file.write_bytes(content)
    status, said = compared(*sides, *how)
    assert (status, file.name in "".join(said.split())) == (1, True), said


@pytest.mark.parametrize("odd", [0, 1])
def test_the_dtype_and_the_shape_of_a_single_rank_are_seen(tmp_path: Path, odd: int) -> None:
    for side in "ab":
        for rank in range(2):
            one = RecordedRank(tmp_path / side, rank=rank, world_size=2, format="parquet", ops=("norm",))
            shape = (1, 2) if (side, rank) == ("b", odd) else (2, 1)
            one.write(0, {"actv": [Measured("x.output", [3.0, 4.0], 0, shape=shape)]})
            one.close()
    for left, right, said in (("a", "b", "(2, 1) against (1, 2)"), ("b", "a", "(1, 2) against (2, 1)")):
        status, output = compared(tmp_path / left, tmp_path / right)
        assert (status, f"rank{odd}: actv/0:x.output, micro-step 0: shape: {said}" in " ".join(output.split())) == (1, True), (
            output
        )


def with_numbers(base: Path, bias: float, **numbers: float) -> Path:
    one = RecordedRank(base, format="parquet", ops=("norm",))
    run = [Measured(name.replace("__", "."), numbers={COUNT: 1, SUM: value}) for name, value in numbers.items()]
    one.write(0, {"param_updated": [Measured("bias", [bias, 2.0], shape=(2,))], "run": run})
    one.close()
    return base


@pytest.mark.parametrize(("name", "status"), [("learning_rate__0", 0), ("learning_rate", 0), ("learning_rate_steps", 1)])
def test_a_bias_may_differ_by_updates_of_the_learning_rate_and_of_no_other_number(
    tmp_path: Path, name: str, status: int
) -> None:
    sides = [with_numbers(tmp_path / side, bias, **{name: 0.5}) for side, bias in (("a", 1.0), ("b", 1.7))]
    assert compared(*sides)[0] == status


def test_a_report_for_build_servers_fails_where_nothing_was_compared(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    sides = trained(tmp_path / "a", "parquet"), trained(tmp_path / "b", "parquet")
    assert compared("--junit", report, *sides)[0] == 0
    assert "<failure" not in report.read_text()
    assert compared("--junit", report, sides[0], tmp_path / "nothing")[0] == 2
    assert "Nothing was compared" in report.read_text()


def test_shares_alone_do_not_judge_gradients_of_biases_and_that_is_said(tmp_path: Path) -> None:
    for side, values in (("a", [0.0, 0.0]), ("b", [1.0, 2.0])):
        one = RecordedRank(tmp_path / side, format="csv", ops=("zeros", "shape"))
        one.write(0, {"grad_reduced": [Measured("bias", values, shape=(2,))]})
        one.close()
    status, said = compared(tmp_path / "a", tmp_path / "b")
    assert (status, "1 row of grad_reduced has no number that can be judged" in said) == (1, True), said
