"""Gradients of what goes into a module and comes out of it, followed while its call is traced.

AOTAutograd traces forward and backward together, over a graph of autograd's own. So gradients are found there as in eager
code: by hooks on results, and on the edges through which the call hands gradients back to its inputs (``input_gradients``).
Nothing is put in the place of what a module is given, and no sum is grouped otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from monitor.pytorch import input_gradients
from monitor.pytorch.input_gradients import Target, sequence_nr
from monitor.recording.backend import Graph
from monitor.recording.following import follow_inputs, follow_result, slots_of
from monitor.recording.protocols import Removable

GRAPH: Final[Graph] = input_gradients

MOST_OPEN: Final = 64
"""Calls of one module within each other. More have begun and raised."""

Named = tuple[Tensor, str]
"""A tensor and the slot that it stands in."""
Reader = Callable[[Tensor, str], Callable[[Tensor], None]]
"""Makes what reads the gradient of a slot, given the tensor that stands for the call."""


@dataclass(frozen=True, slots=True)
class OpenCall:
    """A call that has begun.

    Attributes:
        tag: The tensor that stands for it.
        targets: Where the gradients of its inputs will go, and the slots of these.
        start: What autograd had counted to.
    """

    tag: Tensor
    targets: dict[Target, str]
    start: int

    @classmethod
    def of(cls, tag: Tensor, inputs: Sequence[tuple[Tensor, str, bool]]) -> OpenCall:
        """Of all inputs, each with its slot and whether its gradient is wanted."""
        targets = slots_of(GRAPH, inputs, "input_") if torch.is_grad_enabled() else {}
        return cls(tag, targets, sequence_nr())


class OpenCalls:
    """By the tensors that stand for modules, which in a trace are its own."""

    def __init__(self) -> None:
        self._open = WeakIdKeyDictionary()

    def push(self, handle: Tensor, call: OpenCall | None) -> None:
        """None for a call of which nothing is known: it ends, too."""
        calls: list[OpenCall | None] = self._open.setdefault(handle, [])
        calls.append(call)
        del calls[:-MOST_OPEN]

    def pop(self, handle: Tensor) -> OpenCall | None:
        calls: list[OpenCall | None] = self._open.get(handle, [])
        return calls.pop() if calls else None


def follow(
    call: OpenCall | None, tag: Tensor, results: Sequence[Tensor], outputs: Iterable[Named], read: Reader
) -> list[Removable]:
    """Have the gradients of a call's inputs and outputs read.

    Args:
        tag: Stands for the call from its end on.
        results: All tensors that it returns.
        outputs: Those whose gradients are wanted.

    Returns:
        Handles of hooks on what may outlive the graph.
    """
    if not torch.is_grad_enabled():
        return []
    start = 0 if call is None else call.start
    handles: list[Removable] = []
    for x, slot in outputs:
        if x.requires_grad:
            handles += follow_result(GRAPH, x, start, read(tag, slot))
    if call is not None and call.targets:
        differentiable = [x for x in results if x.requires_grad]
        handles += follow_inputs(GRAPH, call.targets, start, differentiable, partial(read, call.tag))
    return handles
