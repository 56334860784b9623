"""The monitor's own key-value store, for jobs whose launcher gives the ranks an address to meet at but no store.

One process serves a dictionary on a thread; the others are clients. The store has the operations of torch's stores that the
monitor uses, and none that waits: ``check``, ``get`` of a key that exists, ``set``, ``add``, ``compare_set``, ``clone``. Every
call has a timeout. Any thread may call.
"""

from __future__ import annotations

import errno
import json
import os
import selectors
import socket
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock, Thread
from typing import Any, Final

from monitor.failures import LOGGER

# --- Where ranks look for the store, and how the server admits them.

PORT_OFFSET: Final = 1_000
PORTS: Final = 4
"""How many consecutive ports are tried: another program may use the first."""

HIGHEST_PORT: Final = 65_535


class RefusedError(ConnectionError):
    """The store at the address belongs to another job or run."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The address of the store. Every rank derives the same address from the launcher's settings.

    Attributes:
        host: The host of the serving process.
        ports: In the order in which they are tried.
        job: Identifies the job; a store of another job has another value.
    """

    host: str
    ports: tuple[int, ...]
    job: str

    @classmethod
    def beside(cls, host: str, port: int, world_size: int) -> Rendezvous:
        """On the host of the launcher's own rendezvous, ``PORT_OFFSET`` above its port, or below if that is out of range."""
        first = port + PORT_OFFSET if port + PORT_OFFSET + PORTS - 1 <= HIGHEST_PORT else port - PORT_OFFSET
        return cls(host, tuple(range(first, first + PORTS)), f"{port}/{world_size}")

    @classmethod
    def at(cls, address: str, world_size: int) -> Rendezvous:
        """At ``HOST:PORT`` and nowhere else.

        Raises:
            ValueError: ``address`` has another form.
        """
        host, _, port = address.strip().rpartition(":")
        if not host or not (port.isascii() and port.isdecimal() and 0 < int(port) <= HIGHEST_PORT):
            raise ValueError(f"{address!r} is not the address of a store: expected HOST:PORT, such as 10.0.0.1:29501.")
        return cls(host.strip("[]"), (int(port),), f"{port}/{world_size}")

    def __str__(self) -> str:
        first, last = self.ports[0], self.ports[-1]
        return f"{self.host}, port {first}" if first == last else f"{self.host}, ports {first} to {last}"


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a client.

    Attributes:
        process: Random id of the client's process. Another process with the same rank belongs to another run.
    """

    job: str
    rank: int
    process: str

    def to_message(self) -> dict[str, Any]:
        return {"hello": self.job, "rank": self.rank, "process": self.process}

    @classmethod
    def parse(cls, message: Mapping[str, Any]) -> Hello:
        """Raises ``KeyError`` if ``message`` is not a hello."""
        return cls(message["hello"], message["rank"], message["process"])


class Admission:
    """Decides which clients a server admits: each rank of its own job, and only the first process of each rank.

    A server may outlive its job if its process hangs, and the next job may use the same address. The ranks of the next job
    are new processes; they have to try the next port.
    """

    def __init__(self, first: Hello) -> None:
        self._job, self._server_rank = first.job, first.rank
        self._processes = {first.rank: first.process}
        self._outlived = False

    def refusal(self, hello: Hello) -> str:
        """Why the client is refused; "" if it is admitted."""
        if hello.job != self._job:
            return "it belongs to another job"
        known = self._processes.get(hello.rank)
        if known is None and not self._outlived:
            self._processes[hello.rank] = hello.process
            return ""
        if known == hello.process:
            return ""
        self._outlived = self._outlived or hello.rank == self._server_rank
        return f"it belongs to an earlier run: another process has used it as rank {hello.rank}"


# --- The dictionary of a store: used directly by a single process, and served to other ranks by ``StoreServer``.


class LocalStore:
    """A store in the memory of this process."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._held: dict[str, bytes] = {}

    def check(self, keys: list[str], /) -> bool:
        with self._lock:
            return all(key in self._held for key in keys)

    def get(self, key: str, /) -> bytes:
        """Raises ``KeyError`` if the key does not exist, where torch's stores would wait."""
        with self._lock:
            return self._held[key]

    def set(self, key: str, value: str, /) -> None:
        with self._lock:
            self._held[key] = value.encode()

    def add(self, key: str, amount: int, /) -> int:
        with self._lock:
            held = int(self._held.get(key, b"0")) + amount
            self._held[key] = str(held).encode()
            return held

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        with self._lock:
            held = self._held.get(key)
            if held == expected.encode() or (held is None and not expected):
                self._held[key] = desired.encode()
                return self._held[key]
            return expected.encode() if held is None else held


# --- Messages between a store and its clients: one line of JSON each.

MOST_BYTES: Final = 1 << 20
"""Largest size of a line. The longest message is a configuration."""

BLOCK: Final = 1 << 16


class ProtocolError(ConnectionError):
    """The peer does not speak this protocol."""


