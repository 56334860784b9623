"""``judged.json``: what stands beside the events of a rank, so that whoever reads them knows what they are of and what is not
among them.
"""

from __future__ import annotations

from typing import Final

from monitor.coordinator.manifest_format import Natural, Record, StepsRecord

EVENTS_FOLDER: Final = "anomaly_detected"
"""In the base directory; in it a directory ``rank{r}`` for each rank that has judged a step."""

JUDGED_LIMIT: Final = 16 * 2**20
"""Bytes."""


class Judged(Record):
    """What one recording of one rank has judged.

    Attributes:
        directory: Name of the rank's directory, in the base directory, whose manifest is of the same run.
        recording: How many recordings the process had begun before this one.
        host: Where the rank ran.
        events: How many stand in the file.
        not_kept: How many more there were, beyond the bound, by rule.
        steps: Judged.
        rows: How many rows were judged in these steps; None in files of earlier versions.
        trained: The first and the last step of the training that was watched, collected or not; None before the end of the run.
        not_judged: Steps that no rule saw, by reason.
        closed: True once the run has ended and everything was written.
    """

    schema_version: int
    job_id: str
    rank: Natural
    directory: str
    recording: Natural
    host: str
    events: Natural
    not_kept: dict[str, Natural]
    steps: StepsRecord
    rows: Natural | None = None
    trained: tuple[Natural, Natural] | None = None
    not_judged: dict[str, StepsRecord]
    closed: bool


def events_file(recording: int) -> str:
    """``anomaly.json``; of a further recording of the same process ``anomaly-1.json``, ``anomaly-2.json`` …"""
    return f"anomaly-{recording}.json" if recording else "anomaly.json"


def judged_file(recording: int) -> str:
    """The file beside ``events_file(recording)``."""
    return f"judged-{recording}.json" if recording else "judged.json"
