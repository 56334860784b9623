"""Ranks compare copies through real stores while they train, also when the store is gone, hangs, or is a file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hanging import until
from rule_parts import Measured, Rank, facts, read
from serving import served

from monitor.anomalies import copy_exchange
from monitor.anomalies.bit_checks import BitChecks
from monitor.anomalies.corruption import CorruptionAlerts
from monitor.anomalies.listeners import EventFiles
from monitor.coordinator import job_store
from monitor.coordinator.job_store import StoreConnection
from monitor.coordinator.manifest_format import WrongBits
from monitor.coordinator.store import StoreClient
from monitor.coordinator.store_memory import LocalStore
from monitor.failures import Failures
from monitor.series import Placement, Series

SOON = timedelta(seconds=60)
NAMES = ("a", "b", "c")
WORLD = 3


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(copy_exchange, "SHORTEST_PAUSE_S", 0.01)
    yield
    assert [one.name for one in threading.enumerate() if one.name == "monitor-copies"] == []


class CheckedRank:
    """A rank whose bits are checked.

    Attributes:
        notes: Of its manifest.
    """

    def __init__(self, number: int, store: Any, directory: Path, world: int = WORLD) -> None:
        self.number, self.rank, self.notes, self.rung = number, Rank(directory), dict[str, str](), 0
        self.failures = Failures(number)
        self._alerts = CorruptionAlerts(number, self)
        self._alerts.alarm = self._ring  # type: ignore[method-assign]
        self.checks = BitChecks(number, self.rank.series, self._alerts, self.failures)
        self._alerts.events = self.files = EventFiles(directory, "dir", facts(number), self.rank.series, self.failures)
        for kind in ("grad_reduced", "param_origin"):
            for name in NAMES:
                self.rank.series.place(Series(kind, 0, name), Placement(replicas=tuple(range(world))))
        self.checks.compare_with(StoreConnection(number, world, store, "job/copies"))

    def _ring(self) -> None:
        self.rung += 1

    def note(self, key: str, value: str) -> None:
        self.notes[key] = value

    def found_wrong(self, bits: WrongBits) -> None:
        self.notes[f"{bits.check} of {bits.kind}"] = bits.said

    def step(self, step: int, **others: float) -> None:
        rows = [Measured(name, [others.get(name, float(step)), 1.0], checked=True) for name in NAMES]
        self.checks.look(self.rank.step(step, {"grad_reduced": rows}))

    def events(self) -> list[str]:
        self.files.save()
        path = self.files.folder / "anomaly.json"
        return list(read(path)) if path.exists() else []


@pytest.fixture(params=["TCPStore", "PrefixStore", "HashStore", "StoreClient"])
def stores(request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    """One of each rank."""
    if request.param == "HashStore":
        yield [dist.HashStore()] * WORLD
    elif request.param == "StoreClient":
        with served() as meet:
            yield [StoreClient(meet()) for _ in range(WORLD)]
    else:
        server = dist.TCPStore("127.0.0.1", 0, None, True, SOON, wait_for_workers=False)
        clients = [dist.TCPStore("127.0.0.1", server.port, None, False, SOON) for _ in range(WORLD)]
        yield clients if request.param == "TCPStore" else [dist.PrefixStore("default_pg", one) for one in clients]


def test_ranks_find_the_odd_copy_while_they_train_and_the_odd_rank_has_an_event(stores: list[Any], tmp_path: Path) -> None:
    ranks = [CheckedRank(number, store, tmp_path / str(number)) for number, store in enumerate(stores)]
    steps = iter(range(10_000))

    def said() -> bool:
        step = next(steps)
        for rank in ranks:
            rank.step(step, **({"b": -1.0} if rank.number == 1 and step >= 4 else {}))
        return bool(ranks[0].notes) and bool(ranks[1].events())

    assert until(said, 30.0)
    for rank in ranks:
        rank.checks.close()
    (text,) = ranks[0].notes.values()
    assert text.startswith("Copies of grad_reduced differ in step ")
    assert ": b: rank 1 (" in text
    assert [rank.rung for rank in ranks] == [1, 0, 0]
    assert [len(rank.events()) for rank in ranks] == [0, 1, 0]
    assert ranks[1].events()[0].startswith("0:b/rank1/grad_reduced_step_")
    assert [rank.failures.counts.total() for rank in ranks] == [0, 0, 0]


def test_a_single_process_and_tensors_without_copies_start_no_thread(tmp_path: Path) -> None:
    alone = CheckedRank(0, None, tmp_path, world=1)
    alone.step(0)
    assert (alone.checks._exchange, alone.notes) == (None, {})


@pytest.mark.parametrize("store", ["a file", "none"])
def test_where_ranks_cannot_compare_through_the_store_the_manifest_says_so(store: str, tmp_path: Path) -> None:
    rank = CheckedRank(0, dist.FileStore(str(tmp_path / "store"), 3) if store == "a file" else None, tmp_path)
    rank.step(0)
    assert rank.checks._exchange is None
    assert rank.notes["copies"].endswith(": copies are compared by a merge alone.")


SERVER = """
import sys, time
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A store in a process of its own, and its port."""
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process, int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.parametrize("fault", ["killed", "stopped"])
def test_a_store_that_is_gone_or_hangs_holds_up_no_step_and_is_said_once(
    server: tuple[subprocess.Popen[str], int], fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_store, "SAY_AFTER_S", 0.1)
    monkeypatch.setattr(job_store, "RECONNECT_TIMEOUT", timedelta(seconds=1))
    process, port = server
    client = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=1))
    rank = CheckedRank(0, client, tmp_path)
    rank.step(0)
    assert until(lambda: rank.checks._exchange is not None and rank.checks._exchange._published > 0, 30.0)
    os.kill(process.pid, signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
    steps = iter(range(1, 1_000_000))

    def reported() -> bool:
        rank.step(next(steps))  # returns, whatever the store does
        return rank.failures.counts.total() >= 2  # said once, and counted

    assert until(reported, 60.0)
    assert len(rank.failures.counts) == 1
    assert rank.notes == {}
    rank.checks.close()
    os.kill(process.pid, signal.SIGKILL)
    exchange = rank.checks._exchange
    assert exchange is not None
    assert until(lambda: not exchange._thread.is_alive(), 30.0)


class Slow(LocalStore):
    """Answers late, until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()

    def check(self, keys: list[str], /) -> bool:
        self.free.wait(60.0)
        return super().check(keys)


def test_a_slow_store_holds_up_no_step_and_what_it_tells_late_is_said(tmp_path: Path) -> None:
    store = Slow()
    ranks = [CheckedRank(number, store, tmp_path / str(number)) for number in range(WORLD)]
    for step in range(20):
        for rank in ranks:
            rank.step(step, **({"c": -1.0} if rank.number == 2 and step >= 15 else {}))
    assert ranks[0].notes == {}
    store.free.set()
    assert until(lambda: bool(ranks[0].notes), 30.0)
    for rank in ranks:
        rank.checks.close()
    assert ": c: rank 2 (" in next(iter(ranks[0].notes.values()))
    assert "in step 15" in next(iter(ranks[0].notes.values()))
