"""The store's protocol: where ranks look for the store, how the server admits them, its dictionary, and the messages."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any, Final

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
