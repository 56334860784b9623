"""Memory that the monitor keeps on torch devices: pages, their sealed copies, and rows written from host or device.

Sealing on an accelerator takes two copies. The training stream copies the page into the sealed slot, on the device, and clears
it. A side stream then copies the slot to pinned memory, and the writer waits for that copy's event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monitor.stats.partials import COLUMNS, WRITES, Floats
from monitor.stats.table import HostPage, PageCopy, PageMemory
from monitor.stats.torch.tensors import beneath

_current_stream: Final[Callable[[int], torch.Stream]] = getattr(
    torch._C, "_accelerator_getStream", torch.accelerator.current_stream
)
"""The current stream of a device, by its index. Each launch asks."""

# --- Tensors that outlive a call, in memory of their own.


def _is_elsewhere(device: torch.device) -> bool:
    return device.type != "cpu"


def persistent(
    device: torch.device, make: Callable[[], Tensor], elsewhere: Callable[[torch.device], bool] = _is_elsewhere
) -> Tensor:
    """Call ``make`` for a tensor on ``device`` that outlives the current call. Does not wait for the device.

    The caller may run during the warm-up of a device graph. torch then takes allocations of this thread or stream from the
    graph's memory pool and checks them: a tensor kept there is an error in training. So a new thread makes the tensor, in that
    thread's stream, and the caller's stream waits for it.

    Args:
        elsewhere: Whether a device needs such a thread. The host does not.
    """
    if not elsewhere(device):
        return _made(make)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainermon-memory") as thread:
        made, done = thread.submit(_made_there, device, make).result()
    if done is not None:
        stream = torch.accelerator.current_stream(device)
        stream.wait_event(done)
        made.record_stream(stream)  # once freed, its memory is reused only after this stream's work on it
    return made


def pinned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Host memory that a device copies to and from without a wait. ``torch.set_default_device`` does not move it."""
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)


def arriving(x: Tensor) -> Callable[[], Tensor]:
    """Start a copy of ``x`` to the host; the result waits for it. A tensor on the host is not copied."""
    x = x.detach()
    if x.device.type == "cpu":
        return lambda: x
    host = pinned(x.shape, x.dtype)
    host.copy_(x, non_blocking=True)
    event = torch.accelerator.current_stream(x.device).record_event()

    def wait() -> Tensor:
        event.synchronize()
        return host

    return wait


def sent(numbers: Floats | NDArray[np.float32], device: torch.device) -> Tensor:
    """A tensor with these numbers on ``device``. Does not wait for earlier work there."""
    there = torch.from_numpy(numbers)
    return there if device.type == "cpu" else there.pin_memory().to(device, non_blocking=True)


def made_here(_device: torch.device, make: Callable[[], Tensor]) -> Tensor:
    """Call ``make`` here, so that memory comes from the current pool: in a capture, from the graph's."""
    return _made(make)


def _made_there(device: torch.device, make: Callable[[], Tensor]) -> tuple[Tensor, torch.Event | None]:
    if device.type == "cpu":
        return _made(make), None
    with torch.accelerator.device_index(device.index):  # a new thread's device is the first
        return _made(make), torch.accelerator.current_stream(device).record_event()


def _made(make: Callable[[], Tensor]) -> Tensor:
    with beneath(), torch.inference_mode(False):  # the tensor outlives the modes that are active now
        return make()


