"""Models that are spread over ranks and compiled: the rows of eager code, the same bits, and no graph more."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from jobs import Job

WATCHED: dict[str, Any] = {"xy_distribution": True, "all_xy": True, "wg_distribution": True, "ops": ["min", "max", "norm"]}
HOWS = ("replicated", "sharded", "tensor-parallel")

Ran = Callable[[str, str], Job]


@pytest.fixture(scope="module")
def ran(run_job: Callable[..., Job]) -> Ran:
    """The job of a way and a backend, run when it is first asked for."""
    return cache(lambda how, backend: run_job("compiled_wrapped.py", 2, how, backend, **WATCHED, ndigits=12))


def rows(job: Job, rank: int) -> dict[tuple[str, str, int], dict[str, Any]]:
    found = [row for kind in ("actv", "actv_grad", "grad_unreduced", "grad_reduced") for row in job.rows(kind, rank)]
    return {(row.kind, row.name, row.step): dict(row.values) for row in found}


@pytest.mark.parametrize("how", HOWS)
def test_every_rank_has_the_rows_of_eager_code(how: str, ran: Ran) -> None:
    for rank in range(2):
        eager, compiled = rows(ran(how, "none"), rank), rows(ran(how, "aot_eager"), rank)
        assert compiled.keys() == eager.keys()
        assert {kind for kind, *_ in compiled} >= {"actv", "actv_grad", "grad_reduced"}
        for place, values in compiled.items():
            assert values == pytest.approx(eager[place], rel=1e-4, abs=1e-6), place


@pytest.mark.parametrize("how", HOWS)
def test_training_is_the_same_and_nothing_is_compiled_because_of_the_monitor(how: str, ran: Ran) -> None:
    job = ran(how, "aot_eager")
    assert job.monitored == job.plain
    assert job.plain[0]["graphs"] > 0


def test_a_model_that_ddp_has_compiled_in_pieces_trains_as_before(ran: Ran) -> None:
    """Without inductor the next piece would be given what orders the operators of the last one: they have none there."""
    job = ran("in-pieces", "aot_eager")
    assert job.monitored == job.plain
