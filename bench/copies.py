"""What comparing copies through the job's store asks of the store, and how soon a flipped bit is said.

    python bench/copies.py --ranks 1024

Ranks are simulated: each is the monitor's own part of a rank that talks to the store, with the checksums of a small model for
its rows. They share a few processes, and a real store: torch's ``TCPStore`` over the loopback, or the monitor's own
(``--store own``). In the middle of the run one bit differs on one rank. The pauses are those of a job of so many ranks.
"""

from __future__ import annotations

import argparse
import heapq
import multiprocessing
import random
import socket
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
from tables import aligned, save
from torch.distributed import TCPStore

from monitor.anomalies.checked_rows import CheckedRows
from monitor.anomalies.copies import CopyHistory
from monitor.anomalies.copy_exchange import CopyExchange
from monitor.anomalies.corruption import CorruptionAlerts
from monitor.coordinator.job_store import StoreConnection
from monitor.coordinator.manifest_format import WrongBits
from monitor.coordinator.store import Rendezvous, StoreClient, StoreLocator
from monitor.coordinator.store_memory import LocalStore, StoreCapacity
from monitor.coordinator.store_messages import Hello
from monitor.coordinator.store_server import ServerLimits, StoreServer
from monitor.failures import Failures
from monitor.series import Placement, Series, SeriesTable

KINDS = ("param_origin", "grad_reduced", "exp_avg", "exp_avg_sq", "param_updated")
PATIENCE = timedelta(seconds=60)
MOST_RANKS = 1 << 16
KEY = b"the key of the bench"


class Job(NamedTuple):
    """What is simulated.

    Attributes:
        begin: The time of step 0, in seconds of ``time.time``. Known once all processes are ready.
        seconds: How long the ranks take turns.
        fault: The rank and the step from which one checksum differs.
    """

    ranks: int
    tensors: int
    requests: float
    step_s: float
    seconds: float
    fault: tuple[int, int]
    begin: float = 0.0

    def newest(self) -> int:
        """The last step that has ended."""
        return int((time.time() - self.begin) / self.step_s) - 1


class Counted:
    """A store, with the number of requests in each second."""

    def __init__(self, store: Any) -> None:
        self._store, self.requests = store, Counter[int]()

    def __getattr__(self, name: str) -> Any:
        asked: Callable[..., Any] = getattr(self._store, name)

        def ask(*arguments: Any) -> Any:
            self.requests[int(time.time())] += 1
            return asked(*arguments)

        return ask


