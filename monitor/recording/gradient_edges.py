"""The gradient that one module hands back to one of its inputs, found in the graph that a framework recorded.

A hook on the input tensor would see the sum over all its consumers, and blame a clean module for a NaN on its residual. So the
edges are found instead: walking back from the outputs, over the nodes made during the call, to each input. A module that gives
an input back as it is does nothing to it: what comes through that output flows past the module, on no edge of its own.

Which nodes were made during the call, their numbers tell. torch numbers them on each thread from 0, and does not say which
thread made a node. So where other threads may have made nodes of a call, nothing is known of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

from monitor.failures import IN_HOOK
from monitor.recording.protocols import Removable

LEAF: Final = 2**64 - 1
"""The sequence number of what is no result of an operation."""

MOST_EARLIER: Final = 100
"""Nodes from before a call that are looked at."""


class SeveralThreadsError(Exception):
    """Other threads than the one that called may have made nodes of a call."""


class GraphNode(Protocol):
    """A step of the backward. Objects for the same step are equal, and keep it alive."""

    @property
    def next_functions(self) -> tuple[tuple[Any, int], ...]:
        """For each gradient that it gives: the node that takes it, or None, and the index of that node's input."""

    def _sequence_nr(self) -> int:
        """Greater than that of every node made before it; of leaves ``LEAF``."""

    def register_hook(self, fn: Callable[[Any, Any], None], /) -> Removable:
        """Call ``fn(gradients given, gradients taken)`` after it has run."""

    def register_prehook(self, fn: Callable[[Any], None], /) -> Removable:
        """Call ``fn(gradients taken)`` before it runs."""


N = TypeVar("N", bound=GraphNode)
T = TypeVar("T")


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
        ends: The nodes that made the outputs. Those that made the targets were there before: they are not gone into.
        targets: Nodes, each with the index of its input.
        others_call: Whether other threads have called modules in this step.
        into: Is given the edges into the nodes between the ends and the targets, in the same form.

    Returns:
        By target: nodes, each with the index of its ``next_functions`` through which it feeds the target.

    Raises:
        SeveralThreadsError: There is a node that this thread has not made before ``end``, or may not have made.
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
    """Raise unless nodes with lower numbers than ``start``, which lead to a call's results, were there before the call."""
    if earlier and (others_call or _reach_later(earlier, start)):
        raise SeveralThreadsError


def before(
    edges: Iterable[tuple[N, int]], into: Mapping[tuple[N, int], Sequence[tuple[N, int]]], hands_on: Callable[[N], bool]
) -> list[tuple[N, int]]:
    """``edges``, and in the place of those from a node that only hands gradients on the edges into that node.

    Args:
        into: What ``walk`` has filled.
    """
    found: list[tuple[N, int]] = []
    for edge in edges:
        found += before(into.get(edge, ()), into, hands_on) if hands_on(edge[0]) else [edge]
    return found


def _reach_later(nodes: list[N], start: int) -> bool:
    """Whether nodes with lower numbers than ``start`` came after others with this number or a higher one, so that another
    thread has made them. Of many nodes only some are looked at.
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
    """What runs the backward of a framework.

    Args:
        current_pass: The number of the pass in progress; another one for every pass.
        add: The sum of two gradients, recorded by nobody.
    """

    def __init__(self, current_pass: Callable[[], int], add: Callable[[T, T], T]) -> None:
        self.current_pass = current_pass
        self.add = add

    def watch(
        self, target: tuple[GraphNode, int], edges: Sequence[tuple[GraphNode, int]], write: Callable[[T], None]
    ) -> list[Removable]:
        """Call ``write(gradient)`` once in each backward.

        One edge, the usual case, needs no temporary. The parts of several are summed.

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
    """What several edges hand to one target in one backward pass.

    It is complete when all of them have been heard, or, where a pass does not run all of them, when the target is reached.
    """

    def __init__(self, edges: int, write: Callable[[T], None], engine: BackwardEngine[T]) -> None:
        self._edges = edges
        self._write = write
        self._engine = engine
        self._pass: int | None = None
        self._received = 0
        self._total: T | None = None

    def add(self, gradient: T | None) -> None:
        # What an earlier pass left behind belongs to it: it ended before it came to the target.
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
