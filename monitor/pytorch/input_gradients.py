"""The gradient that one module hands back to one of its inputs, observed without touching the graph.

A full module backward hook inserts identities, which regroup sums of gradients and change bits. So the edges are found: the
pre-hook notes the gradient edge of each input and the autograd sequence number, the forward hook walks back from the outputs
over the nodes made during the call, and a post-hook on each edge into the input reads what flows through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn.modules._functions import BackwardHookFunction

from monitor.recording.gradient_edges import Engine, before, walk
from monitor.recording.protocols import Removable

Write = Callable[[Tensor], None]
Target = tuple[Node, int]
"""A gradient edge: the node that will receive the gradient, and the index of its input."""
Edge = tuple[Node, int]
"""A producer: the node and the index of its ``next_functions`` through which it feeds a target."""

_HANDS_ON: Final[Any] = BackwardHookFunction._backward_cls

sequence_nr: Callable[[], int] = torch._C._autograd._get_sequence_nr
recording: Callable[[], bool] = torch.is_grad_enabled
current_pass: Callable[[], int] = torch._C._current_graph_task_id


def requires_grad(x: Tensor) -> bool:
    return x.requires_grad


def made_since(x: Tensor, start: int) -> bool:
    """Whether ``x`` is the result of a node with this number or a later one: its hooks go with the graph."""
    return x.grad_fn is not None and x.grad_fn._sequence_nr() >= start


def on_gradient(x: Tensor, write: Write) -> Removable:
    """Call ``write(gradient)`` with the whole gradient of ``x``, if there is one in the backward that comes by.

    A function with ``set_materialize_grads(False)`` hands None to a result that nothing uses.
    """

    def hook(gradient: Tensor | None) -> None:
        if gradient is not None:
            write(gradient)

    handle: Removable = x.register_hook(hook)
    return handle


def backward_begins(x: Tensor, call: Write) -> None:
    """Call ``call`` when a backward comes to the result ``x`` of a forward, if it is one that a backward can begin from."""
    if x.requires_grad and x.grad_fn is not None:
        x.register_hook(call)


def gradient_target(x: Tensor) -> Target:
    """Where the gradient of ``x`` goes, now. An in-place operation changes it later, so it is noted before the call."""
    edge = get_gradient_edge(x)
    return edge.node, edge.output_nr


def producers(
    outputs: Iterable[Tensor], targets: Iterable[Target], start: int, *, others_call: bool = False
) -> dict[Target, list[Edge]]:
    """The edges into each target from nodes that this thread has made since the sequence number was ``start``. See ``walk``.

    Where users register full backward hooks, torch puts a node behind the inputs and the results of a module that only hands
    gradients on. It is no use of a tensor: the edges into it count as edges into the target behind it.
    """
    ends = [t.grad_fn for t in outputs if t.grad_fn is not None]  # of some views this makes a node
    targets, end = [*targets], sequence_nr()
    found = walk(ends, targets, start, end, others_call=others_call)
    for edges in found.values():
        for node, _ in edges:
            if type(node) is _HANDS_ON:
                into: dict[Edge, list[Edge]] = {}
                found = walk(ends, targets, start, end, others_call=others_call, into=into)
                return {target: before(edges, into, _only_hands_on) for target, edges in found.items()}
    return found


def _only_hands_on(node: Node) -> bool:
    return type(node) is _HANDS_ON


def watch(target: Target, edges: list[Edge], write: Write) -> list[Removable]:
    """See ``Engine.watch``."""
    return ENGINE.watch(target, edges, write)


def _add(one: Tensor, other: Tensor) -> Tensor:
    with torch.no_grad():
        return one + other


ENGINE: Final[Engine[Tensor]] = Engine(current_pass, _add)
