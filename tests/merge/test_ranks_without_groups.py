"""Plain tensors of several ranks without any group."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from recorded_job import merged, tensors

from monitor.merge.report import Report

REDUCED = ("grad_reduced", "param_origin", "exp_avg")
Ran = Callable[[str], tuple[Path, Report]]


@pytest.fixture(scope="module")
def ran(launch: Callable[..., Path]) -> Ran:
    def run(how: str) -> tuple[Path, Report]:
        base = launch("no_groups.py", how, 2) / "out"
        return base, merged(base)

    return cache(run)


@pytest.mark.parametrize("kind", REDUCED)
def test_replicas_that_the_loop_averages_itself_count_once(ran: Ran, kind: str) -> None:
    base, report = ran("averaged")
    assert report.clean
    rows = tensors(base, kind)
    assert len({(row["name"], row["step"]) for row in rows}) == len(rows) > 0


@pytest.mark.parametrize("kind", [kind for kind in REDUCED if kind != "grad_reduced"])  # which was not reduced: no rows
def test_tensors_that_differ_have_no_global_number_and_the_report_says_so(ran: Ran, kind: str) -> None:
    base, report = ran("apart")
    assert not report.clean
    assert tensors(base, kind) == []
    listed = report.told()["without_global"]["listed"]
    assert {one["name"] for one in listed if one["kind"] == kind} == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_local_gradients_are_each_ranks_own(ran: Ran) -> None:
    base, _ = ran("averaged")
    assert {row["ranks"] for row in tensors(base, "grad_unreduced")} == {"0", "1"}


def test_stages_of_a_pipeline_have_their_own(ran: Ran) -> None:
    base, report = ran("stages")
    assert report.clean
    assert {row["stage"] for row in tensors(base, "param_origin")} == {0, 1}
