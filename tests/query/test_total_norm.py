"""``total_norm``: the norm over all tensors, each counted once, or the reason why there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from queried_job import STEPS, VALUES, merged_into, record
from recorded_job import RecordedRank
from sink_rows import Measured

from monitor import QueryError, open_run
from monitor.query.opened import Lacking, roots_of_squares
from monitor.recording.parameters import NOT_FOLLOWED, NOT_REDUCED, ONE_WRITES
from monitor.series import IN_NO_GROUP, Placement

EVERY = np.concatenate([np.array(one) for one in VALUES])


def expected(step: int) -> float:
    """Of ``w``, whose parts two ranks hold, and ``b``, which both hold."""
    return float(np.linalg.norm([*(EVERY * (step + 1)), step]))


@pytest.mark.parametrize("of", ["ranks", "hdf5", "csv", "parquet"])
def test_it_is_the_norm_of_all_elements_of_all_ranks(tmp_path: Path, of: str) -> None:
    record(tmp_path)
    found = open_run(tmp_path if of == "ranks" else merged_into(tmp_path, of)).total_norm("grad_reduced")
    assert found.column_names == ["step", "micro_step", "total_norm", "tensors", "missing"]
    assert found["step"].to_pylist() == list(range(STEPS))
    assert found["total_norm"].to_pylist() == [pytest.approx(expected(step), rel=1e-14) for step in range(STEPS)]
    assert found["tensors"].to_pylist() == [2] * STEPS
    assert found["missing"].to_pylist() == found["micro_step"].to_pylist() == [None] * STEPS


def by_step(path: Path, kind: str = "grad_reduced") -> dict[int, tuple[float | None, str | None]]:
    rows: list[dict[str, Any]] = open_run(path).total_norm(kind).to_pylist()
    return {row["step"]: (row["total_norm"], row["missing"]) for row in rows}


def test_a_step_that_lacks_a_part_has_no_number_and_says_why(tmp_path: Path) -> None:
    found = by_step(record(tmp_path, without=[(1, 2)]))
    assert found[2] == (None, "rank 1 has no rows; w has not all its parts")
    assert [step for step, (norm, _) in found.items() if norm is None] == [2]
    assert found[3] == (pytest.approx(expected(3), rel=1e-14), None)


@pytest.mark.parametrize(
    ("kind", "about", "note"),
    [
        ("grad_reduced", "grad_reduced", NOT_REDUCED.format(step=0, count="1 parameter", names="expert")),
        ("grad_reduced", "grad_reduced", NOT_FOLLOWED.format(step=0)),
        ("param_origin", "weights", ONE_WRITES.format(count="1 parameter", names="expert", owner=0)),
        ("param_origin", IN_NO_GROUP, "ranks 1, 3 hold the same weights"),
        ("grad_reduced", IN_NO_GROUP, "ranks 1, 3 share gradients"),
        ("exp_avg", "weights", ONE_WRITES.format(count="1 parameter", names="expert", owner=0)),
    ],
)
def test_tensors_that_a_rank_says_it_left_out_are_missing(tmp_path: Path, kind: str, about: str, note: str) -> None:
    """As the experts of other ranks, if ``dp_group`` says that all ranks hold the same. Other notes leave norms as they are."""
    one = RecordedRank(tmp_path)
    one.write(0, {each: [Measured("w", [3.0, 4.0])] for each in (kind, "grad_unreduced")})
    one.manifest.note(about, f"changed in place; {note}" if kind == about else note)
    one.close()
    assert by_step(tmp_path, kind) == {0: (None, note)}
    assert by_step(tmp_path, "grad_unreduced") == {0: (5.0, None)}


def test_a_step_that_every_rank_dropped_is_listed_with_the_reason(tmp_path: Path) -> None:
    one = RecordedRank(tmp_path)
    for step in (0, 2):
        one.write(step, {"grad_reduced": [Measured("w", [3.0, 4.0])]})
    one.manifest.dropped(1, "queue full")
    one.close()
    assert by_step(tmp_path) == {0: (5.0, None), 1: (None, "rank 0: queue full"), 2: (5.0, None)}


def test_a_step_that_its_only_format_lost_is_listed_with_the_reason(tmp_path: Path) -> None:
    one = RecordedRank(tmp_path)
    for step in (0, 2):
        one.write(step, {"grad_reduced": [Measured("w", [3.0, 4.0])]})
    one.manifest.lost(1, "csv", "No space left on device")
    one.close()
    assert by_step(tmp_path)[1] == (None, "rank 0, csv: No space left on device")


def test_without_the_directory_of_a_rank_no_step_has_a_number(tmp_path: Path) -> None:
    one = RecordedRank(tmp_path, 0, 2)
    one.write(0, {"grad_reduced": [Measured("w")]})
    one.close()
    assert by_step(tmp_path) == {0: (None, "rank 1 has no directory")}


def test_terms_of_a_sum_and_norms_that_were_not_recorded_give_no_number(tmp_path: Path) -> None:
    for rank in (0, 1):
        one = RecordedRank(tmp_path, rank, 2, "csv", ops=("mean",))
        one.place("actv", "a.output", Placement(partial=True))
        one.write(0, {"actv": [Measured("a.output")]})
        one.close()
    ((norm, why),) = by_step(tmp_path, "actv").values()
    assert norm is None
    assert why == "2 tensors have no norm, because it was not recorded; 2 rows are terms of a sum that no rank recorded"


def test_micro_steps_have_norms_of_their_own(tmp_path: Path) -> None:
    found = open_run(record(tmp_path, steps=1)).total_norm("actv").to_pylist()
    assert [(row["micro_step"], row["tensors"], row["total_norm"]) for row in found] == [
        (micro, 4, pytest.approx(10**0.5)) for micro in (0, 1)
    ]


def test_squares_that_leave_the_range_of_float64_do_not_matter() -> None:
    values = np.array([3e200, 4e200, 3e-200, 4e-200, 0.0, np.nan, 1.0, np.inf, 1.0])
    found = roots_of_squares(values, np.array([0, 2, 4, 5, 7]))
    assert found[:3].tolist() == pytest.approx([5e200, 5e-200, 0.0], rel=1e-15)
    assert np.isnan(found[3])
    assert np.isinf(found[4])


def test_a_kind_without_norms_is_refused(tmp_path: Path) -> None:
    one = RecordedRank(tmp_path)
    one.write(0, {"attention_hook": [Measured("attention")], "replica": [Measured("grad_reduced/w")]})
    one.close()
    run = open_run(tmp_path)
    with pytest.raises(QueryError, match=r"attention_hook has no column 'norm'\. It has kind, stage,"):
        run.total_norm("attention_hook")
    with pytest.raises(QueryError, match="there are no rows of whole tensors of kind 'replica'"):
        run.total_norm("replica")


def test_what_a_report_does_not_list_may_be_missing_anywhere() -> None:
    nothing = {"count": 0, "listed": []}
    told = {"missing_ranks": [], "notes": [], **dict.fromkeys(("gaps", "without_global", "unplaced", "dropped"), nothing)}
    lacking = Lacking.of({**told, "incomplete": {"count": 1001, "listed": []}}, "grad_reduced")
    assert lacking.at(np.array([0, 7])) == ["the report does not list 1001 more of incomplete"] * 2
