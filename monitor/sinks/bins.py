"""Histograms as a column of Arrow: of each row the bins that hold something, null where there is none.

Of 284 bins of magnitudes a tensor fills some thirty, so this is a tenth of what all of them take.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow.compute import SetLookupOptions, SplitPatternOptions, call_function  # type: ignore[attr-defined]

from monitor.series import ADAM_KINDS
from monitor.stats.histograms import BINS, UNIT_UPPER, UPPER, Counts, ending
from monitor.stats.partials import Floats, Partials

HISTOGRAM: Final = "histogram"

FILLED: Final = pa.large_list(pa.struct([("bin", pa.int16()), ("elements", pa.int64())]))
"""In order of bins."""

WHOLE: Final = pa.large_list(pa.int64())
"""For who reads files: the elements of every bin."""


_ENTRY: Final = list(FILLED.value_type)
_SPELLED: Final = pa.array([ending(upper) for upper in UPPER.tolist()], type=pa.large_string())


def upper_of(kind: str) -> Floats:
    """The upper ends of the bins of a kind, shape ``(bins,)``."""
    return UNIT_UPPER if kind in ADAM_KINDS else UPPER


def filled(counts: Counts) -> pa.LargeListArray:
    """The column of counts, shape ``(rows, bins)``, in the type ``FILLED``."""
    rows, bins = np.nonzero(counts)
    entries = pa.StructArray.from_arrays([pa.array(bins.astype(np.int16)), pa.array(counts[rows, bins])], fields=_ENTRY)
    each = np.bincount(rows, minlength=len(counts))
    return _lists(entries, each, each > 0)


def of_kinds(kinds: Sequence[Partials]) -> pa.LargeListArray | None:
    """The column of the rows of one kind after those of the other; None where no row has a histogram."""
    if all(one.histogram is None for one in kinds):
        return None
    parts = [pa.nulls(len(one), FILLED) if one.histogram is None else filled(one.histogram) for one in kinds]
    column = pa.concat_arrays(parts)
    return column if column.null_count < len(column) else None


def parsed(texts: pa.ChunkedArray) -> pa.LargeListArray:
    """The column of what ``monitor.stats.histograms.spelled`` has made text of.

    Raises:
        ValueError: a text is something else.
    """
    joined = texts.combine_chunks().cast(pa.large_string())
    entries = call_function("split_pattern_regex", [joined], SplitPatternOptions(" +"))
    words = entries.flatten()
    said = call_function("greater", [call_function("binary_length", [words]), pa.scalar(0, pa.int64())])
    each = np.bincount(
        np.repeat(np.arange(len(joined)), np.diff(entries.offsets.to_numpy()))[said.to_numpy(zero_copy_only=False)],
        minlength=len(joined),
    )
    return _lists(_entries(words.filter(said)), each, each > 0)


def _entries(words: pa.LargeStringArray) -> pa.StructArray:
    pairs = call_function("split_pattern", [words], SplitPatternOptions(":"))
    if (np.diff(pairs.offsets.to_numpy()) != 2).any():
        raise ValueError("a histogram is not as it is spelled")
    both = pairs.flatten()
    upper, elements = (both.take(pa.array(np.arange(start, len(both), 2))) for start in (0, 1))
    bins = call_function("index_in", [upper], SetLookupOptions(_SPELLED))
    counts = elements.cast(pa.int64())
    if bins.null_count or (counts.to_numpy() < 0).any():
        raise ValueError("a histogram has a bin that there is not")
    return pa.StructArray.from_arrays([bins.cast(pa.int16()), counts], fields=_ENTRY)


def counts_of(column: pa.ChunkedArray | pa.LargeListArray, bins: int = BINS) -> Counts:
    """The elements in each bin, shape ``(rows, bins)``, zeros where there is no histogram.

    Args:
        column: Of either type.
    """
    joined = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    counts = np.zeros((len(joined), bins), dtype=np.int64)
    each = np.diff(joined.offsets.to_numpy())
    entries = joined.flatten()
    rows = np.repeat(np.arange(len(joined)), np.where(joined.is_valid(), each, 0))
    if joined.type == FILLED:
        counts[rows, entries.field("bin").to_numpy()] = entries.field("elements").to_numpy()
    else:
        start = np.repeat(np.cumsum(each) - each, each)
        counts[rows, np.arange(len(rows)) - start] = entries.to_numpy()
    return counts


def whole(table: pa.Table) -> pa.Table:
    """With the elements of every bin, where there are histograms; null in the rows that have none."""
    if HISTOGRAM not in table.column_names:
        return table
    column = table[HISTOGRAM].combine_chunks()
    codes = table["kind"].combine_chunks()
    width = np.array([len(upper_of(kind)) for kind in codes.dictionary.to_pylist()])[codes.indices.to_numpy()]
    there = column.is_valid().to_numpy(zero_copy_only=False)
    each = np.where(there, width, 0)
    counts = counts_of(column)
    values = counts[np.arange(BINS) < each[:, None]]
    return table.set_column(table.column_names.index(HISTOGRAM), HISTOGRAM, _lists(pa.array(values), each, there))


def _lists(entries: pa.Array, each: NDArray[np.int64], there: NDArray[np.bool_]) -> pa.LargeListArray:
    offsets = np.concatenate([[0], np.cumsum(each)])
    return pa.LargeListArray.from_arrays(pa.array(offsets), entries, mask=pa.array(~there))
