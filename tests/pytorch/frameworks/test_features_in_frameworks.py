"""Features of weights that are cut over ranks: of the whole where forward has it, by one rank, without a collective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from jobs import Job
from watching import Row

from monitor.series import Placement

HOOKS = ("linear_hook", "moe_router_weight_hook", "moe_router_logit_hook")
FEATURES: dict[str, Any] = {
    "recording_l2_features": True,
    "l2_targets": {"linear_hook": [], "moe_router_weight_hook": ["router"], "moe_router_logit_hook": ["router"]},
    "wg_distribution": False,
    "param_distribution": False,
    "mv_distribution": False,
}
HOWS = ("ddp", "fsdp1", "fsdp2", "tensor", "zero3")
WHOLE = ("ddp", "fsdp1", "fsdp2", "zero3")
close = partial(pytest.approx, rel=5e-3)


@pytest.fixture(scope="module")
def jobs(run_job: Callable[..., Job]) -> dict[str, Job]:
    """Each way as a job of its own; they have run in the same processes."""
    ran = run_job("features.py", 2, *HOWS, **FEATURES)
    return {how: replace(ran, base=ran.base / how, monitored=[rank[how] for rank in ran.monitored]) for how in HOWS}


def linears(job: Job, rank: int) -> dict[str, Row]:
    """Of the first step, by the name of the module."""
    rows = [row for row in job.rows("linear_hook", rank) if row.step == 0]
    return {row.name.removesuffix(".linear").removeprefix("module."): row for row in rows}


def writers(job: Job) -> list[int]:
    """The ranks whose rows are to be looked at: under DDP and ZeRO no one has passed a group, and every rank writes."""
    return [rank for rank in range(2) if job.rows("linear_hook", rank)]


@pytest.mark.parametrize("how", WHOLE)
def test_a_weight_is_read_whole(jobs: dict[str, Job], how: str) -> None:
    job = jobs[how]
    assert writers(job)
    for rank in writers(job):
        found = linears(job, rank)
        assert sorted(found) == ["down", "router", "up"]
        for name, row in found.items():
            values = job.plain[rank]["whole"][f"{name}.weight"]
            frobenius = sum(value**2 for value in values) ** 0.5
            assert row.values["frobenius_norm"] == close(frobenius)
            assert row.values["kernel_norm"] == close(values[0])


@pytest.mark.parametrize("how", ["fsdp1", "fsdp2"])
def test_a_weight_that_is_gathered_is_written_by_one_rank(jobs: dict[str, Job], how: str) -> None:
    job = jobs[how]
    assert writers(job) == [0]
    placements = {
        one.placement for (kind, _), one in job.series(0).items() if kind in ("linear_hook", "moe_router_weight_hook")
    }
    assert placements == {Placement(replicas=(0, 1))}


def test_a_weight_that_stays_cut_has_the_norms_of_each_part(jobs: dict[str, Job]) -> None:
    job = jobs["tensor"]
    for rank in range(2):
        found = linears(job, rank)
        for name in ("up", "down"):
            values = job.plain[rank]["halves"][name][rank]
            assert found[name].values["kernel_norm"] == close(values[0])
            shard = job.series(rank)["linear_hook", f"{name}.linear"].placement.shard
            assert shard is not None
            assert shard.ranks == (0, 1)


@pytest.mark.parametrize("how", HOWS)
def test_routers_have_logits_on_every_rank(jobs: dict[str, Job], how: str) -> None:
    for rank in range(2):
        rows = jobs[how].rows("moe_router_logit_hook", rank)
        assert [(row.step, row.micro_step) for row in rows] == [(0, 0), (1, 0)]
        assert all(0 < row.values["per_token_expert_entropy"] < 1.4 for row in rows)


@pytest.mark.parametrize("how", HOWS)
def test_nothing_is_communicated_for_it(jobs: dict[str, Job], how: str) -> None:
    for told in jobs[how].monitored:
        assert told["alone"] == told["watched"]
        assert told["alone"] > 0


def test_no_one_was_warned(jobs: dict[str, Job]) -> None:
    assert [said for said in jobs["ddp"].warnings if "eature" in said] == []
