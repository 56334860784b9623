"""What a manifest says about its rank, and never changes; and the form of its notes."""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from monitor.coordinator import manifest_format as schema
from monitor.coordinator.output import JobIdentity


@dataclass(frozen=True, slots=True)
class RankFacts:
    """The facts of a rank that are known when it begins to record, and do not change.

    Attributes:
        groups: Ranks of the groups that this rank belongs to, by role: ``{"dp": [0, 1]}``.
        chunks: Number of model chunks on this rank.
        recording: How many recordings the process had begun before this one.
        watched: The recorded model, identified so that ranks can match their recordings.
        versions: Versions of the framework and the monitor: ``{"torch": "2.13.0"}``.
        config: The configuration as used. Values that JSON cannot hold are converted by ``str``.
    """

    identity: JobIdentity
    rank: int
    world_size: int
    groups: Mapping[str, Sequence[int]]
    versions: Mapping[str, str]
    config: Mapping[str, Any]
    config_path: str
    formats: Sequence[str]
    chunks: int = 1
    recording: int = 0
    watched: schema.RecordedModel | None = None


def fixed_fields(facts: RankFacts) -> dict[str, Any]:
    return {
        "schema_version": schema.SCHEMA_VERSION,
        "job_id": facts.identity.job_id,
        "job_agreed": facts.identity.agreed,
        "timestamp": facts.identity.timestamp,
        "rank": facts.rank,
        "world_size": facts.world_size,
        "groups": {role: tuple(ranks) for role, ranks in facts.groups.items()},
        "pipeline": schema.PipelineRecord.of(facts.rank, facts.groups.get("pp", ()), facts.chunks),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "versions": dict(facts.versions),
        "config_path": facts.config_path,
        "config": json.loads(json.dumps(facts.config, default=str)),
        "formats": tuple(facts.formats),
        "recording": facts.recording,
        "launch": facts.identity.launch,
        "watched": None if facts.watched is None else schema.WatchedRecord.of(facts.watched),
    }


# --- Notes.

Note = str | int | float | bool

MOST_CHARACTERS: Final = 1000


def plain(value: Note) -> Note:
    """A value that JSON can hold: text of bounded length; NaN and Inf become text."""
    if isinstance(value, str):
        return value[:MOST_CHARACTERS]
    return value if math.isfinite(value) else str(value)
