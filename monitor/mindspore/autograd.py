"""Access to MindSpore's autograd graph: gradients of a call's inputs, and calls of cells that a recomputation repeats."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import CodeType, FrameType
from typing import Any, Final, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, _c_expression, mint
from mindspore.common import _no_grad
from mindspore.common.recompute import _RecomputeCell
from mindspore.nn.cell import _pynative_executor

from monitor.failures import LOGGER, EarlierFailure
from monitor.mindspore import hooks
from monitor.recording.backend import Removable
from monitor.recording.gradient_edges import BackwardEngine, walk
from monitor.recording.module_calls import CallIndex

# --- Recomputed cells: which call a recomputation repeats.
#
# A recomputed cell runs without a graph in forward, and again with one in backward. One cell of MindSpore calls it in both
# places, and keeps the arguments of open calls in a stack. So the cell and the size of its stack identify a recomputation.
# ``use_reentrant=False`` is different: it keeps the graph of the forward, whose gradients have rows. Its repetitions have none.

Recomputation = tuple[Any, int]
"""The cell that recomputes, and the number of its open calls below this one."""


class RecomputeRepetitions:
    """Recognises the calls of one cell that are recomputed in a step (``Repetitions``)."""

    def __init__(self) -> None:
        self._calls: WeakKeyDictionary[Any, dict[int, deque[CallIndex]]] = WeakKeyDictionary()

    def began(self, place: CallIndex) -> None:
        """A call begins in forward. Without a graph, every recomputed cell around it will repeat it."""
        for cell, number in [] if recording() else _recomputations(_FORWARD):
            self._calls.setdefault(cell, {}).setdefault(number, deque()).append(place)

    def repeated(self, counts: Mapping[int, int]) -> CallIndex | None:
        """The call that is repeated now; None if its gradients come from the graph of its forward, or if it is unknown.

        A cell that is recomputed inside a recomputed cell has another stack there than in forward. So a call in it is known
        only if it is the only one.
        """
        del counts
        for depth, (cell, number) in enumerate(_recomputations(_BACKWARD)):
            if not (expected := self._calls.get(cell, {}).get(number)):
                continue
            if depth == 0 or len(expected) == 1:
                return expected.popleft()
            _warn_of_nesting()
            break
        return None

    def restart(self, micro_step: int) -> None:
        for calls in self._calls.values():
            for number, places in calls.items():
                calls[number] = deque(place for place in places if place.micro_step != micro_step)

    def forget_step(self) -> None:
        self._calls.clear()


_FORWARD: Final = _RecomputeCell.construct.__code__
_BACKWARD: Final = _RecomputeCell.bprop.__code__


def _recomputations(code: CodeType) -> list[Recomputation]:
    """The recomputed cells whose forward, or backward, is on the stack: the innermost first."""
    found: list[Recomputation] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            cell = frame.f_locals["self"]
            found.append((cell, len(cell.args) - (code is _FORWARD)))  # the backward has removed its own arguments
        frame = frame.f_back
    return found


@cache
def _warn_of_nesting() -> None:
    said = "A recomputed cell is called several times inside another recomputed cell, and it is unknown which call is repeated"
    LOGGER.warning("%s. Gradients of activations inside it have no rows. Recompute only one of the two.", said)


# --- The gradient of one cell's inputs, observed without changing the graph.
#
# ``Cell.register_backward_hook`` makes the cell a function of its own, which regroups sums of gradients and changes bits. So
# the monitor finds the edges itself. The pre-hook notes where the gradient of each input goes, and the number of the graph's
# newest node. The forward hook walks back from the outputs over the nodes made during the call. A hook on each edge into the
# input then reads the gradient.
#
# MindSpore shows its graph in attributes with an underscore, which only this file uses. A version without them has no rows of
# inputs. A query about a tensor's graph waits until earlier calls were issued, though not until they were computed. It may
# raise an error of those calls: then ``EarlierFailure`` is raised.

GRAPH_IS_THERE: Final = (
    hasattr(Tensor, "_grad_node")
    and hasattr(_pynative_executor, "get_current_autodiff_engine_id")
    and hasattr(getattr(_c_expression, "BackwardNodePy", None), "_unique_id")
)
"""Whether this version of MindSpore shows its graph. If not, ``requires_grad`` returns False for every tensor."""

NO_GRAPH: Final = (
    f"MindSpore {mindspore.__version__} does not show its autograd graph: gradients of activations have no rows, nor have "
    "recomputed cells. Use MindSpore 2.9 or later."
)
LEAF: Final = 2**64 - 1
"""The sequence number of a tensor that no operation has made."""

Write = Callable[[Tensor], None]
T = TypeVar("T")


class GraphNode:
    """A node of the backward graph. MindSpore creates a new object for each query; objects of the same node are equal."""

    __slots__ = ("_id", "_node")

    def __init__(self, node: Any) -> None:
        self._node = node
        self._id: int = node._unique_id()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GraphNode) and other._id == self._id

    def __hash__(self) -> int:
        return hash(self._id)

    @property
    def next_functions(self) -> tuple[tuple[GraphNode | None, int], ...]:
        return tuple((None if node is None else GraphNode(node), index) for node, index in self._node.next_functions)

    def _sequence_nr(self) -> int:
        number: int = self._node._sequence_nr()
        return number

    def register_hook(self, fn: Callable[[Any, Any], None], /) -> Removable:
        handle: Removable = self._node.register_hook(fn)
        return handle

    def register_prehook(self, fn: Callable[[Any], None], /) -> Removable:
        handle: Removable = self._node.register_prehook(fn)
        return handle


Target = tuple[GraphNode, int]
"""A gradient edge: the node that will receive the gradient, and the index of its input."""
Start: TypeAlias = Any
"""The beginning of a call, as ``sequence_nr`` returns it: a tensor, or 0."""
Edge = tuple[GraphNode, int]
"""A producer: the node and the index of its ``next_functions`` through which it feeds a target."""


def recording() -> bool:
    """Whether operations called now are recorded for a backward. Does not wait."""
    return bool(_pynative_executor.requires_grad())


def current_pass() -> int:
    """The number of the backward in progress; -1 if there is none, or if backwards cannot be told apart."""
    number: int = _pynative_executor.get_current_autodiff_engine_id() if GRAPH_IS_THERE else -1
    return number


def in_backward() -> bool:
    """Whether the caller runs inside a backward: a forward that begins now repeats an earlier one."""
    return current_pass() >= 0


def sequence_nr() -> Start:
    """A tensor whose node was made now. 0 if no nodes are made. Does not wait.

    MindSpore does not show the next sequence number. A view of a tensor outside the model gets it, and computes nothing. The
    number can be read once MindSpore has dispatched the view, which at the end of a call it has.
    """
    if not (GRAPH_IS_THERE and recording()):
        return 0
    return _queried(lambda: _probe().view(1))


def _number(start: Start) -> int:
    """A number below the sequence numbers of all nodes made after ``start``."""
    return start if isinstance(start, int) else _queried(lambda: int(start._grad_node._sequence_nr()))


def requires_grad(x: Tensor) -> bool:
    """Whether the graph has a node for the gradient of ``x``.

    Each floating-point argument of the differentiated function has one. No gradient arrives for arguments that it is not
    differentiated by.
    """
    return GRAPH_IS_THERE and _queried(lambda: bool(x.is_floating_point() and x._requires_grad and x._grad_node is not None))


def gradient_target(x: Tensor) -> Target:
    """The current gradient edge of ``x``, which requires a gradient. In-place operations change it, so it is noted before the
    call.
    """
    return _queried(lambda: (GraphNode(x._grad_node), x._output_index))


def made_since(x: Tensor, start: Start) -> bool:
    """Whether ``x`` is the result of an operation called after ``sequence_nr`` was ``start``. Its hooks go with the graph."""
    node = _queried(lambda: x._grad_node) if GRAPH_IS_THERE else None
    return node is not None and _number(start) < node._sequence_nr() < LEAF


def producers(
    outputs: Iterable[Tensor], targets: Iterable[Target], start: Start, *, others_call: bool = False
) -> dict[Target, list[Edge]]:
    """The edges into each target from nodes with sequence number ``start`` or later. All threads share the numbers."""
    del others_call
    ends = _queried(lambda: [node for x in outputs if (node := x._grad_node) is not None])
    return walk([GraphNode(node) for node in ends], targets, _number(start))


def on_gradient(x: Tensor, write: Write) -> Removable:
    """Call ``write(gradient)`` with the sum over all consumers of ``x``, once in each backward that reaches ``x``."""
    return _queried(lambda: hooks.on_gradient(x, lambda gradient: None if gradient is None else write(gradient)))


def _queried(ask: Callable[[], T]) -> T:
    try:
        return ask()
    except Exception as error:
        raise EarlierFailure(error) from error


@cache
def _probe() -> Parameter:
    return Parameter(Tensor(np.zeros(1, np.float32)), name="monitor")


def _add(one: Tensor, other: Tensor) -> Tensor:
    with _no_grad():
        return mint.add(one, other)


engine: BackwardEngine[Tensor] = BackwardEngine(current_pass, _add)
