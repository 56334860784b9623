"""Room for the rows of parts until the last program of a tensor combines them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from monitor.stats.torch_persistent import persistent

PART_COLUMNS: Final = 11
"""Numbers of a part (``COLUMNS`` in the source), float64."""

_PARTS: Final = 2048
_TENSORS: Final = 1024

New = Callable[[torch.device, Callable[[], Tensor]], Tensor]


class Workspace:
    """Of one stream, whose launches run one after another and so can share it; or of one launch that is captured.

    Args:
        new: Where its memory is from.

    Attributes:
        rows: Address of the parts' rows.
        counters: Address of an int32 a tensor: its programs that are done. 0 between launches, as the last program leaves it.
    """

    def __init__(self, device: torch.device, parts: int = _PARTS, tensors: int = _TENSORS, new: New = persistent) -> None:
        self._device = device
        self._new = new
        self._rows = self._new_rows(parts)
        self._counters = self._new_counters(tensors)
        self.rows, self.counters = self._rows.data_ptr(), self._counters.data_ptr()

    def reserve(self, parts: int, tensors: int) -> None:
        """Room for so many at once. What was outgrown is free only after what its stream has still to do with it."""
        if parts * PART_COLUMNS > self._rows.numel():
            self._rows = self._new_rows(1 << (parts - 1).bit_length())
            self.rows = self._rows.data_ptr()
        if tensors > self._counters.numel():
            self._counters = self._new_counters(1 << (tensors - 1).bit_length())
            self.counters = self._counters.data_ptr()

    def _new_rows(self, parts: int) -> Tensor:
        return self._new(self._device, lambda: torch.empty(parts * PART_COLUMNS, dtype=torch.float64, device=self._device))

    def _new_counters(self, tensors: int) -> Tensor:
        return self._new(self._device, lambda: torch.zeros(tensors, dtype=torch.int32, device=self._device))
