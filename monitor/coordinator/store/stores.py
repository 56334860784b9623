"""The stores of this process: one for each place where ranks meet, however many monitors it has."""

from __future__ import annotations

import errno
import os
import socket
import uuid
from threading import Lock
from typing import Final

from monitor.coordinator.store.client import Meeting, StoreClient, greet
from monitor.coordinator.store.protocol import Hello, LocalStore, Rendezvous
from monitor.coordinator.store.server import StoreServer
from monitor.failures import LOGGER

OCCUPANT_S: Final = 0.5
"""How long training may be held up to tell the run before, if it is still there, that it has been outlived."""

JobStore = LocalStore | StoreClient


class Stores:
    """What this process serves, and what it asks.

    It serves to its very end, and not only as far as to its exit: frameworks wait there for collectives, in which ranks may be
    that have not asked yet. Then the system closes what is open, and they see it.
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
            serves: Whether this is the process that serves it where ``rendezvous.host`` is its own: one a host at most. It
                needs no connection itself.
        """
        with self._lock:
            if rendezvous not in self._stores:
                self._watch()
                hello = Hello(rendezvous.job, rank, self._process)
                served = self._served(rendezvous, hello) if serves and not self._forked else None
                self._stores[rendezvous] = served or StoreClient(Meeting(rendezvous, hello))
            return self._stores[rendezvous]

    def _served(self, rendezvous: Rendezvous, hello: Hello) -> LocalStore | None:
        """None where ``host`` is another's, or no port is free."""
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
        LOGGER.warning("[rank %d] cannot serve the job's store: something else uses %s.", hello.rank, rendezvous)
        return None

    def _watch(self) -> None:
        if not self._watching:
            self._watching = True
            os.register_at_fork(after_in_child=self._in_forked_child)

    def _in_forked_child(self) -> None:
        """Nothing of the parent's is used: it has the connections, and a child that served would be asked by nobody."""
        self._forked = True
        self._lock = Lock()
        self._process = uuid.uuid4().hex
        for server in self._servers:
            server.abandon()
        self._servers, self._stores = [], {}


def _bound(host: str, port: int) -> socket.socket:
    """Raises ``OSError``: with ``EADDRINUSE`` where somebody listens, with others where ``host`` is another machine's."""
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
    """If it is the store of a run before this one, it lets in no more ranks from now on."""
    try:
        connection, _ = greet(host, port, hello, OCCUPANT_S)
    except OSError:
        return
    connection.close()


STORES: Final = Stores()
"""Belongs to no object of the user's: ports are the process's."""
