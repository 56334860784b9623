"""Lightning: it hands forward, backward and clipping to the optimizer as a closure, and runs a training step as the forward of
its module; gradients, weights and moments are where plain PyTorch keeps them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
from jobs import Job, assert_norms_of_clipping

from monitor.pytorch.gradients import CHANGED
from monitor.recording.parameters import AGGREGATED_EARLY

STEPS = 3
NO_BOUND = 1e9


class Case(NamedTuple):
    """A training of so many ranks; see the script."""

    ranks: int
    how: str
    micro_steps: int
    limit: float


CASES = [
    Case(2, "wrapped", 2, NO_BOUND),
    Case(2, "inner", 2, 0),
    Case(1, "inner", 1, 0.5),
    Case(2, "callback", 2, NO_BOUND),
    Case(2, "manual", 2, 0),
]


def identity(case: Case) -> str:
    return f"{case.how}-{case.ranks}"


@pytest.fixture(scope="module", params=CASES, ids=identity)
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


@pytest.fixture(scope="module")
def job(case: Case, run_job: Callable[..., Job]) -> Job:
    return run_job("lightning_run.py", *case, xy_distribution=True, all_xy=True)


def test_training_has_the_same_bits(job: Job) -> None:
    assert job.plain == job.monitored


def test_nothing_is_warned_of(job: Job) -> None:
    assert job.warnings == []


def test_every_optimizer_step_is_a_step_and_the_run_ends_cleanly(job: Job, case: Case) -> None:
    for rank in range(case.ranks):
        manifest = job.manifest(rank)
        assert manifest.closed
        assert manifest.steps.written.ranges == ((0, STEPS - 1, 1),)


def test_the_norm_of_all_reduced_gradients_is_what_the_framework_reports(job: Job, case: Case) -> None:
    """It clips at the end of the closure; the bound is what is left where it binds."""
    for step, reported in enumerate(job.plain[0]["gradients"]):
        expected = min(reported, case.limit) if case.limit else reported
        assert expected == pytest.approx(job.total_norm("grad_reduced", step), rel=1e-5)
    assert len(job.plain[0]["gradients"]) == STEPS


def test_the_norms_before_and_after_clipping_are_numbers_of_the_run(job: Job, case: Case) -> None:
    assert_norms_of_clipping(job, case.limit)


def test_the_manifest_says_what_was_done_to_gradients(job: Job, case: Case) -> None:
    """Who optimizes by hand has to hold DistributedDataParallel back by hand, and this one does not."""
    clipped = {"grad_reduced": CHANGED} if case.limit else {}
    mixed = {"grad_unreduced": AGGREGATED_EARLY} if case.how == "manual" else {}
    assert job.manifest(0).notes == clipped | mixed


def test_the_norms_of_all_weights_and_moments_are_those_of_the_model(job: Job) -> None:
    """The first step has no moments."""
    for step in range(STEPS):
        assert job.plain[0]["before"][step] == pytest.approx(job.total_norm("param_origin", step), rel=1e-5)
    for step in range(1, STEPS):
        for kind, expected in zip(("exp_avg", "exp_avg_sq"), job.plain[0]["moments"][step - 1], strict=True):
            assert expected == pytest.approx(job.total_norm(kind, step), rel=1e-5)


def test_what_the_ranks_hold_alike_is_written_by_the_first(job: Job, case: Case) -> None:
    for rank in range(1, case.ranks):
        assert not job.rows("grad_reduced", rank)
        assert not job.rows("param_origin", rank)
        assert job.rows("grad_unreduced", rank)


def test_activations_stand_under_the_micro_batch_they_belong_to(job: Job, case: Case) -> None:
    """Each layer is called once in each."""
    expected = [(step, micro_step) for step in range(STEPS) for micro_step in range(case.micro_steps)]
    inputs = "module.last.input" if case.how in ("wrapped", "callback") else "last.input"
    for rank in range(case.ranks):
        for kind in ("actv", "actv_grad"):
            assert [(row.step, row.micro_step) for row in job.rows(kind, rank) if row.name == inputs] == expected


@pytest.mark.parametrize("case", CASES[:-1], ids=identity, indirect=True)
def test_local_gradients_have_a_row_a_step_and_average_to_the_reduced_one(job: Job, case: Case) -> None:
    scale = min(1.0, case.limit / job.plain[0]["gradients"][0]) if case.limit else 1.0
    local = [{row.name: row.values for row in job.rows("grad_unreduced", rank) if row.step == 0} for rank in range(case.ranks)]
    reduced = {row.name: row.values for row in job.rows("grad_reduced", 0) if row.step == 0}
    for rank in range(case.ranks):
        assert len(job.rows("grad_unreduced", rank)) == STEPS * len(reduced)
    for name, values in reduced.items():
        mean = sum(one[name]["mean"] for one in local) / case.ranks
        assert values["mean"] == pytest.approx(scale * mean, rel=1e-4, abs=1e-6 * sum(one[name]["norm"] for one in local))
