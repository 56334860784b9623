"""Reads a tensor of torch into its row: eagerly, in a list, or in code captured in a device graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from monitor.failures import LOGGER
from monitor.pytorch.compiled.operators import NO_VALUE
from monitor.pytorch.fast_path import Reader, ReadTensor
from monitor.recording.recorder import UNREADABLE, Device, Due, LiveRows, RecordedSeries
from monitor.series import NO_MICRO_STEP, SeriesTable
from monitor.stats.host.array_kernel import Reduce
from monitor.stats.ops import Epsilon
from monitor.stats.partials import Floats
from monitor.stats.table import NOT_AN_ALIAS, HostPage, Page, PageMemory, RowSlot
from monitor.stats.torch.device_kernel import count_magnitudes_on_device
from monitor.stats.torch.dispatch import DEVICE_KERNELS, ListedTensor, reduce_into, reduce_listed
from monitor.stats.torch.host_kernel import TorchHostKernel, count_magnitudes
from monitor.stats.torch.memory import TorchDevicePage, persistent, write_block, write_histogram, write_numbers
from monitor.stats.torch.tensors import (
    BYPASSED_KEYS,
    SCALAR,
    beneath,
    capturing,
    has_memory,
    is_opaque,
    is_plain,
    local_shard,
    measured_shape,
    plain_address,
    start_of,
    unseen,
)
from monitor.stats.triton.launch import EVEN, FusedKernel, Kind, TensorGroup, is_listed
from monitor.stats.triton.reading import READ

# --- The current micro-step on the device. Code captured in a device graph runs without the monitor's Python and reads it. A
# captured kernel has its row's address and adds this number to it: the micro-step, or a negative number if nothing must be
# written. The host changes the number between graphs; so does a captured forward of the root when it begins.

OFF = -1
_MICRO_STEP, _STEP, _COUNT = range(3)


class DeviceSteps:
    """The current micro-step of each chunk, kept in a small tensor on each device.

    Attributes:
        active: Whether the step in progress is collected.

    Args:
        captures: Whether the current stream of a device is being captured.
    """

    def __init__(self, captures: Callable[[torch.device], bool] = capturing) -> None:
        self.captures = captures
        self._tensors: dict[tuple[torch.device, int], Tensor] = {}
        self._begun: dict[int, tuple[int, int]] = {}
        self.active = False

    def make(self, device: torch.device, chunk: int) -> None:
        """Allocate the tensor before any capture: a tensor made in a capture would be made anew by every replay.

        Forwards that began earlier in the step are counted.
        """
        if (device, chunk) not in self._tensors and not self.captures(device):
            place = persistent(device, lambda: torch.full((3,), OFF, dtype=torch.int64, device=device))
            self._fill(place)
            self._count(place, *self._begun.get(chunk, (0, 0)))
            self._tensors[device, chunk] = place

    def has(self, device: torch.device, chunk: int) -> bool:
        return (device, chunk) in self._tensors

    def micro_step(self, device: torch.device, chunk: int) -> Tensor:
        """A scalar tensor: the micro-step of the forward in progress, ``OFF`` if that forward has no rows."""
        return self._tensors[device, chunk][_MICRO_STEP]

    def step(self, device: torch.device, chunk: int) -> Tensor:
        """A scalar tensor: 0, or ``OFF`` in a step that is not collected."""
        return self._tensors[device, chunk][_STEP]

    def step_begins(self, active: bool) -> None:
        """Reset to "no micro-step has begun"."""
        self.active = active
        self._begun.clear()
        for place in self._tensors.values():
            self._fill(place)

    def micro_step_begins(self, chunk: int, micro_steps: int) -> None:
        """Count another forward of a chunk's root. Forwards beyond the last row are not recorded."""
        begun, _ = self._begun.get(chunk, (0, 0))
        self._begun[chunk] = begun + 1, micro_steps
        for (_, other), place in self._tensors.items():
            if other == chunk:
                self._count(place, 1, micro_steps)

    def _count(self, place: Tensor, forwards: int, micro_steps: int) -> None:
        with beneath():
            count = place[_COUNT].add_(forwards)
            wanted = (place[_STEP] == 0) & (count < micro_steps)
            place[_MICRO_STEP].copy_(torch.where(wanted, count, OFF))

    def _fill(self, place: Tensor) -> None:
        with beneath():
            place.fill_(OFF)
            if self.active:
                place[_STEP].fill_(0)


