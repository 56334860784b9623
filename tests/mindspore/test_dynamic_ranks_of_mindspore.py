"""Two ranks of MindSpore whose configuration is edited while they train: both go over at the same step."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import Ranks, ended_job
from reading_back import Output

from monitor.config import MonitorConfig
from monitor.coordinator.manifest_format import ConfigurationRecord, ManifestRecord, RecordedModel, read_manifest
from monitor.coordinator.store import ASKED_PER_SECOND
from monitor.failures import Failures
from monitor.mindspore.trainer_mon import BACKEND
from monitor.recording.recording import Recording
from monitor.recording.run import ProcessTopology, RecordingSpec


@pytest.fixture(scope="module")
def job(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return ended_job("dynamic_ranks_of_mindspore.py", tmp_path_factory.mktemp("job"), base, 1)


@pytest.fixture
def output(job: Ranks, base: Path) -> Output:  # noqa: ARG001
    return Output(base / "output")


@pytest.fixture
def manifests(output: Output) -> list[ManifestRecord]:
    return [read_manifest(directory / "manifest.json") for directory in output.directories()]


@pytest.fixture
def switches(manifests: list[ManifestRecord]) -> tuple[ConfigurationRecord, ...]:
    """What rank 0 went over to: off, gradients, everything, off, gradients of every second step."""
    return manifests[0].configurations


def steps_of(output: Output, kind: str, rank: int) -> list[int]:
    return sorted({row.step for row in output.rows(kind, output.directories()[rank])})


def test_ranks_end_well_without_a_warning(job: Ranks) -> None:
    assert (job.status, [rank.status for rank in job.ranks]) == (0, [0, 0])
    assert [rank.warnings for rank in job.ranks] == [[], []]


def test_losses_are_those_of_unmonitored_ranks_in_every_bit(job: Ranks) -> None:
    for rank in job.ranks:
        (told,) = rank.told
        assert len(told["monitored"]) > 20
        assert told["monitored"] == told["plain"]


def test_both_ranks_go_over_at_the_same_steps_and_neither_is_late(manifests: list[ManifestRecord]) -> None:
    first, second = manifests
    assert first.configurations == second.configurations
    assert [(one.origin, one.on) for one in first.configurations] == [
        ("start", False),
        ("file", True),
        ("file", True),
        ("file", False),
        ("file", True),
    ]
    assert all(one.since == one.from_step for one in first.configurations)
    assert [(one.dropped, one.lost, one.failures, one.undecided_since) for one in manifests] == [({}, {}, {}, None)] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_gradients_are_recorded_while_monitoring_is_on(
    job: Ranks, output: Output, switches: tuple[ConfigurationRecord, ...], rank: int
) -> None:
    _, on, _, off, again = (one.from_step for one in switches)
    end = len(job.ranks[0].told[0]["monitored"])
    assert steps_of(output, "grad_unreduced", rank) == [*range(on, off), *range(again, end, 2)]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", ["actv", "actv_grad", "other"])
def test_activations_and_communication_are_recorded_from_the_second_edit_to_the_third(
    output: Output, switches: tuple[ConfigurationRecord, ...], kind: str, rank: int
) -> None:
    _, _, more, off, _ = (one.from_step for one in switches)
    assert steps_of(output, kind, rank) == list(range(more, off))


def test_what_ranks_hold_alike_is_written_by_the_first_after_every_switch(
    output: Output, switches: tuple[ConfigurationRecord, ...]
) -> None:
    assert steps_of(output, "grad_reduced", 0) == steps_of(output, "grad_unreduced", 1)
    assert steps_of(output, "grad_reduced", 1) == []
    assert len(switches) == 5


def test_the_store_that_python_serves_is_asked_no_more_often_than_it_can_answer(tmp_path: Path) -> None:
    spec = RecordingSpec(MonitorConfig(), "", tmp_path, RecordedModel("Network", ""), Failures())
    recording = Recording(spec, ProcessTopology, BACKEND)
    assert recording.job().asked_per_second == ASKED_PER_SECOND
