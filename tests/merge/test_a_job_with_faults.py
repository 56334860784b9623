"""64 ranks: one is missing, one shard is cut off, one step stands twice, and one replica has been tampered with."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from recorded_job import RecordedRank, merged, tensors
from sink_rows import Measured

from monitor.merge.report import Report
from monitor.placement import Placement, Shard

RANKS = tuple(range(64))
MISSING, CUT_OFF, TWICE, TAMPERED = 11, 23, 37, 51


@pytest.fixture(scope="module")
def merged_job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
    base = tmp_path_factory.mktemp("job")
    for rank in RANKS:
        if rank == MISSING:
            continue
        one = RecordedRank(base, rank, len(RANKS))
        one.place("grad_reduced", "w", Placement(shard=Shard(tuple(r for r in RANKS if r != MISSING), (63,), (rank,))))
        one.place("grad_reduced", "b", Placement(unclaimed=RANKS))
        for step in range(10):
            wrong = rank == TAMPERED and step == 2
            one.write(step, {"grad_reduced": [Measured("w", [float(step)]), Measured("b", [1.5 if wrong else 1.0])]})
        one.close()
    shard = next(base.glob(f"*-rank{CUT_OFF}-*")) / "metrics_5-9.h5"
    shard.write_bytes(shard.read_bytes()[:-1000])
    directory = next(base.glob(f"*-rank{TWICE}-*"))
    shutil.copy(directory / "metrics_0-4.h5", directory / "metrics_0-4.2.h5")
    return base, merged(base, rows=400)


def test_the_missing_rank_is_named(merged_job: tuple[Path, Report]) -> None:
    assert merged_job[1].told()["missing_ranks"] == [MISSING]


def test_the_shard_that_is_cut_off_is_named_and_so_are_its_steps(merged_job: tuple[Path, Report]) -> None:
    told = merged_job[1].told()
    (aside,) = told["set_aside"]["listed"]
    assert Path(aside["path"]).name == "metrics_5-9.h5"
    assert [(one["rank"], one["steps"]["ranges"]) for one in told["gaps"]["listed"]] == [(CUT_OFF, [[5, 9, 1]])]


def test_the_steps_that_stand_twice_are_named(merged_job: tuple[Path, Report]) -> None:
    listed = merged_job[1].told()["duplicate_steps"]["listed"]
    assert [(one["rank"], one["steps"]["ranges"]) for one in listed] == [(TWICE, [[0, 4, 1]])]


def test_the_replica_that_was_tampered_with_is_named(merged_job: tuple[Path, Report]) -> None:
    (one,) = merged_job[1].told()["disagreements"]["listed"]
    assert (one["rank"], one["name"], one["step"], one["difference"]) == (TAMPERED, "b", 2, 0.5)


def test_what_is_whole_is_merged(merged_job: tuple[Path, Report]) -> None:
    found = {(row["name"], row["step"]): row["norm"] for row in tensors(merged_job[0])}
    assert {step for name, step in found if name == "b"} == set(range(10))
    assert {step for name, step in found if name == "w"} == set(range(5))
    assert found["w", 3] == pytest.approx(3 * 63**0.5)
