"""A row of ``grad_reduced`` of MindSpore is the mean over the data-parallel ranks, or absent."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from ranks import Ranks, ended_job, run_ranks
from reading_back import Output

from monitor.coordinator.manifest_format import read_manifest
from monitor.recording.parameters import NOT_REDUCED
from monitor.series import IN_NO_GROUP

REDUCED = {
    "in-place": 1,
    "awaited": 1,
    "by-primitive": 1,
    "in-units": 1 / 3,
    "then-clipped": 1,
    "reducer": 1,
    "micro-batches": 1,
}
"""By which factor the program then multiplies the mean."""
LOCAL = ["none", "clipped", "loss-alone", "weights-averaged", "squares", "discarded"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reductions")


@pytest.fixture(scope="module")
def job(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return ended_job("reductions.py", tmp_path_factory.mktemp("job"), base, 1)


def norms(base: Path, how: str, kind: str = "grad_reduced", rank: int = 0) -> dict[tuple[int, str], float]:
    output = Output(base / how / "output")
    return {(row.step, row.name): row.values["norm"] for row in output.rows(kind, output.directories()[rank])}


def means(job: Ranks, how: str) -> dict[tuple[int, str], float]:
    one, other = (rank.told[0][how] for rank in job.ranks)
    return {
        (step, name): float(np.linalg.norm((np.array(one[step][name]) + np.array(other[step][name])) / 2))
        for step in range(len(one))
        for name in one[step]
    }


@pytest.mark.parametrize("how", REDUCED)
def test_gradients_that_were_seen_to_be_reduced_have_the_mean_over_the_ranks(job: Ranks, base: Path, how: str) -> None:
    expected = {series: mean * REDUCED[how] for series, mean in means(job, how).items()}
    assert norms(base, how) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("how", LOCAL)
def test_gradients_that_no_one_reduced_have_no_row_and_that_is_said(job: Ranks, base: Path, how: str) -> None:  # noqa: ARG001
    assert norms(base, how) == {}
    assert norms(base, how, "replica", 1) == {}
    for directory in Output(base / how / "output").directories():
        note = str(read_manifest(directory / "manifest.json").notes["grad_reduced"])
        assert note.startswith(NOT_REDUCED.partition(":")[0])


@pytest.mark.usefixtures("job")
def test_zeros_are_no_reduction_of_the_other_ranks_gradients(base: Path) -> None:
    assert norms(base, "zeros-discarded") == {}
    (directory, _) = Output(base / "zeros-discarded" / "output").directories()
    assert "grad_reduced" in read_manifest(directory / "manifest.json").notes


def test_ranks_that_share_gradients_and_are_in_no_group_are_named(base: Path, tmp_path: Path) -> None:
    ranks = run_ranks(3, "group_too_small.py", tmp_path / "job", base).ranks
    assert [one.told for one in ranks] == [[0], [1], [2]]
    notes = {
        name: [read_manifest(one / "manifest.json").notes.get(IN_NO_GROUP, "") for one in Output(base / name).directories()]
        for name in ("pair", "everyone")
    }
    assert notes["everyone"] == [""] * 3
    assert ["summed over ranks 2 as well" in one for one in notes["pair"]] == [True, False, False]  # which writes the rows
    assert [sum("in no group" in line for line in one.warnings) for one in ranks] == [1, 0, 0]
