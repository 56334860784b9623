"""The least that reading the activations of a step can cost: each distinct tensor once, as fast as the device copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from devices import Clock
from torch import Tensor, nn

COPIED = 256 << 20
"""Bytes of the copy that gives the speed, on a device; a small one shows on the host that it runs."""


def least_seconds(model: nn.Module, step: Callable[[], object], device: torch.device) -> float:
    """Seconds in which every tensor that goes into a module or comes out, and every gradient of one, is read once."""
    return bytes_of(model, step) / bandwidth(device)


def bytes_of(model: nn.Module, step: Callable[[], object]) -> int:
    """Bytes of the distinct tensors of one step; a tensor that trains has a gradient of its size."""
    found: dict[int, Tensor] = {}  # held, so that no address is used twice

    def look(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        for tensor in torch.utils._pytree.tree_leaves((args, kwargs, result)):
            if isinstance(tensor, Tensor):
                found.setdefault(id(tensor), tensor)

    handles = [module.register_forward_hook(look, with_kwargs=True) for module in model.modules()]
    try:
        step()
    finally:
        for handle in handles:
            handle.remove()
    return sum(x.numel() * x.itemsize * (2 if x.requires_grad else 1) for x in found.values())


def bandwidth(device: torch.device, rounds: int = 20) -> float:
    """Bytes a second that a copy on the device reads and writes."""
    size = COPIED if device.type != "cpu" else COPIED >> 5
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    clock = Clock(device)
    seconds = sorted(clock.times(lambda: target.copy_(source))[0] for _ in range(rounds))[rounds // 2]
    return 2 * size / seconds
