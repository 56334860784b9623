"""Hooks of cells and tensors that a compiler may come by.

Where a whole step is compiled, which nobody can see beforehand, the compiler takes the code of every hook inside for a part of
the model, and most Python ends training there. But it calls hooks without the keyword arguments of the cell. So these are asked
for first, in words that it understands, and it never comes to the rest: compiled calls are not observed. Hooks of tensors, of
parameters and of what is handed to a compiled cell, are called alike by both: there a comment tells the compiler where to go.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

from mindspore import Tensor, nn
from mindspore.ops import constexpr

from monitor.failures import LOGGER
from monitor.recording.protocols import Removable

_COMPILED: Final = False
"""As everybody sees it but the compiler, which takes the word of a comment for it."""


def before_forward(cell: nn.Cell, work: Callable[[nn.Cell, Any, Any], object], *, compiled: bool = False) -> Removable:
    """Call ``work(cell, args, kwargs)`` before each call from Python. It must not raise.

    Args:
        compiled: No difference: nothing of ours is in what is compiled.
    """
    del compiled

    def hook(cell: nn.Cell, args: Any, kwargs: Any = None) -> Any:
        if kwargs is None:
            return _tell_of_compiling()
        return _discard(work(cell, args, kwargs))

    handle: Removable = cell.register_forward_pre_hook(hook, with_kwargs=True)
    return handle


def after_forward(
    cell: nn.Cell, work: Callable[[nn.Cell, Any, Any, Any], object], *, always: bool = False, compiled: bool = False
) -> Removable:
    """Call ``work(cell, args, kwargs, result)`` after each call from Python that did not raise. It must not raise.

    Args:
        always: No difference: whoever begins the next forward finds out that the last one has raised.
        compiled: No difference: nothing of ours is in what is compiled.
    """
    del always, compiled

    def hook(cell: nn.Cell, args: Any, *rest: Any) -> Any:
        if len(rest) == 1:
            return None
        return _discard(work(cell, args, *rest))

    handle: Removable = cell.register_forward_hook(hook, with_kwargs=True)
    return handle


def on_gradient(x: Tensor, read: Callable[[Any], object]) -> Removable:
    """Call ``read(gradient)`` when a backward that is not compiled comes to a tensor. It must not raise."""

    def hook(gradient: Any) -> Any:
        if _COMPILED:  # @jit.cond: True
            return gradient
        return _discard(read(gradient))

    handle: Removable = x.register_hook(hook)
    return handle


def takes_hooks(cell: nn.Cell) -> bool:
    """Whether both hooks of a cell are called, and change nothing.

    One with a backward of its own (``bprop``) has none after its call. One whose saved tensors somebody packs is called in
    another way where there are hooks, and then they are packed where they were not before.
    """
    return not getattr(cell, "has_bprop", False) and getattr(cell, "_saved_tensors_pack_hook", None) is None


@constexpr(check=False)  # type: ignore[untyped-decorator]
def _tell_of_compiling() -> None:
    """The compiler computes what is constant, in Python, when it comes to it."""
    _say_once()


@cache
def _say_once() -> None:
    said = "What calls a monitored cell is compiled (@jit), and MindSpore calls no hooks there"
    LOGGER.warning("%s: such calls have no rows. Take @jit off what is to be recorded.", said)


def _discard(_: object) -> None:
    """A hook that returned something would replace what the cell is given, or gives."""


# --- Whether MindSpore compiles what is called, wherever a version keeps the answer.

__all__ = ["jit_context"]

try:
    from mindspore.graph.jit_context import jit_context
except ImportError:  # before 2.9
    try:
        from mindspore.common.jit_context import jit_context
    except ImportError:  # where nothing is traced

        def jit_context() -> Any:
            """None: nothing is being traced."""
            return None
