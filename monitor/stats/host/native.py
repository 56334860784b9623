"""The native kernel: every partial of an array in host memory from one read of it, in C, where it was built.

What numpy and torch have takes a pass for each statistic, and a call for each pass. One loop does all of them at about the
speed of memory, and a small tensor costs one call. It is built when the package is installed, if there is a C compiler; without
it the kernel of numpy does the same work. Every processor computes the same bits (``host_pass.h``).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np

from monitor.stats.ops import Epsilon
from monitor.stats.partials import COLUMNS, WRITES, Floats
from monitor.stats.table import PageCopy

try:
    from monitor.stats import _host_kernel
except ImportError:
    _host_kernel = None  # type: ignore[assignment]

VARIABLE: Final = "MONITOR_NATIVE"
"""The environment variable that, set to 0, has the portable kernels, and the portable lines of CSV, do the work."""

FLOAT32, FLOAT64, BFLOAT16, FLOAT16 = range(4)
"""Formats of elements, as the kernel numbers them."""

Reduce = Callable[[Any, int, Floats, int], bool]
"""Takes what ``NativeKernel.reduce_into`` takes, but for the format."""


class NativeKernel:
    """Reduces elements that lie one behind the other to table rows. Has no state, so any threads may use it."""

    def __init__(self, eps: float) -> None:
        narrow, wide = Epsilon.of(eps, np.float32).bound, Epsilon.of(eps, np.float64).bound
        bounds = (narrow, wide, narrow, narrow)
        self._of: tuple[Reduce, ...] = tuple(partial(_host_kernel.reduce, form, bound) for form, bound in enumerate(bounds))

    def of(self, form: int) -> Reduce:
        """``reduce_into`` for one format, as a call without a frame."""
        return self._of[form]

    def reduce_into(self, source: Any, count: int, form: int, page: Floats, row: int) -> bool:
        """Write the partials of ``count`` elements, at least one, into ``page[row]``.

        Args:
            source: A contiguous array, or the address of the first element, for which the caller answers.
            form: ``FLOAT32`` and its like.

        Returns:
            False, and nothing is written, where squares of float64 leave its range: elsewhere they are scaled.
        """
        return self._of[form](source, count, page, row)


def native_kernel(eps: float) -> NativeKernel | None:
    """None where it was not built, or is not wanted."""
    return NativeKernel(eps) if _host_kernel is not None and is_wanted() else None


def is_wanted() -> bool:
    """Whether what was built in C is to be used, where it was."""
    return os.environ.get(VARIABLE) != "0"


# --- Pages in host memory: numpy arrays, which no framework needs to know of.


class HostPage:
    """A page in host memory.

    Attributes:
        numbers: The live rows, shape ``(rows, columns)``.
        cleared: The columns that are.
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
