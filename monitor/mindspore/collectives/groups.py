"""Which ranks an operator runs on, and what they are called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindspore.communication import get_group_size, get_process_group_ranks, get_rank

from monitor.recording.collectives import Group, Labels


class Groups:
    """Groups of MindSpore, which have names. A name may come to stand for other ranks: it is asked for each time."""

    def __init__(self) -> None:
        self._labels = Labels()
        self._known: dict[tuple[str, tuple[int, ...]], Group] = {}

    def learn(self, roles: Mapping[str, Sequence[int]]) -> None:
        """Say what groups of ranks are called. The first of several roles of the same ranks stands."""
        self._labels.learn(roles)
        self._known.clear()

    def of(self, given: Any) -> Group | None:
        """What is known of a group; None where MindSpore knows none.

        Args:
            given: Its name.
        """
        try:
            key = given, tuple(get_process_group_ranks(given))
            return self._known.get(key) or self._described(*key)
        except (RuntimeError, TypeError, ValueError):
            return None

    def _described(self, name: str, ranks: tuple[int, ...]) -> Group:
        label = self._labels.of(ranks, get_group_size())
        group = self._known[name, ranks] = Group(label, get_rank(name))
        return group
