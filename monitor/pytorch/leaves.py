"""The tensors in a module's arguments and results."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from monitor.recording.tensor_paths import Leaves

LEAVES: Final = Leaves(
    Tensor, (torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator, nn.Module)
)
