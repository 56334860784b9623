"""Zero bubble schedules of ``torch.distributed.pipelining``: gradients of weights that no hook sees are said to be missing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from jobs import Job


@pytest.fixture(scope="module", params=["zero-bubble", "zero-bubble-v"])
def job(request: pytest.FixtureRequest, run_job: Callable[..., Job]) -> Job:
    return run_job("pipelining.py", 2, request.param, xy_distribution=True, all_xy=True)


def test_training_has_the_same_bits(job: Job) -> None:
    assert job.plain == job.monitored


@pytest.mark.parametrize("step", range(3))
def test_the_norm_of_all_reduced_gradients_is_that_over_all_stages(job: Job, step: int) -> None:
    assert job.plain[0]["gradients"][step] == pytest.approx(job.total_norm("grad_reduced", step), rel=1e-5)


def test_each_rank_says_once_which_gradients_have_no_rows_before_aggregation(job: Job) -> None:
    """Rank 0 has the first stage, whose backward is not split, and rank 1 has only stages whose backward is."""
    assert ({row.chunk for row in job.rows("grad_unreduced", 0)}, job.rows("grad_unreduced", 1)) == ({0}, [])
    of_some, of_none = sorted(job.warnings)
    assert "[rank 0] In step 0, 2 of 4 parameters with a row of grad_reduced have none of grad_unreduced, such as" in of_some
    assert "[rank 1] wg_distribution is on, and step 0 has no row of grad_unreduced." in of_none
