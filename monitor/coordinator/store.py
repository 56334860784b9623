"""The monitor's own key-value store, for jobs whose launcher gives the ranks an address to meet at but no store.

One process serves a dictionary on a thread (``StoreServer``); the others are clients. The store has the operations of torch's
stores that the monitor uses, and none that waits: ``check``, ``get`` of a key that exists, ``set``, ``add``, ``compare_set``,
``clone``. Every call has a timeout. Any thread may call.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import Any, Final

from monitor.coordinator.store_memory import LocalStore, StoreCapacity
from monitor.coordinator.store_messages import MOST_BYTES, Handshake, Hello, ProtocolError, RefusedError, encode, parse
from monitor.coordinator.store_server import ServerLimits, StoreServer
from monitor.failures import LOGGER

# --- Where ranks look for the store.

PORT_OFFSET: Final = 1_000
PORTS: Final = 4
"""How many consecutive ports are tried: another program may use the first."""

HIGHEST_PORT: Final = 65_535


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The address of the store. Every rank derives the same address from the launcher's settings.

    Attributes:
        host: The host of the serving process.
        ports: In the order in which they are tried.
        job: Identifies the job; a store of another job has another value.
        world_size: The number of ranks of the job.
    """

    host: str
    ports: tuple[int, ...]
    job: str
    world_size: int

    @classmethod
    def beside(cls, host: str, port: int, world_size: int) -> Rendezvous:
        """On the host of the launcher's own rendezvous, ``PORT_OFFSET`` above its port, or below if that is out of range."""
        first = port + PORT_OFFSET if port + PORT_OFFSET + PORTS - 1 <= HIGHEST_PORT else port - PORT_OFFSET
        return cls(host, tuple(range(first, first + PORTS)), f"{port}/{world_size}", world_size)

    @classmethod
    def at(cls, address: str, world_size: int) -> Rendezvous:
        """At ``HOST:PORT`` and nowhere else.

        Raises:
            ValueError: ``address`` has another form.
        """
        host, _, port = address.strip().rpartition(":")
        if not host or not (port.isascii() and port.isdecimal() and 0 < int(port) <= HIGHEST_PORT):
            raise ValueError(f"{address!r} is not the address of a store: expected HOST:PORT, such as 10.0.0.1:29501.")
        return cls(host.strip("[]"), (int(port),), f"{port}/{world_size}", world_size)

    def __str__(self) -> str:
        first, last = self.ports[0], self.ports[-1]
        return f"{self.host}, port {first}" if first == last else f"{self.host}, ports {first} to {last}"


# --- ``StoreClient``: sends requests to the job's store over its own connection, which it opens at the first request.

FIRST_S: Final = 20.0
"""How long a client looks for the store, which exists once the serving process makes its first record. Together with the
request that follows, this is less than the timeout for agreeing on the job's name.
"""

GREETING_S: Final = 8.0
"""Timeout for a greeting at one port. Another program may not answer; a store takes seconds if thousands of ranks connect at
once.
"""

ASKED_PER_SECOND: Final = 200
"""Requests that the server answers in a second at least. One takes 30 µs, but while training computes in Python its thread
runs only every 5 ms.
"""

ANSWER_S: Final = 8.0
PAUSE_S: Final = 0.1
BLOCK: Final = 1 << 16


class StoreLocator:
    """The address at which the store was found, for all clients of a process.

    A server that replaces it after a restart does not hold the agreements, so the clients do not accept it.

    Args:
        key: The job's.
        first_s: How long to look for the store the first time. Later it either exists or has ended.
    """

    def __init__(self, rendezvous: Rendezvous, hello: Hello, key: bytes, first_s: float = FIRST_S) -> None:
        self.rendezvous = rendezvous
        self._hello, self._key, self._first_s = hello, key, first_s
        self._found: tuple[int, str] | None = None

    def connect(self) -> socket.socket:
        """A connection to the store of this job.

        Raises:
            ConnectionError: No store was found in time. The message names the ports and the last answer.
        """
        if self._found is not None:
            return self._greeted([self._found[0]])
        deadline = time.monotonic() + self._first_s
        while True:
            try:
                return self._greeted(self.rendezvous.ports)
            except ConnectionError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(PAUSE_S)

    def _greeted(self, ports: Any) -> socket.socket:
        """A connection to the first port of the store. A refusal by a store is reported rather than a silent port."""
        said = ""  # no exception: it would hold the frames of its callers, and with them the client, until a garbage collection
        for port in ports:
            try:
                connection, instance = greet(self.rendezvous.host, port, self._hello, self._key)
            except OSError as error:
                said = str(error) if not said or isinstance(error, RefusedError) else said
                continue
            if self._found is None:
                self._found = port, instance
            if self._found == (port, instance):
                return connection
            connection.close()
            said = "another process replaced its server, and does not hold the agreements"
        raise ConnectionError(f"no store of this job at {self.rendezvous}: {said}")


def greet(host: str, port: int, hello: Hello, key: bytes, timeout_s: float = GREETING_S) -> tuple[socket.socket, str]:
    """Connect, and have client and server prove to each other that they know the job's key.

    Returns:
        The connection, and the id of the server, which is unique among all servers ever at this port.

    Raises:
        OSError: No server listens there, or the server is not a store.
        RefusedError: The store does not admit this rank, or does not know the key.
    """
    deadline = time.monotonic() + timeout_s
    connection = socket.create_connection((host, port), timeout_s)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection, _prove(connection, hello, key, deadline)
    except BaseException:
        connection.close()
        raise


