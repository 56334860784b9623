"""Layout and placement of torch tensors, and the search for tensors in a module's arguments and results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

from monitor.pytorch.frameworks.dtensor import activation_placement, layout_of, placement_of
from monitor.recording.arguments import NOT_A_NUMBER, real_number
from monitor.recording.tensor_paths import TensorPaths
from monitor.stats.torch.tensors import SCALAR, beneath, capturing, local_shard

__all__ = ["activation_placement", "computing", "has_gradient", "layout_of", "number_of", "paths", "placement_of", "scalar"]


@contextmanager
def computing() -> Iterator[None]:
    """Computations inside are invisible to autograd and to the user's modes."""
    with torch.no_grad(), beneath():
        yield


def has_gradient(parameter: Tensor) -> bool:
    return parameter.grad is not None


# --- The tensors in a module's arguments and results.

TENSOR_PATHS: Final = TensorPaths(
    Tensor, (torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator, nn.Module)
)

paths: TensorPaths = TENSOR_PATHS

# --- Numbers of the training loop, which may still be computed on a device.


def scalar() -> Tensor:
    """A tensor of one element on the host."""
    return SCALAR


def number_of(x: Any) -> float | Tensor:
    """See ``monitor.recording.backend.Tensors``."""
    if not isinstance(x, Tensor):
        return real_number(x)
    if not all(one.is_replicate() for one in getattr(x, "placements", ())):
        raise TypeError("other ranks have parts of the value of this DTensor: pass its full_tensor()")
    local = local_shard(x)
    if local is None or local.is_meta or local.numel() != 1 or local.is_complex():
        raise TypeError(NOT_A_NUMBER.format(f"a tensor of shape {tuple(x.shape)}, {x.dtype}"))
    if capturing(local.device):
        raise TypeError("a device graph is being captured, and replays of it would not pass the number on")
    with computing():
        return float(local.item()) if local.is_cpu else local.detach().reshape(()).to(torch.float64, copy=True)
