"""Which ranks an operator runs on, and what they are called."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from monitor.recording.collectives import Group, Labels


class Groups:
    """The process groups that were met."""

    def __init__(self) -> None:
        self._labels = Labels()
        self._known: dict[weakref.ref[dist.ProcessGroup], Group] = {}

    def learn(self, roles: Mapping[str, Sequence[int]]) -> None:
        """Say what groups of ranks are called. The first of several roles of the same ranks stands."""
        self._labels.learn(roles)
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
            ranks = dist.get_process_group_ranks(given)
        except KeyError:  # made without torch's knowledge: nobody knows which ranks it is of
            return None
        return Group(self._labels.of(ranks, dist.get_world_size()), given.rank())


_resolve: Final[Any] = torch._C._distributed_c10d._resolve_process_group
