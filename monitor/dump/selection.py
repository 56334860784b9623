"""Which calls of a step are recorded, and what of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from monitor.dump.config import Chosen

Direction = Literal["forward", "backward"]
Section = Literal["input", "output"]

DIRECTIONS: Final = ("forward", "backward")


class Selection:
    """The choice of a configuration."""

    def __init__(self, chosen: Chosen) -> None:
        self._listed = [tuple(name.split(".")) for name in chosen.names]
        self._scope = [_of_call(name) for name in chosen.scope]
        modes = set(chosen.data_mode) - ({"all"} if len(chosen.data_mode) > 1 else set())
        self._directions = {mode for mode in DIRECTIONS if mode in modes} or set(DIRECTIONS)
        self._sections = {mode for mode in ("input", "output") if mode in modes} or {"input", "output"}
        self._inside = not self._scope

    def restart(self) -> None:
        """A step begins."""
        self._inside = not self._scope

    def begins(self, name: str) -> bool:
        """A call begins, ``name`` that of its forward. Whether it lies in the scope."""
        if self._scope and not self._inside and _of_call(name) == self._scope[0]:
            self._inside = True
        return self._inside

    def ended(self, name: str) -> None:
        """It has ended, and with it perhaps the scope."""
        if self._scope and self._inside and _of_call(name) == self._scope[1]:
            self._inside = False

    def wants(self, direction: Direction, section: Section | None = None) -> bool:
        """Whether anything of a direction is recorded, or a section of it."""
        return direction in self._directions and (section is None or section in self._sections)

    def lists(self, name: str, enclosing: Sequence[str]) -> bool:
        """Whether a name is among those that were listed, or within a module that is."""
        if not self._listed:
            return True
        return any(_contains(tuple(one.split(".")), part) for one in (name, *enclosing) for part in self._listed)


def _of_call(name: str) -> tuple[str, ...]:
    """A call's name without the direction, which a scope does not tell apart."""
    return tuple(part for part in name.split(".") if part not in DIRECTIONS)


def _contains(name: tuple[str, ...], part: tuple[str, ...]) -> bool:
    return any(name[start : start + len(part)] == part for start in range(len(name) - len(part) + 1))
