"""Two data-parallel ranks under ``torchrun``: one job, a directory a rank, and gradients before and after they are averaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from launching import EVERY_STEP, Launcher, Nursery
from recorded import Recorded, rank_directories
from two_ranks import TORCHRUN

CONFIG: dict[str, Any] = EVERY_STEP | {"mv_distribution": True, "ndigits": 17}
AVERAGED = ["early", "views", "accumulated", "accumulated-views"]
"""Sections in which every rank writes everything."""

REPLICAS = {"grad_reduced", "param_origin", "param_updated", "exp_avg", "exp_avg_sq"}
OF_EACH_RANK = {"actv", "actv_grad", "grad_unreduced"}


class Job(NamedTuple):
    """What the ranks computed, with and without a monitor, and where they recorded."""

    plain: list[Any]
    monitored: list[Any]
    bases: Path
    said: str

    def recordings(self, section: str) -> list[Recorded]:
        return [Recorded(directory) for directory in rank_directories(self.bases / section)]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Job:
    directory = tmp_path_factory.mktemp("ranks")
    launcher = Launcher(directory, nursery)
    results = [directory / "plain", directory / "monitored"]
    for result in results:
        result.mkdir()
    started = [
        launcher.start_interpreter("ranks.py", results[1], config=CONFIG, module=TORCHRUN),
        *launcher.start_ranks(2, "ranks.py", results[0]),
    ]
    ends = [one.end() for one in started]
    assert [ended.status for ended in ends] == [0, 0, 0], ends[0].err
    assert launcher.clean_up() == ([], [])
    plain, monitored = ([json.loads((result / f"rank{rank}.json").read_text()) for rank in range(2)] for result in results)
    return Job(plain, monitored, directory, ends[0].err)


def test_losses_and_gradients_are_those_of_the_job_that_is_not_monitored(job: Job) -> None:
    assert job.monitored == job.plain
    assert job.plain[0] != job.plain[1]


def test_nothing_is_warned_of(job: Job) -> None:
    assert "[monitor] WARNING" not in job.said, job.said


@pytest.mark.parametrize("section", AVERAGED)
def test_the_ranks_of_a_job_share_its_timestamp_and_its_id(job: Job, section: str) -> None:
    """Also where the monitor was made before the process group."""
    manifests = [recording.manifest() for recording in job.recordings(section)]
    assert [(manifest.rank, manifest.world_size, manifest.closed) for manifest in manifests] == [(0, 2, True), (1, 2, True)]
    assert len({(manifest.job_id, manifest.timestamp, manifest.job_agreed) for manifest in manifests}) == 1
    timestamps = [path.name.split("-rank")[0] for path in rank_directories(job.bases / section)]
    assert timestamps == [manifests[0].timestamp] * 2


def test_every_recording_of_a_job_has_an_id_of_its_own(job: Job) -> None:
    assert len({job.recordings(section)[0].manifest().job_id for section in AVERAGED}) == len(AVERAGED)


def test_gradients_that_are_aggregated_after_every_micro_batch_are_marked_and_others_are_not(job: Job) -> None:
    noted = {
        section: [
            "before the last micro-batch" in str(one.manifest().notes.get("grad_unreduced")) for one in job.recordings(section)
        ]
        for section in ("aggregated-early", "accumulated", "views")
    }
    assert noted == {"aggregated-early": [True, True], "accumulated": [False, False], "views": [False, False]}


def values(recording: Recorded, kind: str, op: str) -> dict[tuple[int, str], float]:
    return {(step, row["name"]): row[op] for step, rows in recording.kinds[kind].items() for row in rows}


@pytest.mark.parametrize("section", AVERAGED)
def test_unreduced_gradients_of_the_ranks_average_to_the_reduced_ones(job: Job, section: str) -> None:
    first, second = job.recordings(section)
    reduced = values(first, "grad_reduced", "mean")
    assert reduced == values(second, "grad_reduced", "mean")
    own = [values(recording, "grad_unreduced", "mean") for recording in (first, second)]
    assert own[0] != own[1]
    assert reduced == pytest.approx({key: (own[0][key] + own[1][key]) / 2 for key in own[1]}, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("section", AVERAGED)
def test_reduced_gradients_are_what_the_optimizer_is_given(job: Job, section: str) -> None:
    truth = {(s, name): norm for s, step in enumerate(job.plain[0][section]["gradients"]) for name, norm in step.items()}
    assert values(job.recordings(section)[0], "grad_reduced", "norm") == pytest.approx(truth, rel=1e-6)


def test_with_a_data_parallel_group_replicas_are_written_by_its_first_rank_alone(job: Job) -> None:
    first, second = job.recordings("grouped")
    assert set(first.kinds) == REPLICAS | OF_EACH_RANK
    assert set(second.kinds) == OF_EACH_RANK
    assert first.manifest().groups == {"dp": (0, 1)}


@pytest.mark.parametrize("section", ["second-rank", "second-rank-grouped"])
def test_a_rank_that_is_not_to_be_monitored_leaves_no_directory_and_hands_its_replicas_on(job: Job, section: str) -> None:
    (only,) = job.recordings(section)
    assert only.manifest().rank == 1
    assert set(only.kinds) == REPLICAS | OF_EACH_RANK
