"""Tensors of every kind that collectives move: recorded as they are, and refused as torch refuses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from jobs import Job
from outcomes import outcome, tensor, values
from torch import Tensor
from watching import assert_statistics

DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool", "complex64")
REDUCED = (
    *(f"reduce torch.{dtype}" for dtype in DTYPES), "largest of integers", "nothing finite", "scalar", "one", "mean",
    "channels last", "transposed", "part of a storage", "sparse",
)  # fmt: skip
"""An all-reduce of one tensor: the first that is reported went in, the second came out."""

MOVED: dict[str, tuple[str, Callable[[list[Any]], list[Any]]]] = {
    **{f"gather torch.{dtype}": ("all_gather.post_0", lambda told: told) for dtype in DTYPES},
    "every other": ("broadcast.post_0", lambda told: told[2:]),
    "negated": ("all_gather.post_0", lambda told: told),
    "split unevenly": ("all_to_all_single.post_0", lambda told: [told]),
    "several dtypes sent": ("recv.post_0", lambda told: told),
    "coalesced": ("all_reduce_coalesced.post_0", lambda told: told),
    "coalesced, asynchronous": ("all_reduce_coalesced.post_0", lambda told: told),
    "coalesced gathers": ("all_gather_into_tensor_coalesced.post_0", lambda told: told),
}
"""The row of what came out, and which of those reported that was."""

NOT_MEASURED = ("empty", "empty rows", "one list twice", "objects")
REFUSED = (
    "conjugated", "sizes differ", "all_reduce_coalesced of several dtypes", "no tensor", "bits of floats", "too few places",
    "wrong size", "other dtype", "no list", "no one there", "to itself", "no argument", "no such option",
    "method without arguments", "method of nothing",
)  # fmt: skip


@pytest.fixture(scope="module")
def job(run_ranks: Callable[..., Job]) -> Job:
    return run_ranks("kinds_of_tensors.py", 2, cc_pre_hook=True)


def step_of(job: Job, case: str) -> int:
    return list(job.monitored[0]["cases"]).index(case)


def moved(x: Tensor) -> Tensor:
    """What is moved of a tensor: of complex ones, torch.distributed moves real and imaginary parts."""
    return torch.view_as_real(x) if x.is_complex() else x


def test_no_case_is_left_out(job: Job) -> None:
    assert sorted([*REDUCED, *MOVED, *NOT_MEASURED, *REFUSED]) == sorted(job.monitored[0]["cases"])


@pytest.mark.parametrize("case", [*REDUCED, *MOVED, *NOT_MEASURED])
def test_what_collectives_move_arrives_as_it_would(case: str, job: Job) -> None:
    for rank in range(2):
        assert "raised" not in outcome(job, rank, case)


@pytest.mark.parametrize("case", REFUSED)
def test_what_torch_refuses_is_refused_in_its_words(case: str, job: Job) -> None:
    for rank in range(2):
        assert "raised" in outcome(job, rank, case)


@pytest.mark.parametrize("case", REDUCED)
def test_what_goes_in_and_what_comes_out_is_recorded_as_it_was(case: str, job: Job) -> None:
    for rank in range(2):
        before, after = map(tensor, outcome(job, rank, case)["told"][:2])
        rows = values(job, rank, step_of(job, case))
        assert sorted(rows) == ["all_reduce.post_0", "all_reduce.pre_0"]
        assert_statistics(rows["all_reduce.pre_0"], moved(before))
        assert_statistics(rows["all_reduce.post_0"], moved(after))


@pytest.mark.parametrize("case", MOVED)
def test_what_comes_out_is_recorded_as_it_was(case: str, job: Job) -> None:
    name, pick = MOVED[case]
    for rank in range(2):
        found = [tensor(one) for one in pick(outcome(job, rank, case)["told"])]
        x = torch.cat([moved(one).double().flatten() for one in found])
        assert_statistics(values(job, rank, step_of(job, case))[name], x)


def test_nothing_is_warned_of(job: Job) -> None:
    assert job.warnings == []
