"""What counts as an optimizer, and which ones do the work inside others."""

from __future__ import annotations

from typing import Any

from mindspore import nn

from monitor.recording import protocols
from monitor.recording.protocols import MAX_WRAPPERS


def optimizers_in(given: Any) -> tuple[nn.Cell, ...]:
    """The optimizers that users call, in sequences, dictionaries and containers, in order, each once.

    Raises:
        TypeError: Something in it is no optimizer, or there is none.
    """

    def checked(one: Any, called: str) -> nn.Cell:
        innermost(one, called)
        cell: nn.Cell = one
        return cell

    return protocols.optimizers_in(given, checked, lambda one: one)


def innermost(optimizer: Any, called: str = "optimizer") -> nn.Cell:
    """The optimizer that does the work inside any number of others, which keep what they wrap in ``opt`` or ``optimizer``.

    Args:
        called: What a message calls it.

    Raises:
        TypeError: It is no optimizer.
    """
    inner = optimizer
    for _ in range(MAX_WRAPPERS):
        wrapped = next((w for name in ("opt", "optimizer") if is_optimizer(w := getattr(inner, name, None))), None)
        if wrapped is None:
            break
        inner = wrapped
    if is_optimizer(inner):
        return inner
    given = type(optimizer).__name__
    expected = "an optimizer of mindspore.nn or mindspore.experimental.optim"
    raise TypeError(f"{called} is a {given}: expected {expected}.")


def is_optimizer(cell: Any) -> bool:
    """A tuple of parameters is what all of them have, of whatever module they are; a model has none."""
    return isinstance(cell, nn.Cell) and isinstance(getattr(cell, "parameters", None), tuple)


def is_a(optimizer: nn.Cell, *names: str) -> bool:
    """Whether one of these is the name of the optimizer's class, or of one that it is made from."""
    return any(base.__name__ in names for base in type(optimizer).__mro__)
