"""The native kernel in C, which computes every partial of a host array in one read.

numpy and torch take one pass, and one call, per statistic. The native kernel computes all of them in one loop at about the
speed of memory, and a small tensor costs one call. It is built if there is a C compiler when the package is installed; without
it, the numpy kernel does the same work. Every processor computes the same bits (``host_pass.h``).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np

from monitor.stats.ops import Epsilon
from monitor.stats.partials import Floats

try:
    from monitor.stats import _host_kernel
except ImportError:
    _host_kernel = None  # type: ignore[assignment]

VARIABLE: Final = "MONITOR_NATIVE"
"""The environment variable that, set to 0, switches off the modules in C: portable kernels and CSV formatting replace them."""

FLOAT32, FLOAT64, BFLOAT16, FLOAT16 = range(4)
"""The kernel's numbers of the element formats."""

Reduce = Callable[[Any, int, Floats, int], bool]
"""Takes the arguments of ``NativeKernel.reduce_into`` without the format."""


class NativeKernel:
    """Reduces contiguous elements to table rows. It has no state, so several threads may use it at once."""

    def __init__(self, eps: float) -> None:
        narrow, wide = Epsilon.of(eps, np.float32).bound, Epsilon.of(eps, np.float64).bound
        bounds = (narrow, wide, narrow, narrow)
        self._of: tuple[Reduce, ...] = tuple(partial(_host_kernel.reduce, form, bound) for form, bound in enumerate(bounds))

    def of(self, form: int) -> Reduce:
        """``reduce_into`` for one format, without the cost of a Python frame."""
        return self._of[form]

    def reduce_into(self, source: Any, count: int, form: int, page: Floats, row: int) -> bool:
        """Write the partials of ``count`` elements, at least one, into ``page[row]``.

        Args:
            source: A contiguous array, or the address of the first element. The caller guarantees that the address is valid.
            form: ``FLOAT32``, ``FLOAT64``, ``BFLOAT16`` or ``FLOAT16``.

        Returns:
            False, and nothing written, if squares of float64 leave its range: the portable kernels scale them.
        """
        return self._of[form](source, count, page, row)


def native_kernel(eps: float) -> NativeKernel | None:
    """The native kernel; None if it was not built or is switched off."""
    return NativeKernel(eps) if _host_kernel is not None and is_wanted() else None


def is_wanted() -> bool:
    """Whether the modules in C are to be used if they were built."""
    return os.environ.get(VARIABLE) != "0"
