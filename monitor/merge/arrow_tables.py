"""Putting rows in order by whole numbers.

Rows have few different keys. Sorting by sixteen bits of the key at a time, lowest first, takes time in proportion to the
number of rows whatever order they are in (numpy sorts numbers of 16 bits by counting them): 5 ns a row and pass, where a sort
by several columns (``numpy.lexsort``) takes 20 to 200.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow.ipc import new_file, open_file

from monitor.sinks.arrow import TEXT

Index = NDArray[np.int64]

_DIGIT: Final = 16
_BITS: Final = 63
"""Of a key that all columns fit in."""


def order_by(columns: Sequence[Index]) -> Index | None:
    """What puts rows in order by these columns, the first one first. Equal rows stay in the order that they are in.

    Returns:
        The rows' numbers; None where they are in order as they are.
    """
    key = _packed(columns)
    if key is None:
        sorted_by_columns: Index = np.lexsort(columns[::-1])
        return sorted_by_columns
    if (key[1:] >= key[:-1]).all():
        return None
    order: Index | None = None
    for shift in range(0, int(key.max()).bit_length(), _DIGIT):
        digit = ((key if order is None else key[order]) >> shift).astype(np.uint16)
        if order is not None and (digit[1:] >= digit[:-1]).all():
            continue
        by_digit = np.argsort(digit, kind="stable")
        order = by_digit if order is None else order[by_digit]
    return order


def starts_of_runs(columns: Sequence[Index]) -> Index:
    """The first row of each run of rows that are alike in these columns."""
    changes = np.ones(len(columns[0]), dtype=np.bool_)
    if len(changes):
        changes[1:] = columns[0][1:] != columns[0][:-1]
        for column in columns[1:]:
            changes[1:] |= column[1:] != column[:-1]
    return np.flatnonzero(changes)


def _packed(columns: Sequence[Index]) -> Index | None:
    """All of them in one number for each row; None where that has not enough bits."""
    key = np.zeros(len(columns[0]), dtype=np.int64)
    bits = 0
    for column in columns if len(key) else ():
        least = int(column.min())
        width = (int(column.max()) - least).bit_length()
        bits += width
        if bits > _BITS:
            return None
        if width:
            key = (key << width) | (column - least)
    return key


# --- Tables that one task leaves for another in a file of Arrow, read as they lie on the disk.


def write_file(path: Path, rows: pa.Table | Iterable[pa.RecordBatch], schema: pa.Schema) -> None:
    """Write a table, or batches that can be read one by one.

    Raises:
        OSError: it cannot be written.
    """
    with pa.OSFile(str(path), "wb") as file, new_file(file, schema) as writer:  # type: ignore[no-untyped-call]
        if isinstance(rows, pa.Table):
            writer.write_table(rows)
        else:
            for batch in rows:
                writer.write_batch(batch)


def read_file(path: Path) -> pa.Table:
    """All of a file. Nothing is copied: the table holds on to the file."""
    with pa.memory_map(str(path)) as file:
        return open_file(file).read_all()  # type: ignore[no-untyped-call]


def read_batch(path: Path, number: int) -> pa.Table:
    """One batch of a file."""
    with pa.memory_map(str(path)) as file:
        return pa.Table.from_batches([open_file(file).get_batch(number)])  # type: ignore[no-untyped-call]


# --- Columns of text: an index for each row, and the texts.

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
    ordered: NDArray[np.int32] = used[np.argsort(first[used])].astype(np.int32)
    number = np.zeros(values + 1, dtype=np.int32)
    number[ordered] = np.arange(len(ordered))
    return number[codes], ordered
