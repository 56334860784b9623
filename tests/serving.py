"""A store of our own for tests: a server in this process, at a port that no one else has, and ranks that ask it."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from monitor.coordinator.store import Rendezvous, StoreLocator
from monitor.coordinator.store_memory import LocalStore
from monitor.coordinator.store_messages import Hello
from monitor.coordinator.store_server import ServerLimits, StoreServer

JOB = "a job"
KEY = b"the key of the job"
RANKS = 1_000


@contextmanager
def served(first_s: float = 5.0) -> Iterator[Callable[[], StoreLocator]]:
    """Gives a ``StoreLocator`` for each further rank; rank 0 serves."""
    listener = socket.create_server(("127.0.0.1", 0))
    rendezvous = Rendezvous("127.0.0.1", (listener.getsockname()[1],), JOB, RANKS)
    server = StoreServer(listener, LocalStore(), Hello(JOB, 0, "process 0"), KEY, ServerLimits(RANKS))
    ranks = itertools.count(1)

    def meet() -> StoreLocator:
        rank = next(ranks)
        return StoreLocator(rendezvous, Hello(JOB, rank, f"process {rank}"), KEY, first_s)

    try:
        yield meet
    finally:
        server.close()
