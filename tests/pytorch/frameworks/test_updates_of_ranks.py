"""What a step does, in jobs of several ranks: of all ranks' rows together every element of every parameter is in one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from jobs import Job

from monitor.sinks.hdf5 import read_hdf5

RECORDED: dict[str, Any] = {
    "update_ratio": True,
    "optimizer_health": True,
    "mg_direction": True,
    "ur_distribution": True,
    "param_distribution": True,
    "mv_distribution": True,
    "wg_distribution": True,
    "ops": ["norm", "mean"],
    "format": ["csv", "hdf5"],
    "ndigits": 17,
}
JOBS: dict[str, tuple[Any, ...]] = {
    "ddp": ("data_parallel.py", 2, "plain"),
    "fsdp1": ("fsdp1.py", 2, "FULL_SHARD", "plain"),
    "fsdp2": ("fsdp2.py", 2, "plain"),
    "hsdp": ("fsdp2.py", 4, "hsdp"),
    "tensor": ("tensor_parallel.py", 2, "tensor"),
}
TOGETHER = {
    "deepspeed_zero.py": ("zero1", "zero2", "zero3"),
    "megatron_run.py": ("bf16", "fp32-distributed", "tp"),
}
"""Several in the same processes: importing DeepSpeed or Megatron takes longer than to train with it."""


@pytest.fixture(scope="module")
def together(run_job: Callable[..., Job]) -> Callable[[str], Job]:
    """The job of a script, run when it is first asked for."""

    def run(script: str) -> Job:
        return run_job(script, 2, *TOGETHER[script], **RECORDED)

    return cache(run)


@pytest.fixture(scope="module", params=[*JOBS, *(f"{script}:{how}" for script, hows in TOGETHER.items() for how in hows)])
def job(request: pytest.FixtureRequest, run_job: Callable[..., Job], together: Callable[[str], Job]) -> Job:
    if request.param in JOBS:
        return run_job(*JOBS[request.param], **RECORDED)
    script, _, how = request.param.partition(":")
    jobs = together(script)
    plain, monitored = ([told[how] for told in each] for each in (jobs.plain, jobs.monitored))
    return replace(jobs, base=jobs.base / how, plain=plain, monitored=monitored)


def elements(job: Job, kind: str) -> dict[tuple[str, int], int]:
    """Of each parameter in each step, how many elements the rows of all ranks together are of."""
    tables = [
        read_hdf5(path, kinds=[kind]).select(["name", "step", "count"])
        for directory in job.directories
        for path in directory.glob("metrics_*.h5")
    ]
    rows = [row for table in tables for row in table.to_pylist()]
    counted: dict[tuple[str, int], int] = {}
    for row in rows:
        place = row["name"], row["step"]
        counted[place] = counted.get(place, 0) + row["count"]
    return counted


def test_training_has_the_same_bits(job: Job) -> None:
    assert job.plain == job.monitored


def test_every_element_is_in_one_row(job: Job) -> None:
    whole = elements(job, "param_updated")
    assert whole
    assert elements(job, "update_ratio") == whole
    moments = elements(job, "exp_avg")
    for kind in ("adam_update", "adam_ratio"):
        after = elements(job, kind)
        assert {place: count for place, count in after.items() if place in moments} == moments
        assert after.items() <= whole.items()


def test_the_health_of_every_stepped_element_is_in_one_row(job: Job) -> None:
    stepped = elements(job, "adam_update")
    assert elements(job, "optimizer_health") == stepped


def test_the_gradient_of_the_first_step_is_the_root_of_its_second_moment(job: Job) -> None:
    """So the optimizer has used the gradient that is read: scaled, clipped and reduced as that one. DeepSpeed clears it."""
    rows = [row for rank in range(len(job.directories)) for row in job.rows("optimizer_health", rank) if row.step == 0]
    assert rows
    known = [row.values for row in rows if row.values["staleness"] is not None]
    assert len(known) == (0 if "zero" in job.base.name else len(rows))
    for values in known:
        assert math.sqrt(1 - values["below_eps"]) - 1e-5 <= values["staleness"] <= 1 + 1e-5
    assert all(values["swallowed"] == 0 for row in rows if (values := row.values)["swallowed"] is not None)


def test_the_norms_of_the_parts_are_those_of_the_whole(job: Job) -> None:
    for step in {step for _, step in elements(job, "param_origin")}:
        rows = [row for rank in range(len(job.directories)) for row in job.rows("update_ratio", rank) if row.step == step]
        assert sum(row.values["weight_norm"] ** 2 for row in rows) == pytest.approx(job.total_norm("param_origin", step) ** 2)


def test_the_first_direction_is_one_and_every_later_one_a_share(job: Job) -> None:
    shares = [(row.step, row.values["mean"]) for rank in range(len(job.directories)) for row in job.rows("other", rank)]
    assert {share for step, share in shares if step == 0} == {1.0}
    later = [share for step, share in shares if step > 0]
    assert all(0.0 <= share <= 1.0 for share in later)
    assert min(later) < 1.0
    assert elements(job, "mg_direction").items() <= elements(job, "grad_reduced").items()
