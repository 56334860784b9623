"""Events of two ranks that pass micro-batches through stages in turns: each says where in the computation it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from event_files import ALWAYS, events_of, judged_of
from jobs import Job

from monitor.anomalies.events import Event
from monitor.sinks.hdf5 import read_hdf5

RANKS = (0, 1)


@pytest.fixture(scope="module")
def job(run_job: Callable[..., Job]) -> Job:
    everything = {"xy_distribution": True, "all_xy": True, "monitor_mbs_grad": True, "format": ["hdf5"]}
    return run_job("pipelining.py", 2, "interleaved", **everything, **ALWAYS)


@pytest.fixture(scope="module", params=RANKS)
def rank(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def events(job: Job, rank: int) -> list[Event]:
    return list(events_of(job.base, rank).values())


def rows(job: Job, rank: int) -> Iterator[dict[str, Any]]:
    """All rows that the rank recorded."""
    (path,) = job.directories[rank].glob("metrics_*.h5")
    yield from read_hdf5(path, ops=["norm", "mean"]).to_pylist()


def test_training_has_the_same_bits(job: Job) -> None:
    assert job.plain == job.monitored


def test_every_row_that_changed_is_an_event_with_the_micro_step_the_chunk_and_the_call_that_the_row_has(
    job: Job, rank: int, events: list[Event]
) -> None:
    """Peers, fault 5: the micro-step was always 0."""
    recorded: dict[tuple[Any, ...], Any] = {}
    expected = set()
    for row in rows(job, rank):
        micro_step = -1 if row["micro_step"] is None else row["micro_step"]
        place = (row["kind"], row["vpp_stage"], row["name"], micro_step)
        for op in ("norm", "mean"):
            first = recorded.setdefault((*place, op), row[op])
            if row[op] != first:
                expected.add((*place, op, row["step"], row["call_id"]))
    found = {
        (*(one.series.kind, one.series.vpp_stage, one.series.name), one.micro_step, one.signal.op, one.step, one.call_id)
        for one in events
    }
    assert found == expected
    assert len(events) == len(expected) > 200


def test_micro_steps_and_chunks_of_all_kinds_are_there(events: list[Event]) -> None:
    assert {one.vpp_stage for one in events} == {0, 1}
    assert {one.micro_step for one in events if one.series.kind in ("actv", "grad_unreduced")} == {0, 1, 2, 3}
    assert {one.micro_step for one in events if one.series.kind == "param_updated"} == {-1}


def test_stage_and_group_are_the_ranks_place_in_the_pipeline(rank: int, events: list[Event]) -> None:
    assert {(one.rank, one.pp_stage, one.group_mates) for one in events} == {(rank, rank, (0, 1))}


def test_the_files_say_whose_events_they_are(job: Job, rank: int, events: list[Event]) -> None:
    judged, manifest = judged_of(job.base, rank), job.manifest(rank)
    assert (judged.job_id, judged.rank, judged.host) == (manifest.job_id, rank, manifest.host)
    assert (judged.directory, judged.recording) == (job.directories[rank].name, manifest.recording)
    assert (judged.steps, judged.events, judged.closed) == (manifest.steps.written, len(events), True)
