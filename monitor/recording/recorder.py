"""Reduces tensors into rows of the live table: the base that each framework's recorder extends."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from monitor.pipeline.process import PROCESS
from monitor.series import NO_MICRO_STEP, Series, SeriesTable
from monitor.stats.histograms import BINS
from monitor.stats.partials import COLUMNS, WRITES
from monitor.stats.table import PAGE_ROWS, KindRows, Page, PageMemory, RowSlot, SealedTable, StatsTable

Device = Hashable
"""The device of a tensor, as a framework names it."""


class RecordedSeries:
    """One series, and its rows on each device.

    Attributes:
        micro_steps: The micro-steps of its rows; ``(NO_MICRO_STEP,)`` for a series with one row per step.
    """

    __slots__ = ("late", "micro_steps", "series", "slots")

    def __init__(self, series: Series, micro_steps: tuple[int, ...] = (NO_MICRO_STEP,)) -> None:
        self.series = series
        self.micro_steps = micro_steps
        self.slots: dict[Device, RowSlot] = {}
        self.late: dict[tuple[Device, int], RowSlot] = {}


class LateRows:
    """Interface of a collector that enters rows at the end of a step. Its methods must not raise."""

    def step_ends(self) -> None:
        """The last moment to measure something in the step in progress."""

    def enter(self) -> None:
        """Enter the measurements: the table is about to be read. The caller holds the lock."""

    def discard(self) -> None:
        """Discard the measurements of the step in progress. The caller holds the lock."""


class Recorder(ABC):
    """Reduces tensors into the live table.

    Attributes:
        active: Whether the step in progress is collected. Every hook checks it first, and returns if it is false.
        table: The live table, changed only under ``lock``.
        steps: Number of ended steps.
        late: Enters rows at the end of a step.

    Args:
        magnitudes: Whether to count a histogram of magnitudes for every tensor.
    """

    def __init__(self, series: SeriesTable, eps: float, *, magnitudes: bool = False) -> None:
        self.active = False
        self.table = StatsTable(series)
        self._eps = eps
        self._magnitudes = magnitudes
        self._open_pages: dict[Device, Page] = {}
        self._slots: dict[tuple[Series, Device, tuple[int, ...]], RowSlot] = {}
        # The autograd engine runs the backward of each device on its own thread.
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
        """Between two steps: set ``eps``, below which elements count as zeros, and whether to count magnitudes."""
        self._magnitudes = magnitudes
        if eps != self._eps:
            self._eps = eps
            self._take_eps(eps)

    def count_magnitudes(self, wanted: bool) -> None:
        """Start or stop counting a histogram of magnitudes for every tensor."""
        self._magnitudes = wanted

    def activate(self, wanted: bool) -> None:
        """Record the next step if ``wanted``. A forked child never records."""
        self.active = wanted and not self._inert

    def micro_step_begins(self, chunk: int, micro_steps: int) -> None:
        """The root of a chunk begins a training forward, one of ``micro_steps`` or more."""
        del chunk, micro_steps

    def end_step(self) -> None:
        """Stop recording the step in progress."""
        if self.active:
            self.late.step_ends()
        self.active = False

    def _become_inert(self) -> None:
        self._inert, self.active = True, False

    @abstractmethod
    def record(self, watched: RecordedSeries, x: Any, micro_step: int = 0, *, aliases: bool = True) -> None:
        """Reduce ``x`` into the row of ``watched`` for ``micro_step``. Without data there is no row.

        Args:
            aliases: Do not read a tensor again that was read under another name and is unchanged since. Off for parameters and
                gradients: loops change them without increasing the version counter (``p.data.clamp_()``).
        """

    @abstractmethod
    def record_all(
        self, items: Sequence[tuple[RecordedSeries, Any]], failed: Callable[[RecordedSeries, Exception], None]
    ) -> None:
        """Reduce one tensor into a row of each series, in this order, without use of aliases.

        Args:
            failed: Called for a tensor that could not be read.
        """

    @abstractmethod
    def record_numbers(
        self, watched: RecordedSeries, numbers: Mapping[int, Any], x: Any, micro_step: int = 0, *, histogram: Any = None
    ) -> None:
        """Write a row of computed numbers.

        Args:
            numbers: By column of partials (``monitor.stats.partials``); the others are 0. Tensors have one element, on the
                device of ``x``, and are read asynchronously.
            x: The measured tensor. The row has the shape and dtype of its local part.
            histogram: Number of elements in each bin, shape of at most ``(BINS,)``, on the device of ``x``.
        """

    @abstractmethod
    def reduce(self, x: Any, page: Page, local_row: int) -> bool:
        """Write the partials of ``x`` into a row. Returns False and writes nothing if ``x`` has no data."""

    @abstractmethod
    def layout(self, x: Any) -> int:
        """The number of the layout of ``x``, or of its local part."""

    @abstractmethod
    def _new_memory(self, rows: int, device: Device, columns: int, cleared: int | slice) -> PageMemory:
        """Memory for a page on ``device``."""

    @abstractmethod
    def _take_eps(self, eps: float) -> None:
        """Set ``eps``, below which elements count as zeros."""

    @abstractmethod
    def _forget_step(self) -> None:
        """A new step has begun: drop references to the last step's tensors. The caller holds the lock."""

    def seal(self, into: SealedTable) -> None:
        """Copy the table into ``into`` and begin a new step."""
        with self.lock:
            self.late.enter()
            self.table.seal(into)
            self.steps += 1
            self._forget_step()

    def kinds_now(self) -> dict[str, KindRows]:
        """The rows of the step in progress so far. Waits for the device."""
        with self.lock:
            self.late.enter()
            return self.table.kinds_now()

    def discard(self) -> None:
        """Discard the step in progress, and begin a new one."""
        with self.lock:
            self._forget_step()
            self.late.discard()
            self.table.discard()
            self.steps += 1

    def page_for(self, device: Device, rows: int) -> Page:
        """A page on ``device`` with room for ``rows`` more rows."""
        page = self._open_pages.get(device)
        if page is None or page.used + rows > page.rows:
            most = max(PAGE_ROWS, rows)
            page = self.table.add_page(self._new_memory(most, device, len(COLUMNS), WRITES), most)
            self._open_pages[device] = page
        return page

    def _histogram_page(self, page: Page, device: Device) -> PageMemory:
        if page.histogram is None:
            page.histogram = self._new_memory(page.rows, device, BINS, slice(None))
        return page.histogram

    def _slot(self, watched: RecordedSeries, device: Device, micro_step: int) -> tuple[RowSlot, int]:
        slot = watched.slots.get(device)
        if slot is None:
            slot = watched.slots[device] = self._allot(watched.series, device, watched.micro_steps)
        if micro_step < slot.rows:
            return slot, micro_step
        late = watched.late.get((device, micro_step))
        if late is None:
            late = watched.late[device, micro_step] = self._allot(watched.series, device, (micro_step,))
        return late, 0

    def _allot(self, series: Series, device: Device, micro_steps: tuple[int, ...]) -> RowSlot:
        """The rows of a series: those of an earlier attachment, or new ones."""
        slot = self._slots.get((series, device, micro_steps))
        if slot is None:
            page = self.page_for(device, len(micro_steps))
            slot = self._slots[series, device, micro_steps] = self.table.allot(page, series, micro_steps)
        return slot
