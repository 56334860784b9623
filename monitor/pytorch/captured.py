"""Where training is, for code that was captured in a device's graph: it runs without us, and reads this on the device.

A captured kernel has its row's address, and adds to it what stands here: the micro-step, or a negative number where nothing
is to be written. The host changes it between the graphs, or a captured forward of the root as it begins.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from monitor.stats.torch.memory import persistent
from monitor.stats.torch.tensors import beneath, capturing

OFF = -1
_MICRO_STEP, _STEP, _COUNT = range(3)


class Places:
    """The micro-step of each chunk on each device.

    Args:
        captures: Whether the current stream of a device is being captured.
    """

    def __init__(self, captures: Callable[[torch.device], bool] = capturing) -> None:
        self.captures = captures
        self._places: dict[tuple[torch.device, int], Tensor] = {}
        self._active = False

    def make(self, device: torch.device, chunk: int) -> None:
        """Have a place, before anything is captured: what is made in a capture would be made anew by every run."""
        if (device, chunk) not in self._places and not self.captures(device):
            self._places[device, chunk] = persistent(device, lambda: torch.full((3,), OFF, dtype=torch.int64, device=device))
            self._fill(self._places[device, chunk])

    def has(self, device: torch.device, chunk: int) -> bool:
        return (device, chunk) in self._places

    def micro_step(self, device: torch.device, chunk: int) -> Tensor:
        """No dimensions: the micro-step of the forward in progress, ``OFF`` where it has no rows."""
        return self._places[device, chunk][_MICRO_STEP]

    def step(self, device: torch.device, chunk: int) -> Tensor:
        """No dimensions: 0, ``OFF`` in a step that is not collected."""
        return self._places[device, chunk][_STEP]

    def step_begins(self, active: bool) -> None:
        """No micro-step has begun."""
        self._active = active
        for place in self._places.values():
            self._fill(place)

    def micro_step_begins(self, chunk: int, micro_steps: int) -> None:
        """Another forward of a chunk's root. One more than there are rows for has none."""
        with beneath():
            for (_, other), place in self._places.items():
                if other == chunk:
                    count = place[_COUNT].add_(1)
                    wanted = (place[_STEP] == 0) & (count < micro_steps)
                    place[_MICRO_STEP].copy_(torch.where(wanted, count, OFF))

    def _fill(self, place: Tensor) -> None:
        with beneath():
            place.fill_(OFF)
            if self._active:
                place[_STEP].fill_(0)
