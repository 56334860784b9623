"""Hooks of cells and tensors that may run into MindSpore's compiler.

If a user compiles a whole step, the compiler treats the code of every hook in it as a part of the model. Most Python code
would end training there, and this cannot be foreseen. But the compiler calls cell hooks without keyword arguments. So each hook
tests these first, in code that the compiler can compile, and returns. Compiled calls are not recorded. Hooks of tensors (of
parameters, and of arguments of a compiled cell) are called alike in both cases. There a comment marks the compiler's branch.
"""

from __future__ import annotations

import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import mindspore as ms
from mindspore import Tensor, nn
from mindspore.ops import constexpr
from mindspore.train import serialization

from monitor.failures import LOGGER
from monitor.mindspore.tape import ON_REQUEST, whole_steps_are_measured
from monitor.recording.backend import Removable

_COMPILED: Final = False
"""False in Python. The compiler reads True from a comment at its use."""

_BEFORE, _AFTER = "_forward_pre_hook", "_forward_hook"
"""The properties of a cell with its hooks before and after its forward."""

_KEPT: Final = "_lazy{}"
"""The attribute in which MindSpore 2.10 keeps such hooks. In other versions they are not hidden."""


def before_forward(cell: nn.Cell, work: Callable[[nn.Cell, Any, Any], object], *, compiled: bool = False) -> Removable:
    """Call ``work(cell, args, kwargs)`` before each call from Python. It must not raise.

    Args:
        compiled: No effect: compiled code contains no hooks of the monitor.
    """
    del compiled

    def hook(cell: nn.Cell, args: Any, kwargs: Any = None) -> Any:
        if kwargs is None:
            return None
        return _discard(work(cell, args, kwargs))

    hidden = _HiddenHooks.of(cell, _BEFORE)
    handle: Removable = cell.register_forward_pre_hook(hook, with_kwargs=True)
    return handle if hidden is None else hidden.hide(handle)


def after_forward(
    cell: nn.Cell,
    work: Callable[[nn.Cell, Any, Any, Any], object],
    *,
    always: bool = False,
    compiled: bool = False,
    when_compiled: Callable[[], None] | None = None,
    quiet: bool = False,
) -> Removable:
    """Call ``work(cell, args, kwargs, result)`` after each call from Python that did not raise. It must not raise.

    Args:
        always: No effect: the beginning of the next forward shows that the last one has raised.
        compiled: No effect: compiled code contains no hooks of the monitor.
        when_compiled: A constant expression, which is evaluated when MindSpore compiles the hook of a plain layer. None: warn
            that the call has no rows, unless operators replace the hook.
        quiet: Whether nothing is missing if the call is compiled, so that no warning is needed.
    """
    del always, compiled
    unseen = not whole_steps_are_measured() and ms.get_context("mode") != ms.GRAPH_MODE
    warns = (when_compiled is not None or unseen) and not quiet and _is_plain(cell)
    in_compiled_code = (when_compiled or _warn_of_compiling) if warns else _replaced

    def hook(cell: nn.Cell, args: Any, *rest: Any) -> Any:
        if len(rest) == 1:
            return in_compiled_code()
        return _discard(work(cell, args, *rest))

    hidden = None if warns else _HiddenHooks.of(cell, _AFTER)
    handle: Removable = cell.register_forward_hook(hook, with_kwargs=True)
    return handle if hidden is None else hidden.hide(handle)


