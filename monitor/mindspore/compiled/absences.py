"""Says once what has no rows in compiled code although the same training has them in the dynamic graph."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from mindspore import nn
from mindspore.nn.cell import _cell_graph_executor, cells_compile_cache

from monitor.failures import Failures
from monitor.mindspore.autograd import recording
from monitor.mindspore.tape import ON_REQUEST

if TYPE_CHECKING:
    from monitor.mindspore.compiled.program import Program

PARTIAL: Final = (
    "Parts of the dynamic graph are compiled (@jit), and have no rows: last bits of training could change. Take @jit off to "
    f"record them, or {ON_REQUEST}."
)
LATE: Final = (
    "Code of this model was compiled before the monitor was attached, and has no rows. Call set_monitor before the first step, "
    "or make the @jit function or the training cell anew after it."
)
TAKEN: Final = (
    "Another monitor observes cells of this model, such as a {name}, in compiled code. This monitor has no rows of them there. "
    "Close the other monitor before set_monitor."
)
REPLACED: Final = (
    "A later monitor of the same model has taken over its compiled code. This monitor has no rows of it from then on. Attach "
    "one monitor to a model."
)
UNREACHED: Final = (
    "Compiled code computes no gradients of {count} parameters, such as {name}. They have no rows of grad_unreduced there; the "
    "dynamic graph has zeros. Set requires_grad to False for parameters of cells that are never called."
)


class Absences:
    """What has no rows in the compiled code of one program."""

    def __init__(self, program: Program) -> None:
        self._known = weakref.ref(program)
        self._earlier: set[str] = set()
        self._with_taps: set[str] = set()
        self._looked_at: set[str] = set()
        self._may_be_late = False
        self._replaced: list[Failures] = []
        self.taken: list[weakref.ref[nn.Cell]] = []

    def begin(self) -> None:
        """Code that was compiled so far has no taps, unless it was compiled under an earlier monitor of the model."""
        self._earlier = _compiled_phases() - self._with_taps
        self._looked_at.clear()
        self._may_be_late = False

    def tape_is_gone(self) -> None:
        """Code that was compiled so far makes no entries any more."""
        self._with_taps.clear()

    def said_of(self, phase: str) -> str:
        """Why code has no taps; empty if it may have some."""
        program = self._known()
        if phase in self._earlier:
            return LATE
        return PARTIAL if program is not None and phase in program.fallback.parts else ""

    def compiled(self, executor: Any, phase: str) -> None:
        """Code is about to be executed, and was compiled now or earlier."""
        program, said = self._known(), self.said_of(phase)
        if not said or program is None:
            self._with_taps.add(phase)
        elif phase not in self._looked_at:
            self._looked_at.add(phase)
            self._look_at(program, {id(one) for one in executor._graph_executor.get_params(phase).values()}, said)

    def _look_at(self, program: Program, found: set[int], said: str) -> None:
        """Warn of code without taps, unless it steps an optimizer: ``StepsFromOutside`` reads such steps.

        Args:
            found: The ids of its parameters.
        """
        weights = parameters_of(program.roots())
        if found & (parameters_of(program.cells_of_optimizers()) - weights):
            return
        if said == PARTIAL:
            program.warn("parts of the dynamic graph", PARTIAL)
        elif found & weights and any(root.training for root in program.roots()):
            if recording():
                program.warn("late", LATE)
            self._may_be_late = True

    def stepped_in_python(self, forwards: int) -> None:
        """Python has called an optimizer. Unless there were forwards, they were in code without taps."""
        program = self._known()
        if self._may_be_late and not forwards and program is not None:
            program.warn("late", LATE)

    def compared(self, others: Iterable[Program]) -> None:
        """Code was compiled in which these programs have taps."""
        program, functions = self._known(), [id(getattr(other, "functions", None)) for other in others]
        if program is None:
            return
        for known in self.taken:
            cell = known()
            if cell is not None and id(getattr(vars(cell).get("_monitored_as"), "functions", None)) in functions:
                program.warn("taken", TAKEN.format(name=type(cell).__name__))

    def replaced(self, failures: Failures) -> None:
        """Another monitor receives the rows from now on."""
        self._replaced.append(failures)

    def replayed(self) -> None:
        """Compiled code has made entries."""
        while self._replaced:
            self._replaced.pop().warn("replaced", REPLACED)


def _compiled_phases() -> set[str]:
    of_functions: set[str] = getattr(sys.modules[type(_cell_graph_executor).__module__], "ms_compile_cache", set())
    return of_functions.union(*cells_compile_cache.values())


def parameters_of(cells: Iterable[nn.Cell]) -> set[int]:
    """The ids of the parameters of cells."""
    return {id(parameter) for cell in cells for parameter in cell.get_parameters()}


def is_called(cells: Iterable[nn.Cell]) -> bool:
    """Whether one of the cells is called on this thread's stack."""
    wanted = {id(cell) for cell in cells}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is nn.Cell.__call__.__code__ and id(frame.f_locals.get("self")) in wanted:
            return True
        frame = frame.f_back
    return False
