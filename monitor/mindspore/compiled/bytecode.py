"""Keeps out of functions that MindSpore compiles from their bytecode (``@jit(capture_mode="bytecode")``).

MindSpore follows the bytecode of such a function. Where it cannot follow a call, the function breaks into parts, which are
compiled or executed one by one. It cannot follow the ``construct`` that the monitor gives to a cell. So with taps the function
would break in other places, and its results would have other bits. Taps are therefore out while it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

from monitor.mindspore.compiled.constructs import TapsOut, unobserved
from monitor.mindspore.dump.jit import BytecodeContext
from monitor.recording.patches import CallListener, CallPatch

if TYPE_CHECKING:
    from monitor.mindspore.compiled.program import Program

UNMEASURED: Final = (
    'A function was called that is compiled with capture_mode="bytecode". The monitor measures nothing in its compiled code, '
    "since training would have other bits. If the function calls this model, rows are missing, and a step without a call from "
    'Python is not counted. Use capture_mode="ast" to record it.'
)


class BytecodeRuns(TapsOut):
    """The calls of such functions that are in progress."""

    def __init__(self, program: Program) -> None:
        super().__init__(program, PATCHES)

    def call_begins(self, patch: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        del args, kwargs
        if patch.name == _BEGINS:
            self._enter()

    def call_ended(self, patch: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        del args, kwargs, result
        if patch.name == _ENDS:
            self._leave()

    def _take_out(self, program: Program, taps_out: ExitStack) -> None:
        program.warn("bytecode", UNMEASURED)
        for cell in program.cells_with_taps():
            taps_out.enter_context(unobserved(cell))


class UnmeasuredBytecode(CallListener):
    """Says once that such a function was called, where no operator measures in compiled code.

    Args:
        say: Called with ``UNMEASURED``.
    """

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        for patch in PATCHES:
            patch.add(self)

    def call_begins(self, patch: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        del patch, args, kwargs
        self.remove()
        self._say(UNMEASURED)

    def remove(self) -> None:
        for patch in PATCHES:
            patch.remove(self)


_BEGINS: Final = "jit_mode_pi_enable"
_ENDS: Final = "jit_mode_pi_disable"
"""The functions of MindSpore that surround each call. The precision dump patches their callers."""


def _patches() -> Sequence[CallPatch]:
    """Empty if this version of MindSpore compiles no bytecode."""
    if BytecodeContext is None:
        return ()
    return tuple(CallPatch(sys.modules[BytecodeContext.__module__], name) for name in (_BEGINS, _ENDS))


PATCHES: Final = _patches()