HOST: Final = torch.device("cpu")

Version = int | tuple[int, int | None] | None
"""A tensor whose version is unchanged still holds the same numbers. None where the version is unknown."""

MAX_SEEN: Final = 8192
"""Tensors remembered for aliases. Forgetting one costs a second read of it, no more."""


class TorchTensorReader(Reader):
    """Reads tensors of torch into rows. Every hook calls it.

    ``record`` and ``record_all`` are those of ``Reader``: the code in C if it is there. What is not ordinary comes to
    ``record_in_python`` and ``record_all_in_python``.
    """

    def __init__(
        self, series: SeriesTable, eps: float, *, magnitudes: bool = False, higher: bool = False, check_sums: bool = False
    ) -> None:
        self.rows = LiveRows(series, _new_memory)
        self._magnitudes = magnitudes
        self.device_steps = DeviceSteps()
        self._lock, self._table = self.rows.lock, self.rows.table
        self._seen: dict[int, ReadTensor] = {}
        self._opaque: dict[type, str] = {}
        self._share(self._table, {}, self._seen, MAX_SEEN, HOST, self._lock, READ, EVEN)
        self.take_kernels(eps, higher=higher, check_sums=check_sums)

    def take_kernels(self, eps: float, *, higher: bool, check_sums: bool) -> None:
        self.eps, self.higher, self.check_sums = eps, higher, check_sums
        self.host = TorchHostKernel(eps, higher=higher, check_sums=check_sums)
        self._checking_host = self.host if check_sums else TorchHostKernel(eps, higher=higher, check_sums=True)
        self._tell()

    @property
    def unreadable(self) -> Sequence[str]:
        return tuple(self._opaque.values())

    @property
    def magnitudes(self) -> bool:
        return self._magnitudes

    @magnitudes.setter
    def magnitudes(self, wanted: bool) -> None:
        self._magnitudes = wanted
        self._tell()

    def _tell(self) -> None:
        narrow, wide = (Epsilon.of(self.eps, precision).bound for precision in (np.float32, np.float64))
        self._measure(narrow, wide, self.higher, self.check_sums, self._magnitudes, self.host.plain is not None)

    def activate(self, active: bool) -> None:
        self.device_steps.step_begins(active)

    def micro_step_begins(self, chunk: int, micro_steps: int) -> None:
        self.device_steps.micro_step_begins(chunk, micro_steps)

    def forget_step(self) -> None:
        self._seen.clear()

    def close(self) -> None:
        """Nothing to do: all memory is freed with the reader."""

    def forget_versions(self) -> None:
        """A tensor whose version is unchanged may hold other numbers: read it again where it is seen next. Never waits."""
        self._seen.clear()

    def keep_micro_step(self, tag: Tensor, chunk: int) -> None:
        """While code is being captured, have it store the micro-step that it runs in."""
        if not tag.is_cpu and self.device_steps.captures(tag.device) and self.device_steps.has(tag.device, chunk):
            tag.copy_(self.device_steps.micro_step(tag.device, chunk))

    def record_in_python(self, watched: RecordedSeries, x: Tensor, micro_step: int, aliases: bool) -> None:
        address = plain_address(x)
        if not address and not self._can_read(x):
            return
        with self._lock:
            plain = (self._checking_host if watched.checked else self.host).plain
            if address and not aliases and plain is not None:
                self._read_directly(plain, watched, x, micro_step, address)
            else:
                self._record(watched, x, micro_step, address=address, version=_version(x) if aliases else None)

    def _can_read(self, x: Tensor) -> bool:
        """Whether the elements of ``x`` are there. A warning names each class once whose tensors nothing can read."""
        there = has_data(x)
        if not there and type(x) not in self._opaque and is_opaque(x):
            name = self._opaque[type(x)] = type(x).__qualname__
            LOGGER.warning("%s", UNREADABLE.format(names=name))
        return there

    def captures(self, device: torch.device) -> bool:
        """Whether the current stream of ``device`` is being captured. The code in C asks."""
        return self.device_steps.captures(device)

    def launch(self, slot: RowSlot, x: Tensor, device: int, address: int, count: int, into: int, checked: int) -> bool:
        """Reduce a dense tensor of a device into a row of ``slot``, for the code in C, which has looked at it.

        Args:
            device: The index of its device.
            address, count: The address of its first element, and their number.
            into: The address of the row.
            checked: Not 0 if check sums are measured.

        Returns:
            Whether it was done; otherwise it needs more than a launch.
        """
        page = slot.page.memory
        assert isinstance(page, TorchDevicePage)
        kernel = DEVICE_KERNELS.kernel(self.eps, x.device, higher=self.higher, check_sums=checked != 0)
        if not isinstance(kernel, FusedKernel) or not page.is_in_order():
            return False
        return kernel.reduces_elements(x, device, address, count, into)

    def launch_all(self, pages: Sequence[Page], groups: Mapping[tuple[Kind, bool], Any]) -> bool:
        """``launch`` for many tensors, which the code in C has listed.

        Args:
            pages: The pages of their rows.
            groups: For each kind, and whether check sums are measured: the first tensor, then addresses, numbers of elements,
                and addresses of rows.
        """
        for page in pages:
            assert isinstance(page.memory, TorchDevicePage)
            if not page.memory.is_in_order():
                return False
        for (kind, checked), (first, *lists) in groups.items():
            together = DEVICE_KERNELS.list(self.eps, first.device, higher=self.higher, check_sums=checked)
            if together is None or not together.launches(kind, TensorGroup(first, *lists)):
                return False
        return True

    def record_value(self, watched: RecordedSeries, x: Tensor, micro_step: int, value: int, tag: Tensor, due: Due) -> None:
        """``record`` for compiled code. Compiled code writes to one tensor over and over and changes no version, so tracing
        numbers the values: an equal value number means that the tensor was read before.

        Args:
            value: The value number, ``NO_VALUE`` if unknown.
            tag: The tensor on the device that holds the micro-step, if the code is being captured.
            due: Whether the step in progress has such a row.
        """
        if due.now and self.record_ordinary(watched, x, micro_step, value):
            return
        address = plain_address(x)
        if address or self._can_read(x):
            with self._lock:
                if not address and self.device_steps.captures(x.device):
                    self._record_captured(watched, x, tag)
                    return
                if not due.now:  # a capture may follow in a step without such rows: it needs one
                    self._slot(watched, x.device, micro_step)
                    return
                version = None if value == NO_VALUE else (value, _version(x))
                self._record(watched, x, micro_step, address=address, version=version)

    def record_all_in_python(
        self, items: Sequence[tuple[RecordedSeries, Tensor]], failed: Callable[[RecordedSeries, Exception], None]
    ) -> None:
        with self._lock:
            listed: list[tuple[RecordedSeries, ListedTensor]] = []
            for watched, x in items:
                try:
                    plain = (self._checking_host if watched.checked else self.host).plain
                    address = plain_address(x)
                    if address and plain is not None:
                        self._read_directly(plain, watched, x, 0, address)
                    elif not address and (one := self._listed(watched, x)) is not None:
                        listed.append((watched, one))
                    elif address or self._can_read(x):
                        self._record(watched, x, 0, address=address, version=None)
                except Exception as error:
                    failed(watched, error)
            for checked in {watched.checked for watched, _ in listed}:
                some = [(watched, one) for watched, one in listed if watched.checked == checked]
                check_sums = self.check_sums or checked
                for place, why in reduce_listed([one for _, one in some], self.eps, higher=self.higher, check_sums=check_sums):
                    failed(some[place][0], why)

    def _read_directly(self, plain: Reduce, watched: RecordedSeries, x: Tensor, micro_step: int, address: int) -> None:
        """``_record`` for a plain tensor without aliases, in few calls: each further call would run code that is not in the
        cache.
        """
        slot = watched.slots.get(HOST)
        if slot is None or micro_step >= slot.rows:
            slot, micro_step = self._slot(watched, HOST, micro_step)
        layout = self._table.layout_of(x.shape, x.dtype)  # first, since it can fail: then there is no row
        memory = slot.page.memory
        assert isinstance(memory, HostPage)
        local_row = slot.local_row + micro_step
        plain(address, x.numel(), memory.numbers, local_row, self._bins(slot.page, local_row))
        self._table.note(slot.row + micro_step, layout)

    def _listed(self, watched: RecordedSeries, x: Tensor) -> ListedTensor | None:
        """An entry for ``x``, on a device, in the list of tensors that one kernel reduces; None if ``x`` must be reduced
        alone.
        """
        local = None if self.magnitudes else local_shard(x)
        if local is None or local.is_cpu or not is_listed(local) or self.device_steps.captures(x.device):
            return None
        slot, _ = self._slot(watched, x.device, 0)
        assert isinstance(slot.page.memory, TorchDevicePage)
        self._table.note(slot.row, self._layout(x))
        return ListedTensor(local, slot.page.memory, slot.local_row)

    def _record(self, watched: RecordedSeries, x: Tensor, micro_step: int, *, address: int, version: Version) -> None:
        """``address``: where the elements of a plain tensor are (``plain_address``)."""
        if not address and self.device_steps.captures(x.device):
            self._record_captured(watched, x, None)
            return
        slot, offset = self._slot(watched, HOST if address else x.device, micro_step)
        row = slot.row + offset
        start = 0
        if version is not None:
            seen, start = self._seen.get(id(x)), start_of(x)
            if seen is not None and seen.version == version and seen.tensor() is x and seen.address == start:
                if seen.row == row:  # this row holds it already, and may have aliases
                    return
                self._table.note(row, seen.layout, alias=seen.row)
                return
        # First, since it can fail: then there is no row.
        layout = self._table.layout_of(x.shape, x.dtype) if address else self._layout(x)
        host = self._checking_host if watched.checked else self.host
        local_row = slot.local_row + offset
        if address and host.plain is not None:
            memory = slot.page.memory
            assert isinstance(memory, HostPage)
            host.plain(address, x.numel(), memory.numbers, local_row, self._bins(slot.page, local_row))
        else:
            if self.magnitudes:
                self._count_magnitudes(x, slot.page, local_row)
            if not self._reduce(x, slot.page, local_row, checked=watched.checked):
                return
        self._table.note(row, layout, NOT_AN_ALIAS)
        if version is not None:
            self._remember(x, version, row, layout, start)

    def _record_captured(self, watched: RecordedSeries, x: Tensor, tag: Tensor | None) -> None:
        """Capture a reduction into a row that the device selects at each replay. Tensors first seen in the capture have no
        row.
        """
        slot, chunk, source = watched.slots.get(x.device), watched.series.vpp_stage, local_shard(x)
        if slot is None or source is None or not self.device_steps.has(x.device, chunk):
            return
        memory = slot.page.memory
        page = torch.from_numpy(memory.numbers) if isinstance(memory, HostPage) else memory.tensor  # type: ignore[attr-defined]
        if watched.micro_steps == (NO_MICRO_STEP,):
            offset = self.device_steps.step(x.device, chunk)
        else:
            offset = self.device_steps.micro_step(x.device, chunk) if tag is None else tag
        reduce_into(source, page, slot.local_row, offset, self.eps, self.higher, self.check_sums or watched.checked)
        self._table.note_captured(slot, self._layout(x))

    def _slot(self, watched: RecordedSeries, device: Device, micro_step: int) -> tuple[RowSlot, int]:
        slot = watched.slots.get(device)
        if slot is not None and micro_step < slot.rows:
            return slot, micro_step
        assert isinstance(device, torch.device)
        if device.type != "cpu":
            self.device_steps.make(device, watched.series.vpp_stage)
        return self.rows.slot(watched, device, micro_step)

    def record_numbers(
        self, watched: RecordedSeries, numbers: Mapping[int, Any], x: Tensor, micro_step: int = 0, *, histogram: Any = None
    ) -> None:
        of_host = x is SCALAR
        if not of_host and (not has_data(x) or self.device_steps.captures(x.device)):  # such rows need the host
            return
        with self._lock:
            device = HOST if of_host or is_plain(x) else x.device
            slot, offset = self._slot(watched, device, micro_step)
            if of_host:  # no tensor is touched
                write_numbers(slot.page.memory, slot.local_row + offset, numbers)
            else:
                with torch._C._ExcludeDispatchKeyGuard(BYPASSED_KEYS), unseen():
                    if histogram is not None:
                        write_histogram(self.rows.histograms(slot.page, device), slot.local_row + offset, histogram)
                    write_numbers(slot.page.memory, slot.local_row + offset, numbers)
            self._table.note(slot.row + offset, self._layout(x), NOT_AN_ALIAS)

    def record_block(
        self, watched: Sequence[RecordedSeries], numbers: Mapping[int, Any], x: Tensor, micro_step: int = 0
    ) -> None:
        if not has_data(x) or self.device_steps.captures(x.device):  # as for ``record_numbers``
            return
        with self._lock, torch._C._ExcludeDispatchKeyGuard(BYPASSED_KEYS), unseen():
            block = self.rows.block(watched, HOST if is_plain(x) else x.device, micro_step)
            write_block(block.page.memory, block.local, numbers)
            self._table.note_block(block.rows, self._layout(x))

    def _bins(self, page: Page, local_row: int) -> Floats | None:
        """Where the histogram of a row in host memory belongs; None if none is wanted."""
        return self.rows.host_histograms(page, HOST)[local_row] if self._magnitudes else None

    def _count_magnitudes(self, x: Tensor, page: Page, local_row: int) -> None:
        counts = count_magnitudes(x) if isinstance(page.memory, HostPage) else count_magnitudes_on_device(x)
        if counts is not None:
            write_histogram(self.rows.histograms(page, x.device), local_row, counts)

    def read_into(self, x: Tensor, slot: RowSlot) -> bool:
        layout = self._layout(x)
        if not self._reduce(x, slot.page, slot.local_row):
            return False
        self._table.note(slot.row, layout)
        return True

    def _reduce(self, x: Tensor, page: Page, local_row: int, *, checked: bool = False) -> bool:
        memory = page.memory
        if isinstance(memory, HostPage):
            return (self._checking_host if checked else self.host).reduce_into(x, memory.numbers, local_row)
        assert isinstance(memory, TorchDevicePage)
        source = local_shard(x)
        if source is not None:
            with memory.written():
                reduce_into(source, memory.tensor, local_row, None, self.eps, self.higher, self.check_sums or checked)
        return source is not None

    def _layout(self, x: Tensor) -> int:
        return self._table.layout_of(measured_shape(x), x.dtype)

    def _remember(self, x: Tensor, version: Version, row: int, layout: int, start: int) -> None:
        if len(self._seen) >= MAX_SEEN:
            self._seen.clear()
        self._seen[id(x)] = ReadTensor(x, version, row, layout, start)


def _new_memory(rows: int, device: Device, columns: int, cleared: int | slice) -> PageMemory:
    assert isinstance(device, torch.device)
    with torch._C._ExcludeDispatchKeyGuard(BYPASSED_KEYS), unseen():
        return HostPage(rows, columns, cleared) if device.type == "cpu" else TorchDevicePage(rows, device, columns, cleared)


def has_data(x: Tensor) -> bool:
    """False for meta and fake tensors, whose devices may not exist here, and for tensors whose storage was freed."""
    local = local_shard(x)
    return local is not None and not local.is_meta and has_memory(local)


def _version(x: Tensor) -> int | None:
    """The number of in-place changes so far; None for inference tensors, which do not count them."""
    try:
        return x._version
    except RuntimeError:
        return None
