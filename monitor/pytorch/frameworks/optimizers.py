"""Which torch optimizers do the work inside what a framework hands to its users."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.optim import Optimizer

from monitor.capture import arguments
from monitor.capture.arguments import MAX_WRAPPERS, held_by


def optimizers_in(given: Any) -> tuple[Optimizer, ...]:
    """The torch optimizers that step: inside sequences, dictionaries, containers and wrappers, in order, each once.

    Raises:
        TypeError: Something in it is no optimizer, or there is none.
    """
    return arguments.optimizers_in(given, innermost, _unwrapped)


def containers_in(given: Any) -> Iterator[Optimizer]:
    """The torch optimizers that hold others, and whose step is the step of all that they hold."""
    for _ in range(MAX_WRAPPERS):
        if isinstance(given, Optimizer) and held_by(given) is not None:
            yield given
        given = getattr(given, "optimizer", None)


def innermost(optimizer: Any, called: str = "optimizer") -> Optimizer:
    """The torch optimizer inside any number of wrappers, which keep what they wrap in ``optimizer``.

    Args:
        called: What a message calls it.

    Raises:
        TypeError: There is none.
    """
    inner = _unwrapped(optimizer)
    if isinstance(inner, Optimizer):
        return inner
    given = type(optimizer).__name__
    raise TypeError(f"{called} is a {given}: expected a torch.optim.Optimizer, or a wrapper that keeps one in `.optimizer`.")


def _unwrapped(optimizer: Any) -> Any:
    """What is inside wrappers, down to what holds several, or wraps nothing."""
    inner = optimizer
    for _ in range(MAX_WRAPPERS):
        if held_by(inner) is not None or (wrapped := getattr(inner, "optimizer", None)) is None:
            break
        inner = wrapped
    return inner