class _HiddenHooks(OrderedDict[int, Any]):
    """The dictionary of a cell's hooks before or after its forward. Python calls the monitor's hooks, the compiler sees none.

    If the compiler sees a hook before the forward, it passes the cell's arguments through a tuple. If calls of the cell share
    weights, as in an RNN, it then adds up their gradients in another order, and training has other bits. Hooks after the
    forward change bits likewise: those of the cells in an ``nn.GRU`` did.

    Attributes:
        hidden: The monitor's hooks by their ids. They run nearest to the forward: the user's run before or after them.
        before: Whether they are called before the forward.
    """

    def __init__(self, before: bool) -> None:
        super().__init__()
        self.before = before
        self.hidden: OrderedDict[int, Any] = OrderedDict()

    @classmethod
    def of(cls, cell: nn.Cell, kind: str) -> _HiddenHooks | None:
        """A cell's hooks; None if it has hooks of the user, whose handles know another dictionary."""
        attributes, kept = vars(cell), _KEPT.format(kind)
        if not getattr(cell, kind) and kept in attributes:
            attributes[kept] = cls(kind == _BEFORE)
        found = attributes.get(kept)
        return found if isinstance(found, cls) else None

    def hide(self, handle: Removable) -> Removable:
        """Hide the hook that was registered last.

        Args:
            handle: Its handle.
        """
        if not len(self):  # MindSpore registers none: the cell has a backward of its own
            return handle
        key, hook = self.popitem()
        self.hidden[key] = hook
        return _HiddenHandle(self.hidden, key, handle)

    def items(self) -> Any:
        users, hidden = tuple(super().items()), tuple(self.hidden.items())
        return users + hidden if self.before else hidden + users

    def __bool__(self) -> bool:
        return len(self) > 0 or len(self.hidden) > 0

    def __reduce__(self) -> Any:
        return type(self), (self.before,), {"hidden": self.hidden}, None, iter(tuple(super().items()))


@dataclass(frozen=True)
class _HiddenHandle:
    """The handle of a hidden hook."""

    hidden: OrderedDict[int, Any]
    key: int
    handle: Removable

    def remove(self) -> None:
        self.hidden.pop(self.key, None)
        self.handle.remove()


def on_gradient(x: Tensor, read: Callable[[Any], object], measure: Callable[[Any], Any] | None = None) -> Removable:
    """Call ``read(gradient)`` when a backward that is not compiled reaches a tensor. It must not raise.

    Args:
        measure: Takes and returns the gradient in a backward that is compiled.
    """
    in_compiled_code = _unchanged if measure is None else measure

    def hook(gradient: Any) -> Any:
        if _COMPILED:  # @jit.cond: True
            return in_compiled_code(gradient)
        return _discard(read(gradient))

    handle: Removable = x.register_hook(hook)
    return handle


def takes_hooks(cell: nn.Cell) -> bool:
    """Whether a cell calls both hooks, and computes the same with them.

    A cell with its own backward (``bprop``) calls no hook after its forward. A cell whose saved tensors are packed is
    called differently with hooks, and would then pack more tensors.
    """
    return not getattr(cell, "has_bprop", False) and getattr(cell, "_saved_tensors_pack_hook", None) is None


def _is_plain(cell: nn.Cell) -> bool:
    """Whether a cell is a layer of MindSpore that takes one tensor, such as ``nn.Dense``: a hook that the compiler sees changes
    no bits there.
    """
    own = type(cell).__module__.startswith("mindspore.") and not cell.name_cells()
    return own and len(inspect.signature(type(cell).construct).parameters) == len(("self", "x"))


def _replaced() -> None:
    """Operators measure in compiled code, or the hooks of other cells warn."""


@constexpr(check=False)  # type: ignore[untyped-decorator]
def _warn_of_compiling() -> None:
    """The compiler runs this in Python, since it evaluates constants when it compiles."""
    warn_of_compiled(_NO_ROWS)


def is_exporting() -> bool:
    """Whether MindSpore compiles a file. It must not hold operators of the monitor, and has no rows in any case."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == serialization.__name__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


_NO_ROWS: Final = (
    "Code that calls a monitored cell is compiled (@jit or GRAPH_MODE), and MindSpore calls no hooks there: such calls have no "
    f"rows. Use PYNATIVE_MODE without @jit, set GRAPH_MODE before set_monitor, or {ON_REQUEST}."
)


def warn_of_compiled(said: str) -> None:
    """Warn once, unless MindSpore compiles a file."""
    if not is_exporting():
        _warn_once(said)


@cache
def _warn_once(said: str) -> None:
    LOGGER.warning("%s", said)


def _unchanged(gradient: Any) -> Any:
    return gradient


def _discard(_: object) -> None:
    """Return None: the return value of a hook would replace the cell's arguments or result."""


# --- Whether MindSpore is tracing. The function has moved between versions.

__all__ = ["jit_context"]

try:
    from mindspore.graph.jit_context import jit_context
except ImportError:  # before 2.9
    try:
        from mindspore.common.jit_context import jit_context
    except ImportError:  # versions that trace nothing

        def jit_context() -> Any:
            """None: nothing is being traced."""
            return None
