"""Which call of a cell this is, also where ``mindspore.recompute`` repeats an earlier one inside a backward."""

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

    A backward belongs to the forward before it: one function runs both. So what is repeated is of the latest micro-step, and if
    that had one call of the cell, it is that one.
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


# --- The gradient that one cell hands back to one of its inputs, observed without touching the graph.
#
# ``Cell.register_backward_hook`` makes the cell a function of its own, which regroups sums of gradients and changes
# bits. So the edges are found: the pre-hook notes where the gradient of each input goes and the number of the graph's
# newest node, the forward hook walks back from the outputs over the nodes made during the call, and a hook on each edge
# into the input reads what flows through it.
#
# What MindSpore tells of its graph is in attributes with an underscore, and all that is known of them is in this file.
# A version without them has no rows of inputs. To ask a tensor about its graph waits for the calls that were made
# before, though not for what they compute, and may be told of an error of theirs: then ``EarlierFailure`` is raised.

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
    """See ``BackwardEngine.watch``."""
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


ENGINE: Final[BackwardEngine[Tensor]] = BackwardEngine(current_pass, _add)

# --- In which of MindSpore's modes a model runs, and which of its cells take hooks there.
#
# What is compiled calls none. A compiled cell itself is called from Python, and so are its hooks; those inside it are
# not.

_DIFFERENTIATING: Final[CodeType | None] = getattr(getattr(base, "_pynative_func_grad_forward", None), "__code__", None)
"""What calls every function that is differentiated."""

_REPEATS: Final = "_recompute_cell"
"""What ``Cell.recompute`` puts into a cell, to call it by. It is no part of the model."""


@dataclass(frozen=True, slots=True)
class Observable:
    """The cells of a model.

    Attributes:
        cells: Those that take hooks, by name, in the order of ``cells_and_names``.
        hiding: The names of those that are compiled and have cells inside, which take none.
    """

    cells: Sequence[tuple[str, nn.Cell]]
    hiding: Sequence[str]

    def told(self) -> str:
        """What a user is to know of it; empty if nothing is hidden."""
        if not self.hiding:
            return ""
        names = ", ".join(repr(name) if name else "the model" for name in self.hiding)
        return f"Cells inside {names} are compiled (@jit) and have no rows: take @jit off to record them."


def refuse_graph_mode() -> None:
    """To be called before anything is attached.

    Raises:
        ValueError: Cells are compiled whenever they are called, and no hook is.
    """
    if ms.get_context("mode") == ms.GRAPH_MODE:
        to_do = "call mindspore.set_context(mode=mindspore.PYNATIVE_MODE) before set_monitor"
        raise ValueError(f"mode is GRAPH_MODE, in which MindSpore calls no hooks and nothing can be recorded: {to_do}.")


def compiled(cell: nn.Cell) -> bool:
    """Whether ``jit`` is around the cell's ``construct``. A function around the call of a cell does not show."""
    return bool(getattr(cell.construct, "__wrapped_by_jit__", False))


def observable(root: nn.Cell) -> Observable:
    """Which cells of a model take hooks. One that is used inside a compiled cell and elsewhere, too, takes none."""
    named = [(name, cell) for name, cell in root.cells_and_names() if _REPEATS not in name.split(".")]
    hiding = {name: inside for name, cell in named if compiled(cell) and (inside := _inside(cell))}
    hidden: set[int] = set().union(*hiding.values())
    if not GRAPH_IS_THERE:  # a repetition could not be told from a call
        repeated = [name.split(".") for name, _ in root.cells_and_names()]
        hidden |= {id(cell) for name, cell in named if any(_repeats(name, one) for one in repeated)}
    cells = [(name, cell) for name, cell in named if id(cell) not in hidden]
    # What is inside another compiled cell is hidden by that.
    outermost = [name for name, cell in cells if name in hiding]
    return Observable(cells, outermost)


def _repeats(name: str, parts: list[str]) -> bool:
    """Whether a cell of that name is recomputed, or lies in one that is, as a cell of these parts shows."""
    if _REPEATS not in parts:
        return False
    within = parts[: parts.index(_REPEATS)]
    return name.split(".")[: len(within)] == within if within else True


def trains(cell: nn.Cell) -> bool:
    """Whether a call of the cell that begins now is one of training: its operations are recorded for a backward.

    MindSpore records more than that: everything, after a function that it differentiated has raised; every call of a cell that
    was told to be recorded (``set_grad``), as those are that somebody trains.
    """
    return recording() and (_DIFFERENTIATING is None or _is_trained(cell))


def _is_trained(cell: nn.Cell) -> bool:
    """Whether the caller is called by a function that is being differentiated, or where a backward of what was recorded is to
    follow: by a cell that is recorded, and in evaluation by one that has an optimizer.
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
    """Say once that a model that is differentiated was never put in training mode: its dropout, for one, does nothing."""
    if not root.training:
        said = "A model is trained with its training flag off: its gradients are recorded, and Dropout and BatchNorm act as in"
        failures.warn("training flag", f"{said} evaluation. Call set_train(True) on it unless that is meant.")


def _inside(cell: nn.Cell) -> set[int]:
    return {id(inner) for _, inner in cell.cells_and_names() if inner is not cell}
