"""Which torch optimizers do the work inside what a framework hands to its users."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.optim import Optimizer

from monitor.recording import protocols
from monitor.recording.protocols import MAX_WRAPPERS, held_by


def optimizers_in(given: Any) -> tuple[Optimizer, ...]:
    """The torch optimizers that step: inside sequences, dictionaries, containers and wrappers, in order, each once.

    Raises:
        TypeError: Something in it is no optimizer, or there is none.
    """
    return protocols.optimizers_in(given, innermost, _unwrapped)


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
    given = type(optimizer).__name__
    if isinstance(inner, Optimizer):
        if not hasattr(inner, "_optimizer_step_pre_hooks"):
            raise TypeError(f"{called} is a {given}, which calls no hooks around its step: pass the optimizer that it wraps.")
        return inner
    raise TypeError(f"{called} is a {given}: expected a torch.optim.Optimizer, or a wrapper that keeps one in `.optimizer`.")


def _unwrapped(optimizer: Any) -> Any:
    """What is inside wrappers, down to what holds several, or wraps nothing."""
    inner = optimizer
    for _ in range(MAX_WRAPPERS):
        wrapped = None if held_by(inner) is not None else _wrapped(inner)
        if wrapped is None:
            break
        inner = wrapped
    return inner


def _wrapped(optimizer: Any) -> Any:
    """What a wrapper keeps in ``optimizer``; of optimizers that call no hooks of torch also in ``optim``."""
    found = getattr(optimizer, "optimizer", None)
    if found is None and isinstance(optimizer, Optimizer) and not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        found = getattr(optimizer, "optim", None)
    return found


def _calls_hooks_of_its_own(wrapper: Any, inner: Optimizer) -> bool:
    """Whether torch has put the call of hooks around the wrapper's step. Lightning's has the hooks of what it wraps."""
    hooks = getattr(wrapper, "_optimizer_step_pre_hooks", None)
    is_hooked = isinstance(wrapper, Optimizer) and bool(getattr(type(wrapper).step, "hooked", False))
    return is_hooked and hooks is not None and hooks is not inner._optimizer_step_pre_hooks


def wrappers_in(given: Any) -> Iterator[tuple[Optimizer, Optimizer]]:
    """The optimizers that wrap another one and call hooks of torch themselves, from outside in, each with the innermost.

    Such a wrapper may change weights after the step of what it wraps, as Lookahead does.
    """
    held = held_by(given)
    for one in held if held is not None else ():
        yield from wrappers_in(one)
    inner = _unwrapped(given)
    while held is None and given is not inner:
        if isinstance(inner, Optimizer) and _calls_hooks_of_its_own(given, inner):
            yield given, inner
            return
        given = _wrapped(given)
