"""Event files read back."""

from __future__ import annotations

from pathlib import Path

from pydantic import TypeAdapter

from monitor.anomalies.events import EVENTS_FOLDER, Event, ScanSummary

ALWAYS = {"alert": {"rules": [{"rule_name": "AnomalyTurbulence", "args": {"threshold": 0}}], "dump": True}}
"""Whatever changes is an event."""


def events_of(base: Path, rank: int = 0) -> dict[str, Event]:
    """All of a rank; none without a file, half a file fails."""
    path = base / EVENTS_FOLDER / f"rank{rank}" / "anomaly.json"
    return TypeAdapter(dict[str, Event]).validate_json(path.read_bytes()) if path.exists() else {}


def judged_of(base: Path, rank: int = 0) -> ScanSummary:
    return ScanSummary.model_validate_json((base / EVENTS_FOLDER / f"rank{rank}" / "judged.json").read_bytes())


def steps_of(events: dict[str, Event]) -> list[int]:
    return sorted({event.step for event in events.values()})
