"""Lines of CSV text, made by Python a number at a time, where the module in C was not built (``native_lines.py``).

A finite value is written as ``f"{x:.6f}"`` from 1e-3 up to 1e15 in magnitude, as ``f"{x:.6e}"`` outside, 6 being ``ndigits``. A
value that too few decimals would turn into zero is scientific too, so only zero is written as zero. Zero itself is ``0``; the
rest is ``nan``, ``inf``, ``-inf`` and, for what was not measured, nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

from monitor.sinks.columns import Column, Counts, Texts

MOST_DIGITS: Final = 16
"""Decimals beyond this many are not written: 17 significant digits tell every double from its neighbours."""

_FIXED_FROM: Final = 1e-3
_FIXED_BELOW: Final = 1e15
_VISIBLE_FROM: Final = (math.nextafter(0.5, 1.0), 0.05, 0.005)
"""The least value that rounds to something else than zero with 0, 1 and 2 decimals; with 3 and more, 1e-3 does."""


def python_lines(columns: Sequence[Column], lengths: Sequence[int], ndigits: int) -> Iterator[memoryview]:
    """See ``monitor.sinks.columns.Join``."""
    rows = zip(*(_cells(column, ndigits) for column in columns), strict=True)
    for length in lengths:
        yield memoryview("".join(f"{','.join(row)}\n" for row in islice(rows, length)).encode())


def fixed_from(ndigits: int) -> float:
    """The least magnitude that is not written in scientific form."""
    return max(_FIXED_FROM, _VISIBLE_FROM[ndigits]) if ndigits < len(_VISIBLE_FROM) else _FIXED_FROM


def _cells(column: Column, ndigits: int) -> list[str]:
    if isinstance(column, Texts):
        texts: list[str] = column.of.take(column.index).to_pylist()
        return texts
    cells = zip(column.values.tolist(), column.valid.tolist(), strict=True)
    if isinstance(column, Counts):
        return [f"{int(value)}" if valid else "" for value, valid in cells]
    least, digits = fixed_from(ndigits), min(ndigits, MOST_DIGITS)
    return [_text(value, least, digits) if valid else "" for value, valid in cells]


def _text(value: float, least: float, digits: int) -> str:
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return f"{value}"
    return f"{value:.{digits}f}" if least <= abs(value) < _FIXED_BELOW else f"{value:.{digits}e}"
