"""In which of MindSpore's modes a model runs, and which of its cells take hooks there.

What is compiled calls none. A compiled cell itself is called from Python, and so are its hooks; those inside it are not.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Final

import mindspore as ms
from mindspore import nn
from mindspore.ops.composite import base

from monitor.failures import Failures
from monitor.mindspore.input_gradients import GRAPH_IS_THERE, recording

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
