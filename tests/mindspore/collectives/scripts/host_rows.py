"""A recorder of tensors on the host, and what it holds."""

from __future__ import annotations

import threading
from typing import Any

import mindspore as ms

from monitor.capture.recorder import LateRows
from monitor.series import SeriesTable
from monitor.stats.host_memory import HostPage
from monitor.stats.mindspore_host_kernel import HostKernel
from monitor.stats.ops import CALLS, derive
from monitor.stats.table import PAGE_ROWS, Page, StatsTable, combined_micro_steps

OPS = ("min", "max", "norm", "nans", CALLS)


class HostRows:
    """What ``Communication`` needs of a recorder."""

    def __init__(self) -> None:
        self.active, self.steps, self.late, self.lock = True, 0, LateRows(), threading.Lock()
        self.series = SeriesTable()
        self.table = StatsTable(self.series)
        self._kernel = HostKernel(1e-8)
        self._page: Page | None = None

    def page_for(self, _device: object, rows: int) -> Page:
        if self._page is None or self._page.used + rows > self._page.rows:
            self._page = self.table.add_page(HostPage(PAGE_ROWS), PAGE_ROWS)
        return self._page

    def reduce(self, x: ms.Tensor, page: Page, local_row: int) -> bool:
        return self._kernel.reduce_into(x, page.memory.numbers, local_row)

    def layout(self, x: ms.Tensor) -> int:
        return self.table.layout_of(x.shape, str(x.dtype))

    def end_step(self) -> dict[str, dict[str, Any]]:
        """The rows of the step in progress, by name, its calls combined; and begin a new one."""
        rows = self.table.kinds_now().get("other")
        self.table.discard()
        self.steps += 1
        if rows is None:
            return {}
        together = combined_micro_steps(rows)
        values = {op: derive(op, together.partials)[0].tolist() for op in OPS}
        names = [self.series[index].name for index in together.series]
        shapes = [list(self.table.layouts[index].shape) for index in together.layout]
        return {
            name: {"shape": shape} | {op: values[op][place] for op in OPS}
            for place, (name, shape) in enumerate(zip(names, shapes, strict=True))
        }
