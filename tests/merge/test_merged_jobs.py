"""Jobs on real ranks: the norms of the merged tensors are those of the same model in one piece."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / folder) for folder in ("processes", "pytorch", "pytorch/frameworks")]

from jobs import Job, start  # noqa: E402
from launching import Launcher, Nursery  # noqa: E402
from recorded_job import merged, tensors  # noqa: E402

JOBS = {
    "fsdp2": (2, ("fsdp2.py", "plain")),
    "fsdp2-replicated": (4, ("fsdp2.py", "hsdp")),
    "dp-tp": (4, ("tensor_parallel.py", "by-hand")),
    "dp-tp-sharded": (4, ("tensor_parallel.py", "fully-sharded")),
}
every = pytest.mark.parametrize("format", ["csv", "hdf5"])


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Iterator[Callable[[str], Job]]:
    """The job of a name, run in both formats at once and merged."""
    launchers = []

    @cache
    def run(how: str) -> Job:
        ranks, (script, *arguments) = JOBS[how]
        directory = tmp_path_factory.mktemp("job")
        launchers.append(Launcher(directory, nursery))
        job = start(launchers[-1], directory, script, ranks, *arguments, format=["csv", "hdf5"])
        for path in job.base.glob("*-rank*"):
            (job.base / "only-csv" / path.name).mkdir(parents=True)
            for file in path.iterdir():
                if file.suffix != ".h5":
                    (job.base / "only-csv" / path.name / file.name).write_bytes(file.read_bytes())
        for base in (job.base, job.base / "only-csv"):
            assert merged(base).clean
        return job

    yield run
    for launcher in launchers:
        launcher.clean_up()


def norm(job: Job, format: str, kind: str, step: int) -> float:  # noqa: A002
    base = job.base / "only-csv" if format == "csv" else job.base
    rows = [row for row in tensors(base, kind) if row["step"] == step]
    assert len({row["name"] for row in rows}) == len(rows), "a row a tensor"
    return math.hypot(*(row["norm"] for row in rows))


@every
@pytest.mark.parametrize("how", JOBS)
def test_the_norms_of_merged_tensors_are_those_of_the_whole_model(ran: Callable[[str], Job], how: str, format: str) -> None:  # noqa: A002
    job = ran(how)
    truth: dict[str, Any] = job.plain[0]
    for step in (1, 2):
        expected = [truth["gradients"][step], truth["before"][step], truth["after"][step], *truth["moments"][step]]
        kinds = ("grad_reduced", "param_origin", "param_updated", "exp_avg", "exp_avg_sq")
        assert [norm(job, format, kind, step) for kind in kinds] == pytest.approx(expected, rel=1e-5)


@every
def test_what_each_data_parallel_rank_has_of_its_own_is_a_tensor_of_its_own(ran: Callable[[str], Job], format: str) -> None:  # noqa: A002
    job = ran("dp-tp")
    base = job.base / "only-csv" if format == "csv" else job.base
    held = {row["ranks"] for row in tensors(base, "grad_unreduced") if row["name"] == "up.weight"}
    assert held == {"0 1", "2 3"}
