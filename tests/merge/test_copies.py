from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from recorded_job import FORMATS, RecordedRank, merged, sharded, table, tensors
from sink_rows import Measured

from monitor.merge.report import Report
from monitor.series import Placement


def test_of_copies_that_every_rank_writes_one_is_taken(tmp_path: Path) -> None:
    for rank in (0, 1):
        one = RecordedRank(tmp_path, rank, 2)
        one.place("grad_reduced", "w", Placement(unclaimed=(0, 1)))
        one.write(0, {"grad_reduced": [Measured("w")]})
        one.close()
    assert merged(tmp_path).clean
    assert [(row["ranks"], row["norm"]) for row in tensors(tmp_path)] == [("0", 5.0)]


@pytest.mark.parametrize("format", FORMATS)
def test_copies_that_differ_are_named(tmp_path: Path, format: str) -> None:  # noqa: A002
    for rank in (0, 1):
        one = RecordedRank(tmp_path, rank, 2, format)
        one.place("grad_reduced", "w", Placement(unclaimed=(0, 1)))
        for step in range(2):
            one.write(step, {"grad_reduced": [Measured("w", [3.0 + (rank and step), 4.0])]})
        one.close()
    report = merged(tmp_path)
    (one,) = report.told()["disagreements"]["listed"]
    assert (one["kind"], one["name"], one["step"], one["rank"], one["other_rank"]) == ("grad_reduced", "w", 1, 1, 0)
    assert one["difference"] == pytest.approx(math.sqrt(32) - 5)
    assert not report.clean


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("value", [4.0, 4.5])
def test_replicas_that_were_kept_to_be_compared_are_held_against_their_owners(
    tmp_path: Path,
    format: str,  # noqa: A002
    value: float,
) -> None:
    for rank, kind, name in ((0, "grad_reduced", "w"), (1, "replica", "grad_reduced/w")):
        one = RecordedRank(tmp_path, rank, 2, format)
        one.place(kind, name, Placement(replicas=(0, 1)))
        one.write(7, {kind: [Measured(name, [3.0, value if rank else 4.0])]})
        one.close()
    listed = merged(tmp_path).told()["disagreements"]["listed"]
    assert [(one["rank"], one["other_rank"], one["step"], one["op"]) for one in listed] == [(1, 0, 7, "norm")] * (value != 4.0)
    assert [row["norm"] for row in tensors(tmp_path)] == [5.0]
    assert table(tmp_path, "per_rank", "replica").num_rows == 1


def everywhere(base: Path, values: Sequence[float], format: str = "hdf5") -> list[tuple[int, int, float]]:  # noqa: A002
    """Each rank writes its copy of ``w``; the ranks that are named, what they are held against, and the difference."""
    for rank, value in enumerate(values):
        one = RecordedRank(base, rank, len(values), format)
        one.place("grad_reduced", "w", Placement(unclaimed=tuple(range(len(values)))))
        one.write(0, {"grad_reduced": [Measured("w", [value])]})
        one.close()
    listed = merged(base).told()["disagreements"]["listed"]
    return [(one["rank"], one["other_rank"], one["difference"]) for one in listed]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 1.0, 1.5, 1.0], [(2, 0, 0.5)]),
        ([1.5, 1.0, 1.0, 1.0], [(0, 1, 0.5)]),
        ([math.nan, 1.0, 1.0], [(0, 1, "nan")]),
        ([1.0, math.nan, math.nan], [(0, 1, "nan")]),
        ([1.0, 3.0, 1.0, 3.0], [(1, 0, 2.0), (3, 0, 2.0)]),
        ([1.0, 2.0, 4.0], [(1, 0, 1.0), (2, 0, 3.0)]),
        ([3.0, 1.0, 2.0, 2.0, 2.0], [(0, 2, 1.0), (1, 2, 1.0)]),
        ([1.0, 1.0 + 1e-9, 1.0], []),
        ([math.inf, math.inf], []),
        ([math.inf, -math.inf], [(1, 0, "inf")]),
    ],
)
def test_the_ranks_that_are_named_are_those_that_differ_from_most(
    tmp_path: Path, values: list[float], expected: list[tuple[int, int, float]]
) -> None:
    assert everywhere(tmp_path, values) == expected


@pytest.mark.parametrize(("value", "named"), [(0.1234567, []), (0.1234581, [1])])
def test_what_csv_rounds_away_is_no_disagreement(tmp_path: Path, value: float, named: list[int]) -> None:
    for rank, each in enumerate((0.1234562, value)):
        one = RecordedRank(tmp_path, rank, 2, "csv", ndigits=6)
        one.place("grad_reduced", "w", Placement(unclaimed=(0, 1)))
        one.write(0, {"grad_reduced": [Measured("w", [each])]})
        one.close()
    assert sorted({one["rank"] for one in merged(tmp_path).told()["disagreements"]["listed"]}) == named


@pytest.mark.parametrize("ndigits", [(3, 6), (6, 3)])
def test_ranks_that_round_differently_are_held_against_each_other_with_the_fewer_decimals(
    tmp_path: Path, ndigits: tuple[int, int]
) -> None:
    """After a change of the configuration between two runs: 0.123 and 0.123456 are the same number."""
    for rank, kept in enumerate(ndigits):
        one = RecordedRank(tmp_path, rank, 2, "csv", ndigits=kept)
        one.place("grad_reduced", "w", Placement(unclaimed=(0, 1)))
        one.write(0, {"grad_reduced": [Measured("w", [0.1234562])]})
        one.close()
    assert merged(tmp_path).told()["disagreements"]["listed"] == []


def in_micro_steps(base: Path, format: str, owners: Sequence[float], replicas: float) -> Report:  # noqa: A002
    """Of each step rank 0 has a row a micro-step, and rank 1 keeps one to be compared."""
    kinds = ("actv", "actv_grad", "grad_unreduced")
    for rank in (0, 1):
        one = RecordedRank(base, rank, 2, format, micro_step_kinds=kinds)
        kind, name = ("replica", "grad_unreduced/w") if rank else ("grad_unreduced", "w")
        one.place(kind, name, Placement(replicas=(0, 1)))
        for step in range(2):
            own = [Measured(name, [value], micro_step) for micro_step, value in enumerate(owners)]
            one.write(step, {kind: [Measured(name, [replicas])] if rank else own})
        one.close()
    return merged(base)


@pytest.mark.parametrize("format", FORMATS)
def test_a_replica_of_a_whole_step_is_held_against_the_last_micro_step(tmp_path: Path, format: str) -> None:  # noqa: A002
    (tmp_path / "same").mkdir()
    assert in_micro_steps(tmp_path / "same", format, [1.0, 2.0, 3.0], 3.0).clean
    (tmp_path / "other").mkdir()
    told = in_micro_steps(tmp_path / "other", format, [1.0, 2.0, 3.0], 2.0).told()
    found = [(one["step"], one["rank"], one["other_rank"], one["difference"]) for one in told["disagreements"]["listed"]]
    assert found == [(0, 1, 0, 1.0), (1, 1, 0, 1.0)]
    assert told["not_compared"]["count"] == 0


def test_replicas_that_have_nothing_to_be_held_against_are_counted(tmp_path: Path) -> None:
    sharded(tmp_path)
    one = RecordedRank(tmp_path, 7, 8)
    one.place("replica", "grad_reduced/lost", Placement(replicas=(6, 7)))
    one.write(0, {"replica": [Measured("grad_reduced/lost")]})
    one.close()
    assert merged(tmp_path).told()["not_compared"]["listed"] == [{"kind": "grad_reduced", "rank": 7, "rows": 1}]
