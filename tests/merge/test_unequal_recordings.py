"""Ranks that watch unequal numbers of models: recordings are matched by what they watch, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from evidence import sampled
from recorded_job import merged, tensors

from monitor.merge.discovery import discover
from monitor.merge.execution import MergeError

Ran = Callable[[str], Path]

LAYERS = {f"layers.{layer}.{what}" for layer in (0, 2) for what in ("weight", "bias")}
WRAPPED = {f"module.{name}" for name in LAYERS}
OTHER = {"other.weight", "other.bias"}


@pytest.fixture(scope="module")
def ran(launch: Callable[..., Path]) -> Ran:
    return cache(lambda how: launch("unequal.py", how, 2) / "out")


def recordings(base: Path) -> dict[tuple[int, ...], list[str]]:
    """The ids of the jobs that the merge finds, by their ranks."""
    found: dict[tuple[int, ...], list[str]] = {}
    for job, runs in discover(base).jobs.items():
        found.setdefault(tuple(sorted(run.rank for run in runs)), []).append(job)
    return found


def names(base: Path, job: str) -> set[str]:
    output = f"merged-{job}"
    report = merged(base, output, job=job)
    assert report.clean, report.spelled()
    return {row["name"] for row in tensors(base, "param_updated", output)}


ALONE = [
    ("copy-first", LAYERS, WRAPPED),
    ("copy-after", LAYERS, WRAPPED),
    ("one-monitor", LAYERS, WRAPPED),
    ("teacher", LAYERS, LAYERS),
    ("same-class", OTHER, LAYERS),
    ("stages", WRAPPED, LAYERS | OTHER),
]


@pytest.mark.parametrize(
    ("how", "own", "shared"),
    sampled(ALONE, 0, 2, 3, 4, 5),
)
def test_a_model_that_one_rank_alone_watches_is_a_complete_recording_of_its_own(
    ran: Ran, how: str, own: set[str], shared: set[str]
) -> None:
    found = recordings(ran(how))
    assert {ranks: len(jobs) for ranks, jobs in found.items()} == {(0,): 1, (0, 1): 1}
    (alone,), (both,) = found[(0,)], found[(0, 1)]
    if how != "stages":  # where a pipeline group was passed, its other ranks are expected
        assert names(ran(how), alone) == own
    assert {name.removeprefix("stage0:").removeprefix("stage1:") for name in names(ran(how), both)} == shared


def test_models_that_ranks_watch_in_other_orders_are_matched_by_the_names_of_their_parameters(ran: Ran) -> None:
    found = recordings(ran("adversaries"))
    assert list(found) == [(0, 1)]
    assert sorted(map(sorted, (names(ran("adversaries"), job) for job in found[0, 1]))) == [sorted(LAYERS), sorted(OTHER)]


def test_models_that_nothing_tells_apart_are_not_mixed_and_the_merge_says_so(ran: Ran) -> None:
    with pytest.raises(MergeError, match="different numbers of recordings of models that look alike") as raised:
        merged(ran("alike"), "mixed")
    assert str(raised.value).count("-rank") == 3
    assert not (ran("alike") / "mixed").exists()


def test_the_ranks_of_a_launch_share_its_id_and_each_recording_has_a_job_id(ran: Ran) -> None:
    runs = [run for each in discover(ran("copy-first")).jobs.values() for run in each]
    assert len({run.manifest.launch for run in runs}) == 1 != len({run.manifest.job_id for run in runs})
    job_ids: dict[Any, set[str]] = {}
    for run in runs:
        assert run.manifest.watched is not None
        job_ids.setdefault(run.manifest.watched.role, set()).add(run.manifest.job_id)
    assert [len(each) for each in job_ids.values()] == [1, 1]
