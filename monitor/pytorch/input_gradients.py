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

Write = Callable[[Tensor], None]
Target = tuple[Node, int]
"""A gradient edge: the node that will receive the gradient, and the index of its input."""
Edge = tuple[Node, int]
"""A producer: the node and the index of its ``next_functions`` through which it feeds a target."""

sequence_nr: Callable[[], int] = torch._C._autograd._get_sequence_nr


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


def watch(target: Target, edges: list[Edge], write: Write) -> list[Any]:
    """Call ``write(gradient)`` once in each backward. Returns the hooks' handles.

    One edge, the usual case, needs no temporary. The parts of several are summed, and the target's own pre-hook, which runs
    when all its gradients are there, ends the sum.
    """
    if len(edges) == 1:
        ((node, k),) = edges
        return [node.register_hook(_passing(k, write))]
    parts: list[Tensor] = []
    handles = [node.register_hook(_passing(k, lambda g: _add(parts, g))) for node, k in edges]

    def finish(_gradients: tuple[Tensor | None, ...]) -> None:
        if parts:
            write(parts.pop())

    return [*handles, target[0].register_prehook(finish)]


def _add(parts: list[Tensor], gradient: Tensor) -> None:
    parts.append(gradient if not parts else parts.pop() + gradient)


def _passing(k: int, write: Write) -> Callable[[Any, Any], None]:
    def hook(gradients: tuple[Tensor | None, ...], _: Any) -> None:
        gradient = gradients[k]
        if gradient is not None:
            write(gradient)

    return hook
