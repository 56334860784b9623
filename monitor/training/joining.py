"""The two halves of a step, which come from two threads: what the loop told, and what was read of its tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from monitor.training.facts import StepFacts, StepNorms

MOST_WAITING: Final = 64
"""Steps that wait for their norms. A writer that is so far behind has dropped some."""

Whole = Callable[[StepFacts, StepNorms | None], None]


class Joining:
    """Hands on each step's facts in their order, with the norms that belong to them as soon as those are there.

    Norms come in the order of their steps, so whoever waits for those of an earlier step waits in vain.

    Args:
        whole: Called with the facts of a step, and its norms if it has any.
    """

    def __init__(self, whole: Whole) -> None:
        self._whole = whole
        self._waiting: deque[StepFacts] = deque()
        self._norms: dict[int, StepNorms | None] = {}
        self._newest = -1

    def facts(self, facts: StepFacts) -> None:
        """The training loop has told of a step."""
        self._waiting.append(facts)
        self._settle()

    def norms(self, step: int, norms: StepNorms | None) -> None:
        """A step of the recording was read; None where it is lost."""
        self._norms[step] = norms
        self._newest = max(self._newest, step)
        while len(self._norms) > MOST_WAITING:  # of a loop that tells nothing
            del self._norms[next(iter(self._norms))]
        self._settle()

    def rest(self) -> None:
        """No more norms will come."""
        while self._waiting:
            self._hand_on(self._waiting.popleft())

    def _settle(self) -> None:
        while self._waiting and (len(self._waiting) > MOST_WAITING or self._is_whole(self._waiting[0])):
            self._hand_on(self._waiting.popleft())

    def _is_whole(self, facts: StepFacts) -> bool:
        return facts.measured is None or facts.measured in self._norms or facts.measured < self._newest

    def _hand_on(self, facts: StepFacts) -> None:
        norms = None if facts.measured is None else self._norms.get(facts.measured)
        if facts.measured is not None:
            self._norms = {step: one for step, one in self._norms.items() if step > facts.measured}
        self._whole(facts, norms)