class TorchDevicePage:
    """A page in an accelerator's memory.

    A row is written in the stream in which its tensor is ready. If another stream seals, events order the two.

    Attributes:
        tensor: The live rows, shape ``(rows, columns)``, float64.
    """

    def __init__(self, rows: int, device: torch.device, columns: int = len(COLUMNS), cleared: int | slice = WRITES) -> None:
        self.tensor = persistent(device, lambda: torch.zeros(rows, columns, dtype=torch.float64, device=device))
        self._index, self._base = self.tensor.get_device(), self.tensor.data_ptr()
        self._cleared_columns = cleared
        self._side = torch.Stream(device=device)
        self._sealing = torch.accelerator.current_stream(self._index)
        self._cleared = self._sealing.record_event()
        self._written: dict[torch.Stream, torch.Event] = {}

    def address(self, row: int) -> int:
        """The address of a row, on the device."""
        return self._base + row * self.tensor.shape[1] * self.tensor.itemsize

    def is_in_order(self) -> bool:
        """Whether the current stream seals, so that rows written in it need no ``written``."""
        return _current_stream(self._index) == self._sealing

    @contextmanager
    def written(self) -> Iterator[None]:
        """The context in which a row is written in the current stream."""
        stream = torch.accelerator.current_stream(self._index)
        if stream == self._sealing:
            yield
            return
        stream.wait_event(self._cleared)
        try:
            yield
        finally:  # rows written before a failure must also be ordered before sealing
            self._written[stream] = stream.record_event()

    def new_copy(self) -> PageCopy:
        return TorchDevicePageCopy(self, self._side)

    def join(self) -> torch.Stream:
        """Let the current stream wait for all rows written so far. It becomes the stream that seals, and is returned."""
        now = torch.accelerator.current_stream(self._index)
        if now != self._sealing:
            self._written[self._sealing] = self._sealing.record_event()
            self._sealing = now
        for stream, event in self._written.items():
            if stream != now:
                now.wait_event(event)
        self._written.clear()
        return now

    def clear(self) -> None:
        stream = self.join()
        self.tensor[:, self._cleared_columns].zero_()
        self._cleared = stream.record_event()

    def forget(self, row: int) -> None:
        with self.written():
            self.tensor[row, self._cleared_columns].zero_()

    def rows_now(self) -> Floats:
        self.join()
        return self.tensor.cpu().numpy()


class TorchDevicePageCopy:
    """A sealed copy of a ``TorchDevicePage``: on the device, then on the host."""

    ready = False

    def __init__(self, page: TorchDevicePage, side: torch.Stream) -> None:
        live = page.tensor
        self._page = page
        self._side = side
        self._sealed = persistent(live.device, lambda: torch.empty_like(live))
        self._host = pinned(live.shape, live.dtype)
        self._taken = torch.Event(device=live.device)
        self._arrived = torch.Event(device=live.device)
        self.nbytes = 2 * live.nbytes

    def take(self, rows: int) -> None:
        del rows  # copying the whole page takes no longer
        training = self._page.join()
        self._sealed.copy_(self._page.tensor)
        self._page.clear()
        self._taken.record(training)
        self._side.wait_event(self._taken)
        with self._side:
            self._host.copy_(self._sealed, non_blocking=True)
            self._arrived.record(self._side)

    def rows(self) -> Floats:
        self._arrived.synchronize()
        return self._host.numpy()


def write_numbers(page: PageMemory, row: int, numbers: Mapping[int, float | torch.Tensor]) -> None:
    """Write a row, with 0 in columns that are not in ``numbers``. Does not wait for tensors on a device."""
    write_block(page, range(row, row + 1), numbers)


def write_block(page: PageMemory, rows: range, numbers: Mapping[int, float | torch.Tensor]) -> None:
    """``write_numbers`` for several rows at equal distances. A tensor has one element for each row, or one for all."""
    part = slice(rows.start, rows.stop, rows.step)
    if isinstance(page, HostPage):
        page.numbers[part] = 0.0
        page.numbers[part, WRITES] = 1.0
        for column, number in numbers.items():
            page.numbers[part, column] = _on_host(number) if isinstance(number, torch.Tensor) else number
        return
    assert isinstance(page, TorchDevicePage)
    with page.written():
        page.tensor[part].zero_()
        page.tensor[part, WRITES].fill_(1.0)
        for column, number in numbers.items():
            place = page.tensor[part, column]
            place.copy_(number) if isinstance(number, torch.Tensor) else place.fill_(number)


def _on_host(numbers: torch.Tensor) -> float | Floats:
    found: float | Floats = numbers.item() if numbers.numel() == 1 else numbers.numpy()
    return found


def write_histogram(page: PageMemory, row: int, counts: NDArray[np.int64] | torch.Tensor) -> None:
    """Write the bins of a row, with 0 in bins beyond ``counts``."""
    if isinstance(page, HostPage):
        page.numbers[row] = 0.0
        page.numbers[row, : len(counts)] = counts
        return
    assert isinstance(page, TorchDevicePage)
    assert isinstance(counts, torch.Tensor)
    with page.written():
        page.tensor[row].zero_()
        page.tensor[row, : len(counts)].copy_(counts)
