"""Threads act as ranks, with the real stores: whatever is edited, and at whatever time, every step is begun alike by all."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from evidence import examples, sampled
from hanging import until
from journals import Noted
from monitor_threads import no_thread_left
from serving import served

from monitor.config import load_config
from monitor.coordinator.store import StoreClient
from monitor.dynamic import Controller, JobConnection
from monitor.dynamic.step_boundary import PollingIntervals
from monitor.failures import Failures

FAST = PollingIntervals(idle=0.02, open=0.005, waiting=0.002, patience=1.0, bound=2.0, file=0.01)
SOON = timedelta(seconds=60)
RULES = {"rules": [{"rule_name": "AnomalyNan"}]}
LAST = 999
"""A ``collect_times`` that ends a test: all ranks stop before the step from which it holds."""

MakeStore = Callable[[], Any]


@pytest.fixture(autouse=True)
def _dynamic_monitoring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAMIC_MONITOR", "True")


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    with no_thread_left():
        yield


class OldClient(dist.TCPStore):  # type: ignore[misc]
    """As it was before it could be cloned."""

    clone = None


@pytest.fixture(params=["HashStore", "FileStore", "TCPStore", "PrefixStore", "OldClient", "StoreClient"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeStore]:
    """Makes one more rank's store of the job."""
    if request.param == "HashStore":
        shared = dist.HashStore()
        yield lambda: shared
    elif request.param == "FileStore":
        first = dist.FileStore(str(tmp_path / "store"), 8)  # kept: the last one to be released deletes the file
        yield lambda: first and dist.FileStore(str(tmp_path / "store"), 8)
    elif request.param == "StoreClient":
        with served() as meet:
            yield lambda: StoreClient(meet())
    else:
        server = dist.TCPStore("127.0.0.1", 0, None, True, SOON, wait_for_workers=False)
        client = OldClient if request.param == "OldClient" else dist.TCPStore
        yield {
            "TCPStore": lambda: client("127.0.0.1", server.port, None, False, SOON),
            "OldClient": lambda: client("127.0.0.1", server.port, None, False, SOON),
            "PrefixStore": lambda: dist.PrefixStore("default_pg", client("127.0.0.1", server.port, None, False, SOON)),
        }[request.param]


class Rank(threading.Thread):
    """A rank that trains in step with the others until ``LAST``.

    Attributes:
        ran: ``collect_times``, and whether activations are recorded, of each step.
        longest: Seconds that a step was held up.
    """

    def __init__(self, rank: int, path: Path, store: Any, together: threading.Barrier, seed: int = 0, **job: Any) -> None:
        super().__init__()
        self.told, self.failures = Noted(), Failures(rank)
        world = JobConnection(rank, together.parties, store, "job/", intervals=FAST, **job)
        self.control = Controller(str(path), load_config(path), world, self.failures)
        self.ran: dict[int, tuple[int, bool]] = {}
        self.longest = 0.0
        self._together, self._delays = together, random.Random(seed * 100 + rank)

    def run(self) -> None:
        self.control.start(self.told)
        step, config = 0, self.control.config
        while True:
            begun = time.monotonic()
            if (switch := self.control.begin(step)) is not None:
                config = switch.config
            self.longest = max(self.longest, time.monotonic() - begun)
            if config.collect_times == LAST:
                break
            self.ran[step] = (config.collect_times, config.xy_distribution)
            time.sleep(self._delays.choice([0.0, 0.0, 0.001, 0.004]))
            self._together.wait(60)  # as a collective does
            step += 1
        self.control.close()


