"""From a tensor of torch to its row."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monitor.capture import recorder
from monitor.capture.recorder import Device, Watched
from monitor.series import SeriesTable
from monitor.stats.host_memory import HostPage
from monitor.stats.partials import Floats
from monitor.stats.table import NOT_AN_ALIAS, Page, PageMemory
from monitor.stats.torch_copies import Copies
from monitor.stats.torch_host_kernel import HostKernel
from monitor.stats.torch_magnitudes import count_magnitudes, count_magnitudes_there
from monitor.stats.torch_memory import DevicePage, write_histogram, write_numbers
from monitor.stats.torch_modes import KEYS_ABOVE_US, unseen
from monitor.stats.torch_op import reduce_into
from monitor.stats.torch_tensors import is_plain, local_shard

HOST: Final = torch.device("cpu")

MAX_SEEN: Final = 8192
"""Tensors remembered for aliases. Forgetting one costs a second read of it, no more."""


class _Seen:
    """A tensor that was read, and the row that holds what was read."""

    __slots__ = ("layout", "row", "tensor", "version")

    def __init__(self, tensor: Tensor, version: int, row: int, layout: int) -> None:
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

    def _take_eps(self, eps: float) -> None:
        self.host = HostKernel(eps)
        self._copies = Copies(eps, self.host.reduce, self._enter)

    def _new_memory(self, rows: int, device: Device, columns: int, cleared: int | slice) -> PageMemory:
        assert isinstance(device, torch.device)
        with torch._C._ExcludeDispatchKeyGuard(KEYS_ABOVE_US), unseen():
            return HostPage(rows, columns, cleared) if device.type == "cpu" else DevicePage(rows, device, columns, cleared)

    def _settle(self) -> None:
        self._copies.reduce()

    def _forget_step(self, *, settled: bool) -> None:
        if not settled:
            self._copies.discard()
        self._seen.clear()

    def record(self, watched: Watched, x: Tensor, micro_step: int = 0, *, aliases: bool = True) -> None:
        plain = is_plain(x)
        if plain or has_data(x):
            with self.lock:
                self._record(watched, x, micro_step, plain=plain, aliases=aliases)

    def record_all(self, items: Sequence[tuple[Watched, Tensor]], failed: Callable[[Watched, Exception], None]) -> None:
        with self.lock:
            rows, orders, layouts, tensors = [], [], [], []  # type: list[int], list[int], list[int], list[Tensor]
            for watched, x in items:
                try:
                    plain = is_plain(x)
                    if plain and self._is_copied(x):
                        rows.append(self._slot(watched, HOST, 0)[0].row)
                        orders.append(self.table.next_order())
                        layouts.append(self.table.layout_of(x.shape, x.dtype))
                        tensors.append(x)
                    elif plain or has_data(x):
                        self._record(watched, x, 0, plain=plain, aliases=False)
                except Exception as error:
                    failed(watched, error)
            if rows:
                self._copies.take_all(rows, tensors)
                self.table.note_rows(np.array(rows), np.array(orders), np.array(layouts))

    def _record(self, watched: Watched, x: Tensor, micro_step: int, *, plain: bool, aliases: bool) -> None:
        slot, offset = self._slot(watched, HOST if plain else x.device, micro_step)
        row = slot.row + offset
        version = _version(x) if aliases else None
        if version is not None:
            seen = self._seen.get(id(x))
            if seen is not None and seen.version == version and seen.tensor() is x:
                self._copies.give_up(row)
                self.table.note(row, seen.layout, alias=seen.row)
                return
        if plain and self._is_copied(x):
            self._copies.take(row, x)
            layout = self.table.layout_of(x.shape, x.dtype)
        else:
            if self._magnitudes:  # first: if it fails there is no row
                self._count_magnitudes(x, slot.page, slot.local_row + offset)
            if not self.reduce(x, slot.page, slot.local_row + offset):
                return
            self._copies.give_up(row)
            layout = self.layout(x)
        self.table.note(row, layout, NOT_AN_ALIAS)
        if version is not None:
            self._remember(x, version, row, layout)

    def record_numbers(
        self,
        watched: Watched,
        numbers: Mapping[int, float | Tensor],
        x: Tensor,
        micro_step: int = 0,
        *,
        histogram: Tensor | None = None,
    ) -> None:
        if not has_data(x):
            return
        with self.lock:
            device = HOST if is_plain(x) else x.device
            slot, offset = self._slot(watched, device, micro_step)
            with torch._C._ExcludeDispatchKeyGuard(KEYS_ABOVE_US), unseen():
                if histogram is not None:
                    write_histogram(self._histogram_page(slot.page, device), slot.local_row + offset, histogram)
                write_numbers(slot.page.memory, slot.local_row + offset, numbers)
            self._copies.give_up(slot.row + offset)
            self.table.note(slot.row + offset, self.layout(x), NOT_AN_ALIAS)

    def _is_copied(self, x: Tensor) -> bool:
        return not self._magnitudes and self._copies.takes(x)

    def _count_magnitudes(self, x: Tensor, page: Page, local_row: int) -> None:
        counts = count_magnitudes(x) if isinstance(page.memory, HostPage) else count_magnitudes_there(x)
        if counts is not None:
            write_histogram(self._histogram_page(page, x.device), local_row, counts)

    def _enter(self, rows: NDArray[np.int64], numbers: Floats) -> None:
        """The numbers of rows on the host that were noted before."""
        for page in self.table.pages:
            here = (rows >= page.first_row) & (rows < page.first_row + page.rows)
            if here.any():
                assert isinstance(page.memory, HostPage)
                page.memory.numbers[rows[here] - page.first_row] = numbers[here]

    def reduce(self, x: Tensor, page: Page, local_row: int) -> bool:
        memory = page.memory
        if isinstance(memory, HostPage):
            return self.host.reduce_into(x, memory.numbers, local_row)
        assert isinstance(memory, DevicePage)
        source = local_shard(x)
        if source is not None:
            with memory.written():
                reduce_into(source, memory.tensor, local_row, None, self._eps)
        return source is not None

    def layout(self, x: Tensor) -> int:
        local = local_shard(x)
        return self.table.layout_of(x.shape if local is None else local.shape, x.dtype)

    def _remember(self, x: Tensor, version: int, row: int, layout: int) -> None:
        if len(self._seen) >= MAX_SEEN:
            self._seen.clear()
        self._seen[id(x)] = _Seen(x, version, row, layout)


def has_data(x: Tensor) -> bool:
    """False for meta and fake tensors, whose devices need not even exist here."""
    local = local_shard(x)
    return local is not None and not local.is_meta


def _version(x: Tensor) -> int | None:
    """The number of in-place changes so far; None for inference tensors, which do not count them."""
    try:
        return x._version
    except RuntimeError:
        return None
