"""Rows of calls of operators: a row for each tensor of each call of a step, combined when the step is written.

Training calls small collectives by the thousand. So at the call a small tensor is copied and nothing else, and all that were
copied are reduced, and given their rows, together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from monitor.pytorch.recorder import Recorder, has_data
from monitor.recording.collectives import LOCK_SECONDS, Call, CallRows
from monitor.recording.recorder import LateRows
from monitor.stats.host.native import HostPage
from monitor.stats.table import Page
from monitor.stats.torch.small_tensors import Staging

HOST: Final = torch.device("cpu")

_Staged = tuple[Call, int, int, torch.Size]
"""A tensor that was copied: its call, its number in it, its place among all that was written in the step, its shape."""


class OperatorCalls(CallRows, LateRows):
    """Reads what calls have moved, on any thread.

    Attributes:
        ending: Called at the last moment to read something in the step in progress. Must not raise.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        self.ending: Callable[[], object] = _nothing
        self._staging = Staging()
        self._staged: list[_Staged] = []
        recorder.late = self

    def read(self, call: Call, tensors: Sequence[Tensor], versions: Sequence[int | None] = ()) -> bool:
        """Reduce what a call has moved, a row a tensor.

        Args:
            versions: Of the tensors, where another thread may already change them: no row is left if one of them has another
                version by the end, or if the step in which the call was issued is over.

        Returns:
            Whether all of them were read. Otherwise none has a row.
        """
        lock = self._recorder.lock
        if not lock.acquire(timeout=LOCK_SECONDS):
            return False
        try:
            if len(tensors) == 1 and not versions and self._recorder.active and self._staging.add(tensors[0]):
                call.begin(self._recorder.steps)  # the shortest way, which most calls take
                self._note(call, tensors[0])
                return True
            return self._read(call, tensors, versions)
        finally:
            lock.release()

    def step_ends(self) -> None:
        self.ending()

    @classmethod
    def of(cls, recorder: Recorder) -> OperatorCalls:
        """Those of ``recorder``: whoever comes after others goes on with their rows."""
        return recorder.late if isinstance(recorder.late, cls) else cls(recorder)

    def let_go(self) -> None:
        """Nobody reads anything more. What was measured stays."""
        self.ending = _nothing

    def enter(self) -> None:
        if not self._staged:
            return
        table = self._recorder.table
        rows = np.array([self._row_of(call, part) for call, part, _, _ in self._staged])
        orders = np.array([order for _, _, order, _ in self._staged])
        table.note_rows(rows, orders, np.array([table.layout_of(shape, torch.float32) for *_, shape in self._staged]))
        numbers = self._recorder.host.staged_rows(self._staging)
        self._staged.clear()
        for page in table.pages:
            here = np.flatnonzero((rows >= page.first_row) & (rows < page.first_row + page.rows))
            if isinstance(page.memory, HostPage):
                page.memory.numbers[rows[here] - page.first_row] = numbers[here]

    def discard(self) -> None:
        self._staging.cut(0)
        self._staged.clear()

    def _note(self, call: Call, x: Tensor) -> None:
        """What was copied just now is the next tensor of ``call``."""
        table = self._recorder.table
        table.writes += 1
        self._staged.append((call, call.read, table.writes, x.shape))
        call.read += 1

    def _read(self, call: Call, tensors: Sequence[Tensor], versions: Sequence[int | None] = ()) -> bool:
        recorder = self._recorder
        if not recorder.active:
            return False
        if versions and (call.issued != recorder.steps or not _are_still(tensors, versions)):
            return False
        if self._staging.is_half_full:
            self.enter()
        call.begin(recorder.steps)
        staged, written, complete = len(self._staged), [], False  # type: int, list[tuple[Page, int]], bool
        try:
            complete = all(self._read_one(call, x, written) for x in tensors) and _are_still(tensors, versions)
        finally:
            if not complete:
                self._forget_all(staged, written)
        return complete

    def _read_one(self, call: Call, x: Tensor, written: list[tuple[Page, int]]) -> bool:
        if self._staging.add(x):
            self._note(call, x)
            return True
        return super()._read_one(call, x, written)

    def _device_of(self, x: Tensor) -> torch.device | None:
        return x.device if has_data(x) else None

    def _forget_all(self, staged: int, written: Sequence[tuple[Page, int]]) -> None:
        self._staging.cut(staged)
        del self._staged[staged:]
        self._forget(written)

    def _row_of(self, call: Call, part: int) -> int:
        if part:
            return self._slot(call.series, HOST, call.number, part).row
        rows = call.series.staged_rows
        while len(rows) <= call.number:
            rows.append(self._slot(call.series, HOST, len(rows), 0).row)
        return rows[call.number]


def _are_still(tensors: Sequence[Tensor], versions: Sequence[int | None]) -> bool:
    """Whether no tensor was changed since it had its version."""
    return not versions or all(x._version == was for x, was in zip(tensors, versions, strict=True) if was is not None)


def _nothing() -> None:
    """Nobody has anything to add."""
