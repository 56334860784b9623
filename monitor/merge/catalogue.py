"""What is known of the series of a kind: which tensor each is, or which part of one. Found by ``monitor.merge.tensors``."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow.compute import index_in  # type: ignore[attr-defined]

from monitor.merge.arrow_tables import NONE, Texts, read_file
from monitor.merge.survey import UNKNOWN
from monitor.sinks.arrow import TEXT

Index = NDArray[np.int64]
Flags = NDArray[np.bool_]

SCHEMA: Final = pa.schema(
    {
        "rank": pa.int64(),
        "vpp_stage": pa.int64(),
        "name": TEXT,
        "replica": pa.bool_(),  # that is only there to be compared
        "global_name": TEXT,
        "stage": pa.int64(),  # place in the pipeline, UNKNOWN without one.
        "tensor": pa.int64(),  # number of the tensor among those of its kind, in model order.
        "part": pa.int64(),  # number of the part, equal for all copies.
        "elements": pa.int64(),  # of this rank's part. UNKNOWN if the number changes.
        "whole": pa.int64(),  # elements of the whole tensor. UNKNOWN if the number changes.
        "parts": pa.int64(),  # number of parts. UNKNOWN if a rank that may hold one is missing.
        "term": pa.bool_(),  # a term of a sum over other ranks.
        "assumed": pa.bool_(),  # assumed to be a copy of its part, unless the numbers differ.
    }
)
"""A row for each series of each rank: by rank, and in the order in which the rank first saw them."""


class Catalogue:
    """Of one kind, in the columns ``SCHEMA``.

    Args:
        others: Of the kind whose rows stand in the same files of CSV.
    """

    def __init__(self, table: pa.Table, kind: str = "", others: Catalogue | None = None) -> None:
        self._table = table.combine_chunks()
        self.kind = kind
        self.others = others

    @classmethod
    def read(cls, path: Path | None, kind: str, others: Path | None = None) -> Catalogue:
        """An empty one where there is no file."""
        table = SCHEMA.empty_table() if path is None else read_file(path)
        return cls(table, kind, None if others is None else cls(read_file(others)))

    def of(self, column: str, series: Index) -> Index:
        """A column for rows of these series; ``UNKNOWN`` for those that are not in it."""
        taken: Index = _taken(self._table[column].to_numpy(), series, UNKNOWN)
        return taken

    def is_replica(self, series: Index) -> Flags:
        """Of a row that is not in it, False."""
        return self._flags("replica", series)

    def is_term(self, series: Index) -> Flags:
        return self._flags("term", series)

    def is_assumed(self, series: Index) -> Flags:
        return self._flags("assumed", series)

    def _flags(self, column: str, series: Index) -> Flags:
        taken: Flags = _taken(self._table[column].to_numpy(), series, False)
        return taken

    def texts(self, column: str, series: Index) -> Texts:
        """A column of text, for rows of these series; none for those that are not in it."""
        values = self._table[column].combine_chunks()
        return Texts(_taken(values.indices.to_numpy(), series, NONE), values.dictionary)

    def names_or(self, names: Texts, series: Index) -> Texts:
        """The names of rows of these series: ``names`` of those that are not in it."""
        known = self.texts("name", series)
        if not len(names.values):
            return known
        values = pa.concat_arrays([known.values, names.values]).dictionary_encode()
        codes = np.where(series == UNKNOWN, names.codes + len(known.values), known.codes)
        return Texts(values.indices.to_numpy()[codes], values.dictionary)

    @cached_property
    def writers(self) -> Index:
        """The ranks that measure this kind, and not only replicas of it."""
        ranks: Index = np.unique(self._table["rank"].to_numpy()[~self._table["replica"].to_numpy()])
        return ranks

    def numbers(self, rank: int, chunk: int, names: pa.StringArray, *, replicas: bool) -> Index:
        """The series of a rank that have these names; ``UNKNOWN`` where there is none.

        Args:
            replicas: The names are those of replicas, with the kind before them.
        """
        first, end = np.searchsorted(self._table["rank"].to_numpy(), [rank, rank + 1]).tolist()
        own = self._table.slice(first, end - first)
        which = np.flatnonzero((own["vpp_stage"].to_numpy() == chunk) & (own["replica"].to_numpy() == replicas))
        known = own["name"].combine_chunks().take(pa.array(which)).cast(pa.string())
        if replicas:
            known = pa.array([f"{self.kind}/{name}" for name in known.to_pylist()], type=pa.string())
        places = np.append(first + which, UNKNOWN)
        found: Index = places[index_in(names, value_set=known).fill_null(UNKNOWN).to_numpy()]
        return found


def _taken(values: NDArray[Any], series: Index, otherwise: Any) -> NDArray[Any]:
    if not len(values):
        return np.full(len(series), otherwise, dtype=values.dtype)
    taken = values[series]
    taken[series == UNKNOWN] = otherwise
    return taken
