"""Rows of calls of operators, of tensors of MindSpore."""

from __future__ import annotations

from mindspore import Tensor

from monitor.capture.operator_calls import CallRows
from monitor.capture.recorder import Device, LateRows
from monitor.mindspore.recorder import Recorder
from monitor.stats.mindspore_tensors import has_data


class OperatorCalls(CallRows, LateRows):
    """Reads what calls have moved. A process of MindSpore computes on one device."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        self._device = recorder.device
        recorder.late = self

    @classmethod
    def of(cls, recorder: Recorder) -> OperatorCalls:
        """Those of ``recorder``: whoever comes after others goes on with their rows."""
        return recorder.late if isinstance(recorder.late, cls) else cls(recorder)

    def _device_of(self, x: Tensor) -> Device | None:
        return self._device if has_data(x) else None
