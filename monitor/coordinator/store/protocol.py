"""Where the ranks of a job look for its store, and how they make sure that it is theirs."""

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
"""How many ports in a row are tried: the first of them may be a stranger's."""

HIGHEST_PORT: Final = 65_535


class RefusedError(ConnectionError):
    """There is a store, and it is not this rank's."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Every rank derives the same one from what the launcher has told it.

    Attributes:
        host: Where the process runs that serves the store.
        ports: In the order in which they are tried.
        job: What the store of another job is recognised by.
    """

    host: str
    ports: tuple[int, ...]
    job: str

    @classmethod
    def beside(cls, host: str, port: int, world_size: int) -> Rendezvous:
        """On the host of the launcher's own meeting point, ``PORT_OFFSET`` above its port, or below where there is no above."""
        first = port + PORT_OFFSET if port + PORT_OFFSET + PORTS - 1 <= HIGHEST_PORT else port - PORT_OFFSET
        return cls(host, tuple(range(first, first + PORTS)), f"{port}/{world_size}")

    @classmethod
    def at(cls, address: str, world_size: int) -> Rendezvous:
        """At ``HOST:PORT`` and nowhere else.

        Raises:
            ValueError: It is spelled otherwise.
        """
        host, _, port = address.strip().rpartition(":")
        if not host or not (port.isascii() and port.isdecimal() and 0 < int(port) <= HIGHEST_PORT):
            raise ValueError(f"{address!r} is no address of a store: expected HOST:PORT, such as 10.0.0.1:29501.")
        return cls(host.strip("[]"), (int(port),), f"{port}/{world_size}")

    def __str__(self) -> str:
        first, last = self.ports[0], self.ports[-1]
        return f"{self.host}, port {first}" if first == last else f"{self.host}, ports {first} to {last}"


@dataclass(frozen=True, slots=True)
class Hello:
    """What a client says first.

    Attributes:
        process: Of the client, drawn at random: another process that says to be the same rank is of another run.
    """

    job: str
    rank: int
    process: str

    def to_message(self) -> dict[str, Any]:
        return {"hello": self.job, "rank": self.rank, "process": self.process}

    @classmethod
    def parse(cls, message: Mapping[str, Any]) -> Hello:
        """Raises ``KeyError`` for what is none."""
        return cls(message["hello"], message["rank"], message["process"])


class Admission:
    """Whom a server lets in: each rank of its own job, and of those only the process that came first.

    A server may outlive its job, when its process hangs, and the next job may be told to meet at the same place. The ranks of
    that one are new processes, which have to look further.
    """

    def __init__(self, first: Hello) -> None:
        self._job, self._server_rank = first.job, first.rank
        self._processes = {first.rank: first.process}
        self._outlived = False

    def refusal(self, hello: Hello) -> str:
        """Why not; "" if it is let in."""
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


# --- The store of a process that has no other ranks, and what a ``StoreServer`` serves to those that it has.


class LocalStore:
    """A ``Store`` in the memory of a process that has no other ranks."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._held: dict[str, bytes] = {}

    def check(self, keys: list[str], /) -> bool:
        with self._lock:
            return all(key in self._held for key in keys)

    def get(self, key: str, /) -> bytes:
        """Raises ``KeyError`` where others would wait: nobody else could set it."""
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


# --- Messages between a store and those who ask it: a line of JSON each.

MOST_BYTES: Final = 1 << 20
"""Of a line. The longest that is sent is a configuration."""

BLOCK: Final = 1 << 16


class ProtocolError(ConnectionError):
    """The other side speaks something else."""


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
    """The one message that is under way. Bounded however slowly it comes.

    Args:
        deadline: By ``time.monotonic``.

    Raises:
        OSError: It did not come, or is none.
    """
    line = b""
    while not line.endswith(b"\n"):
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        received = connection.recv(BLOCK)
        line += received
        if not received or len(line) > MOST_BYTES:
            raise ProtocolError("the connection was closed" if not received else f"a line has more than {MOST_BYTES} bytes")
    return parse(line)
