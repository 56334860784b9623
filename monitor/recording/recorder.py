"""Records the tensors of a rank, step by step, into the live table.

A hook calls ``Recorder.record``, which is the method of the framework's ``TensorReader``. The reader finds the tensor's row in
``LiveRows`` and calls a kernel.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol, final

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


NewMemory = Callable[[int, Device, int, int | slice], PageMemory]
"""Returns the memory of a page: from its number of rows, its device, its number of columns, and the columns to clear."""


class LiveRows:
    """The rows of every series in the live table.

    Attributes:
        table: The live table, changed only under ``lock``.
        lock: The autograd engine runs the backward of each device on a thread of its own.
        slots: The rows of each series. A later attachment continues with them.
    """

    def __init__(self, series: SeriesTable, new_memory: NewMemory) -> None:
        self.table = StatsTable(series)
        self.lock = threading.Lock()
        self.slots: dict[tuple[Series, Device, tuple[int, ...]], RowSlot] = {}
        self._new_memory = new_memory
        self._open_pages: dict[Device, Page] = {}

    def slot(self, watched: RecordedSeries, device: Device, micro_step: int) -> tuple[RowSlot, int]:
        """The rows of a series on ``device``, and which of them has ``micro_step``."""
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
        slot = self.slots.get((series, device, micro_steps))
        if slot is None:
            slot = self.slots[series, device, micro_steps] = self.new_slot(series, device, micro_steps)
        return slot

    def new_slot(self, series: Series, device: Device, micro_steps: tuple[int, ...]) -> RowSlot:
        """New rows on ``device``, one for each of ``micro_steps``."""
        page = self._open_pages.get(device)
        if page is None or page.used + len(micro_steps) > page.rows:
            rows = max(PAGE_ROWS, len(micro_steps))
            page = self.table.add_page(self._new_memory(rows, device, len(COLUMNS), WRITES), rows)
            self._open_pages[device] = page
        return self.table.allot(page, series, micro_steps)

    def histograms(self, page: Page, device: Device) -> PageMemory:
        """The histograms of a page on ``device``."""
        if page.histogram is None:
            page.histogram = self._new_memory(page.rows, device, BINS, slice(None))
        return page.histogram


class TensorReader(Protocol):
    """Reads the tensors of a framework into rows.

    Attributes:
        rows: The rows, made by the reader.
        eps: The bound below which elements count as zeros.
        higher: Whether to measure the higher moments (``partials``) of every tensor.
        magnitudes: Whether to count a histogram of magnitudes for every tensor.
    """

    rows: LiveRows
    eps: float
    higher: bool
    magnitudes: bool

    def record(self, watched: RecordedSeries, x: Any, micro_step: int = 0, *, aliases: bool = True) -> None:
        """Reduce ``x`` into the row of ``watched`` for ``micro_step``. Without data there is no row.

        Args:
            aliases: Do not read a tensor again that was read under another name and is unchanged since. Off for parameters and
                gradients: loops change them without increasing the version counter (``p.data.clamp_()``).
        """

    def record_all(
        self, items: Sequence[tuple[RecordedSeries, Any]], failed: Callable[[RecordedSeries, Exception], None]
    ) -> None:
        """Reduce one tensor into a row of each series, in this order, without use of aliases.

        Args:
            failed: Called for a tensor that could not be read.
        """

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

    def read_into(self, x: Any, slot: RowSlot) -> bool:
        """Reduce ``x`` into the row of ``slot``. False if ``x`` has no data, and no row. The caller holds the lock."""

    def take_kernels(self, eps: float, *, higher: bool) -> None:
        """Set ``eps`` and ``higher``, from the next tensor on."""

    def activate(self, active: bool) -> None:
        """Whether tensors are recorded from now on: a step begins or ends."""

    def micro_step_begins(self, chunk: int, micro_steps: int) -> None:
        """The root of a chunk begins a training forward, one of ``micro_steps`` or more."""

    def forget_step(self) -> None:
        """A new step begins: drop references to the last step's tensors. The caller holds the lock."""


class LateRows(Protocol):
    """Enters rows at the end of a step. Its methods must not raise."""

    def step_ends(self) -> None:
        """The last moment to measure something in the step in progress."""

    def enter(self) -> None:
        """Enter the measurements: the table is about to be read. The caller holds the lock."""

    def discard(self) -> None:
        """Discard the measurements of the step in progress. The caller holds the lock."""


class NoLateRows:
    """Has no rows to enter."""

    def step_ends(self) -> None: ...

    def enter(self) -> None: ...

    def discard(self) -> None: ...


@final
class Recorder:
    """Records the tensors of a rank, step by step. Every hook calls it.

    ``record``, ``record_all``, ``record_numbers`` and ``micro_step_begins`` are the methods of ``TensorReader``.

    Attributes:
        active: Whether the step in progress is collected. Every hook checks it first, and returns if it is false.
        table: The live table, changed only under ``lock``.
        steps: Number of ended steps.
        late: Enters rows at the end of a step.
    """

    def __init__(self, reader: TensorReader) -> None:
        self.active = False
        self.reader = reader
        self.table, self.lock = reader.rows.table, reader.rows.lock
        # Methods here that call the reader's would be a further call for each tensor.
        self.record, self.record_all, self.record_numbers = reader.record, reader.record_all, reader.record_numbers
        self.micro_step_begins = reader.micro_step_begins
        self.steps = 0
        self.late: LateRows = NoLateRows()
        self._inert = False
        PROCESS.on_fork_child(self._become_inert)

    @property
    def has_rows(self) -> bool:
        """Whether anything was recorded since the last seal."""
        return self.table.writes > 0

    def use(self, eps: float, *, magnitudes: bool = False, higher: bool = False) -> None:
        """Set ``eps``, below which elements count as zeros, and whether to count magnitudes and to measure higher moments.

        From the next tensor on.
        """
        self.reader.magnitudes = magnitudes
        if (eps, higher) != (self.reader.eps, self.reader.higher):
            self.reader.take_kernels(eps, higher=higher)

    def activate(self, wanted: bool) -> None:
        """Record the next step if ``wanted``. A forked child never records."""
        self.active = wanted and not self._inert
        self.reader.activate(self.active)

    def end_step(self) -> None:
        """Stop recording the step in progress."""
        if self.active:
            self.late.step_ends()
        self.active = False
        self.reader.activate(False)

    def _become_inert(self) -> None:
        self._inert, self.active = True, False

    def seal(self, into: SealedTable) -> None:
        """Copy the table into ``into`` and begin a new step."""
        with self.lock:
            self.late.enter()
            self.table.seal(into)
            self.steps += 1
            self.reader.forget_step()

    def kinds_now(self) -> dict[str, KindRows]:
        """The rows of the step in progress so far. Waits for the device."""
        with self.lock:
            self.late.enter()
            return self.table.kinds_now()

    def discard(self) -> None:
        """Discard the step in progress, and begin a new one."""
        with self.lock:
            self.reader.forget_step()
            self.late.discard()
            self.table.discard()
            self.steps += 1
