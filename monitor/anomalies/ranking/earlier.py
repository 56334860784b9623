"""Steps of the runs that a resumed run continues: their events were set aside in directories of their own."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from monitor.anomalies.ranking.job import Member
from monitor.coordinator.manifest_format import EarlierRun, ManifestRecord, StepsRecord
from monitor.coordinator.resume import KILLED


class EarlierSteps(NamedTuple):
    """Steps of an earlier run that the events of this one say nothing of.

    Attributes:
        first: The first step of that run; ``end`` is the first step of the run after it.
    """

    reason: str
    first: int
    end: int
    steps: StepsRecord


def earlier_steps(member: Member) -> Iterator[EarlierSteps]:
    """By run, what it wrote and what it lost when it was killed, latest run first."""
    manifest = member.manifest
    if manifest is None or any(run.job_id == manifest.job_id for run in manifest.resumed):
        return  # the events are an earlier run's themselves
    runs: list[EarlierRun | ManifestRecord] = [*manifest.resumed, manifest]
    end = manifest.first_step
    for run, following in reversed(list(pairwise(runs))):
        if run.first_step is None or end is None or following.first_step is None:
            continue
        end = min(end, following.first_step)
        found = _found_in(member, following)
        yield EarlierSteps(f"an earlier run recorded them{found}", run.first_step, end, manifest.steps.written)
        if KILLED in manifest.dropped:
            reason = f"an earlier run was killed before they were written{found}"
            yield EarlierSteps(reason, run.first_step, end, manifest.dropped[KILLED])


def _found_in(member: Member, following: EarlierRun | ManifestRecord) -> str:
    """Where the events of a run are: the run after it renamed their directory."""
    own: Path = member.events.files.folder
    aside = own.parent.with_name(f"{own.parent.name}-before-{following.timestamp}-{following.job_id[:8]}")
    if (aside / own.name).is_dir():
        return f". Rank its events with -d {aside}"
    return f". Its events are not beside {own.parent}"
