"""What the manifests of a job say of its configurations: what holds on which rank, since when, and whether the ranks agree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from monitor.coordinator.manifest_format import ConfigurationRecord, ManifestRecord
from monitor.dynamic.control import WATCHING_RANK
from monitor.merge.discovery import Found, choose, discover
from monitor.merge.errors import MergeError

MOST_REMARKS: Final = 20

MOST_RANKS: Final = 1_000_000
"""Of a job. A damaged number must not have us count for hours."""


class ControlError(ValueError):
    """Nothing was done. The message says why, and what to change."""


@dataclass(frozen=True, slots=True)
class WatchedJob:
    """The ranks of a job, each as its manifest has it.

    Attributes:
        ranks: By rank, and of a rank by recording.
    """

    job_id: str
    ranks: tuple[ManifestRecord, ...]

    @property
    def config_path(self) -> str:
        """Of the file that the job watches: that of the rank that watches it, or of the first one that is known."""
        return next((one for one in self.ranks if one.rank == WATCHING_RANK), self.ranks[0]).config_path

    @property
    def is_dynamic(self) -> bool:
        """Whether the job looks at its file at all."""
        return any(one.configurations for one in self.ranks)

    @property
    def running(self) -> tuple[ManifestRecord, ...]:
        """Those that have not ended cleanly."""
        return tuple(one for one in self.ranks if not one.closed)

    def took_over(self, digest: str) -> bool:
        """Whether a configuration is the latest of every rank that runs."""
        return all(one.configurations and one.configurations[-1].digest == digest for one in self.running)


def job_in(base: Path, job: str | None) -> WatchedJob:
    """The job that is meant: the one named, the only one that runs, or the only one there is.

    Args:
        base: The directory that the ranks' directories lie in.
        job: The beginning of its id; None: it goes without saying.

    Raises:
        ControlError: There is none, or more than one.
    """
    try:
        found = discover(base)
        return _watched(found, _only_running(found) if job is None else choose(found, job))
    except MergeError as error:
        raise ControlError(str(error)) from error


def _only_running(found: Found) -> str:
    running = [job for job in found.job_ids() if any(not run.manifest.closed for run in found.jobs[job])]
    return running[0] if len(running) == 1 else choose(found, None)


def _watched(found: Found, job: str) -> WatchedJob:
    manifests = [run.manifest for run in found.jobs[job]]
    return WatchedJob(job, tuple(sorted(manifests, key=lambda one: (one.rank, one.recording))))


def disagreements(job: WatchedJob) -> list[str]:
    """What is not as it should be, a sentence each; of many the first.

    Manifests are rewritten from time to time, not all at once: a rank that has not written something yet does not disagree.
    """
    said = [*_missing(job), *_different(job), *_undecided(job), *_late(job)]
    more = [f"and {len(said) - MOST_REMARKS} others"] if len(said) > MOST_REMARKS else []
    return said[:MOST_REMARKS] + more


def _missing(job: WatchedJob) -> Iterator[str]:
    """A rank that is to be monitored has a manifest from the first step on."""
    first = job.ranks[0]
    ranks = range(min(first.world_size, MOST_RANKS))
    expected = set(first.config.get("module_ranks") or ranks) & set(ranks)
    if missing := sorted(expected - {one.rank for one in job.ranks}):
        shown = ", ".join(map(str, missing[:MOST_REMARKS]))
        more = f" and {len(missing) - MOST_REMARKS} more" if len(missing) > MOST_REMARKS else ""
        yield f"no manifest of rank {shown}{more}: it has not begun, or its directory is gone"


def _different(job: WatchedJob) -> Iterator[str]:
    first: dict[tuple[int, int, str], tuple[int, ConfigurationRecord]] = {}
    for one in job.ranks:
        for record in one.configurations:
            rank, known = first.setdefault((one.recording, record.number, record.origin), (one.rank, record))
            if (record.from_step, record.digest) != (known.from_step, known.digest):
                ranks = f"ranks {rank} and {one.rank} do not mean the same by change {record.number}"
                yield f"{ranks}: {_told(known)}, and {_told(record)}"


def _told(record: ConfigurationRecord) -> str:
    return f"{record.digest} from step {record.from_step} on"


def _undecided(job: WatchedJob) -> Iterator[str]:
    for one in job.ranks:
        if one.undecided_since is not None:
            since = f"from step {one.undecided_since} on it goes by its own configuration"
            yield f"rank {one.rank} could not reach the others: {since}"


def _late(job: WatchedJob) -> Iterator[str]:
    for one in job.ranks:
        for record in one.configurations:
            if record.since > record.from_step:
                missed = f"steps {record.from_step} to {record.since - 1}"
                yield f"rank {one.rank} learned late of change {record.number}: it has recorded {missed} as before"
