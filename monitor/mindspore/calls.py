"""Access to MindSpore's graph and modes: repeated calls of cells, gradient edges, compiled cells, training forwards."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from types import CodeType, FrameType
from typing import Any, Final, TypeVar

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn
from mindspore.common import _no_grad
from mindspore.nn.cell import _pynative_executor
from mindspore.ops.composite import base

from monitor.failures import EarlierFailure, Failures
from monitor.mindspore import hooks
from monitor.recording import protocols
from monitor.recording.gradient_edges import BackwardEngine, walk
from monitor.recording.protocols import CallIndex, Removable


class Calls(protocols.Calls):
    """The calls of one cell in one step.

    One function runs a forward and its backward. So ``mindspore.recompute`` repeats calls of the latest micro-step. If the cell
    had one call there, that call is repeated.
    """

    def __init__(self) -> None:
        super().__init__()
        self._repeated: set[int] = set()

    def repeat(self) -> CallIndex | None:
        if not self._counts:
            return None
        micro_step = max(self._counts)
        if self._counts[micro_step] != 1 or micro_step in self._repeated:
            return None
        self._repeated.add(micro_step)
        return CallIndex(micro_step, 0)

    def restart(self, micro_step: int) -> None:
        super().restart(micro_step)
        self._repeated.discard(micro_step)


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

GRAPH_IS_THERE: Final = hasattr(Tensor, "_grad_node") and hasattr(_pynative_executor, "get_current_autodiff_engine_id")
"""Whether this version of MindSpore shows its graph. If not, ``requires_grad`` returns False for every tensor."""
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


def sequence_nr() -> int:
    """A number below the sequence numbers of all later nodes. 0 if no nodes are made."""
    if not (GRAPH_IS_THERE and recording()):
        return 0
    # MindSpore does not show the number. A view of a tensor outside the model gets the next one, and computes nothing.
    return _queried(lambda: int(_probe().view(1)._grad_node._sequence_nr()))


def requires_grad(x: Tensor) -> bool:
    """Whether the graph has a node for the gradient of ``x``.

    Each floating-point argument of the differentiated function has one. No gradient arrives for arguments that it is not
    differentiated by.
    """
    return GRAPH_IS_THERE and bool(x.is_floating_point()) and _queried(lambda: x._requires_grad and x._grad_node is not None)


def gradient_target(x: Tensor) -> Target:
    """The current gradient edge of ``x``, which requires a gradient. In-place operations change it, so it is noted before the
    call.
    """
    return _queried(lambda: (GraphNode(x._grad_node), x._output_index))


def made_since(x: Tensor, start: int) -> bool:
    """Whether ``x`` is the result of an operation called after ``sequence_nr`` was ``start``. Its hooks go with the graph."""
    node = _queried(lambda: x._grad_node) if GRAPH_IS_THERE else None
    return node is not None and start < node._sequence_nr() < LEAF


def producers(
    outputs: Iterable[Tensor], targets: Iterable[Target], start: int, *, others_call: bool = False
) -> dict[Target, list[Edge]]:
    """The edges into each target from nodes with sequence number ``start`` or later. All threads share the numbers."""
    del others_call
    ends = _queried(lambda: [node for x in outputs if (node := x._grad_node) is not None])
    return walk([GraphNode(node) for node in ends], targets, start)


def watch(target: Target, edges: list[Edge], write: Write) -> list[Removable]:
    """See ``BackwardEngine.watch``."""
    return ENGINE.watch(target, edges, write)


def on_gradient(x: Tensor, write: Write) -> Removable:
    """Call ``write(gradient)`` with the sum over all consumers of ``x``, once in each backward that reaches ``x``."""
    return _queried(lambda: hooks.on_gradient(x, lambda gradient: None if gradient is None else write(gradient)))


def backward_begins(x: Tensor, call: Write) -> None:
    """Call ``call`` when a backward begins from the forward's result ``x``, if it can begin there."""
    if requires_grad(x) and made_since(x, 0):  # a hook on a parameter would stay for every later backward
        on_gradient(x, call)


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


ENGINE: Final[BackwardEngine[Tensor]] = BackwardEngine(current_pass, _add)

# --- MindSpore's modes, and the cells that take hooks in them.
#
# MindSpore calls no hooks inside compiled code. It calls the hooks of a compiled cell itself, but not those of cells inside it.

