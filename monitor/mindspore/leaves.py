"""The tensors in a cell's arguments and results."""

from __future__ import annotations

from typing import Final

from mindspore import Tensor, nn
from mindspore._c_expression import typing

from monitor.recording.tensor_paths import Leaves

LEAVES: Final = Leaves(Tensor, (nn.Cell, typing.Type))
