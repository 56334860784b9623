"""Ranks that hold copies, without training: what each holds in a step is written down, and each turn is taken by hand."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from monitor.anomalies.checked_rows import CheckedRows
from monitor.anomalies.copies import CopyHistory
from monitor.anomalies.copy_exchange import CopyExchange
from monitor.anomalies.corruption import CorruptionAlerts
from monitor.coordinator.job_store import StoreConnection
from monitor.coordinator.manifest_format import WrongBits
from monitor.coordinator.store_memory import LocalStore
from monitor.failures import Failures
from monitor.series import Placement, Series, SeriesTable

KINDS = ("param_origin", "grad_reduced", "exp_avg", "param_updated")


class SimulatedRank:
    """A rank of a job.

    Attributes:
        notes: Of its manifest, in order.
        alarms: How often its alarm was rung.
    """

    def __init__(
        self,
        number: int,
        world: int,
        store: Any,
        groups: Sequence[Sequence[int]],
        names: Sequence[str] = ("a", "b", "c"),
        pause_s: float | None = 0.0,
        chunks: int = 1,
    ) -> None:
        self.number, self.store, self.notes, self.alarms = number, store, list[tuple[str, str]](), 0
        self.series, self.failures = SeriesTable(), Failures(number)
        self._groups = {f"{name}{'' if at == 0 else at}": tuple(group) for at, group in enumerate(groups) for name in names}
        self._names = [f"{chunk}:{name}" if chunk else name for chunk in range(chunks) for name in self._groups]
        for kind in KINDS:
            for name in self._names:
                self.series.place(self._series_of(kind, name), Placement(replicas=self._groups[name.rpartition(":")[2]]))
        alerts = CorruptionAlerts(number, self)
        alerts.alarm = self._ring  # type: ignore[method-assign]
        self.history = CopyHistory(number, f"node-{number}", self.series)
        job = StoreConnection(number, world, store, "copies/", asked_per_second=1e6)
        self.exchange = CopyExchange(job, self.history, alerts, self.failures, pause_s)
        self.exchange.turn(store)  # the first one only finds its place among those of the others

    def _ring(self) -> None:
        self.alarms += 1

    def note(self, key: str, value: str) -> None:
        self.notes.append((key, value))

    def found_wrong(self, bits: WrongBits) -> None:
        self.notes.append((f"{bits.check} of {bits.kind} in step {bits.step}", bits.said))

    @staticmethod
    def _series_of(kind: str, name: str) -> Series:
        chunk, _, own = name.rpartition(":")
        return Series(kind, int(chunk or 0), own)

    def hold(
        self,
        step: int,
        changed: Mapping[tuple[str, str], int] | None = None,
        now: float = 0.0,
        without: str = "",
        kinds: Sequence[str] = KINDS,
    ) -> None:
        """Hold what all ranks hold in a step, but for what is ``changed``, by kind and name."""
        rows = {}
        for at, kind in enumerate(kinds):
            names = [name for name in self._names if name != without]
            numbers = np.array([self.series.index_of(self._series_of(kind, name)) for name in names])
            sums = np.array([value_of(step, kind, name) for name in names], np.uint64)
            for (of, name), value in (changed or {}).items():
                if of == kind and name in names:
                    sums[names.index(name)] = value
            rows[kind] = CheckedRows(numbers, sums, np.arange(len(names)) + 1000 * at)
        self.history.add(step, rows, now)

    def turn(self) -> None:
        self.exchange.turn(self.store)

    def events(self) -> list[tuple[int, str]]:
        """Step and series of the verdicts about this rank."""
        return [
            (verdict.step, f"{self.series[series].kind}/{self.series[series].name}")
            for verdict in self.exchange.verdicts
            for series, _ in self.history.find(verdict)
        ]


def value_of(step: int, kind: str, name: str) -> int:
    return random.Random(f"{step} {kind} {name}").getrandbits(64) | 1


class SimulatedJob:
    """Ranks that all hold copies of the same tensors."""

    def __init__(self, world: int, store: Any = None, groups: Sequence[Sequence[int]] = (), **rank: Any) -> None:
        self.store = LocalStore() if store is None else store
        every = groups or [range(world)]
        self.ranks = [
            SimulatedRank(number, world, self.store, [group for group in every if number in group], **rank)
            for number in range(world)
        ]

    def step(self, step: int, changed: Mapping[int, Mapping[tuple[str, str], int]] | None = None, now: float = 0.0) -> None:
        for rank in self.ranks:
            rank.hold(step, (changed or {}).get(rank.number), now)

    def turns(self, count: int = 1) -> None:
        for _ in range(count):
            for rank in self.ranks:
                rank.turn()

    @property
    def notes(self) -> list[str]:
        return [what for rank in self.ranks for _, what in rank.notes]


def flipped(*kinds_and_names: tuple[str, str], bits: int = 1) -> dict[tuple[str, str], int]:
    return dict.fromkeys(kinds_and_names, 2 * bits)
