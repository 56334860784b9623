"""From a tensor of torch to its row."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from monitor.pytorch.compiled.operators import NO_VALUE
from monitor.recording import recorder
from monitor.recording.recorder import Device, Watched
from monitor.series import NO_MICRO_STEP, Series, SeriesTable
from monitor.stats.host.native import HostPage, Reduce
from monitor.stats.partials import Floats
from monitor.stats.table import NOT_AN_ALIAS, Page, PageMemory, RowSlot
from monitor.stats.torch.dispatch import ListedTensor, reduce_into, reduce_listed
from monitor.stats.torch.host_kernel import TorchHostKernel
from monitor.stats.torch.magnitudes import count_magnitudes, count_magnitudes_on_device
from monitor.stats.torch.memory import TorchDevicePage, persistent, write_histogram, write_numbers
from monitor.stats.torch.tensors import (
    BYPASSED_KEYS,
    beneath,
    capturing,
    has_memory,
    is_plain,
    local_shard,
    plain_address,
    unseen,
)
from monitor.stats.triton.tensor_list import is_listed

# --- Where training is, for code that was captured in a device's graph: it runs without us, and reads this on the device.
#
# A captured kernel has its row's address, and adds to it what stands here: the micro-step, or a negative number where
# nothing is to be written. The host changes it between the graphs, or a captured forward of the root as it begins.

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


HOST: Final = torch.device("cpu")

Version = int | tuple[int, int | None] | None
"""What must be the same for a tensor to hold what it held; None where that cannot be told."""

MAX_SEEN: Final = 8192
"""Tensors remembered for aliases. Forgetting one costs a second read of it, no more."""


class _Seen:
    """A tensor that was read, and the row that holds what was read."""

    __slots__ = ("layout", "row", "tensor", "version")

    def __init__(self, tensor: Tensor, version: Version, row: int, layout: int) -> None:
        self.tensor = weakref.ref(tensor)
        self.version = version
        self.row = row
        self.layout = layout


class Recorder(recorder.Recorder):
    """The one path that every hook on tensors of torch takes."""

    def __init__(self, series: SeriesTable, eps: float, *, magnitudes: bool = False) -> None:
        super().__init__(series, eps, magnitudes=magnitudes)
        self._take_eps(eps)
        self._seen: dict[int, _Seen] = {}
        self.places = Places()

    def _take_eps(self, eps: float) -> None:
        self.host = TorchHostKernel(eps)

    def _new_memory(self, rows: int, device: Device, columns: int, cleared: int | slice) -> PageMemory:
        assert isinstance(device, torch.device)
        with torch._C._ExcludeDispatchKeyGuard(BYPASSED_KEYS), unseen():
            return HostPage(rows, columns, cleared) if device.type == "cpu" else TorchDevicePage(rows, device, columns, cleared)

    def _forget_step(self) -> None:
        self._seen.clear()

    def activate(self, wanted: bool) -> None:
        super().activate(wanted)
        self.places.step_begins(self.active)

    def end_step(self) -> None:
        super().end_step()
        self.places.step_begins(False)

    def micro_step_begins(self, chunk: int, micro_steps: int) -> None:
        self.places.micro_step_begins(chunk, micro_steps)

    def keep_micro_step(self, tag: Tensor, chunk: int) -> None:
        """Where code is being captured, have it keep the micro-step that it runs in."""
        if not tag.is_cpu and self.places.captures(tag.device) and self.places.has(tag.device, chunk):
            tag.copy_(self.places.micro_step(tag.device, chunk))

    def record(self, watched: Watched, x: Tensor, micro_step: int = 0, *, aliases: bool = True) -> None:
        address = plain_address(x)
        if not address and not has_data(x):
            return
        with self.lock:
            plain = self.host.plain
            if address and not aliases and plain is not None and not self._magnitudes:
                self._read_directly(plain, watched, x, micro_step, address)
            else:
                self._record(watched, x, micro_step, address=address, version=_version(x) if aliases else None)

    def record_value(self, watched: Watched, x: Tensor, micro_step: int, value: int, tag: Tensor) -> None:
        """Of compiled code: the same. Whether the tensor was read before is told by what it holds, numbered in tracing: the
        code writes to one tensor over and over, and changes no version.

        Args:
            value: ``NO_VALUE`` where nothing is known.
            tag: Where the micro-step is on the device, if the code is being captured.
        """
        address = plain_address(x)
        if address or has_data(x):
            with self.lock:
                if not address and self.places.captures(x.device):
                    self._record_captured(watched, x, tag)
                    return
                if not self.active:  # captured, perhaps, in a step that is not collected: then there has to be a row
                    self._slot(watched, x.device, micro_step)
                    return
                version = None if value == NO_VALUE else (value, _version(x))
                self._record(watched, x, micro_step, address=address, version=version)

    def record_all(self, items: Sequence[tuple[Watched, Tensor]], failed: Callable[[Watched, Exception], None]) -> None:
        with self.lock:
            plain = None if self._magnitudes else self.host.plain
            listed: list[tuple[Watched, ListedTensor]] = []
            for watched, x in items:
                try:
                    address = plain_address(x)
                    if address and plain is not None:
                        self._read_directly(plain, watched, x, 0, address)
                    elif not address and (one := self._listed(watched, x)) is not None:
                        listed.append((watched, one))
                    elif address or has_data(x):
                        self._record(watched, x, 0, address=address, version=None)
                except Exception as error:
                    failed(watched, error)
            for place, why in reduce_listed([one for _, one in listed], self._eps):
                failed(listed[place][0], why)

    def _read_directly(self, plain: Reduce, watched: Watched, x: Tensor, micro_step: int, address: int) -> None:
        """A plain tensor that stands for no other: what ``_record`` comes to, in few calls, since a hook finds the code of each
        of them cold.
        """
        slot = watched.slots.get(HOST)
        if slot is None or micro_step >= slot.rows:
            slot, micro_step = self._slot(watched, HOST, micro_step)
        layout = self.table.layout_of(x.shape, x.dtype)  # what can fail comes first: then there is no row
        memory = slot.page.memory
        assert isinstance(memory, HostPage)
        plain(address, x.numel(), memory.numbers, slot.local_row + micro_step)
        self.table.note(slot.row + micro_step, layout)

    def _listed(self, watched: Watched, x: Tensor) -> ListedTensor | None:
        """``x``, on a device, as one of many that are reduced at once; None if it is to be reduced alone."""
        local = None if self._magnitudes else local_shard(x)
        if local is None or local.is_cpu or not is_listed(local) or self.places.captures(x.device):
            return None
        slot, _ = self._slot(watched, x.device, 0)
        assert isinstance(slot.page.memory, TorchDevicePage)
        self.table.note(slot.row, self.layout(x))
        return ListedTensor(local, slot.page.memory, slot.local_row)

    def _record(self, watched: Watched, x: Tensor, micro_step: int, *, address: int, version: Version) -> None:
        """``address``: where the elements of a plain tensor are (``plain_address``)."""
        if not address and self.places.captures(x.device):
            self._record_captured(watched, x, None)
            return
        slot, offset = self._slot(watched, HOST if address else x.device, micro_step)
        row = slot.row + offset
        if version is not None:
            seen = self._seen.get(id(x))
            if seen is not None and seen.version == version and seen.tensor() is x:
                if seen.row == row:  # which holds it, and may stand for others
                    return
                self.table.note(row, seen.layout, alias=seen.row)
                return
        # What can fail comes first: then there is no row.
        layout = self.table.layout_of(x.shape, x.dtype) if address else self.layout(x)
        if address and self.host.plain is not None and not self._magnitudes:
            self.host.plain(address, x.numel(), numbers_of(slot.page), slot.local_row + offset)
        else:
            if self._magnitudes:
                self._count_magnitudes(x, slot.page, slot.local_row + offset)
            if not self.reduce(x, slot.page, slot.local_row + offset):
                return
        self.table.note(row, layout, NOT_AN_ALIAS)
        if version is not None:
            self._remember(x, version, row, layout)

    def _record_captured(self, watched: Watched, x: Tensor, tag: Tensor | None) -> None:
        """Into the row that the device finds whenever this runs. There is none for what was not seen before the capture."""
        slot, chunk, source = watched.slots.get(x.device), watched.series.vpp_stage, local_shard(x)
        if slot is None or source is None or not self.places.has(x.device, chunk):
            return
        memory = slot.page.memory
        page = torch.from_numpy(memory.numbers) if isinstance(memory, HostPage) else memory.tensor  # type: ignore[attr-defined]
        if watched.micro_steps == (NO_MICRO_STEP,):
            offset = self.places.step(x.device, chunk)
        else:
            offset = self.places.micro_step(x.device, chunk) if tag is None else tag
        reduce_into(source, page, slot.local_row, offset, self._eps)
        self.table.note_captured(slot, self.layout(x))

    def _allot(self, series: Series, device: Device, micro_steps: tuple[int, ...]) -> RowSlot:
        assert isinstance(device, torch.device)
        if device.type != "cpu":
            self.places.make(device, series.vpp_stage)
        return super()._allot(series, device, micro_steps)

    def record_numbers(
        self,
        watched: Watched,
        numbers: Mapping[int, float | Tensor],
        x: Tensor,
        micro_step: int = 0,
        *,
        histogram: Tensor | None = None,
    ) -> None:
        if not has_data(x) or self.places.captures(x.device):  # such rows need the host
            return
        with self.lock:
            device = HOST if is_plain(x) else x.device
            slot, offset = self._slot(watched, device, micro_step)
            with torch._C._ExcludeDispatchKeyGuard(BYPASSED_KEYS), unseen():
                if histogram is not None:
                    write_histogram(self._histogram_page(slot.page, device), slot.local_row + offset, histogram)
                write_numbers(slot.page.memory, slot.local_row + offset, numbers)
            self.table.note(slot.row + offset, self.layout(x), NOT_AN_ALIAS)

    def _count_magnitudes(self, x: Tensor, page: Page, local_row: int) -> None:
        counts = count_magnitudes(x) if isinstance(page.memory, HostPage) else count_magnitudes_on_device(x)
        if counts is not None:
            write_histogram(self._histogram_page(page, x.device), local_row, counts)

    def reduce(self, x: Tensor, page: Page, local_row: int) -> bool:
        memory = page.memory
        if isinstance(memory, HostPage):
            return self.host.reduce_into(x, memory.numbers, local_row)
        assert isinstance(memory, TorchDevicePage)
        source = local_shard(x)
        if source is not None:
            with memory.written():
                reduce_into(source, memory.tensor, local_row, None, self._eps)
        return source is not None

    def layout(self, x: Tensor) -> int:
        local = local_shard(x)
        return self.table.layout_of(x.shape if local is None else local.shape, x.dtype)

    def _remember(self, x: Tensor, version: Version, row: int, layout: int) -> None:
        if len(self._seen) >= MAX_SEEN:
            self._seen.clear()
        self._seen[id(x)] = _Seen(x, version, row, layout)


def numbers_of(page: Page) -> Floats:
    """The live rows of a page on the host."""
    memory = page.memory
    assert isinstance(memory, HostPage)
    return memory.numbers


def has_data(x: Tensor) -> bool:
    """False for meta and fake tensors, whose devices need not even exist here, and for those whose storage was freed."""
    local = local_shard(x)
    return local is not None and not local.is_meta and has_memory(local)


def _version(x: Tensor) -> int | None:
    """The number of in-place changes so far; None for inference tensors, which do not count them."""
    try:
        return x._version
    except RuntimeError:
        return None