class Rank:
    """A simulated rank: it has held all steps that have ended when it takes a turn."""

    def __init__(self, number: int, job: Job, told: list[float]) -> None:
        self.number, self.job, self._told, self._series, self._held = number, job, told, SeriesTable(), -1
        placement = Placement(replicas=tuple(range(job.ranks)))
        self._rows = {
            kind: np.array([self._placed(Series(kind, 0, f"layers.{one}.weight"), placement) for one in range(job.tensors)])
            for kind in KINDS
        }
        self._history = CopyHistory(number, socket.gethostname(), self._series)
        alerts = CorruptionAlerts(number, self)
        connection = StoreConnection(number, job.ranks, None, "copies/", asked_per_second=job.requests)
        self._exchange = CopyExchange(connection, self._history, alerts, Failures(number))

    def _placed(self, one: Series, placement: Placement) -> int:
        self._series.place(one, placement)
        return self._series.index_of(one)

    def found_wrong(self, _bits: WrongBits) -> None:
        """See ``BitsJournal``."""
        self._told.append(time.time())

    def note(self, key: str, value: str) -> None:
        """See ``BitsJournal``."""

    def turn(self, store: Any) -> float:
        """Seconds until the next turn."""
        for step in range(self._held + 1, self.job.newest() + 1):
            self._history.add(step, {kind: self._checked(step, kind) for kind in KINDS}, time.monotonic())
            self._held = step
        self._exchange.turn(store)
        return self._exchange.pause()

    def _checked(self, step: int, kind: str) -> CheckedRows:
        sums = np.arange(1, self.job.tensors + 1, dtype=np.uint64) * np.uint64(2 * step + 1)
        if (self.number, kind) == (self.job.fault[0], "grad_reduced") and step >= self.job.fault[1]:
            sums[self.job.tensors // 2] ^= np.uint64(1 << 40)
        return CheckedRows(self._rows[kind], sums, np.arange(self.job.tensors))


def take_turns(job: Job, numbers: range, connect: Callable[[], Any], result: Connection) -> None:
    """The ranks of one process."""
    store, told = Counted(connect()), list[float]()
    ranks = [Rank(number, job, told) for number in numbers]
    result.send("ready")
    job = job._replace(begin=result.recv())
    for rank in ranks:
        rank.job = job
    due = [(job.begin, place) for place in range(len(ranks))]
    late = 0.0
    while due[0][0] < job.begin + job.seconds:
        at, place = due[0]
        time.sleep(max(0.0, at - time.time()))
        late = max(late, time.time() - at)
        heapq.heapreplace(due, (time.time() + ranks[place].turn(store), place))
    result.send((store.requests, told, late))


def tcp_client(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, None, False, PATIENCE)


class OwnClients:
    """Makes clients of the monitor's own store; each process is admitted as a rank of its own."""

    def __init__(self, port: int) -> None:
        self._port = port

    def __call__(self) -> StoreClient:
        rank = random.SystemRandom().randrange(1, MOST_RANKS)
        rendezvous = Rendezvous("127.0.0.1", (self._port,), "bench", MOST_RANKS)
        return StoreClient(StoreLocator(rendezvous, Hello("bench", rank, str(rank)), KEY))


class TcpClients(OwnClients):
    """The same for torch's."""

    def __call__(self) -> Any:
        return tcp_client(self._port)


def serve(kind: str, port: Connection) -> None:
    """Serve a store until the parent closes the pipe."""
    if kind == "tcp":
        server: Any = TCPStore("127.0.0.1", 0, None, True, PATIENCE, wait_for_workers=False)
        port.send(server.port)
    else:
        listener = socket.create_server(("127.0.0.1", 0))
        port.send(listener.getsockname()[1])
        held = LocalStore(StoreCapacity.of(MOST_RANKS))
        server = StoreServer(listener, held, Hello("bench", 0, "server"), KEY, ServerLimits(MOST_RANKS))
    port.recv()
    del server


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """One job with one fault."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(options.store, theirs), daemon=True)
    server.start()
    port = ours.recv()
    pause_s = pause_of(options.ranks, options.requests)
    fault_step = int((8 * pause_s + 2.0) / options.step_s)
    seconds = fault_step * options.step_s + 14 * pause_s + 6.0
    job = Job(options.ranks, options.tensors, options.requests, options.step_s, seconds, (options.ranks // 3 + 1, fault_step))
    shares = [range(1), *_shares(1, options.ranks, options.processes)]
    pipes = [context.Pipe() for _ in shares]
    connect = (TcpClients if options.store == "tcp" else OwnClients)(port)
    workers = [
        context.Process(target=take_turns, args=(job, share, connect, send), daemon=True)
        for share, (_, send) in zip(shares, pipes, strict=True)
    ]
    for worker in workers:
        worker.start()
    for pipe, _ in pipes:
        pipe.recv()
    begin = time.time() + 0.5
    for pipe, _ in pipes:
        pipe.send(begin)
    found = [pipe.recv() for pipe, _ in pipes]
    for worker in workers:
        worker.join()
    ours.send(None)
    server.join()
    each = sum((Counter(requests) for requests, _, _ in found), Counter[int]())
    steady = [each[second] for second in range(int(begin + pause_s) + 2, int(begin + seconds) - 1)]
    told = min((at for _, times, _ in found for at in times), default=None)
    fault_at = begin + (fault_step + 1) * options.step_s
    return {
        "ranks": options.ranks,
        "store": options.store,
        "pause": pause_s,
        "allowed": options.requests,
        "requests": mean(steady),
        "most": max(steady),
        "said_after": None if told is None else told - fault_at,
        "late": max(late for _, _, late in found),
        "each_second": [each[second] for second in sorted(each)],
    }


def pause_of(ranks: int, requests: float) -> float:
    """Seconds between two turns of one rank."""
    history = CopyHistory(0, "", SeriesTable())
    history.groups["all"] = tuple(range(ranks))
    return CopyExchange(StoreConnection(0, ranks, asked_per_second=requests), history, None, Failures()).turn_s  # type: ignore[arg-type]


def _shares(first: int, end: int, count: int) -> list[range]:
    cuts = [first + (end - first) * part // count for part in range(count + 1)]
    return [range(begin, after) for begin, after in pairwise(cuts) if after > begin]


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--tensors", type=int, default=300, help="tensors of each kind")
    parser.add_argument("--requests", type=float, default=2000.0, help="requests a second that the store may get")
    parser.add_argument("--step-s", type=float, default=0.5, help="seconds of a step")
    parser.add_argument("--store", choices=["tcp", "own"], default="tcp")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures = [measured(options) for _ in range(options.rounds)]
    heads = ["ranks", "store", "pause, s", "requests/s allowed", "mean", "most in a second", "said after, s"]
    rows = [
        [
            str(one["ranks"]),
            one["store"],
            f"{one['pause']:.2f}",
            f"{one['allowed']:.0f}",
            f"{one['requests']:.0f}",
            str(one["most"]),
            "not said" if one["said_after"] is None else f"{one['said_after']:.1f}",
        ]
        for one in figures
    ]
    print(aligned(heads, rows, names=2))
    save(options.json, figures)


if __name__ == "__main__":
    main()
