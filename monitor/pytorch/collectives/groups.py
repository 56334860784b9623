"""Which ranks an operator runs on, and what they are called."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

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


class Groups:
    """The process groups that were met."""

    def __init__(self) -> None:
        self._roles: dict[tuple[int, ...], str] = {}
        self._known: dict[weakref.ref[dist.ProcessGroup], Group] = {}

    def learn(self, roles: Mapping[str, Sequence[int]]) -> None:
        """Say what groups of ranks are called. The first of several roles of the same ranks stands."""
        for role, ranks in roles.items():
            self._roles.setdefault(tuple(sorted(ranks)), role)
        self._known.clear()

    def of(self, given: Any) -> Group | None:
        """What is known of a process group; None where torch knows none.

        Args:
            given: Itself, its name, or what the dispatcher makes of it.
        """
        if not isinstance(given, dist.ProcessGroup):
            try:
                given = _resolve(given) if isinstance(given, str) else dist.ProcessGroup.unbox(given)
            except (RuntimeError, TypeError):
                return None
        group = self._known.get(weakref.ref(given))
        if group is None and (group := self._described(given)) is not None:
            self._known[weakref.ref(given, self._forget)] = group
        return group

    def _forget(self, gone: weakref.ref[dist.ProcessGroup]) -> None:
        self._known.pop(gone, None)

    def _described(self, given: dist.ProcessGroup) -> Group | None:
        try:
            ranks = tuple(sorted(dist.get_process_group_ranks(given)))
        except KeyError:  # made without torch's knowledge: nobody knows which ranks it is of
            return None
        if len(ranks) == dist.get_world_size():
            return Group(WORLD, given.rank())
        return Group(self._roles.get(ranks) or spelled(ranks), given.rank())


_resolve: Final[Any] = torch._C._distributed_c10d._resolve_process_group


def spelled(ranks: Sequence[int]) -> str:
    """Ranks in ascending order, short where they are evenly spaced: ``0-7``, ``0-28by4``, ``0+3+5``."""
    interval = ranks[1] - ranks[0] if len(ranks) > 2 else 0
    if interval and list(ranks) == list(range(ranks[0], ranks[-1] + 1, interval)):
        return f"{ranks[0]}-{ranks[-1]}" + (f"by{interval}" if interval > 1 else "")
    return "+".join(map(str, ranks))
