"""Ways to issue a call and to wait for it: outputs are recorded as they came, and Work and futures do what they would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from jobs import Job
from outcomes import outcome, together, values
from torch import Tensor
from watching import assert_statistics

ONE_CALL = (
    "waited for twice", "overwritten at once", "waited for with a limit", "future waited for twice", "work and future",
    "changed by what follows", "changed twice", "changed by a callback", "failing callback", "waited for elsewhere",
    "released", "method of a list", "method of a tensor", "method with an operator", "method with options",
    "method of the class",
)  # fmt: skip
ROWS: dict[str, tuple[str, int]] = {
    **dict.fromkeys(ONE_CALL, ("all_reduce", 1)),
    "futures together": ("all_reduce", 2),
    "in reverse": ("all_reduce", 5),
    "on threads of their own": ("all_reduce", 40),
    "method from a root": ("broadcast", 1),
    "method of nested lists": ("all_gather", 1),
    "method of plain lists": ("all_gather", 1),
}
"""The operator, and how often it was called."""

NOT_WAITED_FOR = ("polled", "below the dispatcher", "in Python")
"""Where there need not be a row of what came out; if there is one, it is right."""


@pytest.fixture(scope="module")
def job(run_ranks: Callable[..., Job]) -> Job:
    return run_ranks("works.py", 2, brief=False, cc_pre_hook=True)


def rows_of(job: Job, rank: int, case: str) -> dict[str, dict[str, Any]]:
    return values(job, rank, list(job.monitored[0]["cases"]).index(case))


def given(job: Job, rank: int, case: str) -> Tensor:
    """What came out, before anybody changed it."""
    first, *_ = outcome(job, rank, case)["told"]
    return together(first if isinstance(first, list) else [first])


def test_no_case_is_left_out(job: Job) -> None:
    assert sorted([*ROWS, *NOT_WAITED_FOR]) == sorted(job.monitored[0]["cases"])


@pytest.mark.parametrize("case", [*ROWS, *NOT_WAITED_FOR])
def test_works_and_futures_do_what_they_would(case: str, job: Job) -> None:
    for rank in range(2):
        assert "raised" not in outcome(job, rank, case)


@pytest.mark.parametrize("case", ROWS)
def test_what_comes_out_is_recorded_as_it_came(case: str, job: Job) -> None:
    op, calls = ROWS[case]
    for rank in range(2):
        row = rows_of(job, rank, case)[f"{op}.post_0"]
        assert row["calls"] == calls
        assert_statistics(row, given(job, rank, case))


@pytest.mark.parametrize("case", NOT_WAITED_FOR)
def test_what_no_one_waits_for_is_recorded_right_or_not_at_all(case: str, job: Job) -> None:
    for rank in range(2):
        for name, row in rows_of(job, rank, case).items():
            if ".post_" in name:
                assert_statistics(row, given(job, rank, case))


def test_nothing_is_warned_of(job: Job) -> None:
    assert job.warnings == []
