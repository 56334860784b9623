"""Two configurations against each other, in a line for people."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Final

from monitor.config import MonitorConfig
from monitor.config.errors import shown

MOST_CHARACTERS: Final = 500
NOTHING: Final = "no field differs"


def digest_of(config: MonitorConfig) -> str:
    """Sixteen hexadecimal characters, the same for equal configurations on every rank."""
    return sha256(json.dumps(config.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()[:16]


def summary(before: MonitorConfig, after: MonitorConfig) -> str:
    """The fields that differ: ``dynamic_on: false -> true, collect_times: 5 -> 10``."""
    old, new = before.model_dump(mode="json"), after.model_dump(mode="json")
    named = [
        f"{name}: {shown(old.get(name))} -> {shown(new.get(name))}" for name in {**old, **new} if old.get(name) != new.get(name)
    ]
    said = ", ".join(named) or NOTHING
    return said if len(said) <= MOST_CHARACTERS else said[: MOST_CHARACTERS - 4] + " ..."
