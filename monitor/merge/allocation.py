"""How a process that does nothing but merge gets its memory."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Final

import pyarrow as pa

_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_ARENAS: Final = -8
"""Of ``mallopt`` in glibc."""

_MOST: Final = 1 << 30


def keep_freed_memory() -> None:
    """Keep memory that is freed for what is needed next, instead of handing it back to the system at once.

    Columns are made and dropped by the hundred, a megabyte or two each. By default the C library maps each of them anew, and
    the system clears every page: a seventh of the time of a merge. The peak stays where it is. For processes that end when
    the work is done; without effect where the C library is another one.
    """
    pa.set_memory_pool(pa.system_memory_pool())  # two allocators would each keep what the other one could use
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, _MOST)
        mallopt(_TRIM_THRESHOLD, _MOST)
        mallopt(_ARENAS, 1)  # or each thread that parses CSV would keep some of its own
