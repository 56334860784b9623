"""Which call of a module this is, also where it repeats an earlier one inside a backward pass (activation checkpointing)."""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field
from types import FrameType

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils import checkpoint

from monitor.pytorch.input_gradients import sequence_nr
from monitor.recording import protocols
from monitor.recording.protocols import Place


def recomputing() -> bool:
    """Whether a backward pass is running on this thread: a forward inside one repeats an earlier forward."""
    return torch._C._current_graph_task_id() != -1


@dataclass(slots=True)
class _Begun:
    """The calls that began on one thread.

    Attributes:
        numbers: What autograd had counted to at each, ascending.
        places: Which call each was; None for one that built a graph, so that nothing will repeat it.
    """

    numbers: list[int] = field(default_factory=list)
    places: list[Place | None] = field(default_factory=list)

    def after(self, number: int, position: int) -> Place | None:
        """The call at ``position`` after ``number``, if all up to it were without a graph."""
        first = bisect_right(self.numbers, number)
        run = self.places[first : first + position + 1]
        return run[position] if len(run) > position and None not in run else None


class Calls(protocols.Calls):
    """The calls of one module in one step.

    Non-reentrant checkpointing repeats calls whose graph is there already; the repetition counts for nothing. Reentrant
    checkpointing calls a module without a graph first, and again, with one, when backward comes to the node that stands for
    the segment. That node was made just before the segment ran, so it repeats the first calls after its making, in their
    order. Autograd numbers nodes as they are made, each thread for itself; where threads leave it open which call is meant,
    none is.
    """

    def __init__(self) -> None:
        super().__init__()
        self._begun: dict[int, _Begun] = {}
        self._repeated: Counter[tuple[int, int]] = Counter()

    def begin(self, micro_step: int) -> Place:
        place = super().begin(micro_step)
        self._note(place)
        return place

    def repeat(self) -> Place | None:
        node = torch._C._current_autograd_node()
        if not isinstance(node, BackwardCFunction) or _is_unpacking():
            return None
        number: int = node._sequence_nr()
        segment = torch._C._current_graph_task_id(), number
        position = self._repeated[segment]
        self._repeated[segment] += 1
        found = {begun.after(number, position) for begun in self._begun.values()} - {None}
        place = found.pop() if len(found) == 1 else None
        if place is not None and not torch.is_grad_enabled():
            # A checkpoint within a checkpoint: this repetition will itself be repeated.
            self._note(place)
        return place

    def _note(self, place: Place) -> None:
        begun = self._begun.setdefault(threading.get_ident(), _Begun())
        begun.numbers.append(sequence_nr())
        begun.places.append(None if torch.is_grad_enabled() else place)


def _is_unpacking() -> bool:
    """Whether the node's own backward has not been reached yet: non-reentrant checkpointing recomputes what a node has saved
    when the node asks for it, and that may be the node of a reentrant segment within.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not BackwardCFunction.apply.__code__:
        if frame.f_code.co_name == "unpack_hook" and frame.f_code.co_filename == checkpoint.__file__:
            return True
        frame = frame.f_back
    return False
