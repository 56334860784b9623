"""Hooks that are in place, and how they are taken away."""

from __future__ import annotations

from typing import Protocol


class Removable(Protocol):
    """What frameworks return when they take a hook."""

    def remove(self) -> None: ...


class HookSet:
    """Handles of hooks that are in place."""

    def __init__(self) -> None:
        self._handles: list[Removable] = []

    def add(self, handle: Removable) -> None:
        self._handles.append(handle)

    def remove(self) -> None:
        """Take every hook away."""
        while self._handles:
            self._handles.pop().remove()
