"""``StoreServer``: serves a dictionary to the other ranks of a job, on a daemon thread."""

from __future__ import annotations

import selectors
import socket
import time
import uuid
from contextlib import suppress
from threading import Thread
from typing import Any, Final

from monitor.coordinator.store.protocol import BLOCK, MOST_BYTES, Admission, Hello, LocalStore, ProtocolError, encode, parse

OPERATIONS: Final = ("check", "get", "add", "compare_set")
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
