"""What a recorder holds of calls."""

from __future__ import annotations

from typing import Any

from monitor.mindspore.tensor_reader import MindSporeTensorReader
from monitor.recording.recorder import Recorder
from monitor.series import SeriesTable
from monitor.stats.ops import CALLS, derive
from monitor.stats.partials import combined_micro_steps

OPS = ("min", "max", "norm", "nans", CALLS)


class HostRows:
    """A recorder of steps that are all collected."""

    def __init__(self) -> None:
        self.series = SeriesTable()
        self.reader = MindSporeTensorReader(self.series, 1e-8)
        self.recorder = Recorder(self.reader)
        self.recorder.activate(True)

    def end(self) -> dict[str, dict[str, Any]]:
        """The rows of the step in progress, by name, its calls combined; and begin a new one."""
        rows = self.recorder.kinds_now().get("other")
        self.recorder.discard()
        if rows is None:
            return {}
        together = combined_micro_steps(rows)
        values = {op: derive(op, together.partials)[0].tolist() for op in OPS}
        names = [self.series[index].name for index in together.series]
        shapes = [list(self.recorder.table.layouts[index].shape) for index in together.layout]
        return {
            name: {"shape": shape} | {op: values[op][place] for op in OPS}
            for place, (name, shape) in enumerate(zip(names, shapes, strict=True))
        }
