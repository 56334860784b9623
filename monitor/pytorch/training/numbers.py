"""Tensors that are read later, by another thread, as what they are now."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from monitor.training.step import Number


def kept(x: Any) -> Number:
    """See ``Backend.kept``. On the host a number is read at once, from a device it is copied in the stream that computes it.

    A DTensor is refused: its ranks would have to meet to tell its value.
    """
    if isinstance(x, int | float):
        return float(x)
    if hasattr(x, "_local_tensor"):
        raise TypeError("a DTensor's value is known to its ranks together alone: pass full_tensor() of it")
    if isinstance(x, Tensor) and x.numel() == 1:
        there = arriving(x)
        return float(there().item()) if x.device.type == "cpu" else lambda: float(there().item())
    if not isinstance(x, Tensor) and hasattr(x, "item"):
        return float(x.item())
    raise TypeError(f"expected a number or a tensor of one element, got {_told(x)}")


def arriving(x: Tensor) -> Callable[[], Tensor]:
    """Waits for what ``x`` is now, on the host. On the host already it is ``x`` itself."""
    x = x.detach()
    if x.device.type == "cpu":
        return lambda: x
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    host.copy_(x, non_blocking=True)
    return partial(_arrived, host, torch.accelerator.current_stream(x.device).record_event())


def _arrived(host: Tensor, event: torch.Event) -> Tensor:
    event.synchronize()
    return host


def _told(x: Any) -> str:
    return f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
