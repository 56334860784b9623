"""Access to PyTorch's autograd graph: gradients of a call's inputs, and repetitions by activation checkpointing."""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils import checkpoint

from monitor.recording.backend import Removable
from monitor.recording.gradient_edges import BackwardEngine, before, walk
from monitor.recording.module_calls import CallIndex

# --- The gradient that a module returns for one of its inputs, observed without changing the graph. A full module backward hook
# inserts identities, which regroup sums of gradients and change bits. Instead, the pre-hook notes the gradient edge of each
# input and the autograd sequence number. The forward hook walks back from the outputs over the nodes made during the call. A
# post-hook on each edge into the input reads the gradient that flows through it.

Write = Callable[[Tensor], None]
Target = tuple[Node, int]
"""A gradient edge: the node that will receive the gradient, and the index of its input."""
Edge = tuple[Node, int]
"""A producer: the node and the index of its ``next_functions`` through which it feeds a target."""

_FORWARDING_NODE: Final[Any] = BackwardHookFunction._backward_cls

sequence_nr: Callable[[], int] = torch._C._autograd._get_sequence_nr
recording: Callable[[], bool] = torch.is_grad_enabled


def requires_grad(x: Tensor) -> bool:
    """Whether the gradient of ``x`` has a place in the graph. A view that was made without a graph has none, but its
    ``requires_grad`` is that of its base.
    """
    return x.requires_grad and (x.grad_fn is not None or not x._is_view() or _accumulates(x))


def _accumulates(view: Tensor) -> bool:
    with torch.enable_grad():
        node = view.view_as(view).grad_fn
    return node is not None and node.next_functions[0][0] is not None


def made_since(x: Tensor, start: int) -> bool:
    """Whether a node with this number or a later one made ``x``. Its hooks are freed with the graph."""
    return x.grad_fn is not None and x.grad_fn._sequence_nr() >= start


def on_gradient(x: Tensor, write: Write) -> Removable:
    """Call ``write(gradient)`` with the whole gradient of ``x``, if a backward computes one.

    A function with ``set_materialize_grads(False)`` passes None for a result that nothing uses.
    """

    def hook(gradient: Tensor | None) -> None:
        if gradient is not None:
            write(gradient)

    handle: Removable = x.register_hook(hook)
    return handle


def gradient_target(x: Tensor) -> Target:
    """The edge that the gradient of ``x`` flows to now. An in-place operation changes the edge, so it is noted before the
    call.
    """
    edge = get_gradient_edge(x)
    return edge.node, edge.output_nr


def producers(
    outputs: Iterable[Tensor], targets: Iterable[Target], start: int, *, others_call: bool = False
) -> dict[Target, list[Edge]]:
    """The edges into each target from nodes that this thread has made since the sequence number was ``start``. See ``walk``.

    For users' full backward hooks, torch inserts a node behind the inputs and results of a module, which only passes gradients
    on. It does not use a tensor: edges into it count as edges into the target behind it.
    """
    ends = [t.grad_fn for t in outputs if t.grad_fn is not None]  # for some views, reading grad_fn creates a node
    targets, end = [*targets], sequence_nr()
    found = walk(ends, targets, start, end, others_call=others_call)
    for edges in found.values():
        for node, _ in edges:
            if type(node) is _FORWARDING_NODE:
                into: dict[Edge, list[Edge]] = {}
                found = walk(ends, targets, start, end, others_call=others_call, into=into)
                return {target: before(edges, into, _only_forwards) for target, edges in found.items()}
    return found


def _only_forwards(node: Node) -> bool:
    return type(node) is _FORWARDING_NODE


def _add(one: Tensor, other: Tensor) -> Tensor:
    with torch.no_grad():
        return one + other


engine: BackwardEngine[Tensor] = BackwardEngine(torch._C._current_graph_task_id, _add)


MOST_THREADS: Final = 16
"""Threads whose lists are kept for the next step."""


@dataclass(slots=True)
class _Begun:
    """The calls that began on one thread.

    Attributes:
        numbers: Autograd's sequence number at each call, ascending.
        places: The place of each call; None for a call that built a graph, which nothing will repeat.
    """

    numbers: list[int] = field(default_factory=list)
    places: list[CallIndex | None] = field(default_factory=list)

    def after(self, number: int, position: int) -> CallIndex | None:
        """The call at ``position`` after ``number``, if all calls up to it were without a graph."""
        first = bisect_right(self.numbers, number)
        run = self.places[first : first + position + 1]
        return run[position] if len(run) > position and None not in run else None


class CheckpointRepetitions:
    """Recognises the calls of one module that ``torch.utils.checkpoint`` repeats in a step (``Repetitions``).

    Non-reentrant checkpointing repeats calls whose graph exists already; the repetition is ignored. Reentrant checkpointing
    calls a module first without a graph, and again with one when backward reaches the segment's node. That node was made just
    before the segment ran, so it repeats the first calls after its creation, in their order. Autograd numbers nodes as they are
    made, separately in each thread. If threads make the match ambiguous, the repetition has no call.
    """

    def __init__(self) -> None:
        self._begun: dict[int, _Begun] = {}
        self._repeated: Counter[tuple[int, int]] = Counter()

    def began(self, place: CallIndex) -> None:
        begun = self._begun.get(threading.get_ident())
        if begun is None:
            begun = self._begun[threading.get_ident()] = _Begun()
        begun.numbers.append(sequence_nr())
        begun.places.append(None if torch.is_grad_enabled() else place)

    def repeated(self, _counts: Mapping[int, int]) -> CallIndex | None:
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
            self.began(place)
        return place

    def restart(self, micro_step: int) -> None:
        """Keep the failed calls: their segments may still have a backward."""

    def forget_step(self) -> None:
        if len(self._begun) > MOST_THREADS:
            self._begun.clear()
        for begun in self._begun.values():
            begun.numbers.clear()
            begun.places.clear()
        self._repeated.clear()


def _is_unpacking() -> bool:
    """Whether the node is still unpacking its saved tensors, before its own backward. Non-reentrant checkpointing recomputes
    saved tensors when a node unpacks them, and the node may be that of a reentrant segment within.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not BackwardCFunction.apply.__code__:
        if frame.f_code.co_name == "unpack_hook" and frame.f_code.co_filename == checkpoint.__file__:
            return True
        frame = frame.f_back
    return False


def nesting() -> int:
    """Number of backwards of this thread within which the one in progress runs: each runs a function of Python that has called
    the next one, as reentrant checkpointing does for a segment.
    """
    depth = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        depth += frame.f_code is BackwardCFunction.apply.__code__
        frame = frame.f_back
    return depth
