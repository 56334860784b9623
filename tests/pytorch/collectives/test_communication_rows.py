"""Rows of communication, their names and counts, and the log of the first step."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from typing import Any

import pytest
from jobs import Job


@pytest.fixture(scope="module")
def job(run_ranks: Callable[..., Job]) -> Job:
    return run_ranks("fault_3.py", 2, "ranks", cc_pre_hook=True)


def of_step(job: Job, rank: int, step: int) -> dict[str, dict[str, Any]]:
    return {row.name: row.values for row in job.rows("other", rank) if row.step == step}


def test_fault_3_rows_fit_their_header_norms_are_not_summed_and_ddp_is_seen(job: Job) -> None:
    """Peers, fault 3: misaligned rows, sums of the norms of list members, nothing under DistributedDataParallel."""
    for rank in range(2):
        rows = of_step(job, rank, 0)
        # Rank 0 gave zeros and (0, 12), rank 1 (3, 4) and (0, 12).
        assert rows["all_gather.post_0"]["norm"] == pytest.approx(math.sqrt(5**2 + 2 * 12**2), rel=1e-12)
        assert rows["all_gather.post_0"]["calls"] == 2
        assert rows["all_gather.post_0"]["shape"] == "[2]"
        assert rows["all_reduce.post_0"]["norm"] == pytest.approx(2.0, rel=1e-12)
        assert rows["all_reduce.post_0"]["calls"] == 1


def test_an_operator_on_some_of_the_ranks_has_a_row_of_its_own_named_after_them(job: Job) -> None:
    for rank in range(2):
        assert of_step(job, rank, 0)[f"all_gather@{rank}.post_0"]["norm"] == 1.0


def test_a_group_with_a_role_is_called_by_it(run_ranks: Callable[..., Job]) -> None:
    job = run_ranks("fault_3.py", 2, "roles")
    gathered = {"all_gather.post_0", "all_gather@tp.post_0"}
    assert [{name for name in of_step(job, rank, 1) if "gather" in name} for rank in range(2)] == [gathered, gathered]


def test_the_log_has_each_call_site_of_the_first_step_once_with_its_count(job: Job) -> None:
    with open(job.directories[0] / "communication_log.csv", newline="") as file:
        logged = list(csv.DictReader(file))
    mine = [one for one in logged if one["op"] == "all_gather" and one["dtype"] == "torch.float32"]
    assert [(one["group"], one["shape"], one["calls"]) for one in mine] == [
        ("world", "[2]", "1"),
        ("world", "[2]", "1"),
        ("0", "[1]", "1"),
    ]
    assert all("fault_3.py[" in one["stack"].splitlines()[0] for one in mine)


def test_a_rank_that_is_not_monitored_records_nothing_of_its_communication(run_ranks: Callable[..., Job]) -> None:
    job = run_ranks("fault_3.py", 2, "ranks", others={"module_ranks": [1]})
    (only,) = job.directories
    assert "-rank1-" in only.name
    assert job.plain == job.monitored
