"""``StoreClient``: sends requests to the job's store over its own connection, which it opens at the first request."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from threading import Lock
from typing import Any, Final

from monitor.coordinator.store.protocol import Hello, ProtocolError, RefusedError, Rendezvous, encode, receive

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
        said: OSError | None = None
        for port in ports:
            try:
                connection, instance = greet(self.rendezvous.host, port, self._hello)
            except OSError as error:
                said = error if said is None or isinstance(error, RefusedError) else said
                continue
            if self._found is None:
                self._found = port, instance
            if self._found == (port, instance):
                return connection
            connection.close()
            said = RefusedError("another process replaced its server, and does not hold the agreements")
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