def write(path: Path, **fields: Any) -> None:
    """As editors do."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(fields))
    draft.replace(path)


@pytest.mark.parametrize("count", sampled([4, 2]))
def test_many_edits_at_random_moments_hold_from_the_same_steps_on_all_ranks(
    make_store: MakeStore, tmp_path: Path, count: int
) -> None:
    path = tmp_path / "config.json"
    write(path, collect_times=0)
    together = threading.Barrier(count)
    ranks = [Rank(rank, path, make_store(), together, seed=count) for rank in range(count)]
    for rank in ranks:
        rank.start()
    moments = random.Random(count)
    for edit in range(1, examples(25, 50) + 1):
        time.sleep(moments.choice([0.0, 0.005, 0.02, 0.04]))
        write(path, collect_times=edit)
    write(path, collect_times=LAST)
    for rank in ranks:
        rank.join(60)
    assert all(rank.ran == ranks[0].ran for rank in ranks)
    assert all(rank.told.records == ranks[0].told.records for rank in ranks)
    taken = [seen for seen, _ in ranks[0].ran.values()]
    assert taken == sorted(taken)
    assert len(set(taken)) > 5
    assert all(record.since == record.from_step for record in ranks[0].told.records)
    assert not any(rank.failures.counts for rank in ranks)


def test_an_alert_on_one_rank_brings_detail_to_all_at_the_same_step_and_takes_it_back(
    make_store: MakeStore, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    on_alert = {"set": {"xy_distribution": True}, "steps": 5}
    write(path, dynamic_on=True, on_alert=on_alert, alert=RULES)
    ranks = two_ranks(path, make_store)
    wait_until(lambda: len(ranks[1].ran) > 3)
    ranks[1].control.alert()
    wait_until(lambda: (100_000_000, True) in ranks[0].ran.values())
    wait_until(lambda: not ranks[0].control.config.xy_distribution)
    end(path, ranks)
    assert ranks[0].ran == ranks[1].ran
    deep = [step for step, (_, detailed) in ranks[0].ran.items() if detailed]
    assert deep == list(range(deep[0], deep[0] + 5))


def test_alerts_on_all_ranks_at_once_bring_detail_once(make_store: MakeStore, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    write(path, dynamic_on=True, on_alert={"set": {"xy_distribution": True}, "steps": 3}, alert=RULES)
    ranks = two_ranks(path, make_store)
    for rank in ranks:
        rank.control.alert()
    wait_until(lambda: any(record.origin == "return" for record in ranks[0].told.records))
    end(path, ranks)
    assert [record.origin for record in ranks[0].told.records] == ["start", "alert", "return", "file"]
    assert ranks[0].ran == ranks[1].ran


def test_ranks_that_have_read_different_files_begin_alike_and_come_to_what_the_file_says(
    make_store: MakeStore, tmp_path: Path
) -> None:
    """The file was edited while the job started."""
    path = tmp_path / "config.json"
    together = threading.Barrier(2)
    write(path, collect_times=1)
    late_reader = Rank(1, path, make_store(), together)
    write(path, collect_times=2)
    watcher = Rank(0, path, make_store(), together)
    late_reader.start()
    time.sleep(0.1)
    watcher.start()
    wait_until(lambda: (2, False) in late_reader.ran.values())
    end(path, [watcher, late_reader])
    assert watcher.ran == late_reader.ran
    assert watcher.ran[0] == (1, False)


def test_a_rank_that_never_comes_holds_no_one_up(make_store: MakeStore, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    write(path, collect_times=1)
    failures = Failures()
    control = Controller(str(path), load_config(path), JobConnection(0, 2, make_store(), "job/", intervals=FAST), failures)
    control.start(Noted())
    write(path, collect_times=2)
    waited = []
    for step in range(100):
        before = time.monotonic()
        assert control.begin(step) is None
        waited.append(time.monotonic() - before)
        time.sleep(0.002)
    assert max(waited) < FAST.patience
    control.close()


def test_a_rank_that_stops_answering_costs_the_others_at_most_the_bound_and_they_go_on_as_before(
    make_store: MakeStore, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    write(path, collect_times=1)
    pace = PollingIntervals(idle=0.01, open=0.005, waiting=0.002, patience=0.1, bound=1.0, file=0.01)
    watched = load_config(path)
    silent = Controller(str(path), watched, JobConnection(1, 2, make_store(), "job/", intervals=pace), Failures())
    other = Controller(str(path), watched, JobConnection(0, 2, make_store(), "job/", intervals=pace), Failures())
    silent.start(Noted())
    other.start(Noted())
    silent._participant._agreement.poll = lambda: iter(())
    time.sleep(0.1)
    write(path, collect_times=2)
    waited, step = 0.0, 0
    while waited < 0.05:
        before = time.monotonic()
        assert other.begin(step) is None
        waited = time.monotonic() - before
        step += 1
        time.sleep(0.001)
    assert waited < pace.bound
    assert other._boundary.undecided_since is None
    silent.close()
    other.close()


class Stalling:
    """A connection on which calls hang for as long as ``open`` is not set. It has no clone."""

    def __init__(self, store: Any) -> None:
        self.open = threading.Event()
        self.open.set()
        self._store = store

    def __getattr__(self, name: str) -> Any:
        if name in ("clone", "underlying_store", "host", "port"):
            raise AttributeError(name)
        self.open.wait(30)
        return getattr(self._store, name)


def test_a_rank_whose_store_hangs_waits_for_the_bound_and_knows_later_which_steps_it_missed(
    make_store: MakeStore, tmp_path: Path
) -> None:
    """Its acknowledgement has arrived, so the others go over, and it cannot know."""
    path = tmp_path / "config.json"
    write(path, collect_times=1)
    pace = PollingIntervals(idle=0.01, open=0.005, waiting=0.002, patience=0.05, bound=0.1, file=0.01)
    connection = Stalling(make_store())
    told = Noted()
    well = Controller(str(path), load_config(path), JobConnection(0, 2, make_store(), "job/", intervals=pace), Failures())
    cut_off = Controller(str(path), load_config(path), JobConnection(1, 2, connection, "job/", intervals=pace), Failures())
    well.start(Noted())
    cut_off.start(told)
    first, last = cut_off._participant._agreement, well._participant._agreement
    acknowledge_first, acknowledge_last = first._acknowledge, last._acknowledge

    def acknowledge_and_be_cut_off(promised: int) -> Any:
        yield from acknowledge_first(promised)
        connection.open.clear()

    def acknowledge_afterwards(promised: int) -> Any:
        while connection.open.is_set():
            yield None
        yield from acknowledge_last(promised)

    first._acknowledge, last._acknowledge = acknowledge_and_be_cut_off, acknowledge_afterwards
    write(path, collect_times=2)
    wait_until(lambda: well._boundary.expects("file"))
    assert well.begin(0) is not None
    assert [cut_off.begin(step) for step in range(3)] == [None] * 3
    assert told.undecided_since == 0
    connection.open.set()
    wait_until(lambda: told.undecided_since is None)
    switch = cut_off.begin(3)
    assert switch is not None
    assert switch.config.collect_times == 2
    assert [(record.from_step, record.since) for record in told.records] == [(0, 0), (0, 3)]
    well.close()
    cut_off.close()


def test_a_rank_that_cannot_reach_the_store_at_the_start_says_so_and_catches_up(make_store: MakeStore, tmp_path: Path) -> None:
    path, its_own = tmp_path / "config.json", tmp_path / "its_own.json"  # the first rank may still read its file
    write(path, collect_times=1)
    write(its_own, collect_times=2)
    well = Controller(
        str(path),
        load_config(path),
        JobConnection(0, 2, make_store(), "job/", intervals=replace(FAST, file=3600.0)),
        Failures(),
    )
    well.start(Noted())
    connection, told, failures = Stalling(make_store()), Noted(), Failures()
    connection.open.clear()
    late = Controller(str(its_own), load_config(its_own), JobConnection(1, 2, connection, "job/", intervals=FAST), failures)
    late.start(told, timeout_s=0.05)
    assert list(failures.counts) == ["no agreement at the start"]
    assert late.begin(0) is None
    assert told.undecided_since == 0
    connection.open.set()
    wait_until(lambda: told.undecided_since is None)
    switch = late.begin(1)
    assert switch is not None
    assert (switch.from_step, switch.config.collect_times) == (0, 1)
    well.close()
    late.close()


def two_ranks(path: Path, make_store: MakeStore) -> list[Rank]:
    together = threading.Barrier(2)
    ranks = [Rank(rank, path, make_store(), together) for rank in range(2)]
    for rank in ranks:
        rank.start()
    return ranks


def end(path: Path, ranks: list[Rank]) -> None:
    write(path, collect_times=LAST)
    for rank in ranks:
        rank.join(60)
        assert not rank.is_alive()


def wait_until(condition: Callable[[], bool]) -> None:
    assert until(condition, SOON.total_seconds())
