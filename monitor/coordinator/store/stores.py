"""The stores of this process: one for each rendezvous, shared by all monitors of the process."""

from __future__ import annotations

import errno
import os
import socket
import uuid
from threading import Lock
from typing import Final

from monitor.coordinator.store.client import StoreClient, StoreLocator, greet
from monitor.coordinator.store.protocol import Hello, LocalStore, Rendezvous
from monitor.coordinator.store.server import StoreServer
from monitor.failures import LOGGER

OCCUPANT_S: Final = 0.5
"""How long training may be delayed to notify a server of an earlier run that its run is over."""

JobStore = LocalStore | StoreClient


class Stores:
    """The stores that this process serves or connects to.

    The process serves until it ends, also during its exit: frameworks wait there for collectives with ranks that may not have
    sent their requests yet. At the end the system closes the connections, and the clients notice.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._stores: dict[Rendezvous, JobStore] = {}
        self._servers: list[StoreServer] = []
        self._process = uuid.uuid4().hex
        self._forked = False
        self._watching = False

    def at(self, rendezvous: Rendezvous, rank: int, serves: bool) -> JobStore:
        """The job's store, the same at every call. Does not wait for another rank.

        Args:
            serves: Whether this process serves the store if ``rendezvous.host`` is its own host. At most one process a host
                does; it needs no connection itself.
        """
        with self._lock:
            if rendezvous not in self._stores:
                self._watch()
                hello = Hello(rendezvous.job, rank, self._process)
                served = self._served(rendezvous, hello) if serves and not self._forked else None
                self._stores[rendezvous] = served or StoreClient(StoreLocator(rendezvous, hello))
            return self._stores[rendezvous]

    def _served(self, rendezvous: Rendezvous, hello: Hello) -> LocalStore | None:
        """A store that this process serves; None if ``host`` is another machine, or no port is free."""
        for port in rendezvous.ports:
            try:
                listener = _bound(rendezvous.host, port)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    return None
                _notify_occupant(rendezvous.host, port, hello)
                continue
            held = LocalStore()
            self._servers.append(StoreServer(listener, held, hello))
            return held
        LOGGER.warning("[rank %d] cannot serve the job's store: another program uses %s.", hello.rank, rendezvous)
        return None

    def _watch(self) -> None:
        if not self._watching:
            self._watching = True
            os.register_at_fork(after_in_child=self._in_forked_child)

    def _in_forked_child(self) -> None:
        """Use nothing of the parent's: it keeps the connections, and no client would connect to the child."""
        self._forked = True
        self._lock = Lock()
        self._process = uuid.uuid4().hex
        for server in self._servers:
            server.abandon()
        self._servers, self._stores = [], {}


def _bound(host: str, port: int) -> socket.socket:
    """Raises ``OSError``: ``EADDRINUSE`` if the port is in use, another error if ``host`` is another machine."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of the run before may still linger
        listener.bind(address)
        listener.listen(1)  # with SO_REUSEADDR two can be bound, and one can listen
    except BaseException:
        listener.close()
        raise
    return listener


def _notify_occupant(host: str, port: int, hello: Hello) -> None:
    """If the occupant is the store of an earlier run, it admits no more ranks from now on."""
    try:
        connection, _ = greet(host, port, hello, OCCUPANT_S)
    except OSError:
        return
    connection.close()


STORES: Final = Stores()
"""Module-level because ports belong to the process, not to a monitor."""
