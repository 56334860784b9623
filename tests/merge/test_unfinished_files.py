"""Runs that were killed, or still write: the whole steps of their unfinished files are merged."""

from __future__ import annotations

from pathlib import Path

import pytest
from recorded_job import RecordedRank, merged, table
from sink_rows import Measured

from monitor import open_run
from monitor.merge.report import Report
from monitor.series import Placement, Shard

SPOOLED = pytest.mark.parametrize("format", ["hdf5", "parquet"])
LAST = 6
"""The last of seven steps, in records of five."""


def record(base: Path, *formats: str) -> list[RecordedRank]:
    """Two ranks with a part each of ``w``, which still write."""
    ranks = []
    for rank in (0, 1):
        one = RecordedRank(base, rank, 2, formats, groups={"dp": [0, 1]})
        one.place("grad_reduced", "w", Placement(shard=Shard((0, 1), (4,), (rank * 2,))))
        for step in range(LAST + 1):
            one.write(step, rows(step + 1.0))
        one.manifest.save()
        ranks.append(one)
    return ranks


def rows(factor: float) -> dict[str, list[Measured]]:
    return {"grad_reduced": [Measured("w", [3.0 * factor, 4.0 * factor])]}


def part_of(rank: RecordedRank) -> Path:
    (path,) = rank.directory.glob(".*.part")
    return path


def steps_in(base: Path, output: str) -> list[int]:
    return sorted(table(base, "per_rank", output=output)["step"].to_pylist())


def set_aside(report: Report) -> list[str]:
    return [one["path"] for one in report.told()["set_aside"]["listed"]]


@SPOOLED
def test_the_merge_of_a_run_that_still_writes_has_the_rows_of_the_finished_run(tmp_path: Path, format: str) -> None:  # noqa: A002
    ranks = record(tmp_path, format)
    early = merged(tmp_path, "early")
    for rank in ranks:
        rank.close()
    late = merged(tmp_path, "late")
    for folder in ("per_rank", "global"):
        assert table(tmp_path, folder, output="early").equals(table(tmp_path, folder, output="late"))
    assert (early.clean, late.clean) == (False, True)
    assert early.told()["not_closed"]["count"] == 2
    assert set_aside(early) == []


@SPOOLED
def test_an_opened_run_has_the_last_steps_of_a_run_that_was_killed(tmp_path: Path, format: str) -> None:  # noqa: A002
    record(tmp_path, format)
    run = open_run(tmp_path)
    assert run.rows("grad_reduced", steps=LAST, columns=["rank", "norm"]).to_pylist() == [
        {"rank": rank, "norm": pytest.approx(5.0 * (LAST + 1))} for rank in (0, 1)
    ]
    assert all(one.startswith("not closed") or "after" in one for one in run.missing)


@SPOOLED
def test_a_step_that_was_cut_off_in_the_middle_is_not_there(tmp_path: Path, format: str) -> None:  # noqa: A002
    for rank in record(tmp_path, format):
        part = part_of(rank)
        part.write_bytes(part.read_bytes()[:-3])
    report = merged(tmp_path)
    assert steps_in(tmp_path, "merged") == [step for step in range(LAST) for _ in range(2)]
    assert set_aside(report) == []


@SPOOLED
def test_an_unfinished_file_without_a_whole_step_changes_nothing(tmp_path: Path, format: str) -> None:  # noqa: A002
    ranks = record(tmp_path, format)
    part_of(ranks[0]).write_bytes(b"")
    part_of(ranks[1]).write_bytes(b"\x10\x00\x00\x00 no block")
    report = merged(tmp_path)
    assert steps_in(tmp_path, "merged") == [step for step in range(5) for _ in range(2)]
    assert set_aside(report) == []


@SPOOLED
def test_an_unfinished_file_of_another_rank_is_set_aside(tmp_path: Path, format: str) -> None:  # noqa: A002
    ranks = record(tmp_path, format)
    part = part_of(ranks[1])
    part.write_bytes(part_of(ranks[0]).read_bytes())
    assert set_aside(merged(tmp_path)) == [str(part)]


def test_two_formats_with_the_same_steps_are_merged_once(tmp_path: Path) -> None:
    record(tmp_path, "hdf5", "parquet", "csv")
    report = merged(tmp_path)
    assert steps_in(tmp_path, "merged") == [step for step in range(LAST + 1) for _ in range(2)]
    assert report.told()["duplicate_steps"]["count"] == 0


@SPOOLED
def test_a_step_that_was_written_again_has_the_values_of_the_unfinished_file(tmp_path: Path, format: str) -> None:  # noqa: A002
    for rank in record(tmp_path, format):
        rank.flush()
        rank.write(LAST, rows(100.0))
    merged(tmp_path)
    found = table(tmp_path, "global")
    assert found["step"].to_pylist().count(LAST) == 1
    last = found.filter(found["step"].to_numpy() == LAST)
    assert last["norm"].to_pylist() == [pytest.approx(500.0 * 2**0.5)]
