"""What was not recorded, as far as the manifests of the ranks know."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from monitor.convert.request import Request
from monitor.coordinator.manifest_format import StepsRecord
from monitor.merge.atomic_output import MergeError
from monitor.merge.discovery import RankRun, discover, runs_of
from monitor.merge.merge import missing_ranks

SHOWN: Final = 10
"""Ranks; more are counted."""


def absent_from(request: Request) -> Iterator[str]:
    """A sentence for ranks that left no directory, and for the steps that a rank dropped."""
    try:
        found = discover(request.base, request.span)
    except MergeError:
        return
    jobs = [one for one in found.job_ids() if one.startswith(request.job or "")]
    runs = runs_of(found, jobs[0]) if len(jobs) == 1 else ()
    if runs and (missing := missing_ranks(runs)):
        shown = ", ".join(map(str, missing[:SHOWN])) + (f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else "")
        yield f"no directory of rank {shown}, of {runs[0].manifest.world_size} ranks"
    for run in runs:
        for reason, steps in _dropped(run):
            yield f"rank {run.rank}: {steps.count:,} steps are missing: {reason}"


def _dropped(run: RankRun) -> Iterator[tuple[str, StepsRecord]]:
    yield from run.manifest.dropped.items()
    yield from run.manifest.lost.get("csv", {}).items()
