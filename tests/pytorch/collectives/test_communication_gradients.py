"""Gradients through communication: those of torch, to the bit, and recorded forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from jobs import Job
from outcomes import calls, outcome, together, values
from watching import assert_statistics

BOTH_WAYS = {
    "all_reduce": ("all_reduce", "all_reduce"),
    "all_gather_single": ("all_gather_into_tensor", "reduce_scatter_tensor"),
    "all_gather_single along rows": ("all_gather_into_tensor", "reduce_scatter_tensor"),
    "all_gather_single_autograd": ("all_gather_into_tensor", "reduce_scatter_tensor"),
    "all_gather_tensor_autograd": ("all_gather_into_tensor", "reduce_scatter_tensor"),
    "reduce_scatter_single": ("reduce_scatter_tensor", "all_gather_into_tensor"),
    "reduce_scatter_single along rows": ("reduce_scatter_tensor", "all_gather_into_tensor"),
    "reduce_scatter_single_autograd": ("reduce_scatter_tensor", "all_gather_into_tensor"),
    "reduce_scatter_tensor_autograd": ("reduce_scatter_tensor", "all_gather_into_tensor"),
    "all_to_all_single": ("all_to_all_single", "all_to_all_single"),
    "all_to_all_single_autograd": ("all_to_all_single", "all_to_all_single"),
    "permute_tensor": ("all_to_all_single", "all_to_all_single"),
    "all_reduce_coalesced": ("all_reduce_coalesced", "all_reduce_coalesced"),
    "all_gather_single_coalesced": ("all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor_coalesced", "all_gather_into_tensor_coalesced"),
    "operator all_reduce": ("all_reduce", "all_reduce"),
    "operator all_gather_into_tensor": ("all_gather_into_tensor", "reduce_scatter_tensor"),
    "operator reduce_scatter_tensor": ("reduce_scatter_tensor", "all_gather_into_tensor"),
    "operator all_to_all_single": ("all_to_all_single", "all_to_all_single"),
    "old operator all_gather_into_tensor": ("all_gather_into_tensor", "reduce_scatter_tensor"),
    "old operator reduce_scatter_tensor": ("reduce_scatter_tensor", "all_gather_into_tensor"),
    "old operator all_to_all_single": ("all_to_all_single", "all_to_all_single"),
}
"""What a case issues in its forward and in its backward, a call each."""

NO_AUTOGRAD = "an autograd kernel was not registered to the Autograd key(s)"
ONCE = {"all_gather_into_tensor": 1, "all_gather": 1, "all_reduce": 1, "reduce_scatter_tensor": 1}
CALLS = {
    **{case: dict.fromkeys(ops, 1 + (ops[0] == ops[1])) for case, ops in BOTH_WAYS.items()},
    "all_reduce, twice": {"all_reduce": 4},
    "all_reduce of the largest": {"all_reduce": 1},
    "broadcast": {"broadcast": 1},
    "all_gather_single, twice": {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2},
    "nn broadcast": {"broadcast": 1, "reduce": 1},
    "nn gather": {"gather": 1, "scatter": 1},
    "nn scatter": {"scatter": 1, "gather": 1},
    "nn reduce": {"reduce": 1, "broadcast": 1},
    "nn reduce_scatter": {"reduce_scatter": 1, "all_gather": 1},
    "nn all_gather": {"all_gather": 1, "scatter": 2},
    "nn _all_gather_base": {"all_gather_into_tensor": 1},
    "nn all_to_all": {"scatter": 4},
    "nn all_to_all_single": {"all_to_all_single": 2},
    "nn all_reduce": {"all_reduce": 2},
    "plain all_reduce": {"all_reduce": 1},
    "plain all_reduce, waited for": {"all_reduce": 1},
    "plain broadcast": {"broadcast": 1},
    "plain all_reduce of a leaf": {"all_reduce": 1},
    "plain all_reduce of a view": {"all_reduce": 1},
    "plain all_gather into views": {"all_gather": 1},
    "hooks of the user's": {"all_reduce": 2},
    "no_grad": ONCE,
    "inference_mode": ONCE,
    "multithreading off": ONCE,
    "saved tensors packed": ONCE,
}
"""Calls by operator."""


@pytest.fixture(scope="module")
def job(run_ranks: Callable[..., Job]) -> Job:
    return run_ranks("gradients.py", 2, cc_pre_hook=True)


def step_of(job: Job, case: str) -> int:
    return list(job.monitored[0]["cases"]).index(case)


def test_no_case_is_left_out(job: Job) -> None:
    assert sorted(CALLS) == sorted(job.monitored[0]["cases"])


@pytest.mark.parametrize("case", CALLS)
def test_results_gradients_graphs_versions_and_warnings_are_those_of_torch_alone(case: str, job: Job) -> None:
    for rank in range(2):
        outcome(job, rank, case)


@pytest.mark.parametrize("case", CALLS)
def test_every_call_of_forward_and_backward_is_recorded_once(case: str, job: Job) -> None:
    assert [calls(job, rank, step_of(job, case)) for rank in range(2)] == [CALLS[case]] * 2


@pytest.mark.parametrize("case", BOTH_WAYS)
def test_what_comes_out_forward_and_backward_is_recorded_as_it_was(case: str, job: Job) -> None:
    for rank in range(2):
        _, _, _, outputs, grads = outcome(job, rank, case)["told"]
        forward, backward = together(outputs), together(grads) / 2  # the inputs are twice the leaves: exact
        rows = values(job, rank, step_of(job, case))
        expected = dict(zip([f"{op}.post_0" for op in BOTH_WAYS[case]], [forward, backward], strict=True))
        if len(expected) == 1:
            expected = {name: torch.cat([forward, backward]) for name in expected}
        assert set(expected) == {name for name in rows if ".post_" in name}
        for name, x in expected.items():
            assert_statistics(rows[name], x)


@pytest.mark.parametrize("case", ["plain all_reduce", "plain all_reduce, waited for", "plain broadcast"])
def test_torch_warns_of_what_has_no_derivative(case: str, job: Job) -> None:
    """So that the comparison of warnings compares some."""
    assert any(NO_AUTOGRAD in message for _, message in outcome(job, 0, case)["warned"])


def test_nothing_else_has_changed_and_nothing_is_missing(job: Job) -> None:
    assert job.plain == job.monitored
    assert job.warnings == []
    assert all("communication" not in job.manifest(rank).notes for rank in range(2))
