"""What ``TrainingMetrics`` may be given, checked before anything is attached; what a step is told, as it can be used."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Integral, Real
from typing import Any

from monitor.failures import Failures
from monitor.training.flops import MEASURED, Given


def count(name: str, value: Any, least: int) -> int:
    """An integer of any kind (numpy's too), as a plain one.

    Raises:
        TypeError: It is none.
        ValueError: It is below ``least``.
    """
    if not _is_integer(value):
        raise TypeError(f"{name} is {value!r} and must be an integer.")
    if value < least:
        raise ValueError(f"{name} is {value} and must be at least {least}.")
    return int(value)


def flops(value: Any) -> Given:
    """Floating point operations of a step: a number, ``"measure"`` or None.

    Raises:
        TypeError: It is no number, and no word that is known.
        ValueError: It is not above 0, or not finite.
    """
    if value is None:
        return None
    if isinstance(value, str) and value == MEASURED:
        return MEASURED
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f'model_flops is {value!r} and must be a number, "{MEASURED}" or None.')
    number = float(value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"model_flops is {value} and must be a number above 0.")
    return number


def weakly(name: str, x: Any) -> Callable[[], Any]:
    """A reference that does not let it live on; of several optimizers one of each, in a list until one of them is gone.

    Raises:
        TypeError: It can be no model and no optimizer.
    """
    if x is None:
        return nothing
    if isinstance(x, (list, tuple, Mapping)):
        each = [weakly(name, one) for one in (x.values() if isinstance(x, Mapping) else x)]
        return partial(_all_of, each)
    try:
        return weakref.ref(x)
    except TypeError:
        raise TypeError(f"{name} is a {type(x).__name__}: expected the {name} itself.") from None


def _all_of(references: Sequence[Callable[[], Any]]) -> list[Any] | None:
    found = [reference() for reference in references]
    return None if any(one is None for one in found) else found


def nothing() -> None:
    """In place of what there is not."""


def batch_size(value: Any, failures: Failures) -> int | None:
    """Samples of a step; None where it says nothing that they could be, which is said once. Waits for no device."""
    if value is None:
        return None
    if _is_integer(value) and value > 0:
        return int(value)
    said = f"batch_size is {value!r}" if isinstance(value, int | float | str) else f"batch_size is a {type(value).__name__}"
    failures.warn("batch_size", f"{said} and must be an integer above 0: the samples of steps are not known.")
    return None


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
