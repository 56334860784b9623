"""The gradient that one module hands back to one of its inputs, observed without touching the graph.

A hook on the input tensor would see the sum over all its consumers, and blame a clean module for a NaN on its residual; a full
module backward hook inserts identities, which regroup sums of gradients and change bits. So the edges are found instead: the
pre-hook notes the gradient edge of each input and the autograd sequence number, the forward hook walks back from the outputs
over the nodes made during the call, and a post-hook on each edge into the input reads what flows through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from monitor.capture.hooks import Removable

Write = Callable[[Tensor], None]
Target = tuple[Node, int]
"""A gradient edge: the node that will receive the gradient, and the index of its input."""
Edge = tuple[Node, int]
"""A producer: the node and the index of its ``next_functions`` through which it feeds a target."""

sequence_nr: Callable[[], int] = torch._C._autograd._get_sequence_nr
recording: Callable[[], bool] = torch.is_grad_enabled


def requires_grad(x: Tensor) -> bool:
    return x.requires_grad


def made_since(x: Tensor, start: int) -> bool:
    """Whether ``x`` is the result of a node with this number or a later one: its hooks go with the graph."""
    return x.grad_fn is not None and x.grad_fn._sequence_nr() >= start


def on_gradient(x: Tensor, write: Write) -> Removable:
    """Call ``write(gradient)`` with the whole gradient of ``x``."""
    handle: Removable = x.register_hook(write)
    return handle


def backward_begins(x: Tensor, call: Write) -> None:
    """Call ``call`` when a backward comes to the result ``x`` of a forward, if it is one that a backward can begin from."""
    if x.requires_grad and x.grad_fn is not None:
        x.register_hook(call)


def gradient_target(x: Tensor) -> Target:
    """Where the gradient of ``x`` goes, now. An in-place operation changes it later, so it is noted before the call."""
    edge = get_gradient_edge(x)
    return edge.node, edge.output_nr


def producers(outputs: Iterable[Tensor], targets: Iterable[Target], start: int) -> dict[Target, list[Edge]]:
    """The edges into each target from nodes with sequence number ``start`` or later."""
    found: dict[Target, list[Edge]] = {target: [] for target in targets}
    nodes = {node for node, _ in found}
    stack = [t.grad_fn for t in outputs if t.grad_fn is not None]
    visited: set[Node] = set()
    while stack:
        node = stack.pop()
        if node in visited or node._sequence_nr() < start:
            continue
        visited.add(node)
        for k, (following, index) in enumerate(node.next_functions):
            if following is None:
                continue
            if following not in nodes:
                stack.append(following)
            elif (following, index) in found:
                found[following, index].append((node, k))
    return found


def watch(target: Target, edges: list[Edge], write: Write) -> list[Removable]:
    """Call ``write(gradient)`` once in each backward.

    One edge, the usual case, needs no temporary. The parts of several are summed.

    Returns:
        The handles of hooks on the target, which may outlive the graph.
    """
    if len(edges) == 1:
        ((node, k),) = edges
        node.register_hook(_passing(k, lambda gradient: None if gradient is None else write(gradient)))
        return []
    parts = _Sum(len(edges), write)
    for node, k in edges:
        node.register_hook(_passing(k, parts.add))
    return [target[0].register_prehook(parts.finish)] if edges else []


class _Sum:
    """What several edges hand to one target in one backward pass.

    It is complete when all of them have been heard, or, where a pass does not run all of them, when the target is reached.
    """

    def __init__(self, edges: int, write: Write) -> None:
        self._edges = edges
        self._write = write
        self._pass = -1
        self._heard = 0
        self._total: Tensor | None = None

    def add(self, gradient: Tensor | None) -> None:
        # What an earlier pass left behind belongs to it: it ended before it came to the target.
        if self._pass != (now := torch._C._current_graph_task_id()):
            self._pass, self._heard, self._total = now, 0, None
        self._heard += 1
        if gradient is not None:
            with torch.no_grad():
                self._total = gradient if self._total is None else self._total + gradient
        if self._heard == self._edges:
            self.finish()

    def finish(self, *_: object) -> None:
        total, self._total = self._total, None
        if total is not None and self._pass == torch._C._current_graph_task_id():
            self._write(total)


def _passing(k: int, take: Callable[[Tensor | None], None]) -> Callable[[Any, Any], None]:
    def hook(gradients: tuple[Tensor | None, ...], _: Any) -> None:
        take(gradients[k])

    return hook
