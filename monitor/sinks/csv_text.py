"""Formats columns as lines of CSV text: in C (``lines.c``) where it was built, else in Python, with the same characters.

The C module formats all rows and columns in one call without Python's lock. For few rows the call takes a few microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice, pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from monitor.sinks.text_cache import TextCache
from monitor.stats.host.native import is_wanted
from monitor.stats.partials import Floats

# --- The columns of a block of rows. All columns are aligned.


@dataclass(frozen=True, slots=True)
class TextColumn:
    """A column of cached texts.

    Attributes:
        of: The texts.
        index: The number of each row's text; int64, shape ``(rows,)``.
    """

    of: TextCache[Any]
    index: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class NumberColumn:
    """A column of floating-point numbers.

    Attributes:
        values: float64, shape ``(rows,)``.
        valid: Which values were measured, shape ``(rows,)``; the others become empty cells.
    """

    values: Floats
    valid: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class CountColumn(NumberColumn):
    """A column of integers."""


Column = TextColumn | NumberColumn

Join = Callable[[Sequence[Column], Sequence[int], int], Iterator[memoryview]]
"""Takes columns, the number of rows of each text, and ``ndigits``; yields the texts, whose lines each end with a newline."""

# --- Lines formatted in Python, where the C module was not built.
#
# With ``ndigits`` 6, a finite value is written as ``f"{x:.6f}"`` if its magnitude is from 1e-3 up to 1e15, else as
# ``f"{x:.6e}"``. A value that rounds to zero with so few decimals is scientific too, so only zero is written as zero.
# Zero itself is ``0``; the rest is ``nan``, ``inf``, ``-inf``, and an empty cell for what was not measured.

MOST_DIGITS: Final = 16
"""No more decimals are written: 17 significant digits distinguish every double from its neighbours."""

_FIXED_FROM: Final = 1e-3
_FIXED_BELOW: Final = 1e15
_VISIBLE_FROM: Final = (math.nextafter(0.5, 1.0), 0.05, 0.005)
"""The least value that does not round to zero, with 0, 1 and 2 decimals. With 3 and more decimals, 1e-3 does not."""


def python_lines(columns: Sequence[Column], lengths: Sequence[int], ndigits: int) -> Iterator[memoryview]:
    """See ``monitor.sinks.csv_text.Join``."""
    rows = zip(*(_cells(column, ndigits) for column in columns), strict=True)
    for length in lengths:
        yield memoryview("".join(f"{','.join(row)}\n" for row in islice(rows, length)).encode())


def fixed_from(ndigits: int) -> float:
    """The least magnitude that is written with a fixed point."""
    return max(_FIXED_FROM, _VISIBLE_FROM[ndigits]) if ndigits < len(_VISIBLE_FROM) else _FIXED_FROM


def _cells(column: Column, ndigits: int) -> list[str]:
    if isinstance(column, TextColumn):
        texts: list[str] = column.of.take(column.index).to_pylist()
        return texts
    cells = zip(column.values.tolist(), column.valid.tolist(), strict=True)
    if isinstance(column, CountColumn):
        return [f"{int(value)}" if valid else "" for value, valid in cells]
    least, digits = fixed_from(ndigits), min(ndigits, MOST_DIGITS)
    return [_text(value, least, digits) if valid else "" for value, valid in cells]


def _text(value: float, least: float, digits: int) -> str:
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return f"{value}"
    return f"{value:.{digits}f}" if least <= abs(value) < _FIXED_BELOW else f"{value:.{digits}e}"


try:
    from monitor.sinks import _lines
except ImportError:
    _lines = None  # type: ignore[assignment]

_TEXT, _NUMBER, _COUNT = range(3)

LEAST_POWER: Final = -308
MOST_POWER: Final = MOST_DIGITS + 324
"""Greatest power of ten in the table. Powers from ``LEAST_POWER`` on scale any double to an integer of all written digits."""

SCALE: Final = 1400
"""Bits behind the binary point while powers of ten are computed: the least power keeps more than 128 significant bits."""

_WORD: Final = (1 << 64) - 1


def is_native() -> bool:
    """Whether the C module was built and is not switched off."""
    return _lines is not None and is_wanted()


def native_lines(columns: Sequence[Column], lengths: Sequence[int], ndigits: int) -> Iterator[memoryview]:
    """See ``monitor.sinks.csv_text.Join``."""
    ends = np.cumsum(lengths)
    positions = np.empty_like(ends)
    digits = min(ndigits, MOST_DIGITS)
    given = tuple(map(_native_column, columns))
    text = memoryview(_lines.lines(given, ends, _powers_of_ten(), LEAST_POWER, digits, fixed_from(ndigits), positions))
    for begin, end in pairwise((0, *positions.tolist())):
        yield text[begin:end]


def _native_column(column: Column) -> tuple[Any, ...]:
    if isinstance(column, TextColumn):
        return (_TEXT, *column.of.characters(), column.index)
    return (_COUNT if isinstance(column, CountColumn) else _NUMBER, column.values, column.valid)


@cache
def _powers_of_ten() -> NDArray[np.uint64]:
    """``10**k = (high * 2**64 + low) * 2**exponent``, cut off after 128 bits; shape ``(powers, 3)``."""
    rows = []
    for k in range(LEAST_POWER, MOST_POWER + 1):
        bits = 10**k << SCALE if k >= 0 else (1 << SCALE) // 10**-k
        shift = bits.bit_length() - 128
        top = bits >> shift
        rows.append((top >> 64, top & _WORD, (shift - SCALE) & _WORD))
    return np.array(rows, dtype=np.uint64)
