"""Tensors that are read later, by another thread.

An operation makes a new tensor, so what a step has computed stays what it is. A parameter is what changes, and is copied.
"""

from __future__ import annotations

from typing import Any

from mindspore import Parameter, Tensor

from monitor.stats.mindspore.tensors import on_host
from monitor.training.step import Number


def kept(x: Any) -> Number:
    """See ``Backend.kept``. A tensor is waited for by whoever calls what is returned: here everything that reads it waits."""
    if isinstance(x, int | float):
        return float(x)
    if isinstance(x, Tensor) and x.size == 1:
        still = x.copy() if isinstance(x, Parameter) else x
        return lambda: float(on_host(still).reshape(()).item())
    if not isinstance(x, Tensor) and hasattr(x, "item"):
        return float(x.item())
    raise TypeError(f"expected a number or a tensor of one element, got {_told(x)}")


def _told(x: Any) -> str:
    return f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
