"""Rows of calls of operators, of tensors of MindSpore."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monitor.mindspore.recorder import HOST, Recorder
from monitor.mindspore.tensors import computing
from monitor.recording.collectives import Call, CallRows
from monitor.recording.recorder import Device, LateRows
from monitor.stats.mindspore.tensors import has_data, on_host


class OperatorCalls(CallRows, LateRows):
    """Reads what calls have moved."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        recorder.late = self

    @classmethod
    def of(cls, recorder: Recorder) -> OperatorCalls:
        """Those of ``recorder``: whoever comes after others goes on with their rows."""
        return recorder.late if isinstance(recorder.late, cls) else cls(recorder)

    def read(self, call: Call, tensors: Sequence[Any]) -> bool:
        """Reduce what a call has moved, a row a tensor.

        Raises:
            EarlierFailure: Something that was called before has failed.
        """
        if not self._recorder.active or not all(map(has_data, tensors)):
            return False
        with computing():
            if self._recorder.device == HOST:
                for x in tensors:
                    on_host(x)  # waits for it, and is not to do so with the lock
            return super().read(call, tensors)

    def _device_of(self, x: Any) -> Device | None:
        device: Device = self._recorder.device
        return device if has_data(x) else None
