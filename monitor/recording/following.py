"""Gradients of what goes into a call and comes out of it, followed in the graph that it has recorded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from monitor.recording.backend import Graph, Target, Write
from monitor.recording.protocols import Removable

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
    targets: Mapping[Target, Slot],
    start: int,
    results: Sequence[Any],
    writer: Callable[[Slot], Write],
    *,
    others_call: bool = False,
) -> list[Removable]:
    """Have the gradients taken that nodes made during the call hand to its inputs.

    An input that no such node uses has none, also where the call gives it back: what others do with it is not the call's.

    Args:
        targets: Where they go, and the slot of each.
        results: Those of the call that have a gradient.
        writer: Makes what takes the gradient of a slot; asked only where there will be one.
        others_call: Whether other threads have called modules in this step.

    Returns:
        Handles of hooks that may outlive the graph.

    Raises:
        SeveralThreadsError: It cannot be told which nodes were made during the call.
    """
    handles: list[Removable] = []
    for target, edges in graph.producers(results, targets, start, others_call=others_call).items():
        if edges:
            handles += graph.watch(target, edges, writer(targets[target]))
    return handles


def on_several_threads(name: str) -> str:
    """What to say of a call of which other threads may have recorded operations."""
    return (
        f"Gradients of the inputs of {name!r} are not recorded in calls where other threads may have recorded some of the "
        "operations: PyTorch numbers operations for each thread and does not say which thread recorded one."
    )


def slots_of(graph: Graph, inputs: Sequence[tuple[Any, str, bool]], prefix: str) -> dict[Target, str]:
    """Where the gradients of a call's inputs go, and what these gradients are called.

    A tensor that was given in several places has one gradient. Nothing in the graph says which part of it belongs to which
    place. So it has one name, made of all of its places (``input_0+1``), and it is wanted if any of them is.

    Args:
        inputs: Every tensor of the call, the name of its place, and whether its gradient is wanted.
        prefix: What each name begins with. It is not repeated within a name.
    """
    places: dict[Target, list[str]] = {}
    chosen: set[Target] = set()
    for x, name, wanted in inputs:
        if graph.requires_grad(x):
            target = graph.gradient_target(x)
            places.setdefault(target, []).append(name)
            if wanted:
                chosen.add(target)
    taken = [name for _, name, _ in inputs] if len(places) < len(inputs) else ()
    return {target: joint_name(names, prefix, taken) for target, names in places.items() if target in chosen}


def joint_name(places: Sequence[str], prefix: str, taken: Collection[str]) -> str:
    """The name of a tensor that was given in these places, and a name that no other place has.

    Args:
        taken: The names of all places.
    """
    if len(places) == 1:
        return places[0]
    joint = places[0] + "".join(f"+{name.removeprefix(prefix)}" for name in places[1:])
    while joint in taken:
        joint += "~"
    return joint


def places_of(name: str, prefix: str) -> list[str]:
    """The places that ``joint_name`` has made a name of."""
    first, *others = name.rstrip("~").split("+")
    return [first, *(prefix + other for other in others)]
