"""The tensors in a module's arguments and results."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from monitor.capture.leaves import Leaves

LEAVES: Final = Leaves(Tensor)
