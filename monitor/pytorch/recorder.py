"""From a tensor to its row: the one path that every hook takes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monitor.pipeline.process import PROCESS
from monitor.series import NO_MICRO_STEP, Series, SeriesTable
from monitor.stats.histograms import BINS
from monitor.stats.host_memory import HostPage
from monitor.stats.partials import COLUMNS, WRITES, Floats
from monitor.stats.rows import KindRows
from monitor.stats.table import NOT_AN_ALIAS, PAGE_ROWS, Page, PageMemory, Sealed, Slot, StatsTable
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


class Watched:
    """One series, and the rows it has been given on each device.

    Attributes:
        micro_steps: The micro-steps that its rows stand for; ``(NO_MICRO_STEP,)`` for a series of whole steps.
    """

    __slots__ = ("late", "micro_steps", "series", "slots")

    def __init__(self, series: Series, micro_steps: tuple[int, ...] = (NO_MICRO_STEP,)) -> None:
        self.series = series
        self.micro_steps = micro_steps
        self.slots: dict[torch.device, Slot] = {}
        self.late: dict[tuple[torch.device, int], Slot] = {}


class LateRows:
    """Whoever has rows of its own in the table, and enters them late. Must not raise."""

    def step_ends(self) -> None:
        """The last moment to measure something in the step in progress."""

    def enter(self) -> None:
        """Enter what was measured: the table is about to be read. The caller has the lock."""

    def discard(self) -> None:
        """Let go of what was measured in the step in progress. The caller has the lock."""


class _Seen:
    """A tensor that was read, and the row that holds what was read."""

    __slots__ = ("layout", "row", "tensor", "version")

    def __init__(self, tensor: Tensor, version: int, row: int, layout: int) -> None:
        self.tensor = weakref.ref(tensor)
        self.version = version
        self.row = row
        self.layout = layout


class Recorder:
    """Reduces tensors into the live table.

    Attributes:
        active: Whether the step in progress is collected. Every hook looks here first and does nothing else if not.
        table: Changed by whoever has the ``lock``.
        steps: How many were ended.
        late: Who enters rows late.

    Args:
        magnitudes: Whether a histogram of magnitudes is counted of every tensor.
    """

    def __init__(self, series: SeriesTable, eps: float, *, magnitudes: bool = False) -> None:
        self.active = False
        self.table = StatsTable(series)
        self.host = HostKernel(eps)
        self._copies = Copies(eps, self.host.reduce, self._enter)
        self._eps = eps
        self._magnitudes = magnitudes
        self._open_pages: dict[torch.device, Page] = {}
        self._slots: dict[tuple[Series, torch.device, tuple[int, ...]], Slot] = {}
        self._seen: dict[int, _Seen] = {}
        # The engine runs the backward of each device on a thread of its own.
        self.lock = threading.Lock()
        self.steps = 0
        self.late = LateRows()
        self._inert = False
        PROCESS.on_fork_child(self._become_inert)

    @property
    def has_rows(self) -> bool:
        """Whether anything was recorded since the last seal."""
        return self.table.writes > 0

    def use(self, eps: float, *, magnitudes: bool = False) -> None:
        """Between two steps: count as small what is below ``eps``, and say whether histograms of magnitudes are counted."""
        self._magnitudes = magnitudes
        if eps != self._eps:
            self.host, self._eps = HostKernel(eps), eps
            self._copies = Copies(eps, self.host.reduce, self._enter)

    def count_magnitudes(self, wanted: bool) -> None:
        """Count a histogram of magnitudes of every tensor from now on, or no longer."""
        self._magnitudes = wanted

    def activate(self, wanted: bool) -> None:
        """Record the coming step or not. In a forked child nothing is ever recorded."""
        self.active = wanted and not self._inert

    def end_step(self) -> None:
        """Record nothing more in the step in progress."""
        if self.active:
            self.late.step_ends()
        self.active = False

    def _become_inert(self) -> None:
        self._inert, self.active = True, False

    def record(self, watched: Watched, x: Tensor, micro_step: int = 0, *, aliases: bool = True) -> None:
        """Reduce ``x`` into the row of ``watched`` for ``micro_step``. Without data there is no row.

        Args:
            aliases: A tensor read before under another name, and unchanged since by its version, is not read again. Off
                for parameters and their gradients, which loops do change behind the version (``p.data.clamp_()``).
        """
        plain = is_plain(x)
        if plain or has_data(x):
            with self.lock:
                self._record(watched, x, micro_step, plain=plain, aliases=aliases)

    def record_all(self, items: Sequence[tuple[Watched, Tensor]], failed: Callable[[Watched, Exception], None]) -> None:
        """Reduce tensors that are no aliases into the rows of as many series, in this order.

        Args:
            failed: Told of a tensor that could not be read.
        """
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
        """Write a row whose numbers were computed elsewhere.

        Args:
            numbers: By column of partials (``monitor.stats.partials``); the others are 0. Tensors have one element, on the
                device of ``x``, and are not waited for.
            x: What was measured, whose local part's shape and dtype are those of the row.
            histogram: Elements in each bin, shape of at most ``(BINS,)``, on the device of ``x``.
        """
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

    def _histogram_page(self, page: Page, device: torch.device) -> PageMemory:
        if page.histogram is None:
            page.histogram = _memory(page.rows, device, BINS, slice(None))
        return page.histogram

    def _enter(self, rows: NDArray[np.int64], numbers: Floats) -> None:
        """The numbers of rows on the host that were noted before."""
        for page in self.table.pages:
            here = (rows >= page.first_row) & (rows < page.first_row + page.rows)
            if here.any():
                assert isinstance(page.memory, HostPage)
                page.memory.numbers[rows[here] - page.first_row] = numbers[here]

    def seal(self, into: Sealed) -> None:
        """Copy the table into ``into`` and begin a new step."""
        with self.lock:
            self._copies.reduce()
            self.late.enter()
            self.table.seal(into)
            self.steps += 1
            self._seen.clear()

    def kinds_now(self) -> dict[str, KindRows]:
        """What the step in progress has measured so far. Waits for the device."""
        with self.lock:
            self._copies.reduce()
            self.late.enter()
            return self.table.kinds_now()

    def discard(self) -> None:
        """Begin a new step without keeping this one."""
        with self.lock:
            self._copies.discard()
            self.late.discard()
            self.table.discard()
            self.steps += 1
            self._seen.clear()

    def _slot(self, watched: Watched, device: torch.device, micro_step: int) -> tuple[Slot, int]:
        slot = watched.slots.get(device)
        if slot is None:
            slot = watched.slots[device] = self._allot(watched.series, device, watched.micro_steps)
        if micro_step < slot.rows:
            return slot, micro_step
        late = watched.late.get((device, micro_step))
        if late is None:
            late = watched.late[device, micro_step] = self._allot(watched.series, device, (micro_step,))
        return late, 0

    def _allot(self, series: Series, device: torch.device, micro_steps: tuple[int, ...]) -> Slot:
        """The rows of a series: those it has from an earlier attachment, or new ones."""
        slot = self._slots.get((series, device, micro_steps))
        if slot is None:
            page = self.page_for(device, len(micro_steps))
            slot = self._slots[series, device, micro_steps] = self.table.allot(page, series, micro_steps)
        return slot

    def page_for(self, device: torch.device, rows: int) -> Page:
        """A page of ``device`` with room for that many more rows."""
        page = self._open_pages.get(device)
        if page is None or page.used + rows > page.rows:
            page = self._open_pages[device] = self._new_page(device, max(PAGE_ROWS, rows))
        return page

    def _new_page(self, device: torch.device, rows: int) -> Page:
        return self.table.add_page(_memory(rows, device, len(COLUMNS), WRITES), rows)

    def reduce(self, x: Tensor, page: Page, local_row: int) -> bool:
        """Write the partials of ``x`` into a row. False, and nothing written, if there is no data to read."""
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
        """The number of the layout of ``x``, or of its local part."""
        local = local_shard(x)
        return self.table.layout_of(x.shape if local is None else local.shape, x.dtype)

    def _remember(self, x: Tensor, version: int, row: int, layout: int) -> None:
        if len(self._seen) >= MAX_SEEN:
            self._seen.clear()
        self._seen[id(x)] = _Seen(x, version, row, layout)


def _memory(rows: int, device: torch.device, columns: int, cleared: int | slice) -> PageMemory:
    with torch._C._ExcludeDispatchKeyGuard(KEYS_ABOVE_US), unseen():
        return HostPage(rows, columns, cleared) if device.type == "cpu" else DevicePage(rows, device, columns, cleared)


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
