"""Compiled models that communicate: as many graphs and breaks as without a monitor, the same bits, and each call recorded."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace

import pytest
from evidence import sampled
from jobs import Job
from outcomes import calls, outcome, together, values

TRACED = ("function", "functional", "tensor parallel")
UNTRACED = ("interrupted", "data parallel", "data parallel, backward compiled")
"""Those of which torch itself cannot trace all that communicates: it breaks the graph there, or it is below Python."""

BY_OPERATOR = {
    "function": {"all_reduce": 3},
    "functional": {"all_reduce": 9, "all_gather_into_tensor": 6, "reduce_scatter_tensor": 6},
    "tensor parallel": {"all_reduce": 2},
    "interrupted": {"all_reduce": 3},
}
"""Calls of three steps; of two where the model is tensor parallel."""

NEEDS_A_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
BACKENDS = ["aot_eager", pytest.param("inductor", marks=NEEDS_A_COMPILER)]
CASES = [
    *(pytest.param("inductor", case, marks=NEEDS_A_COMPILER) for case in sampled(TRACED)),
    *(pytest.param("aot_eager", case) for case in TRACED),
    *(pytest.param("untraced", case) for case in UNTRACED),
]


@pytest.fixture(scope="module")
def inductor(run_ranks: Callable[..., Job]) -> Job:
    return run_ranks("compiled.py", 2, "inductor", "", *sampled(TRACED), cc_pre_hook=True)


@pytest.fixture(scope="module")
def aot_eager(run_ranks: Callable[..., Job]) -> Job:
    return run_ranks("compiled.py", 2, "aot_eager", "", *TRACED, cc_pre_hook=True)


@pytest.fixture(scope="module")
def untraced(run_ranks: Callable[..., Job]) -> Job:
    plain, monitored = (
        run_ranks("compiled.py", 2, "aot_eager", alone, *UNTRACED, cc_pre_hook=True) for alone in ("plain", "monitored")
    )
    return replace(monitored, plain=plain.plain)


@pytest.fixture
def job(request: pytest.FixtureRequest) -> Job:
    """The job that the parameter names."""
    return request.getfixturevalue(request.param)


def step_of(job: Job, case: str) -> int:
    return list(job.monitored[0]["cases"]).index(case)


@pytest.mark.parametrize(("job", "case"), CASES, indirect=["job"])
def test_there_are_as_many_graphs_and_breaks_and_the_same_bits(job: Job, case: str) -> None:
    for rank in range(2):
        told = outcome(job, rank, case)["told"]
        assert told["stats"]["unique_graphs"] > 0
        assert (told["graph_break"] > 0) is (case in ("interrupted", "data parallel"))


@pytest.mark.parametrize(("job", "case"), CASES, indirect=["job"])
def test_each_call_is_recorded_once(job: Job, case: str) -> None:
    for rank in range(2):
        found = calls(job, rank, step_of(job, case))
        assert sum(found.values()) == outcome(job, rank, case)["told"]["calls"] > 0
        assert found == BY_OPERATOR.get(case, found)


@pytest.mark.parametrize("job", BACKENDS, indirect=True)
def test_what_comes_out_is_recorded_as_it_was(job: Job) -> None:
    for rank in range(2):
        outputs = together(outcome(job, rank, "function")["told"]["outputs"]) - 1  # which the function adds, and rounds
        row = values(job, rank, step_of(job, "function"))["all_reduce.post_0"]
        assert row["max"] == pytest.approx(outputs.max().item(), abs=1e-6)
        assert row["norm"] == pytest.approx(outputs.norm().item(), rel=1e-6)


@pytest.mark.parametrize("job", [*BACKENDS, "untraced"], indirect=True)
def test_nothing_is_missing_and_nothing_is_warned_of(job: Job) -> None:
    assert job.warnings == []
    assert all("communication" not in job.manifest(rank).notes for rank in range(2))
