"""Whether weights are, when a step uses them, what the optimizer left. It also sees shards that no other rank holds."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from monitor.failures import LOGGER
from monitor.series import REPLICA_KIND, SeriesTable
from monitor.stats.ops import checksums
from monitor.stats.partials import Words
from monitor.stats.table import StepRows
from monitor.terminal import plain

BEGAN_WITH: Final = "param_origin"
LEFT: Final = "param_updated"
"""The kinds of weights before and after an optimizer's step."""

MOST_SAID: Final = 10
"""Warnings of a run. Loops may write to some weights in every step, so each weight is named once."""

NAMED: Final = 5
"""Weights that a warning names."""

_FEW: Final = 3
"""So few weights are never called most of them."""

_CAUSES: Final = "a checkpoint that was loaded, an average or a limit of weights, a second optimizer, a router's bias"


class BetweenSteps:
    """A watcher of the rows (``Watcher``) that compares the checksums of weights after a step and before the next one.

    Args:
        note: Adds a note to the manifest, from a key and a text.
    """

    def __init__(self, rank: int, series: SeriesTable, note: Callable[[str, str], None]) -> None:
        self._rank, self._series, self._note = rank, series, note
        self._step, self._left = -1, (np.zeros(0, np.int64), np.zeros(0, np.uint64))
        self._began, self._places = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._replicas: dict[str, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
        self._said: set[int] = set()
        self._warnings = 0
        self._said_of_most = False

    def look(self, rows: StepRows) -> None:
        """Compare the weights that the step began with, and keep those that it left."""
        began, left = self._weights(rows, BEGAN_WITH), self._weights(rows, LEFT)
        if len(began[0]) and rows.step == self._step + 1:
            self._compare(rows.step, *began)
        if not np.array_equal(left[0], self._left[0]):
            self._began = np.zeros(0, np.int64)  # so that places are found anew
        self._step, self._left = rows.step, left

    def _weights(self, rows: StepRows, kind: str) -> tuple[NDArray[np.int64], Words]:
        """The series of a kind and their checksums, also of replicas that another rank writes."""
        series, sums = [np.zeros(0, np.int64)], [np.zeros(0, np.uint64)]
        if (written := rows.kinds.get(kind)) is not None:
            series.append(written.series)
            sums.append(checksums(written.partials))
        if (replicas := rows.kinds.get(REPLICA_KIND)) is not None:
            own = self._replicas_of(kind, replicas.series)
            series.append(replicas.series[own])
            sums.append(checksums(replicas.partials.take(own)))
        return np.concatenate(series), np.concatenate(sums)

    def _replicas_of(self, kind: str, series: NDArray[np.int64]) -> NDArray[np.int64]:
        known = self._replicas.get(kind)
        if known is None or not np.array_equal(known[0], series):
            own = [place for place, one in enumerate(series.tolist()) if self._series[one].name.startswith(f"{kind}/")]
            known = self._replicas[kind] = series.copy(), np.array(own, dtype=np.int64)
        return known[1]

    def _compare(self, step: int, series: NDArray[np.int64], now: Words) -> None:
        before = np.append(self._left[1], np.uint64(0))[self._places_of(series)]
        known = (now != 0) & (before != 0)
        changed = series[known & (now != before)]
        if len(changed):
            self._tell(step, changed, int(known.sum()))

    def _places_of(self, began: NDArray[np.int64]) -> NDArray[np.int64]:
        """The place of the same weight among those that the last step left; one past the end if it is not there."""
        if not len(self._began) or not np.array_equal(began, self._began):
            names = {self._name(one): place for place, one in enumerate(self._left[0].tolist())}
            places = [names.get(self._name(one), len(names)) for one in began.tolist()]
            self._began, self._places = began.copy(), np.array(places, dtype=np.int64)
        return self._places

    def _name(self, series: int) -> tuple[int, str]:
        one = self._series[series]
        return one.vpp_stage, one.name.removeprefix(f"{BEGAN_WITH}/").removeprefix(f"{LEFT}/")

    def _tell(self, step: int, changed: NDArray[np.int64], of: int) -> None:
        what = f"{len(changed):,} of {of:,} weights are in step {step} not what the optimizer left in step {step - 1}"
        if of >= _FEW and 2 * len(changed) > of:
            if not self._said_of_most:
                self._said_of_most = True
                self._say(step, f"{what}: so many at once that something wrote them, such as {_CAUSES}. Said once.")
            return
        fresh = [one for one in changed.tolist() if one not in self._said]
        if fresh and self._warnings < MOST_SAID:
            self._warnings += 1
            self._said.update(fresh)
            names = ", ".join(self._name(one)[1] for one in fresh[:NAMED]) + (", …" if len(fresh) > NAMED else "")
            self._say(step, f"{what}: {names}. The memory of this device was corrupted, or something else wrote: {_CAUSES}.")

    def _say(self, step: int, what: str) -> None:
        LOGGER.warning("[rank %d] %s", self._rank, plain(what))
        self._note(f"weights before step {step}", f"rank {self._rank} ({socket.gethostname()}): {what}")

    def dropped(self, step: int, reason: str) -> None:
        """The weights of this step are not known: nothing is compared with them."""
        del step, reason
        self._step = -1

    def save(self) -> None:
        """Nothing to save: what was found has been said."""

    def close(self) -> None:
        """Nothing to close."""
