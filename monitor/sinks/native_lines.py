"""Lines in C (``lines.c``), where that was built: one call for all rows and columns, in which no other thread waits for the
interpreter, and which takes a few microseconds where the rows are few. Character by character they are those of
``python_lines.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from monitor.sinks.columns import Column, Counts, Texts
from monitor.sinks.python_lines import MOST_DIGITS, fixed_from
from monitor.stats.host.native import is_wanted

try:
    from monitor.sinks import _lines
except ImportError:
    _lines = None  # type: ignore[assignment]

_TEXT, _NUMBER, _COUNT = range(3)

LEAST_POWER: Final = -308
MOST_POWER: Final = MOST_DIGITS + 324
"""From the least power of ten to this: those that make of a double an integer with as many digits as are written."""

SCALE: Final = 1400
"""Bits behind the point of a power of ten: the least one keeps more than 128 significant ones."""

_WORD: Final = (1 << 64) - 1


def is_there() -> bool:
    """Whether it was built and is wanted."""
    return _lines is not None and is_wanted()


def native_lines(columns: Sequence[Column], lengths: Sequence[int], ndigits: int) -> Iterator[memoryview]:
    """See ``monitor.sinks.columns.Join``."""
    ends = np.cumsum(lengths)
    positions = np.empty_like(ends)
    digits = min(ndigits, MOST_DIGITS)
    told = tuple(map(_told, columns))
    text = memoryview(_lines.lines(told, ends, _powers_of_ten(), LEAST_POWER, digits, fixed_from(ndigits), positions))
    for begin, end in pairwise((0, *positions.tolist())):
        yield text[begin:end]


def _told(column: Column) -> tuple[Any, ...]:
    if isinstance(column, Texts):
        return (_TEXT, *column.of.characters(), column.index)
    return (_COUNT if isinstance(column, Counts) else _NUMBER, column.values, column.valid)


@cache
def _powers_of_ten() -> NDArray[np.uint64]:
    """``10**k = (high * 2**64 + low) * 2**exponent``, but for what is cut off behind 128 bits; shape ``(powers, 3)``."""
    rows = []
    for k in range(LEAST_POWER, MOST_POWER + 1):
        bits = 10**k << SCALE if k >= 0 else (1 << SCALE) // 10**-k
        shift = bits.bit_length() - 128
        top = bits >> shift
        rows.append((top >> 64, top & _WORD, (shift - SCALE) & _WORD))
    return np.array(rows, dtype=np.uint64)
