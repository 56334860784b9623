"""Every operator that gloo has: what goes in and what comes out is recorded as it was, and stays as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from jobs import Job
from watching import assert_statistics

OPERATORS = (
    "all_reduce", "broadcast", "reduce", "all_reduce_coalesced", "all_gather", "all_gather_into_tensor", "all_gather_coalesced",
    "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "gather", "scatter", "send",
    "batch_isend_irecv", "barrier", "future", "functional all_reduce", "functional broadcast",
    "functional all_gather_into_tensor", "functional reduce_scatter_tensor", "functional all_to_all_single",
)  # fmt: skip

NAMES = {"send": ("send", "recv"), "batch_isend_irecv": ("send", "recv"), "future": ("all_reduce", "all_reduce")}


@pytest.fixture(scope="module", params=["sync", "async"])
def job(request: pytest.FixtureRequest, run_ranks: Callable[..., Job]) -> Job:
    return run_ranks("every_operator.py", 2, request.param, cc_pre_hook=True)


def together(tensors: list[Any]) -> torch.Tensor:
    return torch.cat([torch.tensor(one, dtype=torch.float32).flatten() for one in tensors])


@pytest.mark.parametrize("operator", OPERATORS)
def test_rows_hold_the_statistics_of_what_went_in_and_of_what_came_out(operator: str, job: Job) -> None:
    step = OPERATORS.index(operator)
    taken, given = NAMES.get(operator, (operator.split()[-1],) * 2)
    for rank in range(2):
        inputs, outputs = job.monitored[rank][operator]
        expected = {f"{taken}.pre_0": inputs, f"{given}.post_0": outputs}
        expected = {name: together(tensors) for name, tensors in expected.items() if tensors}
        rows = {row.name: row.values for row in job.rows("other", rank) if row.step == step}
        assert sorted(expected) == sorted(rows)
        for name, x in expected.items():
            assert_statistics(rows[name], x)
            assert rows[name]["calls"] == 1


def test_results_are_the_same_bits(job: Job) -> None:
    assert job.plain == job.monitored


def test_outputs_are_recorded_only_once_and_nothing_is_warned_of(job: Job) -> None:
    assert job.warnings == []
    assert all("communication" not in job.manifest(rank).notes for rank in range(2))
