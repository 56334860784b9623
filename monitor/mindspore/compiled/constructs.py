"""The attribute ``construct`` of an observed cell: the compiler compiles it in place of the method of the cell's class."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any

from mindspore import nn

from monitor.recording.patches import CallListener, CallPatch

if TYPE_CHECKING:
    from monitor.mindspore.compiled.program import Program

Construct = Callable[..., Any]


class _Number(int):
    """The number of an observed cell, which copies of the cell do not have: theirs is 0.

    Attributes:
        functions: The functions with which compiled code measures the cell.
    """

    functions: Any = None

    def __deepcopy__(self, memo: Any) -> int:
        del memo
        return 0


def install(cell: nn.Cell, number: int, construct: Construct, functions: Any) -> None:
    """Let compiled code observe a cell, unless another model's does. A ``construct`` that the user has put around the monitor's
    stays there.
    """
    attributes = vars(cell)
    marked = _Number(number)
    marked.functions = functions
    if attributes.get("_monitored_as"):
        return
    if "_monitored_as" in attributes and not _is_ours(attributes.get("construct")):
        if getattr(attributes["_monitored_as"], "functions", None) is functions:
            attributes["_monitored_as"] = marked
        return
    uninstall(cell)  # a copy of an observed cell
    own = attributes.get("construct")
    plain = cell.construct
    function = construct(_is_compiled_by_itself(plain))
    function.__signature__ = _with_self(inspect.signature(plain))
    function._of_monitor = True
    attributes["_monitored_as"] = marked
    attributes["_unobserved"] = plain
    attributes["_had_construct"] = own is not None
    attributes["construct"] = MethodType(function, cell)


def _with_self(signature: inspect.Signature) -> inspect.Signature:
    """The signature of a method before it is bound."""
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    return signature.replace(parameters=[first, *signature.parameters.values()])


def uninstall(cell: nn.Cell) -> None:
    attributes = vars(cell)
    if "_monitored_as" not in attributes:
        return
    now = attributes.get("construct")
    if not _is_ours(now) and now not in (None, attributes.get("_unobserved")):  # the user's, which may call the monitor's
        rested = _Number(0)
        rested.functions = getattr(attributes["_monitored_as"], "functions", None)
        attributes["_monitored_as"] = rested
        return
    if attributes["_had_construct"]:
        attributes["construct"] = attributes["_unobserved"]
    else:
        attributes.pop("construct", None)
    for name in ("_monitored_as", "_unobserved", "_had_construct"):
        attributes.pop(name)


def is_installed(cell: nn.Cell, functions: Any) -> bool:
    """Whether compiled code observes a cell with these functions."""
    marked = vars(cell).get("_monitored_as")
    return bool(marked) and getattr(marked, "functions", None) is functions


def has_taps(cell: nn.Cell) -> bool:
    """Whether the ``construct`` of a cell is the monitor's: not taken out, and not inside one of the user's."""
    return _is_ours(vars(cell).get("construct"))


def _is_ours(construct: Any) -> bool:
    return getattr(getattr(construct, "__func__", None), "_of_monitor", False)


def _is_compiled_by_itself(construct: Any) -> bool:
    return bool(getattr(construct, "__wrapped_by_jit__", False))


def original_construct(cell: nn.Cell) -> Any:
    """The method ``construct`` of a cell, observed or not."""
    return vars(cell).get("_unobserved", cell.construct)


@contextmanager
def unobserved(cell: nn.Cell) -> Iterator[None]:
    """A while in which a cell with taps has the ``construct`` that it has without the monitor."""
    attributes = vars(cell)
    mine = attributes.pop("construct", None)
    if attributes.get("_had_construct"):
        attributes["construct"] = attributes["_unobserved"]
    try:
        yield
    finally:
        if mine is not None and "_monitored_as" in attributes:  # else another thread calls it, or the monitor was closed
            attributes["construct"] = mine


def call_original(cell: nn.Cell, args: Any, kwargs: Any) -> Any:
    return cell._unobserved(*args, **kwargs)


def call_from_python(cell: nn.Cell, args: Any, kwargs: Any) -> Any:
    """Call a compiled ``construct``. Its hooks see the call, so it must be compiled without taps of its own."""
    with unobserved(cell):
        return cell.construct(*args, **kwargs)


class TapsOut(CallListener):
    """Takes the taps of one program out while calls of MindSpore are in progress, and puts them back.

    Attributes:
        depth: How many calls: one may contain another.

    Args:
        patches: Of the functions that are called. The subclass says where a call begins and where it ends.
    """

    def __init__(self, program: Program, patches: Sequence[CallPatch]) -> None:
        self._known, self._patches = weakref.ref(program), patches
        self._taps_out = ExitStack()
        self.depth = 0

    def begin(self) -> None:
        """Follow calls from now on."""
        for patch in self._patches:
            patch.remove(self)
            patch.add(self)

    def end(self) -> None:
        for patch in self._patches:
            patch.remove(self)
        self.depth = 0
        self._taps_out.close()

    def _enter(self) -> None:
        program = self._known()
        if program is not None and program.failures is not None:
            self.depth += 1
            if self.depth == 1:
                program.failures.guarded("taking taps out", self._take_out)(program, self._taps_out)

    def _leave(self) -> None:
        if self.depth:  # else the call began before the monitor was attached
            self.depth -= 1
            if not self.depth:
                self._taps_out.close()

    def _take_out(self, program: Program, taps_out: ExitStack) -> None:
        """Take all taps out. Closing ``taps_out`` puts them back, and must not raise."""
        raise NotImplementedError
