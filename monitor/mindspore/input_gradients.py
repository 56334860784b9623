"""The gradient that one cell hands back to one of its inputs, observed without touching the graph.

``Cell.register_backward_hook`` makes the cell a function of its own, which regroups sums of gradients and changes bits. So the
edges are found: the pre-hook notes where the gradient of each input goes and the number of the graph's newest node, the forward
hook walks back from the outputs over the nodes made during the call, and a hook on each edge into the input reads what flows
through it.

What MindSpore tells of its graph is in attributes with an underscore, and all that is known of them is in this file. A version
without them has no rows of inputs. To ask a tensor about its graph waits for the calls that were made before, though not for
what they compute, and may be told of an error of theirs: then ``EarlierFailure`` is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Final, TypeVar

import numpy as np
from mindspore import Parameter, Tensor, mint
from mindspore.common import _no_grad
from mindspore.nn.cell import _pynative_executor

from monitor.failures import EarlierFailure
from monitor.mindspore import hooks
from monitor.recording.gradient_edges import Engine, walk
from monitor.recording.protocols import Removable

GRAPH_IS_THERE: Final = hasattr(Tensor, "_grad_node") and hasattr(_pynative_executor, "get_current_autodiff_engine_id")
"""Whether this version of MindSpore shows its graph. If not, ``requires_grad`` is False of every tensor."""
LEAF: Final = 2**64 - 1
"""The sequence number of what is no result of an operation."""

Write = Callable[[Tensor], None]
T = TypeVar("T")


class Node:
    """A step of the backward. MindSpore makes a new object for it whenever one is asked for; these are equal."""

    __slots__ = ("_id", "_node")

    def __init__(self, node: Any) -> None:
        self._node = node
        self._id: int = node._unique_id()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Node) and other._id == self._id

    def __hash__(self) -> int:
        return hash(self._id)

    @property
    def next_functions(self) -> tuple[tuple[Node | None, int], ...]:
        return tuple((None if node is None else Node(node), index) for node, index in self._node.next_functions)

    def _sequence_nr(self) -> int:
        number: int = self._node._sequence_nr()
        return number

    def register_hook(self, fn: Callable[[Any, Any], None], /) -> Removable:
        handle: Removable = self._node.register_hook(fn)
        return handle

    def register_prehook(self, fn: Callable[[Any], None], /) -> Removable:
        handle: Removable = self._node.register_prehook(fn)
        return handle


Target = tuple[Node, int]
"""A gradient edge: the node that will receive the gradient, and the index of its input."""
Edge = tuple[Node, int]
"""A producer: the node and the index of its ``next_functions`` through which it feeds a target."""


def recording() -> bool:
    """Whether operations that are called now are recorded for a backward. Does not wait."""
    return bool(_pynative_executor.requires_grad())


def current_pass() -> int:
    """The number of the backward in progress, -1 where none is, or where none can be told from another."""
    number: int = _pynative_executor.get_current_autodiff_engine_id() if GRAPH_IS_THERE else -1
    return number


def in_backward() -> bool:
    """Whether this is called from a backward: a forward that begins now repeats an earlier one."""
    return current_pass() >= 0


def sequence_nr() -> int:
    """What the nodes that are made from now on exceed. 0 where none are made."""
    if not (GRAPH_IS_THERE and recording()):
        return 0
    # There is no asking for the number, but a view of what is nobody's gets the next one, and computes nothing.
    return _settled(lambda: int(_nobodys().view(1)._grad_node._sequence_nr()))


def requires_grad(x: Tensor) -> bool:
    """Whether the graph has a place for the gradient of ``x``.

    It has one for every floating-point argument of the function that is differentiated, and asks for none of those that are not
    to be differentiated by: then no gradient comes.
    """
    return GRAPH_IS_THERE and bool(x.is_floating_point()) and _settled(lambda: x._requires_grad and x._grad_node is not None)


def gradient_target(x: Tensor) -> Target:
    """Where the gradient of ``x`` goes, now; ``x`` requires one. An in-place operation changes it later, so it is noted before
    the call.
    """
    return _settled(lambda: (Node(x._grad_node), x._output_index))


def made_since(x: Tensor, start: int) -> bool:
    """Whether ``x`` is the result of an operation called after ``sequence_nr`` was ``start``: its hooks go with the graph."""
    node = _settled(lambda: x._grad_node) if GRAPH_IS_THERE else None
    return node is not None and start < node._sequence_nr() < LEAF


def producers(
    outputs: Iterable[Tensor], targets: Iterable[Target], start: int, *, others_call: bool = False
) -> dict[Target, list[Edge]]:
    """The edges into each target from nodes with sequence number ``start`` or later. All threads share the numbers."""
    del others_call
    ends = _settled(lambda: [node for x in outputs if (node := x._grad_node) is not None])
    return walk([Node(node) for node in ends], targets, start)


def watch(target: Target, edges: list[Edge], write: Write) -> list[Removable]:
    """See ``Engine.watch``."""
    return ENGINE.watch(target, edges, write)


def on_gradient(x: Tensor, write: Write) -> Removable:
    """Call ``write(gradient)`` with the sum over all consumers of ``x``, once in each backward that has one for it."""
    return _settled(lambda: hooks.on_gradient(x, lambda gradient: None if gradient is None else write(gradient)))


def backward_begins(x: Tensor, call: Write) -> None:
    """Call ``call`` when a backward comes to the result ``x`` of a forward, if it is one that a backward can begin from."""
    if requires_grad(x) and made_since(x, 0):  # a hook on a parameter would stay, and be called in every backward
        on_gradient(x, call)


def _settled(ask: Callable[[], T]) -> T:
    try:
        return ask()
    except Exception as error:
        raise EarlierFailure(error) from error


@cache
def _nobodys() -> Parameter:
    return Parameter(Tensor(np.zeros(1, np.float32)), name="monitor")


def _add(one: Tensor, other: Tensor) -> Tensor:
    with _no_grad():
        return mint.add(one, other)


ENGINE: Final[Engine[Tensor]] = Engine(current_pass, _add)
