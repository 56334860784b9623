"""Pages in the memory of torch devices.

On the host a page is a numpy array that torch shares. On an accelerator sealing is two copies: on the training stream one small
device copy into the sealed slot and a reset, on a side stream from there to pinned memory; the writer waits for its event.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from monitor.stats.partials import COLUMNS, WRITES, Floats
from monitor.stats.table import PageCopy


class HostPage:
    """A page in host memory.

    Attributes:
        numbers: The live rows, shape ``(rows, len(COLUMNS))``.
        tensor: The same memory, for code that is compiled.
    """

    def __init__(self, rows: int) -> None:
        self.numbers: Floats = np.zeros((rows, len(COLUMNS)))
        self.tensor = torch.from_numpy(self.numbers)

    def new_copy(self) -> PageCopy:
        return HostPageCopy(self.numbers)

    def clear(self) -> None:
        self.numbers[:, WRITES] = 0.0

    def rows_now(self) -> Floats:
        return self.numbers.copy()


class HostPageCopy:
    """A sealed copy of a ``HostPage``."""

    def __init__(self, live: Floats) -> None:
        self._live = live
        self._sealed = np.empty_like(live)
        self.nbytes = live.nbytes

    def take(self) -> None:
        np.copyto(self._sealed, self._live)
        self._live[:, WRITES] = 0.0

    def rows(self) -> Floats:
        return self._sealed


class DevicePage:
    """A page in an accelerator's memory.

    Attributes:
        tensor: The live rows, shape ``(rows, len(COLUMNS))``, float64.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.tensor = torch.zeros(rows, len(COLUMNS), dtype=torch.float64, device=device)
        self._side = torch.Stream(device=device)

    def new_copy(self) -> PageCopy:
        return DevicePageCopy(self.tensor, self._side)

    def clear(self) -> None:
        self.tensor[:, WRITES].zero_()

    def rows_now(self) -> Floats:
        return self.tensor.cpu().numpy()


class DevicePageCopy:
    """A sealed copy of a ``DevicePage``: on the device, then on the host."""

    def __init__(self, live: Tensor, side: torch.Stream) -> None:
        self._live = live
        self._side = side
        self._sealed = torch.empty_like(live)
        self._host = torch.empty(live.shape, dtype=live.dtype, pin_memory=True)
        self._taken = torch.Event(device=live.device)
        self._arrived = torch.Event(device=live.device)
        self.nbytes = 2 * live.nbytes

    def take(self) -> None:
        training = torch.accelerator.current_stream(self._live.device)
        self._sealed.copy_(self._live)
        self._live[:, WRITES].zero_()
        self._taken.record(training)
        self._side.wait_event(self._taken)
        with self._side:
            self._host.copy_(self._sealed, non_blocking=True)
            self._arrived.record(self._side)

    def rows(self) -> Floats:
        self._arrived.synchronize()
        return self._host.numpy()
