"""Places hooks on the autograd graph of a call to record the gradients of its inputs and results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from monitor.recording.backend import Graph, Target, Write
from monitor.recording.protocols import Removable

Slot = TypeVar("Slot")


def follow_result(graph: Graph, x: Any, start: int, write: Write) -> list[Removable]:
    """Call ``write`` with the whole gradient of a result.

    Args:
        start: The number of the first node that the call may have created.

    Returns:
        The handle of the hook, if the hook may outlive the graph: ``x`` may have existed before the call.
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
    """Record the gradients that nodes of the call pass to its inputs.

    An input that no such node uses has no gradient here, even if the call returns it: later uses do not belong to the call.

    Args:
        targets: The targets of the inputs' gradients, and the slot of each.
        results: The results of the call that have a gradient.
        writer: Returns the receiver of a slot's gradient; called only if there will be a gradient.
        others_call: Whether other threads have called modules in this step.

    Returns:
        Handles of hooks that may outlive the graph.

    Raises:
        SeveralThreadsError: The nodes of the call cannot be told from those of other threads.
    """
    handles: list[Removable] = []
    for target, edges in graph.producers(results, targets, start, others_call=others_call).items():
        if edges:
            handles += graph.watch(target, edges, writer(targets[target]))
    return handles


def on_several_threads(name: str) -> str:
    """The warning about a call in which other threads may have recorded operations."""
    return (
        f"Gradients of the inputs of {name!r} are not recorded in calls where other threads may have recorded some of the "
        "operations: PyTorch numbers operations for each thread and does not say which thread recorded one."
    )


def slots_of(graph: Graph, inputs: Sequence[tuple[Any, str, bool]], prefix: str) -> dict[Target, str]:
    """The targets of the gradients of a call's inputs, and the names of these gradients.

    A tensor that is passed as several arguments has one gradient, and the graph does not show the part of each argument. So
    the gradient has one name made of all arguments (``input_0+1``). It is recorded if any of them is selected.

    Args:
        inputs: Every tensor of the call, the name of its argument, and whether its gradient is selected.
        prefix: The common prefix of the names. A joint name has it once.
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
    """The name of a tensor that was passed as these arguments, different from the names of all arguments.

    Args:
        taken: The names of all arguments.
    """
    if len(places) == 1:
        return places[0]
    joint = places[0] + "".join(f"+{name.removeprefix(prefix)}" for name in places[1:])
    while joint in taken:
        joint += "~"
    return joint


def places_of(name: str, prefix: str) -> list[str]:
    """The arguments that ``joint_name`` has joined."""
    first, *others = name.rstrip("~").split("+")
    return [first, *(prefix + other for other in others)]
