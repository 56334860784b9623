"""Rows of calls of operators: a row for each tensor of each call of a step, combined when the step is written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any, Final

from monitor.series import Series
from monitor.stats.table import Page, Slot

LOCK_SECONDS: Final = 1.0
"""A handler of a signal may communicate, too, and may have interrupted its own thread in here: it must not wait for ever."""


class CallSeries:
    """A series whose rows are the calls of a step.

    Attributes:
        calls: How many there were in the step ``step``.
        slots: The row of each call's each tensor: by device, number of the call, and number of the tensor in it.
        staged_rows: Where first tensors are put off: on the host, their rows, by number of the call.
    """

    __slots__ = ("calls", "series", "slots", "staged_rows", "step")

    def __init__(self, series: Series) -> None:
        self.series = series
        self.step = -1
        self.calls = 0
        self.slots: dict[tuple[Hashable, int, int], Slot] = {}
        self.staged_rows: list[int] = []


class Call:
    """One call: its tensors may be read at different times, and each has a row.

    A call has its number from the step in which it is first read, which need not be the one in which it was issued.

    Args:
        issued: The step in which it was issued.
    """

    __slots__ = ("issued", "number", "read", "series", "step")

    def __init__(self, series: CallSeries, issued: int) -> None:
        self.series = series
        self.issued = issued
        self.step = -1
        self.number = 0
        self.read = 0

    def begin(self, step: int) -> None:
        """Take the next number of ``step``, unless it has one there."""
        if self.step != step:
            series = self.series
            if series.step != step:
                series.step, series.calls = step, 0
            self.step, self.number, self.read = step, series.calls, 0
            series.calls += 1


class CallRows(ABC):
    """Reads what calls have moved, on any thread, into the table of a recorder."""

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder
        self._series: dict[Series, CallSeries] = {}

    @abstractmethod
    def _device_of(self, x: Any) -> Hashable:
        """Where a tensor is, as the recorder names it; None where it has no data."""

    def series(self, series: Series) -> CallSeries:
        """The rows of ``series``."""
        known = self._series.get(series)
        if known is None:
            known = self._series[series] = CallSeries(series)
        return known

    def read(self, call: Call, tensors: Sequence[Any]) -> bool:
        """Reduce what a call has moved, a row a tensor.

        Returns:
            Whether all of them were read. Otherwise none has a row.
        """
        lock = self._recorder.lock
        if not lock.acquire(timeout=LOCK_SECONDS):
            return False
        try:
            return bool(self._recorder.active) and self._read(call, tensors)
        finally:
            lock.release()

    def _read(self, call: Call, tensors: Sequence[Any]) -> bool:
        call.begin(self._recorder.steps)
        written: list[tuple[Page, int]] = []
        complete = False
        try:
            complete = all(self._read_one(call, x, written) for x in tensors)
        finally:
            if not complete:
                self._forget(written)
        return complete

    def _read_one(self, call: Call, x: Any, written: list[tuple[Page, int]]) -> bool:
        recorder = self._recorder
        device = self._device_of(x)
        if device is None:
            return False
        slot = self._slot(call.series, device, call.number, call.read)
        written.append((slot.page, slot.local_row))  # whatever happens to it from here on
        if not recorder.reduce(x, slot.page, slot.local_row):
            return False
        recorder.table.note(slot.row, recorder.layout(x))
        call.read += 1
        return True

    def _forget(self, written: Sequence[tuple[Page, int]]) -> None:
        for page, row in written:
            page.memory.forget(row)

    def _slot(self, series: CallSeries, device: Hashable, number: int, part: int) -> Slot:
        key = (device, number, part)
        slot = series.slots.get(key)
        if slot is None:
            page = self._recorder.page_for(device, 1)
            slot = series.slots[key] = self._recorder.table.allot(page, series.series, (number,))
        return slot