def _prove(connection: socket.socket, hello: Hello, key: bytes, deadline: float) -> str:
    """The id of the server, after both have proved that they know the key."""

    def ask(message: dict[str, Any]) -> dict[str, Any]:
        connection.sendall(encode(message))
        reply = receive(connection, deadline)
        if "refused" in reply:
            raise RefusedError.because(reply["refused"], hello.rank)
        return reply

    asked = secrets.token_hex(16)
    handshake = Handshake.answered(hello, asked, ask(hello.to_message(asked)))
    if not handshake.is_proved(key, "server", ask({"proof": handshake.proof(key, "client")}).get("welcome")):
        raise RefusedError.because(RefusedError.OTHER_KEY, hello.rank)
    return handshake.instance


def receive(connection: socket.socket, deadline: float) -> dict[str, Any]:
    """Receive one message by the deadline, however slowly it arrives.

    Args:
        deadline: In the time of ``time.monotonic``.

    Raises:
        OSError: No message arrived in time, or it is not valid.
    """
    line = b""
    while not line.endswith(b"\n"):
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        received = connection.recv(BLOCK)
        line += received
        if not received or len(line) > MOST_BYTES:
            raise ProtocolError("the connection was closed" if not received else f"a line has more than {MOST_BYTES} bytes")
    return parse(line)


class StoreClient:
    """A store that another process serves.

    Each request is sent once: a request without an answer may or may not have taken effect.

    Raises:
        ConnectionError: From every operation: the store cannot be reached. The next one tries again.
        TimeoutError: It did not answer.
    """

    def __init__(self, locator: StoreLocator) -> None:
        self._locator = locator
        self._connection: socket.socket | None = None
        self._lock = Lock()

    def clone(self) -> StoreClient:
        """Another connection, for another thread."""
        return StoreClient(self._locator)

    def check(self, keys: list[str], /) -> bool:
        return bool(self._ask("check", keys))

    def get(self, key: str, /) -> bytes:
        """Raises ``KeyError`` where there is no such key; does not wait for it."""
        return str(self._ask("get", key)).encode()

    def set(self, key: str, value: str, /) -> None:
        self._ask("set", key, value)

    def add(self, key: str, amount: int, /) -> int:
        return int(self._ask("add", key, amount))

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        return str(self._ask("compare_set", key, expected, desired)).encode()

    def _ask(self, operation: str, *arguments: Any) -> Any:
        with self._lock:
            try:
                reply = self._answered({"do": operation, "with": arguments})
            except BaseException:
                self._disconnect()  # a late answer must not be taken for the answer to the next request
                raise
        if "error" in reply:
            raise (KeyError if reply["error"].startswith("KeyError") else RuntimeError)(reply["error"])
        return reply["is"]

    def _answered(self, question: dict[str, Any]) -> dict[str, Any]:
        if self._connection is None:
            self._connection = self._locator.connect()
        self._connection.settimeout(ANSWER_S)
        self._connection.sendall(encode(question))
        return receive(self._connection, time.monotonic() + ANSWER_S)

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __del__(self) -> None:
        with suppress(Exception):  # the interpreter may be shutting down
            self._disconnect()


# --- The stores of this process: one for each rendezvous, shared by all monitors of the process.

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
        self._process = secrets.token_hex(16)
        self._forked = False
        self._watching = False

    def at(self, rendezvous: Rendezvous, rank: int, serves: bool, key: Callable[[], bytes]) -> JobStore:
        """The job's store, the same at every call. Does not wait for another rank.

        Args:
            key: Returns the job's key. Called once for each rendezvous, and may raise.
            serves: Whether this process serves the store if ``rendezvous.host`` is its own host. At most one process a host
                does; it needs no connection itself.

        Raises:
            Exception: What ``key`` raises.
        """
        with self._lock:
            if rendezvous not in self._stores:
                self._watch()
                hello, secret = Hello(rendezvous.job, rank, self._process), key()
                served = self._served(rendezvous, hello, secret) if serves and not self._forked else None
                self._stores[rendezvous] = served or StoreClient(StoreLocator(rendezvous, hello, secret))
            return self._stores[rendezvous]

    def _served(self, rendezvous: Rendezvous, hello: Hello, key: bytes) -> LocalStore | None:
        """A store that this process serves; None if ``host`` is another machine, or no port is free."""
        for port in rendezvous.ports:
            try:
                listener = _bound(rendezvous.host, port)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    return None
                _notify_occupant(rendezvous.host, port, hello, key)
                continue
            held = LocalStore(StoreCapacity.of(rendezvous.world_size))
            self._servers.append(StoreServer(listener, held, hello, key, ServerLimits(rendezvous.world_size)))
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
        self._process = secrets.token_hex(16)
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


def _notify_occupant(host: str, port: int, hello: Hello, key: bytes) -> None:
    """If the occupant is the store of an earlier run, it admits no more ranks from now on."""
    try:
        connection, _ = greet(host, port, hello, key, OCCUPANT_S)
    except OSError:
        return
    connection.close()


STORES: Final = Stores()
"""Module-level because ports belong to the process, not to a monitor."""
