"""Lines in C (``lines.c``), where that was built: one call for all rows and columns, in which no other thread waits for the
interpreter, and which takes a few microseconds where the rows are few. Character by character they are those of
``arrow_lines.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from monitor.sinks.columns import Column, Counts, Texts
from monitor.sinks.decimals import LEAST_POWER, MOST_DIGITS, SCALE, fixed_from, scaled_powers_of_ten
from monitor.stats.native import is_wanted

try:
    from monitor.sinks import _lines
except ImportError:
    _lines = None  # type: ignore[assignment]

_TEXT, _NUMBER, _COUNT = range(3)


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
    for bits in scaled_powers_of_ten():
        shift = bits.bit_length() - 128
        top = bits >> shift
        rows.append((top >> 64, top & _WORD, (shift - SCALE) & _WORD))
    return np.array(rows, dtype=np.uint64)


_WORD: Final = (1 << 64) - 1
