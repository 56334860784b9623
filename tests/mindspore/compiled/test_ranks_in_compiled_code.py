"""Ranks whose steps or backwards are compiled: replicas are compared, and what cannot be seen makes no run bad."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import Ranks, ended_job

from monitor.mindspore.gradients import OUT_OF_SIGHT
from monitor.report.checks import CheckResult, checks_of
from monitor.report.facts import facts_of
from monitor.report.findings import BAD, GOOD


@pytest.fixture(scope="module")
def job(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return ended_job("graph_ranks.py", tmp_path_factory.mktemp("job"), base, 2)


def checks(output: Path) -> dict[str, CheckResult]:
    with facts_of(output) as facts:
        return {one.name: one for one in checks_of(facts)}


def test_training_has_the_bits_of_unmonitored_ranks(job: Ranks) -> None:
    for rank in job.ranks:
        assert rank.told == [["graph", True], ["backward", True]]


@pytest.mark.usefixtures("job")
def test_a_weight_that_changes_on_the_rank_that_writes_no_weights_is_named(base: Path) -> None:
    found = checks(base / "graph")
    assert found["Replicas agree"].state == found["Unchanged between steps"].state == BAD
    place = found["Replicas agree"].finding.place
    assert (place.step, place.kind, place.name) == (2, "param_origin", "a.weight")
    assert "rank 1 found that its own copy" in found["Replicas agree"].finding.says
    assert "Rank 1" in found["Unchanged between steps"].finding.says


@pytest.mark.parametrize("name", ["graph", "backward"])
@pytest.mark.usefixtures("job")
def test_reductions_that_cannot_be_seen_are_no_failure(base: Path, name: str) -> None:
    found = checks(base / name)
    assert found["Monitoring itself"].state != BAD
    assert OUT_OF_SIGHT.rstrip(".") in found["Monitoring itself"].finding.says
    assert found["Replicas agree"].state == (BAD if name == "graph" else GOOD)
