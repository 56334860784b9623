"""The checksums of a step: of tensors that this rank writes, and of replicas that another rank writes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from monitor.series import CHECKED_KINDS, REPLICA_KIND, SeriesTable, underlying_series
from monitor.stats.ops import checksums
from monitor.stats.partials import Words
from monitor.stats.table import StepRows

Numbers = NDArray[np.int64]


class CheckedRows(NamedTuple):
    """The rows of one kind, in columns.

    Attributes:
        series: Numbers in the rank's ``SeriesTable``.
        checksums: 0 where none was measured.
        call_id: Places in the rank's execution order.
    """

    series: Numbers
    checksums: Words
    call_id: Numbers


NO_ROWS = CheckedRows(np.zeros(0, np.int64), np.zeros(0, np.uint64), np.zeros(0, np.int64))


class ChecksumReader:
    """Reads the checksums of a step. Which replicas are of which kind is found once, as steps have the same rows."""

    def __init__(self, series: SeriesTable) -> None:
        self._series = series
        self._replicas = np.zeros(0, np.int64)
        self._of_kind: dict[str, Numbers] = {}

    def read(self, rows: StepRows) -> dict[str, CheckedRows]:
        """The rows of each kind that has any."""
        own = {kind: rows.kinds[kind] for kind in CHECKED_KINDS if kind in rows.kinds}
        found = {kind: CheckedRows(one.series, checksums(one.partials), one.call_id) for kind, one in own.items()}
        if (replicas := rows.kinds.get(REPLICA_KIND)) is not None:
            sums = checksums(replicas.partials)
            for kind, places in self._kinds_of(replicas.series).items():
                copies = CheckedRows(replicas.series[places], sums[places], replicas.call_id[places])
                before = found.get(kind, NO_ROWS)
                found[kind] = CheckedRows(*(np.concatenate(columns) for columns in zip(before, copies, strict=True)))
        return found

    def _kinds_of(self, replicas: Numbers) -> dict[str, Numbers]:
        if not np.array_equal(replicas, self._replicas):
            places: dict[str, list[int]] = {kind: [] for kind in CHECKED_KINDS}
            for place, one in enumerate(replicas.tolist()):
                kind = underlying_series(self._series[one]).kind
                if kind in places:
                    places[kind].append(place)
            self._replicas = replicas.copy()
            self._of_kind = {kind: np.array(some, dtype=np.int64) for kind, some in places.items() if some}
        return self._of_kind
