"""Which torch optimizer does the work inside what a framework hands to its users."""

from __future__ import annotations

from typing import Any, Final

from torch.optim import Optimizer

MAX_WRAPPERS: Final = 16
"""More are a circle."""


def innermost(optimizer: Any) -> Optimizer:
    """The torch optimizer inside any number of wrappers, which keep what they wrap in ``optimizer``.

    Raises:
        TypeError: There is none.
    """
    inner = optimizer
    for _ in range(MAX_WRAPPERS):
        if (wrapped := getattr(inner, "optimizer", None)) is None:
            break
        inner = wrapped
    if isinstance(inner, Optimizer):
        return inner
    given = type(optimizer).__name__
    raise TypeError(f"optimizer is a {given}: expected a torch.optim.Optimizer, or a wrapper that keeps one in `.optimizer`.")
