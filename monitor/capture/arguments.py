"""What ``set_monitor`` may be given, checked before anything is attached."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any


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
