"""The load of an expert over data-parallel ranks is that of all their tokens, and not a mean of loads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
from jobs import Job

from monitor.merge.merge import Wanted, merge
from monitor.merge.outputs import read_merged
from monitor.merge.report import Report

KIND = "moe_router_load_hook"
TOGETHER = ("ddp", "parts", "passed", "fsdp1", "fsdp2")
HOWS = (*TOGETHER, "alone")
SUFFIXES = {"csv": ".csv", "hdf5": ".h5", "parquet": ".parquet"}


@pytest.fixture(scope="module")
def jobs(run_job: Callable[..., Job]) -> dict[str, Job]:
    fields: dict[str, Any] = dict.fromkeys(("wg_distribution", "param_distribution", "mv_distribution"), False)
    fields |= {
        "recording_l2_features": True,
        "l2_targets": {KIND: ["router", "router.module"]},
        "format": [*SUFFIXES],
        "run_numbers": False,
    }
    ran = run_job("routers.py", 2, *HOWS, **fields)
    return {how: replace(ran, base=ran.base / how, monitored=[rank[how] for rank in ran.monitored]) for how in HOWS}


def merged(job: Job, format: str, to: Path) -> tuple[list[dict[str, Any]], Report]:  # noqa: A002
    """The merged rows, from files of one format alone."""
    copytree(job.base, to / "ranks")
    for suffix in {*SUFFIXES.values()} - {SUFFIXES[format]}:
        for path in (to / "ranks").rglob(f"*{suffix}"):
            path.unlink()
    report = merge(Wanted(to / "ranks", to / "merged"))
    rows = [row for path in (to / "merged" / "global").glob(f"{KIND}_*") for row in read_merged(path).to_pylist()]
    return sorted(rows, key=lambda row: (row["step"], row["ranks"], row["name"])), report


def assert_whole(rows: list[dict[str, Any]], counts: list[int]) -> None:
    router, *experts = rows
    loads = np.array(counts) / sum(counts)
    assert [row["assigned"] for row in experts] == counts
    assert [row["load"] for row in experts] == pytest.approx(loads, rel=1e-15)
    assert router["assigned"] == sum(counts)
    assert router["imbalance"] == pytest.approx(max(counts) * len(counts) / sum(counts), rel=1e-15)
    assert router["dead_experts"] == counts.count(0)
    found = [router[name] for name in ("load_p05", "load_p50", "load_p95")]
    assert found == pytest.approx([np.percentile(loads, share) for share in (5, 50, 95)], rel=1e-12)


@pytest.mark.parametrize("format", SUFFIXES)
@pytest.mark.parametrize("how", TOGETHER)
def test_counts_of_both_ranks_are_added(jobs: dict[str, Job], tmp_path: Path, how: str, format: str) -> None:  # noqa: A002
    rows, report = merged(jobs[how], format, tmp_path)
    ranks = jobs[how].monitored
    assert report.clean
    assert {row["ranks"] for row in rows} == {"0 1"}
    for step in range(2):
        of_step = [row for row in rows if row["step"] == step]
        assert_whole(of_step, [a + b for a, b in zip(*(rank["counts"][step] for rank in ranks), strict=True)])
        z_loss = sum(rank["squares"][step] for rank in ranks) / sum(rank["tokens"] for rank in ranks)
        assert of_step[0]["z_loss"] == (None if format == "csv" else pytest.approx(z_loss, rel=1e-5))
    loads = [np.array(rank["counts"][0]) / sum(rank["counts"][0]) for rank in ranks]
    assert np.abs(loads[0] - loads[1]).max() > 0.05, "a mean of loads would be another number"


@pytest.mark.parametrize("format", SUFFIXES)
def test_ranks_without_a_known_group_stay_apart(jobs: dict[str, Job], tmp_path: Path, format: str) -> None:  # noqa: A002
    rows, report = merged(jobs["alone"], format, tmp_path)
    assert report.clean
    for rank in range(2):
        of_rank = [row for row in rows if (row["ranks"], row["step"]) == (str(rank), 1)]
        assert_whole(of_rank, jobs["alone"].monitored[rank]["counts"][1])


@pytest.mark.parametrize("how", HOWS)
def test_each_rank_has_the_rows_of_its_own_tokens(jobs: dict[str, Job], how: str) -> None:
    for rank in range(2):
        rows = [{"step": row.step, **row.values} for row in jobs[how].rows(KIND, rank)]
        for step in range(2):
            router, *experts = [row for row in rows if row["step"] == step]
            counts = jobs[how].monitored[rank]["counts"][step]
            assert [row["assigned"] for row in experts] == counts
            assert router["dead_experts"] == counts.count(0)


def test_a_row_of_whole_ranks_is_missing_where_a_rank_is(jobs: dict[str, Job], tmp_path: Path) -> None:
    copytree(jobs["ddp"].base, tmp_path / "ranks")
    for path in jobs["ddp"].directories[1].glob("*.*"):
        if path.suffix in SUFFIXES.values():
            (tmp_path / "ranks" / path.parent.name / path.name).unlink()
    report = merge(Wanted(tmp_path / "ranks", tmp_path / "merged"))
    assert not report.clean
    assert [row for path in (tmp_path / "merged" / "global").glob(f"{KIND}_*") for row in read_merged(path).to_pylist()] == []