def encode(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def parse(line: bytes) -> dict[str, Any]:
    """Raises ``ProtocolError``."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise ProtocolError(f"expected a message of a store, received {line[:80]!r}")
    return message


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


# --- ``StoreClient``: sends requests to the job's store over its own connection, which it opens at the first request.

FIRST_S: Final = 20.0
"""How long a client looks for the store, which exists once the serving process makes its first record. Together with the
request that follows, this is less than the timeout for agreeing on the job's name.
"""

GREETING_S: Final = 8.0
"""Timeout for a greeting at one port. Another program may not answer; a store takes seconds if thousands of ranks connect at
once.
"""

ANSWER_S: Final = 8.0
PAUSE_S: Final = 0.1


class StoreLocator:
    """The address at which the store was found, for all clients of a process.

    A server that replaces it after a restart does not hold the agreements, so the clients do not accept it.

    Args:
        first_s: How long to look for the store the first time. Later it either exists or has ended.
    """

    def __init__(self, rendezvous: Rendezvous, hello: Hello, first_s: float = FIRST_S) -> None:
        self.rendezvous = rendezvous
        self._hello, self._first_s = hello, first_s
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
                connection, instance = greet(self.rendezvous.host, port, self._hello)
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


def greet(host: str, port: int, hello: Hello, timeout_s: float = GREETING_S) -> tuple[socket.socket, str]:
    """Connect, and have the server identify itself.

    Returns:
        The connection, and the id of the server, which is unique among all servers ever at this port.

    Raises:
        OSError: No server listens there, or the server is not a store.
        RefusedError: The store does not admit this rank.
    """
    deadline = time.monotonic() + timeout_s
    connection = socket.create_connection((host, port), timeout_s)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(encode(hello.to_message()))
        reply = receive(connection, deadline)
        if "refused" in reply:
            raise RefusedError(str(reply["refused"]))
        if reply.get("welcome") != hello.job or not reply.get("instance"):
            raise ProtocolError("it is not a store")
    except BaseException:
        connection.close()
        raise
    return connection, str(reply["instance"])


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


# --- ``StoreServer``: serves a dictionary to the other ranks of a job, on a daemon thread.

OPERATIONS: Final = ("check", "get", "set", "add", "compare_set")
BACKLOG: Final = 4_096
"""All ranks connect at once; the system may allow fewer."""

OUT_OF_DESCRIPTORS_S: Final = 0.05
ASKED_PER_SECOND: Final = 200
"""Requests that the server answers in a second at least. One takes 30 µs, but while training computes in Python the thread
runs only every 5 ms.
"""

SEND_S: Final = 1.0
"""Timeout for sending an answer. Answers are short and fit the system's buffer, so that sending usually takes no time."""

JOIN_S: Final = 1.0


class StoreServer:
    """Serves ``held`` at one port from now on.

    One thread serves all connections, so operations take effect one after the other. A client that does not read its answers
    is disconnected.

    Args:
        listener: A bound socket, owned by the server from now on.
        own: The hello of the serving process itself.
    """

    def __init__(self, listener: socket.socket, held: LocalStore, own: Hello) -> None:
        self._listener, self._held = listener, held
        self._admission = Admission(own)
        self._instance = uuid.uuid4().hex
        self._peers: set[_Peer] = set()
        self._woken, self._waker = socket.socketpair()
        self._closed = False
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._thread = Thread(target=self._run, name="monitor-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End, within a second. Clients lose their connections."""
        self._closed = True
        with suppress(OSError):  # the thread may have ended already
            self._waker.send(b"\0")
        self._thread.join(JOIN_S)

    def abandon(self) -> None:
        """In a forked child, which lacks the thread: close inherited sockets, so that clients notice the parent's end."""
        for inherited in (self._listener, self._woken, self._waker, *(peer.connection for peer in list(self._peers))):
            inherited.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while not self._closed:
                for key, _ in selector.select():
                    if key.data is not None:
                        self._hear(selector, key.data)
                    elif key.fileobj is self._listener:
                        self._accept(selector)
        for open_one in (self._listener, self._woken, self._waker, *(peer.connection for peer in self._peers)):
            open_one.close()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the client has gone, or no descriptor is free: others may close meanwhile
            time.sleep(OUT_OF_DESCRIPTORS_S)
            return
        connection.settimeout(SEND_S)
        peer = _Peer(connection)
        self._peers.add(peer)
        selector.register(connection, selectors.EVENT_READ, peer)

    def _hear(self, selector: selectors.BaseSelector, peer: _Peer) -> None:
        try:
            for line in peer.lines():
                peer.connection.sendall(encode(self._answer(peer, parse(line))))
        except Exception:  # the client has ended, does not read, or is another program that may send anything
            selector.unregister(peer.connection)
            self._peers.discard(peer)
            peer.connection.close()

    def _answer(self, peer: _Peer, message: dict[str, Any]) -> dict[str, Any]:
        if peer.admitted:
            return self._done(message)
        try:
            hello = Hello.parse(message)
        except KeyError:
            raise ProtocolError("the client did not send a hello") from None
        if refusal := self._admission.refusal(hello):
            return {"refused": refusal}
        peer.admitted = True
        return {"welcome": hello.job, "instance": self._instance}

    def _done(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            operation, arguments = message["do"], message["with"]
            if operation not in OPERATIONS:
                raise ValueError(f"expected one of {', '.join(OPERATIONS)}, received {operation!r}")
            found = getattr(self._held, operation)(*arguments)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return {"is": found.decode() if isinstance(found, bytes) else found}


class _Peer:
    """A client's connection, and the incomplete line that it has sent so far."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.admitted = False
        self._received = b""

    def lines(self) -> list[bytes]:
        """The lines that are complete now. Raises ``OSError`` when the connection is closed."""
        received = self.connection.recv(BLOCK)
        *lines, self._received = (self._received + received).split(b"\n")
        if not received or len(self._received) > MOST_BYTES:
            raise ProtocolError("the connection was closed, or a line has no end")
        return lines


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
