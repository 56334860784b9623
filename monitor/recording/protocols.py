"""Hooks that are in place, and how they are taken away."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, Final, NamedTuple, Protocol, TypeVar


class Removable(Protocol):
    """What frameworks return when they take a hook."""

    def remove(self) -> None: ...


class HookSet:
    """Handles of hooks that are in place."""

    def __init__(self) -> None:
        self._handles: list[Removable] = []

    def add(self, handle: Removable) -> None:
        self._handles.append(handle)

    def remove(self) -> None:
        """Take every hook away."""
        while self._handles:
            self._handles.pop().remove()


# --- Which call of a module this is.


class CallIndex(NamedTuple):
    """A call of a module among those of its step.

    Attributes:
        micro_step: The micro-step of its forward.
        call: How many calls of the module that micro-step had before.
    """

    micro_step: int
    call: int


class Calls:
    """The calls of one module in one step."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def begin(self, micro_step: int) -> CallIndex:
        """A call in forward."""
        place = CallIndex(micro_step, self._counts[micro_step])
        self._counts[micro_step] += 1
        return place

    def begun(self, micro_step: int) -> int:
        """How many calls of a micro-step have begun."""
        return self._counts[micro_step]

    def repeat(self) -> CallIndex | None:
        """A call in backward: the one it repeats, None where that has a graph or cannot be told."""
        return None

    def restart(self, micro_step: int) -> None:
        """The micro-step begins anew: its forward failed."""
        del self._counts[micro_step]


# --- What users of the PyTorch room may have to catch.


class RunEnded(SystemExit):
    """The monitor has done what it was asked for, and ends the run on every rank: the structure was printed.

    Raised from ``optimizer.step()`` after all files are complete. As a ``SystemExit`` with status 0 it passes through
    ``except Exception`` and ends the process without a traceback.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(0)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


# --- What ``set_monitor`` may be given, checked before anything is attached.

T = TypeVar("T")

MAX_WRAPPERS: Final = 16
"""More are a circle."""

HOLDING_SEVERAL: Final = ("optimizers", "chained_optimizers")
"""Where containers keep their optimizers: torchtitan's and those like it, Megatron's."""


def chunks_of(model: Any, module: type, called: str) -> Sequence[Any]:
    """The chunks of a virtual pipeline, or the one module as a list of itself.

    Args:
        module: The class of a module.
        called: What users call it.

    Raises:
        TypeError: Something in it is no module.
        ValueError: The list is empty.
    """
    chunks = list(model) if isinstance(model, (list, tuple)) else [model]
    for chunk in chunks:
        if not isinstance(chunk, module):
            raise TypeError(f"model is a {type(chunk).__name__}: expected a {called}, or a list of model chunks.")
    if not chunks:
        raise ValueError(f"model is an empty list: expected a {called}, or a list of model chunks.")
    return chunks


def given(optimizer: Any, expected: str) -> Any:
    """The optimizer, which has to be passed.

    Args:
        expected: What it may be, in words.

    Raises:
        TypeError: It was not.
    """
    if optimizer is None:
        raise TypeError(f"optimizer is a NoneType: expected {expected}.")
    return optimizer


def optimizers_in(given: Any, leaf: Callable[[Any, str], T], unwrapped: Callable[[Any], Any]) -> tuple[T, ...]:
    """The optimizers inside sequences, dictionaries and containers, in order, each once.

    Args:
        leaf: Makes an optimizer of what holds no others, and is called so; or raises.
        unwrapped: What one wraps; itself where it wraps nothing.

    Raises:
        TypeError: Something in it is no optimizer, or there is none.
    """
    found = {id(one): one for one in _leaves(given, leaf, unwrapped, "optimizer", 0)}
    if not found:
        raise TypeError(f"optimizer is a {type(given).__name__} without an optimizer: expected one, or a sequence of them.")
    return tuple(found.values())


def _leaves(given: Any, leaf: Callable[[Any, str], T], unwrapped: Callable[[Any], Any], called: str, depth: int) -> Iterator[T]:
    inner = unwrapped(given)
    held = held_by(inner)
    if held is None or depth > MAX_WRAPPERS:
        yield leaf(given, called)
        return
    for place, one in enumerate(held):
        yield from _leaves(one, leaf, unwrapped, f"{called}[{place}]", depth + 1)


def held_by(given: Any) -> list[Any] | None:
    """The optimizers, wrapped or not, that a sequence, a dictionary or a container holds; None of anything else."""
    if isinstance(given, (list, tuple, set, frozenset)):
        return list(given)
    if isinstance(given, Mapping):
        return list(given.values())
    for name in HOLDING_SEVERAL:
        held = getattr(given, name, None)
        if isinstance(held, (list, tuple, Mapping)) and held:
            return held_by(held)
    return None


def only(given: Any) -> Any:
    """What a sequence or a dictionary of one optimizer holds; anything else as it is."""
    while isinstance(given, (list, tuple, Mapping)) and len(given) == 1:
        given = next(iter(given.values() if isinstance(given, Mapping) else given))
    return given


def count(name: str, value: Any, least: int) -> int:
    """An integer of any kind (numpy's too), as a plain one.

    Raises:
        TypeError: It is none: older scripts passed the optimizer second.
        ValueError: It is below ``least``.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        order = "set_monitor(model, grad_acc_steps, optimizer, dp_group, tp_group, start_iteration)"
        raise TypeError(f"{name} is a {type(value).__name__} and must be an integer. The order is {order}.")
    if value < least:
        raise ValueError(f"{name} is {value} and must be at least {least}.")
    return int(value)
