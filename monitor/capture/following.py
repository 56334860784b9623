"""Gradients of what goes into a call and comes out of it, followed in the graph that it has recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from monitor.capture.backend import Graph, Target, Write
from monitor.capture.hooks import Removable

Slot = TypeVar("Slot")


def follow_result(graph: Graph, x: Any, start: int, write: Write) -> list[Removable]:
    """Have ``write`` called with the whole gradient of a result.

    Args:
        start: The number of the first node that the call may have made.

    Returns:
        The handle of the hook, if it is not gone with the graph: ``x`` may have been there before the call.
    """
    handle = graph.on_gradient(x, write)
    return [] if graph.made_since(x, start) else [handle]


def follow_inputs(
    graph: Graph,
    targets: Mapping[Target, Sequence[Slot]],
    start: int,
    results: Sequence[Any],
    writer: Callable[[Sequence[Slot]], Write],
) -> list[Removable]:
    """Have the gradients taken that the call hands back to its inputs.

    Args:
        targets: Where they go, and the slots that each input stands in.
        results: Those of the call that have a gradient.
        writer: Makes what takes the gradient of an input, for all of its slots; asked only where there will be one.

    Returns:
        Handles of hooks that may outlive the graph.
    """
    passed = {graph.gradient_target(x): x for x in results}
    inside = [target for target in targets if target not in passed]
    edges = graph.producers(results, inside, start) if inside else {}
    handles: list[Removable] = []
    for target, slots in targets.items():
        if target in passed:  # passed through, it has one gradient, the total
            handles += follow_result(graph, passed[target], start, writer(slots))
        elif edges[target]:
            handles += graph.watch(target, edges[target], writer(slots))
    return handles


def together(writes: Sequence[Write]) -> Write:
    """What gives a gradient to each of these."""
    if len(writes) == 1:
        return writes[0]

    def write(gradient: Any) -> None:
        for each in writes:
            each(gradient)

    return write
