"""64 ranks: one is missing, one shard is cut off, one step stands twice, and one replica has been tampered with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from recorded_job import RecordedRank, tensors
from sink_rows import Measured
from typer.testing import CliRunner

from monitor.merge.cli import app
from monitor.series import Placement, Shard

RANKS = tuple(range(64))
MISSING, CUT_OFF, TWICE, TAMPERED = 11, 23, 37, 51


class Merged(NamedTuple):
    """What the command wrote and said."""

    base: Path
    status: int
    report: dict[str, Any]
    lines: list[str]

    def file(self, rank: int, name: str) -> Path:
        return next(self.base.glob(f"*-rank{rank}-*")) / name


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Merged:
    base = tmp_path_factory.mktemp("job")
    for rank in RANKS:
        if rank != MISSING:
            record(base, rank)
    shard = next(base.glob(f"*-rank{CUT_OFF}-*")) / "metrics_5-9.h5"
    shard.write_bytes(shard.read_bytes()[:-1000])
    resumed = next(base.glob(f"*-rank{TWICE}-*"))
    shutil.copy(resumed / "metrics_0-4.h5", resumed / "metrics_0-4.2.h5")
    result = CliRunner().invoke(app, [str(base)])
    report = json.loads((base / "merged" / "report.json").read_text())
    return Merged(base, result.exit_code, report, result.output.splitlines())


def record(base: Path, rank: int) -> None:
    """A part of ``w``, which the ranks there are hold between them, and a copy of ``b``."""
    one = RecordedRank(base, rank, len(RANKS))
    one.place("grad_reduced", "w", Placement(shard=Shard(tuple(r for r in RANKS if r != MISSING), (63,), (rank,))))
    one.place("grad_reduced", "b", Placement(unclaimed=RANKS))
    for step in range(10):
        wrong = rank == TAMPERED and step == 2
        one.write(step, {"grad_reduced": [Measured("w", [float(step)]), Measured("b", [1.5 if wrong else 1.0])]})
    one.close()


def test_it_is_merged_and_the_exit_status_says_that_something_is_wrong(job: Merged) -> None:
    assert job.status == 1


def test_the_missing_rank_is_named(job: Merged) -> None:
    assert job.report["missing_ranks"] == [MISSING]
    assert "missing ranks    11" in job.lines


def test_the_shard_that_is_cut_off_is_named_and_so_are_its_steps(job: Merged) -> None:
    (aside,) = job.report["set_aside"]["listed"]
    shard = job.file(CUT_OFF, "metrics_5-9.h5")
    assert Path(aside["path"]) == shard
    assert "truncated file" in aside["reason"]
    assert [line for line in job.lines if line.startswith("set aside")] == [f"set aside        {shard}: {aside['reason']}"]
    assert [(one["rank"], one["steps"]["ranges"]) for one in job.report["gaps"]["listed"]] == [(CUT_OFF, [[5, 9, 1]])]
    assert "gaps             rank 23 has no grad_reduced at steps 5 to 9" in job.lines


def test_the_steps_that_stand_twice_are_named(job: Merged) -> None:
    listed = job.report["duplicate_steps"]["listed"]
    assert [(one["rank"], one["steps"]["ranges"]) for one in listed] == [(TWICE, [[0, 4, 1]])]
    assert "duplicate steps  rank 37 has grad_reduced twice at steps 0 to 4; the last file counts" in job.lines


def test_the_replica_that_was_tampered_with_is_named(job: Merged) -> None:
    (one,) = job.report["disagreements"]["listed"]
    assert (one["rank"], one["name"], one["step"], one["difference"]) == (TAMPERED, "b", 2, 0.5)
    assert "disagreements    grad_reduced b at step 2: norm is 1.5 on rank 51, 1.0 on rank 0" in job.lines


def test_nothing_else_is_said_to_be_wrong(job: Merged) -> None:
    wrong = {what for what, found in job.report.items() if isinstance(found, dict) and found.get("count") and what != "steps"}
    assert wrong == {"gaps", "duplicate_steps", "set_aside", "disagreements", "incomplete"}


def test_what_is_whole_is_merged(job: Merged) -> None:
    found = {(row["name"], row["step"]): row["norm"] for row in tensors(job.base)}
    assert {step for name, step in found if name == "b"} == set(range(10))
    assert {step for name, step in found if name == "w"} == set(range(5))
    assert found["w", 3] == pytest.approx(3 * 63**0.5)
