from __future__ import annotations

from pathlib import Path

import pytest
from converted_job import VALUES, curves, files, in_single, job, plain
from recorded_job import RecordedRank
from sink_rows import Measured

from monitor.convert import ConversionError, csv2tensorboard_by_step


def converted(base: Path, output: str = "curves", **options: object) -> Path:
    return csv2tensorboard_by_step(base, None, None, output_dirpath=base / output, **options).output  # type: ignore[arg-type]


def test_tensorboard_shows_what_it_would_have_shown_of_the_run_itself(tmp_path: Path) -> None:
    job(tmp_path, format=["csv", "tensorboard"])
    output = converted(tmp_path)
    for rank in range(2):
        (recorded,) = tmp_path.glob(f"*-rank{rank}-*")
        live = curves(recorded)
        found = [curves(run) for run in (output / f"rank{rank}").iterdir()]
        assert len(live) > 6 * 3 * len(VALUES) / 2
        assert repr(sorted(live.items())) == repr(sorted(point for run in found for point in run.items()))  # NaN is not itself


def test_there_is_a_run_for_each_rank_and_kind(tmp_path: Path) -> None:
    job(tmp_path, steps=[0])
    runs = {str(path.parent.relative_to(tmp_path / "curves")) for path in converted(tmp_path).rglob("*tfevents*")}
    assert runs == {f"rank{rank}/{kind}" for rank in range(2) for kind in ("actv", "grad_reduced", "other", "replica")}


def test_the_axis_is_the_step(tmp_path: Path) -> None:
    plain(tmp_path, steps=[3, 4, 117])
    assert curves(converted(tmp_path) / "rank0" / "grad_reduced")["0:w/rank0/grad_reduced_norm"] == [(3, 1), (4, 1), (117, 1)]


def test_what_was_not_measured_or_does_not_fit_has_no_point(tmp_path: Path) -> None:
    one = RecordedRank(tmp_path, format="csv", ops=("max", "nans", "shape", "dtype"))
    one.write(0, {"exp_avg": [Measured("empty", []), Measured("far", [1e100]), Measured("near", [0.1])]})
    one.close()
    assert curves(converted(tmp_path) / "rank0" / "exp_avg") == {
        "0:near/rank0/exp_avg_max": [(0, in_single(0.1))],
        **{f"0:{name}/rank0/exp_avg_nans": [(0, 0.0)] for name in ("empty", "far", "near")},
    }


def test_the_number_of_processes_and_the_moment_change_no_byte(tmp_path: Path) -> None:
    job(tmp_path)
    one, again, many = (converted(tmp_path, str(i), process_num=n) for i, n in enumerate((1, 1, 2)))
    assert len(files(one)) == 8
    assert files(one) == files(again) == files(many)


def test_a_step_that_stands_in_no_order_is_shown_in_order(tmp_path: Path) -> None:
    directory = plain(tmp_path, steps=[0, 1, 2])
    shard = directory / "grad_reduced_0-4.csv"
    header, *rows = shard.read_text().splitlines(keepends=True)
    shard.write_text(header + "".join(reversed(rows)))
    points = curves(converted(tmp_path) / "rank0" / "grad_reduced")["0:w/rank0/grad_reduced_norm"]
    assert [step for step, _ in points] == [0, 1, 2]


def test_a_directory_that_is_empty_is_filled_and_one_that_is_not_is_left_as_it_is(tmp_path: Path) -> None:
    plain(tmp_path)
    (tmp_path / "curves").mkdir()
    converted(tmp_path)
    before = files(tmp_path)
    with pytest.raises(ConversionError, match="exists"):
        converted(tmp_path)
    assert files(tmp_path) == before
