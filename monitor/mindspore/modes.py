"""In which of MindSpore's modes a model runs, and which of its cells take hooks there.

What is compiled calls none. A compiled cell itself is called from Python, and so are its hooks; those inside it are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mindspore as ms
from mindspore import nn

from monitor.failures import Failures


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
    named = list(root.cells_and_names())
    hiding = {name: inside for name, cell in named if compiled(cell) and (inside := _inside(cell))}
    hidden: set[int] = set().union(*hiding.values())
    cells = [(name, cell) for name, cell in named if id(cell) not in hidden]
    # What is inside another compiled cell is hidden by that.
    outermost = [name for name, cell in cells if name in hiding]
    return Observable(cells, outermost)


def warn_of_evaluation(root: nn.Cell, failures: Failures) -> None:
    """Say once that a model that is differentiated was never put in training mode: its dropout, for one, does nothing."""
    if not root.training:
        said = "A model is trained with its training flag off: its gradients are recorded, and Dropout and BatchNorm act as in"
        failures.warn("training flag", f"{said} evaluation. Call set_train(True) on it unless that is meant.")


def _inside(cell: nn.Cell) -> set[int]:
    return {id(inner) for _, inner in cell.cells_and_names() if inner is not cell}
