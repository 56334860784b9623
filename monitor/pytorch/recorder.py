"""From a tensor to its row: the one path that every hook takes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from monitor.pipeline.process import PROCESS
from monitor.series import NO_MICRO_STEP, Series, SeriesTable
from monitor.stats.partials import WRITES, Floats
from monitor.stats.table import NOT_AN_ALIAS, PAGE_ROWS, Page, Sealed, Slot, StatsTable
from monitor.stats.torch_host_kernel import KEYS_ABOVE_US, HostKernel
from monitor.stats.torch_memory import DevicePage, HostPage
from monitor.stats.torch_op import reduce_into
from monitor.stats.torch_small_tensors import is_small
from monitor.stats.torch_tensors import local_shard

MAX_SEEN: Final = 8192
"""Tensors remembered for aliases. Forgetting one costs a second read of it, no more."""

MOST_STAGED: Final = 1024
"""Copies of small tensors that wait to be reduced together: 4 MiB at most."""


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


class CallSeries:
    """A series whose rows are the calls of a step, combined when the step is written."""

    __slots__ = ("calls", "series", "slots", "step")

    def __init__(self, series: Series) -> None:
        self.series = series
        self.slots: dict[tuple[torch.device, int, int], Slot] = {}
        self.step = -1
        self.calls = 0


class Call:
    """One call of a ``CallSeries``: its tensors may be read at different times, and each has a row.

    A call has its number from the step in which it is first read, which need not be the one in which it was issued.
    """

    __slots__ = ("issued", "number", "of", "read", "step")

    def __init__(self, of: CallSeries, issued: int) -> None:
        self.of = of
        self.issued = issued
        self.step = -1
        self.number = 0
        self.read = 0

    def begin(self, step: int) -> None:
        """Take the next number of ``step``, unless it has one there."""
        if self.step != step:
            if self.of.step != step:
                self.of.step, self.of.calls = step, 0
            self.step, self.number, self.read = step, self.of.calls, 0
            self.of.calls += 1


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
        before_end: Called before a step ends: the last moment to record something in it. Must not raise.
    """

    def __init__(self, series: SeriesTable, eps: float) -> None:
        self.active = False
        self.table = StatsTable(series)
        self._host = HostKernel(eps)
        self._eps = eps
        self._open_pages: dict[torch.device, Page] = {}
        self._slots: dict[tuple[Series, torch.device, tuple[int, ...]], Slot] = {}
        self._seen: dict[int, _Seen] = {}
        # The engine runs the backward of each device on a thread of its own.
        self._lock = threading.Lock()
        self._inert = False
        self._sealed = 0
        self.before_end: Callable[[], None] = _nothing
        self._staged: dict[int, tuple[Slot, Tensor]] = {}
        PROCESS.on_fork_child(self._become_inert)

    @property
    def has_rows(self) -> bool:
        """Whether anything was recorded since the last seal."""
        return self.table.writes > 0

    def activate(self, wanted: bool) -> None:
        """Record the coming step or not. In a forked child nothing is ever recorded."""
        self.active = wanted and not self._inert

    def end_step(self) -> None:
        """Record nothing more in the step in progress, after what ``before_end`` adds."""
        if self.active:
            self.before_end()
        self.active = False

    def _become_inert(self) -> None:
        self._inert, self.active = True, False

    def record(self, watched: Watched, x: Tensor, micro_step: int = 0, *, aliases: bool = True) -> None:
        """Reduce ``x`` into the row of ``watched`` for ``micro_step``. Without data there is no row.

        Args:
            aliases: A tensor read before under another name, and unchanged since by its version, is not read again. Off
                for parameters and their gradients, which loops do change behind the version (``p.data.clamp_()``).
        """
        if not _has_data(x):
            return
        with self._lock:
            slot, offset = self._slot(watched, x.device, micro_step)
            version = _version(x) if aliases else None
            if version is not None:
                seen = self._seen.get(id(x))
                if seen is not None and seen.version == version and seen.tensor() is x:
                    self.table.note(slot.row + offset, seen.layout, alias=seen.row)
                    return
            if self._reduce(x, slot.page, slot.local_row + offset):
                layout = self._layout(x)
                self.table.note(slot.row + offset, layout, NOT_AN_ALIAS)
                if version is not None:
                    self._remember(x, version, slot.row + offset, layout)

    def record_all(self, items: Sequence[tuple[Watched, Tensor]], failed: Callable[[Watched | None, Exception], None]) -> None:
        """Reduce tensors that are no aliases into their rows, in this order; small ones are read together.

        Args:
            failed: Told of a tensor that could not be read; of none (None) where small ones could only not be read together.
        """
        try:
            together = self._host.small_rows([x for _, x in items])
        except Exception as error:
            failed(None, error)
            together = {}
        for place, (watched, x) in enumerate(items):
            try:
                if place in together:
                    self._enter(watched, x, together[place])
                else:
                    self.record(watched, x, aliases=False)
            except Exception as error:
                failed(watched, error)

    def new_call(self, of: CallSeries) -> Call:
        """A call that is issued now."""
        return Call(of, self._sealed)

    def record_call(self, call: Call, tensors: Sequence[Tensor], versions: Sequence[int | None] = ()) -> bool:
        """Reduce what one call has moved, a row a tensor. Safe on any thread.

        Args:
            versions: Of the tensors, where another thread may already change them: no row is left if one of them has another
                version by the end, or if the step in which the call was issued is over.

        Returns:
            Whether all of them were read.
        """
        with self._lock:
            if not self.active:
                return False
            if versions and (call.issued != self._sealed or not _are_still(tensors, versions)):
                return False
            call.begin(self._sealed)
            rows = [self._record_of(call, x) for x in tensors]
            complete = None not in rows and _are_still(tensors, versions)
            if not complete:
                self._forget(rows)
            if len(self._staged) >= MOST_STAGED:
                self._reduce_staged()
            return complete

    def _record_of(self, call: Call, x: Tensor) -> Slot | None:
        if not _has_data(x):
            return None
        slot = self._slot_of_call(call, x.device)
        if is_small(x):
            with torch._C._ExcludeDispatchKeyGuard(KEYS_ABOVE_US):
                self._staged[slot.row] = slot, x.clone()
        elif not self._reduce(x, slot.page, slot.local_row):
            return None
        call.read += 1
        self.table.note(slot.row, self._layout(x))
        return slot

    def _forget(self, slots: Sequence[Slot | None]) -> None:
        """A call that was not read as a whole has no row."""
        for slot in slots:
            if slot is not None and self._staged.pop(slot.row, None) is None:
                memory = slot.page.memory
                numbers = memory.numbers if isinstance(memory, HostPage) else memory.tensor  # type: ignore[attr-defined]
                numbers[slot.local_row, WRITES] = 0.0

    def reduce_staged(self) -> None:
        """Reduce the copies of small tensors that calls have moved: many together cost less than each on its own."""
        with self._lock:
            self._reduce_staged()

    def _reduce_staged(self) -> None:
        staged, self._staged = [*self._staged.values()], {}
        together = self._host.small_rows([x for _, x in staged])
        for place, (slot, x) in enumerate(staged):
            memory = slot.page.memory
            assert isinstance(memory, HostPage)
            if place in together:
                memory.numbers[slot.local_row] = together[place]
            else:
                self._host.reduce_into(x, memory.numbers, slot.local_row)

    def _slot_of_call(self, call: Call, device: torch.device) -> Slot:
        key = (device, call.number, call.read)
        slot = call.of.slots.get(key)
        if slot is None:
            slot = call.of.slots[key] = self.table.allot(self._page_for(device, 1), call.of.series, (call.number,))
        return slot

    def _enter(self, watched: Watched, x: Tensor, numbers: Floats) -> None:
        with self._lock:
            slot, _ = self._slot(watched, x.device, 0)
            memory = slot.page.memory
            assert isinstance(memory, HostPage)
            memory.numbers[slot.local_row] = numbers
            self.table.note(slot.row, self._layout(x), NOT_AN_ALIAS)

    def seal(self, into: Sealed) -> None:
        """Copy the table into ``into`` and begin a new step."""
        with self._lock:
            self._reduce_staged()
            self.table.seal(into)
            self._sealed += 1
            self._seen.clear()

    def discard(self) -> None:
        """Begin a new step without keeping this one."""
        with self._lock:
            self._staged.clear()
            self.table.discard()
            self._sealed += 1
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
            page = self._page_for(device, len(micro_steps))
            slot = self._slots[series, device, micro_steps] = self.table.allot(page, series, micro_steps)
        return slot

    def _page_for(self, device: torch.device, rows: int) -> Page:
        page = self._open_pages.get(device)
        if page is None or page.used + rows > page.rows:
            page = self._open_pages[device] = self._new_page(device, max(PAGE_ROWS, rows))
        return page

    def _new_page(self, device: torch.device, rows: int) -> Page:
        memory = HostPage(rows) if device.type == "cpu" else DevicePage(rows, device)
        return self.table.add_page(memory, rows)

    def _reduce(self, x: Tensor, page: Page, local_row: int) -> bool:
        memory = page.memory
        if isinstance(memory, HostPage):
            return self._host.reduce_into(x, memory.numbers, local_row)
        assert isinstance(memory, DevicePage)
        source = local_shard(x)
        if source is not None:
            reduce_into(source, memory.tensor, local_row, None, self._eps)
        return source is not None

    def _layout(self, x: Tensor) -> int:
        local = local_shard(x)
        return self.table.layout_of(x.shape if local is None else local.shape, x.dtype)

    def _remember(self, x: Tensor, version: int, row: int, layout: int) -> None:
        if len(self._seen) >= MAX_SEEN:
            self._seen.clear()
        self._seen[id(x)] = _Seen(x, version, row, layout)


def _has_data(x: Tensor) -> bool:
    """False for meta and fake tensors, whose devices need not even exist here."""
    local = local_shard(x)
    return local is not None and not local.is_meta


def _version(x: Tensor) -> int | None:
    """The number of in-place changes so far; None for inference tensors, which do not count them."""
    return None if x.is_inference() else x._version


def _are_still(tensors: Sequence[Tensor], versions: Sequence[int | None]) -> bool:
    """Whether no tensor was changed since it had its version."""
    return not versions or all(x._version == was for x, was in zip(tensors, versions, strict=True) if was is not None)


def _nothing() -> None:
    """Nobody has anything to add."""
