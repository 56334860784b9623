"""Lines with Arrow: every cell is made as a column of strings, and Arrow joins the columns, outside the GIL."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

import numpy as np
import pyarrow as pa
from pyarrow.compute import call_function  # type: ignore[attr-defined]

from monitor.sinks.columns import Column, Counts, Numbers, Texts
from monitor.sinks.decimals import spell, spell_counts

TOGETHER: Final = 8192
"""Numbers that are spelled together: a column of doubles (64 KB) stays in the cache, and is below the size from which every
allocation is a mapping of its own and each of its pages a fault."""

_COMMA: Final = pa.scalar(",", type=pa.string())
_NEWLINE: Final = pa.scalar("\n", type=pa.string())
_NOTHING: Final = pa.scalar("", type=pa.string())


def arrow_lines(columns: Sequence[Column], lengths: Sequence[int], ndigits: int) -> Iterator[memoryview]:
    """See ``monitor.sinks.columns.Join``."""
    *others, last = _strings(columns, ndigits)
    ended = call_function("binary_join_element_wise", [last, _NOTHING, _NEWLINE])
    lines = call_function("binary_join_element_wise", [*others, ended, _COMMA])
    _, offsets, characters = lines.buffers()
    where = np.frombuffer(offsets, dtype=np.int32)[lines.offset + np.cumsum([0, *lengths])]
    text = memoryview(characters)  # one line behind the other, as they stand in the array
    for begin, end in pairwise(where.tolist()):
        yield text[begin:end]


def _strings(columns: Sequence[Column], ndigits: int) -> list[pa.StringArray]:
    numbers = _spelled([one for one in columns if isinstance(one, Numbers) and not isinstance(one, Counts)], ndigits)
    return [
        one.of.take(one.index)
        if isinstance(one, Texts)
        else spell_counts(one.values, one.valid)
        if isinstance(one, Counts)
        else next(numbers)
        for one in columns
    ]


def _spelled(columns: list[Numbers], ndigits: int) -> Iterator[pa.StringArray]:
    """Of many rows a column at a time, which stays in the cache; of few all columns at once, since then the calls cost."""
    rows = len(columns[0].values) if columns else 0
    at_once = max(TOGETHER // max(rows, 1), 1)
    for first in range(0, len(columns), at_once):
        some = columns[first : first + at_once]
        texts = spell(np.concatenate([one.values for one in some]), np.concatenate([one.valid for one in some]), ndigits)
        yield from (texts.slice(i * rows, rows) for i in range(len(some)))
