"""Columns of text: a number for each row, and what the numbers stand for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from monitor.sinks.arrow import TEXT

NONE: Final = -1
"""The number of a row without text."""

Codes = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Texts:
    """A column of text.

    Attributes:
        codes: int32, shape ``(rows,)``: of each row the place of its text in ``values``, or ``NONE``.
        values: Each text once.
    """

    codes: Codes
    values: pa.StringArray

    @classmethod
    def of(cls, parts: Sequence[pa.DictionaryArray]) -> Texts:
        """One after the other."""
        known = [one for one in parts if one.null_count < len(one)]
        if not known:
            return cls(np.full(sum(map(len, parts)), NONE, dtype=np.int32), pa.array([], type=pa.string()))
        column = pa.chunked_array(parts, type=TEXT).unify_dictionaries().combine_chunks()
        codes = column.indices.fill_null(NONE) if column.null_count else column.indices
        return cls(codes.to_numpy(), column.dictionary)

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_] | slice) -> Texts:
        return Texts(self.codes[rows], self.values)

    def arrow(self) -> pa.StringArray:
        return self.values.take(pa.array(self.codes, mask=self.codes == NONE))

    def in_use(self) -> pa.DictionaryArray:
        """With no other values than those in use, in order of first use: equal columns are equal in every byte."""
        if not len(self.codes):
            return pa.array([], type=TEXT)
        low, high = self.codes.min(), self.codes.max()
        if low == high:  # as most are
            numbers, used = np.zeros(len(self.codes), dtype=np.int32), self.codes[:1]
        else:
            numbers, used = _by_first_use(self.codes, len(self.values))
        missing = self.codes == NONE if low == NONE else None
        return pa.DictionaryArray.from_arrays(pa.array(numbers, mask=missing), self.values.take(pa.array(used[used != NONE])))


def same(text: str, rows: int) -> Texts:
    """The same text in every row."""
    return Texts(np.zeros(rows, dtype=np.int32), pa.array([text], type=pa.string()))


def _by_first_use(codes: Codes, values: int) -> tuple[Codes, Codes]:
    """The codes numbered anew in order of first use, and which ones these are. ``NONE`` is numbered, too, last."""
    first = np.full(values + 1, len(codes))
    first[codes[::-1]] = np.arange(len(codes) - 1, -1, -1)  # of several the last one stays, which is the first use
    first[NONE] = len(codes)
    used = np.flatnonzero(first < len(codes))
    used = used[np.argsort(first[used])].astype(np.int32)
    number = np.zeros(values + 1, dtype=np.int32)
    number[used] = np.arange(len(used))
    return number[codes], used
