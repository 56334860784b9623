"""Hooks of cells that a compiler may come by.

Where a whole step is compiled, which nobody can see beforehand, the compiler takes the code of every hook inside for a part of
the model, and most Python ends training there. But it calls hooks without the keyword arguments of the cell. So these are asked
for first, in words that it understands, and it never comes to the rest: compiled calls are not observed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import nn

from monitor.capture.hooks import Removable


def before_forward(cell: nn.Cell, work: Callable[[nn.Cell, Any, Any], object]) -> Removable:
    """Call ``work(cell, args, kwargs)`` before each call from Python. It must not raise."""

    def hook(cell: nn.Cell, args: Any, kwargs: Any = None) -> Any:
        if kwargs is None:
            return None
        return _discard(work(cell, args, kwargs))

    handle: Removable = cell.register_forward_pre_hook(hook, with_kwargs=True)
    return handle


def after_forward(cell: nn.Cell, work: Callable[[nn.Cell, Any, Any, Any], object], *, always: bool = False) -> Removable:
    """Call ``work(cell, args, kwargs, result)`` after each call from Python that did not raise. It must not raise.

    Args:
        always: No difference: MindSpore calls nobody after a call that has raised.
    """
    del always

    def hook(cell: nn.Cell, args: Any, *rest: Any) -> Any:
        if len(rest) == 1:
            return None
        return _discard(work(cell, args, *rest))

    handle: Removable = cell.register_forward_hook(hook, with_kwargs=True)
    return handle


def takes_hooks(cell: nn.Cell) -> bool:
    """Whether both hooks of a cell are called: one with a backward of its own (``bprop``) has none after its call."""
    return not getattr(cell, "has_bprop", False)


def _discard(_: object) -> None:
    """A hook that returned something would replace what the cell is given, or gives."""