_DIFFERENTIATING: Final[CodeType | None] = getattr(getattr(base, "_pynative_func_grad_forward", None), "__code__", None)
"""The code that calls every function that is differentiated."""

_REPEATS: Final = "_recompute_cell"
"""The attribute through which ``Cell.recompute`` calls a cell. It is no part of the model."""


@dataclass(frozen=True, slots=True)
class Observable:
    """The cells of a model.

    Attributes:
        cells: The cells that take hooks, by name, in the order of ``cells_and_names``.
        hiding: The names of compiled cells that contain other cells, which take no hooks.
    """

    cells: Sequence[tuple[str, nn.Cell]]
    hiding: Sequence[str]

    def warning(self) -> str:
        """The warning for the user; empty if no cell is hidden."""
        if not self.hiding:
            return ""
        names = ", ".join(repr(name) if name else "the model" for name in self.hiding)
        return f"Cells inside {names} are compiled (@jit) and have no rows: take @jit off to record them."


def refuse_graph_mode() -> None:
    """Refuse graph mode, before anything is attached.

    Raises:
        ValueError: The mode is GRAPH_MODE, in which every cell is compiled and no hook is called.
    """
    if ms.get_context("mode") == ms.GRAPH_MODE:
        to_do = "call mindspore.set_context(mode=mindspore.PYNATIVE_MODE) before set_monitor"
        raise ValueError(f"mode is GRAPH_MODE, so MindSpore calls no hooks and nothing can be recorded: {to_do}.")


def compiled(cell: nn.Cell) -> bool:
    """Whether ``jit`` is around the cell's ``construct``. A compiled function that calls the cell is not detected."""
    return bool(getattr(cell.construct, "__wrapped_by_jit__", False))


def observable(root: nn.Cell) -> Observable:
    """The cells of a model that take hooks. A cell used both inside a compiled cell and elsewhere takes none."""
    named = [(name, cell) for name, cell in root.cells_and_names() if _REPEATS not in name.split(".")]
    hiding = {name: inside for name, cell in named if compiled(cell) and (inside := _inside(cell))}
    hidden: set[int] = set().union(*hiding.values())
    if not GRAPH_IS_THERE:  # a repetition could not be distinguished from a call
        repeated = [name.split(".") for name, _ in root.cells_and_names()]
        hidden |= {id(cell) for name, cell in named if any(_repeats(name, one) for one in repeated)}
    cells = [(name, cell) for name, cell in named if id(cell) not in hidden]
    # A compiled cell inside another compiled cell is hidden by the outer one.
    outermost = [name for name, cell in cells if name in hiding]
    return Observable(cells, outermost)


def _repeats(name: str, parts: list[str]) -> bool:
    """Whether the cell ``name`` is recomputed, or lies in a recomputed cell, to which the path ``parts`` leads."""
    if _REPEATS not in parts:
        return False
    within = parts[: parts.index(_REPEATS)]
    return name.split(".")[: len(within)] == within if within else True


def trains(cell: nn.Cell) -> bool:
    """Whether a call of the cell that begins now trains: its operations are recorded for a backward.

    MindSpore also records operations that do not train: everything after a differentiated function has raised, and every call
    of a cell with ``set_grad``.
    """
    return recording() and (_DIFFERENTIATING is None or _is_trained(cell))


def _is_trained(cell: nn.Cell) -> bool:
    """Whether a backward will follow: a differentiated function is on the stack, or a cell that requires gradients. In
    evaluation the cell must have an optimizer.
    """
    sign = "requires_grad" if cell.training else "optimizer"
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _DIFFERENTIATING:
            return True
        if frame.f_code is nn.Cell.__call__.__code__ and getattr(frame.f_locals.get("self"), sign, None) not in (None, False):
            return True
        frame = frame.f_back
    return False


def warn_of_evaluation(root: nn.Cell, failures: Failures) -> None:
    """Warn once that a differentiated model was never put in training mode, so that its dropout has no effect."""
    if not root.training:
        said = "A model is trained with its training flag off: its gradients are recorded, but Dropout and BatchNorm act as in"
        failures.warn("training flag", f"{said} evaluation. Call set_train(True) on it unless that is meant.")


def _inside(cell: nn.Cell) -> set[int]:
    return {id(inner) for _, inner in cell.cells_and_names() if inner is not cell}
