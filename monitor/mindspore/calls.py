"""Which call of a cell this is, also where ``mindspore.recompute`` repeats an earlier one inside a backward."""

from __future__ import annotations

from monitor.recording import protocols
from monitor.recording.protocols import Place


class Calls(protocols.Calls):
    """The calls of one cell in one step.

    A backward belongs to the forward before it: one function runs both. So what is repeated is of the latest micro-step, and if
    that had one call of the cell, it is that one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._repeated: set[int] = set()

    def repeat(self) -> Place | None:
        if not self._counts:
            return None
        micro_step = max(self._counts)
        if self._counts[micro_step] != 1 or micro_step in self._repeated:
            return None
        self._repeated.add(micro_step)
        return Place(micro_step, 0)

    def restart(self, micro_step: int) -> None:
        super().restart(micro_step)
        self._repeated.discard(micro_step)
