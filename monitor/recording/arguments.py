"""Checks arguments of ``TrainerMon``, and finds the model's chunks and optimizers in those of ``set_monitor``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Final, TypeVar

import numpy as np

T = TypeVar("T")


MAX_WRAPPERS: Final = 16
"""Maximum nesting of wrappers. More means a cycle."""

HOLDING_SEVERAL: Final = ("optimizers", "chained_optimizers")
"""Attributes in which containers keep their optimizers, such as those of torchtitan and Megatron."""


def chunks_of(model: Any, module: type, called: str) -> Sequence[Any]:
    """The chunks of a virtual pipeline, or the one module as a list of itself.

    Args:
        module: The class of a module.
        called: The name of that class in messages.

    Raises:
        TypeError: The model, or an item of the list, is not a module.
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
    """The optimizer, which must be passed.

    Args:
        expected: The accepted types, in words.

    Raises:
        TypeError: The optimizer is None.
    """
    if optimizer is None:
        raise TypeError(f"optimizer is a NoneType: expected {expected}.")
    return optimizer


def flag(value: Any, name: str) -> bool:
    """An argument that is True or False.

    Raises:
        TypeError: It is neither.
    """
    if value not in (True, False):
        raise TypeError(f"{name} is {value!r}: expected True or False.")
    return bool(value)


def optimizers_in(given: Any, leaf: Callable[[Any, str], T], unwrapped: Callable[[Any], Any]) -> tuple[T, ...]:
    """The optimizers inside sequences, dictionaries and containers, in order, each once.

    Args:
        leaf: Returns the optimizer for an object that contains no others, and its name in messages; or raises.
        unwrapped: Returns the wrapped optimizer; the object itself if it wraps nothing.

    Raises:
        TypeError: An item is no optimizer, or there is none.
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
    """The optimizers, wrapped or not, in a sequence, a dictionary or a container; None for anything else."""
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
    """The only item of a sequence or dictionary of length 1; anything else unchanged."""
    while isinstance(given, (list, tuple, Mapping)) and len(given) == 1:
        given = next(iter(given.values() if isinstance(given, Mapping) else given))
    return given


def count(name: str, value: Any, least: int) -> int:
    """An integer of any type (numpy's too), as an ``int``.

    Raises:
        TypeError: The value is no integer: older scripts passed the optimizer second.
        ValueError: The value is below ``least``.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        order = "set_monitor(model, grad_acc_steps, optimizer, dp_group, tp_group, start_iteration)"
        raise TypeError(f"{name} is a {type(value).__name__} and must be an integer. The order is {order}.")
    if value < least:
        raise ValueError(f"{name} is {value} and must be at least {least}.")
    return int(value)


NOT_A_NUMBER: Final = "expected a number or a tensor of one element, got {}"


def real_number(value: Any) -> float:
    """A number of Python or numpy, as a float.

    Raises:
        TypeError: The value is no real number.
    """
    if isinstance(value, np.generic | np.ndarray) and value.size == 1:
        value = value.item()
    if not isinstance(value, Real):
        raise TypeError(NOT_A_NUMBER.format(f"a {type(value).__name__}"))
    return float(value)
