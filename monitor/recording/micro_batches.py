"""How many micro-batches a step has, as the first steps show it."""

from __future__ import annotations


class MicroBatchCount:
    """Learns the number from the training forwards of each step.

    The first step decides. If two later steps in a row agree on another number, they correct it, once: the first step may have
    had a forward more, for example to find the largest batch.

    Attributes:
        adopted: The number in use; 0 before the first step has ended.
    """

    def __init__(self) -> None:
        self.adopted = 0
        self._before = 0
        self._corrected = False

    def step_ended(self, forwards: int) -> bool:
        """Whether ``adopted`` has changed. A first step whose forwards were not seen counts as one micro-batch."""
        first, again = not self.adopted, forwards == self._before
        self._before = forwards
        if not first and (self._corrected or not again or forwards in (0, self.adopted)):
            return False
        self._corrected = not first
        self.adopted = max(1, forwards)
        return True
