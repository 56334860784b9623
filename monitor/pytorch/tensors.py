"""Layout and placement of torch tensors, and the search for tensors in a module's arguments and results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor, nn

from monitor.pytorch.frameworks.dtensor import activation_placement, layout_of, placement_of
from monitor.recording.tensor_paths import TensorPaths
from monitor.stats.torch.tensors import beneath

__all__ = ["activation_placement", "computing", "layout_of", "paths", "placement_of"]


@contextmanager
def computing() -> Iterator[None]:
    """Computations inside are invisible to autograd and to the user's modes."""
    with torch.no_grad(), beneath():
        yield


# --- The tensors in a module's arguments and results.

TENSOR_PATHS: Final = TensorPaths(
    Tensor, (torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator, nn.Module)
)

paths: TensorPaths = TENSOR_PATHS
