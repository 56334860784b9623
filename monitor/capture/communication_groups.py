"""What a group of ranks is called in rows and in the log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

WORLD: Final = "world"


@dataclass(frozen=True, slots=True)
class Group:
    """A process group as rows and the log name it.

    Attributes:
        label: Its role (``dp``, ``tp``, ``pp``) where that is known, else its ranks; ``world`` for all ranks of the job.
        rank: Of this process in the group.
    """

    label: str
    rank: int

    @property
    def suffix(self) -> str:
        """What the group adds to an operator's name: nothing where it is all of the job."""
        return "" if self.label == WORLD else f"@{self.label}"


class Labels:
    """What groups are called, by their ranks."""

    def __init__(self) -> None:
        self._roles: dict[tuple[int, ...], str] = {}

    def learn(self, roles: Mapping[str, Sequence[int]]) -> None:
        """Say what groups of ranks are called. The first of several roles of the same ranks stands."""
        for role, ranks in roles.items():
            self._roles.setdefault(tuple(sorted(ranks)), role)

    def of(self, ranks: Sequence[int], world_size: int) -> str:
        """The label of a group of these ranks of the job."""
        ordered = tuple(sorted(ranks))
        if len(ordered) == world_size:
            return WORLD
        return self._roles.get(ordered) or spelled(ordered)


def spelled(ranks: Sequence[int]) -> str:
    """Ranks in ascending order, short where they are evenly spaced: ``0-7``, ``0-28by4``, ``0+3+5``."""
    interval = ranks[1] - ranks[0] if len(ranks) > 2 else 0
    if interval and list(ranks) == list(range(ranks[0], ranks[-1] + 1, interval)):
        return f"{ranks[0]}-{ranks[-1]}" + (f"by{interval}" if interval > 1 else "")
    return "+".join(map(str, ranks))
