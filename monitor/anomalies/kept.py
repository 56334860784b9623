"""Which events of a run of any length are kept, so that what broke first is among them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

MOST: Final = 10_000
MOST_OF_A_STEP: Final = 1_000


@dataclass(frozen=True, slots=True)
class Entry:
    """An event as it stands in the file.

    Attributes:
        place: Step, and place among the events of the step in call order.
        content: Key and value.
    """

    place: tuple[int, int]
    rule: str
    content: bytes


class Kept:
    """The first events of each step, and of as many steps as there is room for.

    The bound on those of a step is halved whenever all of them would be more than ``most``. So a stream of harmless events does
    not push out the one that comes after it, and of every step the earliest ones stay.

    Attributes:
        most_of_a_step: The bound as it stands.
    """

    def __init__(self, most: int = MOST, most_of_a_step: int = MOST_OF_A_STEP) -> None:
        self.most_of_a_step = most_of_a_step
        self._most = most
        self._steps: dict[int, Sequence[Entry]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Entry]:
        return (entry for entries in self._steps.values() for entry in entries)

    def add(self, step: int, entries: Sequence[Entry]) -> None:
        """Take in a step's events in call order; those of a step that came before are replaced."""
        self._count -= len(self._steps.pop(step, ()))
        if not entries:
            return
        self._put(step, entries)
        while self._count > self._most and self.most_of_a_step > 1:
            self.most_of_a_step //= 2
            for held, before in list(self._steps.items()):
                self._put(held, before)
        if self._count > self._most:
            self._count -= len(self._steps.pop(step))

    def _put(self, step: int, entries: Sequence[Entry]) -> None:
        self._count -= len(self._steps.get(step, ()))
        self._steps[step] = entries[: self.most_of_a_step]
        self._count += len(self._steps[step])
