"""Fields of other tools' configurations that the monitor knows by name and has no use for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from monitor.config.explain import spelled
from monitor.config.jsonc import Path


def without(fields: Mapping[str, Any], unused: Collection[Path], below: Path = ()) -> tuple[dict[str, Any], list[Path]]:
    """The fields without those at the paths in ``unused``, and the paths that were there. ``fields`` stays as it is.

    Args:
        below: Where ``fields`` stand.
    """
    left: dict[str, Any] = {}
    found: list[Path] = []
    for name, value in fields.items():
        path = (*below, name)
        if path in unused:
            found.append(path)
        elif isinstance(value, dict):
            left[name], deeper = without(value, unused, path)
            found += deeper
        else:
            left[name] = value
    return left, found


def said_of(found: Collection[Path]) -> str:
    """What to warn of, where there are any."""
    names = ", ".join(spelled(path) for path in found)
    return f"{names}: known and not used here, so without effect."
