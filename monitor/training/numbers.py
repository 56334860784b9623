"""Numbers that a step reports, some of which a device has yet to compute."""

from __future__ import annotations

from collections.abc import Callable

Number = float | Callable[[], float]
"""A number, or what waits for it: called once, by the writer's thread, never by training's."""


def read(number: Number) -> float:
    """The number, waited for."""
    return number if isinstance(number, int | float) else number()
