"""Pages in host memory: numpy arrays, independent of the framework."""

from __future__ import annotations

import numpy as np

from monitor.stats.partials import COLUMNS, WRITES, Floats
from monitor.stats.table import PageCopy


class HostPage:
    """A page in host memory.

    Attributes:
        numbers: The live rows, shape ``(rows, columns)``.
        cleared: The columns that ``clear`` sets to zero.
    """

    def __init__(self, rows: int, columns: int = len(COLUMNS), cleared: int | slice = WRITES) -> None:
        self.numbers: Floats = np.zeros((rows, columns))
        self.cleared = cleared

    def new_copy(self) -> PageCopy:
        return HostPageCopy(self)

    def clear(self) -> None:
        self.numbers[:, self.cleared] = 0.0

    def forget(self, row: int) -> None:
        self.numbers[row, self.cleared] = 0.0

    def rows_now(self) -> Floats:
        return self.numbers.copy()


class HostPageCopy:
    """A sealed copy of a ``HostPage``."""

    ready = True

    def __init__(self, page: HostPage) -> None:
        self._page = page
        self._sealed = np.zeros_like(page.numbers)
        self.nbytes = self._sealed.nbytes

    def take(self, rows: int) -> None:
        live = self._page.numbers[:rows]
        np.copyto(self._sealed[:rows], live)
        live[:, self._page.cleared] = 0.0

    def rows(self) -> Floats:
        return self._sealed
