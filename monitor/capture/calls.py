"""Which call of a module this is."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple


class Place(NamedTuple):
    """A call of a module among those of its step.

    Attributes:
        micro_step: The micro-step of its forward.
        call: How many calls of the module that micro-step had before.
    """

    micro_step: int
    call: int


class Calls:
    """The calls of one module in one step."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def begin(self, micro_step: int) -> Place:
        """A call in forward."""
        place = Place(micro_step, self._counts[micro_step])
        self._counts[micro_step] += 1
        return place

    def begun(self, micro_step: int) -> int:
        """How many calls of a micro-step have begun."""
        return self._counts[micro_step]

    def repeat(self) -> Place | None:
        """A call in backward: the one it repeats, None where that has a graph or cannot be told."""
        return None

    def restart(self, micro_step: int) -> None:
        """The micro-step begins anew: its forward failed."""
        del self._counts[micro_step]
