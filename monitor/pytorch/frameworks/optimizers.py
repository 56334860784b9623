"""Which torch optimizer does the work inside what a framework hands to its users."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


def innermost(optimizer: Any) -> Optimizer:
    """The torch optimizer inside any number of wrappers, which keep what they wrap in ``optimizer``.

    Raises:
        TypeError: There is none.
    """
    inner = optimizer
    while (wrapped := getattr(inner, "optimizer", None)) is not None and wrapped is not inner:
        inner = wrapped
    if isinstance(inner, Optimizer):
        return inner
    given = type(optimizer).__name__
    raise TypeError(f"optimizer is a {given}: expected a torch.optim.Optimizer, or a wrapper that keeps one in `.optimizer`.")
