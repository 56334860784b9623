"""Finds the gradient that one module passes back to one of its inputs, in the autograd graph of a framework.

A hook on the input tensor would see the sum over all its consumers, and blame a correct module for a NaN on its residual. So
the search finds edges: it walks back from the outputs, over the nodes created during the call, to each input. If a module
returns an input unchanged, the gradient of that output bypasses the module and has no edge.

Sequence numbers show which nodes were created during the call. torch numbers the nodes of each thread from 0, and does not
record the thread. So if other threads may have created nodes of a call, the gradients of its inputs are unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

from monitor.failures import IN_HOOK
from monitor.recording.backend import Autograd, Removable, Start, Target, Write

LEAF: Final = 2**64 - 1
"""The sequence number of a leaf, which is no result of an operation."""

MOST_EARLIER: Final = 100
"""Maximum number of nodes from before a call that are examined."""


class SeveralThreadsError(Exception):
    """Other threads than the calling one may have created nodes of a call."""


class GraphNode(Protocol):
    """A node of the backward graph. Objects for the same node are equal, and keep it alive."""

    @property
    def next_functions(self) -> tuple[tuple[Any, int], ...]:
        """For each gradient that the node returns: the receiving node, or None, and the index of its input."""

    def _sequence_nr(self) -> int:
        """Greater than the number of every earlier node; ``LEAF`` for leaves."""

    def register_hook(self, fn: Callable[[Any, Any], None], /) -> Removable:
        """Call ``fn(returned gradients, received gradients)`` after the node has run."""

    def register_prehook(self, fn: Callable[[Any], None], /) -> Removable:
        """Call ``fn(received gradients)`` before the node runs."""


N = TypeVar("N", bound=GraphNode)
T = TypeVar("T")
Slot = TypeVar("Slot")


def walk(
    ends: Iterable[N],
    targets: Iterable[tuple[N, int]],
    start: int,
    end: int = LEAF,
    *,
    others_call: bool = False,
    into: dict[tuple[N, int], list[tuple[N, int]]] | None = None,
) -> dict[tuple[N, int], list[tuple[N, int]]]:
    """The edges into each target from nodes with sequence numbers from ``start`` to before ``end``.

    Args:
        ends: The nodes of the outputs. The walk stops at the nodes of the targets, which existed before the call.
        targets: Nodes, each with the index of its input.
        others_call: Whether other threads have called modules in this step.
        into: Receives the edges into the nodes between ends and targets, in the form of the result.

    Returns:
        By target: nodes, each with the index of its ``next_functions`` that leads to the target.

    Raises:
        SeveralThreadsError: Another thread has created, or may have created, one of the nodes.
    """
    found: dict[tuple[N, int], list[tuple[N, int]]] = {target: [] for target in targets}
    nodes = {node for node, _ in found}
    stack, visited = list(ends), set(nodes)
    earlier: list[N] = []
    while stack:
        node = stack.pop()
        if node in visited:
            continue
        visited.add(node)
        if (number := node._sequence_nr()) < start:
            earlier.append(node)
            continue
        if end <= number < LEAF:
            raise SeveralThreadsError
        for k, (following, index) in enumerate(node.next_functions):
            if following is None:
                continue
            if following not in nodes:
                stack.append(following)
                if into is not None:
                    into.setdefault((following, index), []).append((node, k))
            elif (following, index) in found:
                found[following, index].append((node, k))
    _check(earlier, start, others_call=others_call)
    return found


def _check(earlier: list[N], start: int, *, others_call: bool) -> None:
    """Raise unless the nodes with lower numbers than ``start`` that lead to the results existed before the call."""
    if earlier and (others_call or _reach_later(earlier, start)):
        raise SeveralThreadsError


def before(
    edges: Iterable[tuple[N, int]], into: Mapping[tuple[N, int], Sequence[tuple[N, int]]], hands_on: Callable[[N], bool]
) -> list[tuple[N, int]]:
    """``edges``, in which an edge from a node that only passes gradients on is replaced by the edges into that node.

    Args:
        into: The edges into nodes, as filled by ``walk``.
    """
    found: list[tuple[N, int]] = []
    for edge in edges:
        found += before(into.get(edge, ()), into, hands_on) if hands_on(edge[0]) else [edge]
    return found


def _reach_later(nodes: list[N], start: int) -> bool:
    """Whether nodes with lower numbers than ``start`` follow nodes with this number or a higher one, so that another thread
    has created them. At most ``MOST_EARLIER`` nodes are examined.
    """
    stack, visited = list(nodes), set(nodes)
    while stack and len(visited) < MOST_EARLIER:
        for following, _ in stack.pop().next_functions:
            if following is None or following in visited:
                continue
            if start <= following._sequence_nr() < LEAF:
                return True
            visited.add(following)
            stack.append(following)
    return False


class BackwardEngine(Generic[T]):
    """Hooks on the backward graph of a framework.

    Args:
        current_pass: Returns the number of the backward in progress, different for every backward.
        add: Returns the sum of two gradients, computed without autograd.
    """

    def __init__(self, current_pass: Callable[[], int], add: Callable[[T, T], T]) -> None:
        self.current_pass = current_pass
        self.add = add

    def watch(
        self, target: tuple[GraphNode, int], edges: Sequence[tuple[GraphNode, int]], write: Callable[[T], None]
    ) -> list[Removable]:
        """Call ``write(gradient)`` once in each backward.

        A single edge, the usual case, needs no temporary tensor. The gradients of several edges are summed.

        Returns:
            The handles of hooks on the target, which may outlive the graph.
        """
        if len(edges) == 1:
            ((node, k),) = edges
            node.register_hook(_passing(k, lambda gradient: None if gradient is None else write(gradient)))
            return []
        parts = _EdgeSum(len(edges), write, self)
        for node, k in edges:
            node.register_hook(_passing(k, parts.add))
        return [target[0].register_prehook(parts.finish)] if edges else []


class _EdgeSum(Generic[T]):
    """The sum of the gradients of several edges to one target in one backward.

    It is complete when all edges have passed a gradient, or when the backward reaches the target without running all of them.
    """

    def __init__(self, edges: int, write: Callable[[T], None], engine: BackwardEngine[T]) -> None:
        self._edges = edges
        self._write = write
        self._engine = engine
        self._pass: int | None = None
        self._received = 0
        self._total: T | None = None

    def add(self, gradient: T | None) -> None:
        # Discard the sum of an earlier backward, which ended before it reached the target.
        if self._pass != (now := self._engine.current_pass()):
            self._pass, self._received, self._total = now, 0, None
        self._received += 1
        if gradient is not None:
            self._total = gradient if self._total is None else self._sum(self._total, gradient)
        if self._received == self._edges:
            self.finish()

    def _sum(self, one: T, other: T) -> T:
        with IN_HOOK:
            return self._engine.add(one, other)

    def finish(self, *_: object) -> None:
        total, self._total = self._total, None
        if total is not None and self._pass == self._engine.current_pass():
            self._write(total)


def _passing(k: int, take: Callable[[Any], None]) -> Callable[[Any, Any], None]:
    def hook(gradients: tuple[Any, ...], _: Any) -> None:
        take(gradients[k])

    return hook


# --- Hooks that record the gradients of a call's inputs and results.


def follow_result(graph: Autograd, x: Any, start: Start, write: Write) -> list[Removable]:
    """Call ``write`` with the whole gradient of a result.

    Args:
        start: The beginning of the call.

    Returns:
        The handle of the hook, if the hook may outlive the graph: ``x`` may have existed before the call.
    """
    handle = graph.on_gradient(x, write)
    return [] if graph.made_since(x, start) else [handle]


def follow_inputs(
    graph: Autograd,
    targets: Mapping[Target, Slot],
    start: Start,
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
            handles += graph.engine.watch(target, edges, writer(targets[target]))
    return handles


def on_several_threads(name: str) -> str:
    """The warning about a call in which other threads may have recorded operations."""
    return (
        f"Gradients of the inputs of {name!r} are not recorded in calls where other threads may have recorded some of the "
        "operations: PyTorch numbers operations for each thread and does not say which thread recorded one."
    )


def slots_of(graph: Autograd, inputs: Sequence[tuple[Any, str, bool]], prefix: str) -> dict[Target, str]:
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
