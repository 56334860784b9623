"""When a step ends, by the rule of ``docs/optimizers.md``."""

from __future__ import annotations


class Clock:
    """The step and the micro-step.

    A step ends when each optimizer has stepped or was skipped; or just before one that has stepped does so again.
    """

    def __init__(self, optimizers: int) -> None:
        self.step = 0
        self.micro_step = -1
        self._optimizers = optimizers
        self._done: set[int] = set()

    def optimizer_begins(self, index: int) -> None:
        if index in self._done:
            self._end()

    def optimizer_ends(self, index: int) -> None:
        self._done.add(index)
        if len(self._done) == self._optimizers:
            self._end()

    def had_its_turn(self, index: int | None) -> bool:
        """Whether an optimizer has stepped, or was skipped, in the step in progress."""
        return index in self._done

    def _end(self) -> None:
        self.step += 1
        self.micro_step = -1
        self._done.clear()
