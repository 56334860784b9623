"""``StoreServer``: serves a dictionary to the other ranks of a job, on a daemon thread.

It serves inside a training process, and any program may connect to its port. So everything that a client can cause is bounded:
connections, descriptors, memory, time, and work in a turn. A send never waits.
"""

from __future__ import annotations

import resource
import secrets
import selectors
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread
from typing import Any, Final

from monitor.coordinator.store_memory import LocalStore
from monitor.coordinator.store_messages import MOST_BYTES, Handshake, Hello, ProtocolError, RefusedError, encode, parse, text_in
from monitor.failures import LOGGER

OPERATIONS: Final = ("check", "get", "set", "add", "compare_set")
BACKLOG: Final = 4_096
"""All ranks connect at once; the system may allow fewer."""

JOIN_S: Final = 1.0

HELLO_S: Final = 5.0
UNREAD_S: Final = 8.0
MOST_WAITING: Final = 64
"""Connections that have not proved anything yet."""

GRACE_S: Final = 0.1
"""How long such a connection may be silent while others wait for its place. A rank that lost its place tries again."""

CONNECTIONS_OF_A_RANK: Final = 24
"""Each recording of a rank has three at most: for its name, for changes of the configuration, for comparing copies."""

AT_ONCE: Final = 16
"""Requests of a client that are answered, and connections that are accepted, before the others have their turn."""

MOST_BUFFERED: Final = 64 << 20
"""Bytes of all requests that are incomplete and answers that are not sent yet."""

LEAST_RESERVE: Final = 64
"""Descriptors that are left to training, if a quarter of those that the system allows is less."""

OUT_OF_DESCRIPTORS_S: Final = 0.05
MOST_HELLO_BYTES: Final = 1 << 10
"""Largest size of a line from a client that has not proved that it knows the key."""

RECEIVED_AT_ONCE: Final = 1 << 16
MOST_ERROR: Final = 500
"""Characters of an error."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """The bounds of a server.

    Attributes:
        ranks: The number of ranks of the job.
        hello_s: Within so long a client has to prove that it knows the key, however slowly it sends.
        unread_s: Within so long a client has to read its answers.
    """

    ranks: int
    hello_s: float = HELLO_S
    unread_s: float = UNREAD_S

    @property
    def connections(self) -> int:
        """Most connections of all ranks together."""
        return CONNECTIONS_OF_A_RANK * self.ranks


class Admission:
    """Decides which clients a server admits: each rank of its own job, and only the first process of each rank.

    A server may outlive its job if its process hangs, and the next job may use the same address. The ranks of the next job
    are new processes; they have to try the next port.
    """

    def __init__(self, first: Hello, ranks: int) -> None:
        self._job, self._server_rank, self._ranks = first.job, first.rank, ranks
        self._processes = {first.rank: first.process}
        self._outlived = False

    def is_of_job(self, hello: Hello) -> bool:
        return hello.job == self._job and 0 <= hello.rank < self._ranks

    def refusal(self, hello: Hello) -> str:
        """Why a client of the job is refused; "" if it is admitted."""
        known = self._processes.get(hello.rank)
        if known is None and not self._outlived:
            self._processes[hello.rank] = hello.process
            return ""
        if known == hello.process:
            return ""
        self._outlived = self._outlived or hello.rank == self._server_rank
        return RefusedError.EARLIER_RUN


class StoreServer:
    """Serves ``held`` at one port from now on.

    One thread serves all connections, so operations take effect one after the other.

    Args:
        listener: A bound socket, owned by the server from now on.
        own: The hello of the serving process itself.
        key: The job's.
    """

    def __init__(self, listener: socket.socket, held: LocalStore, own: Hello, key: bytes, limits: ServerLimits) -> None:
        self._listener, self._held, self._rank, self._key, self._limits = listener, held, own.rank, key, limits
        self._admission = Admission(own, limits.ranks)
        self._instance = secrets.token_hex(16)
        self._peers: set[_Peer] = set()
        self._waiting: dict[_Peer, float] = {}
        """Peers that are not admitted, and when they connected, the first one first."""
        self._unread: dict[_Peer, float] = {}
        """Peers that have not read all answers, and since when."""
        self._busy: set[_Peer] = set()
        """Peers that have sent more requests than were answered in their turn."""
        self._buffered = 0
        self._accepts_from: float | None = None
        self._is_short = False
        self._woken, self._waker = socket.socketpair()
        self._closed = False
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
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
        self._selector.close()
        for inherited in (self._listener, self._woken, self._waker, *(peer.connection for peer in list(self._peers))):
            inherited.close()

    def _run(self) -> None:
        try:
            while not self._closed:
                self._take_turn()
        except Exception as error:
            said = "Ranks cannot agree on a name or on changes of the configuration any more. Training continues."
            LOGGER.warning("[rank %d] the job's store has ended: %r. %s", self._rank, error, said)
        finally:
            self.abandon()

    def _take_turn(self) -> None:
        found = self._selector.select(self._pause())
        for peer in dict.fromkeys([*(key.data for key, _ in found if key.data is not None), *self._busy]):
            self._attend(peer)
        now = time.monotonic()
        self._drop_late(now)
        if self._accepts_from is not None and now >= self._accepts_from:
            self._accepts_from = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        if any(key.fileobj is self._listener for key, _ in found):
            self._accept(now)

    # --- Connections that are not admitted yet.

    def _accept(self, now: float) -> None:
        for _ in range(AT_ONCE):
            if len(self._waiting) >= MOST_WAITING and not self._displace(now):
                return self._accept_later(now + GRACE_S)
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return None
            except OSError:  # the client has gone, or no descriptor is free: others may close meanwhile
                return self._accept_later(now + OUT_OF_DESCRIPTORS_S)
            if connection.fileno() >= _descriptors_allowed():
                connection.close()
                self._report_shortage()
                self._displace(now)
                return self._accept_later(now + OUT_OF_DESCRIPTORS_S)
            self._begin(_Peer(connection, now), now)
        return None

    def _begin(self, peer: _Peer, now: float) -> None:
        self._peers.add(peer)
        self._waiting[peer] = now
        self._selector.register(peer.connection, peer.events, peer)

    def _displace(self, now: float) -> bool:
        """Drop the client that has waited longest, if it has been silent for ``GRACE_S``."""
        silent = next((peer for peer in self._waiting if now - peer.heard >= GRACE_S), None)
        if silent is not None:
            self._drop(silent)
        return silent is not None

    def _accept_later(self, when: float) -> None:
        self._accepts_from = when
        self._selector.unregister(self._listener)

    def _report_shortage(self) -> None:
        """Only if ranks hold the descriptors: connections of others end by themselves."""
        if not self._is_short and len(self._peers) > 2 * MOST_WAITING:
            self._is_short = True
            said = "Ranks without a connection have names of their own, and do not see changes of the configuration"
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            LOGGER.warning(
                "[rank %d] the job's store has %d connections, as many as the limit of %d open files leaves it. %s. "
                "Raise the limit (ulimit -n) on this host before the job starts.",
                *(self._rank, len(self._peers), limit, said),
            )

    def _drop_late(self, now: float) -> None:
        for peers, allowed_s in ((self._waiting, self._limits.hello_s), (self._unread, self._limits.unread_s)):
            for peer in [one for one, since in peers.items() if now - since >= allowed_s]:
                self._drop(peer)

    def _pause(self) -> float | None:
        """Seconds until something is to be done that no client causes; None if there is nothing."""
        if self._busy:
            return 0.0
        due = [since + self._limits.hello_s for since in list(self._waiting.values())[:1]]
        due += [since + self._limits.unread_s for since in list(self._unread.values())[:1]]
        due += [self._accepts_from] if self._accepts_from is not None else []
        return max(0.0, min(due) - time.monotonic()) if due else None

    # --- All connections.

    def _attend(self, peer: _Peer) -> None:
        """Receive from a client, or send to it, and answer some of its requests."""
        try:
            if peer.outgoing:
                peer.send()
            elif not peer.has_line():
                peer.receive()
            self._answer_some(peer)
            self._note_buffers(peer)
        except Exception:  # the client has ended, or is another program that may send anything
            self._drop(peer)

    def _answer_some(self, peer: _Peer) -> None:
        for _ in range(AT_ONCE):
            if peer.outgoing or not peer.has_line():
                return
            peer.outgoing += self._answer(peer, peer.next_line())
            peer.send()

    def _note_buffers(self, peer: _Peer) -> None:
        """Note what is left to do for a client. Raises ``ProtocolError`` if all clients together have too much."""
        self._buffered += peer.buffered - peer.counted
        peer.counted = peer.buffered
        if self._buffered > MOST_BUFFERED:
            raise ProtocolError("the clients do not complete their requests, or do not read their answers")
        if peer.outgoing:
            self._unread.setdefault(peer, time.monotonic())
        else:
            self._unread.pop(peer, None)
        (self._busy.add if not peer.outgoing and peer.has_line() else self._busy.discard)(peer)
        if self._selector.get_key(peer.connection).events != peer.events:
            self._selector.modify(peer.connection, peer.events, peer)

    def _drop(self, peer: _Peer) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(peer.connection)
        self._buffered -= peer.counted
        self._peers.discard(peer)
        self._busy.discard(peer)
        self._waiting.pop(peer, None)
        self._unread.pop(peer, None)
        peer.connection.close()

    def _answer(self, peer: _Peer, line: bytes) -> bytes:
        if peer.admitted:
            return self._done(line)
        return encode(self._challenge(peer, parse(line)) if peer.handshake is None else self._admit(peer, parse(line)))

    def _challenge(self, peer: _Peer, message: dict[str, Any]) -> dict[str, Any]:
        hello = Hello.parse(message)
        peer.handshake = Handshake(hello, text_in(message, "nonce"), secrets.token_hex(16), self._instance)
        if not self._admission.is_of_job(hello):
            return peer.refused(RefusedError.OTHER_JOB)
        return peer.handshake.to_message()

    def _admit(self, peer: _Peer, message: dict[str, Any]) -> dict[str, Any]:
        handshake = peer.handshake
        if handshake is None or peer.is_refused:
            raise ProtocolError("the client was refused")
        if not handshake.is_proved(self._key, "client", message.get("proof")):
            return peer.refused(RefusedError.OTHER_KEY)
        if len(self._peers) - len(self._waiting) >= self._limits.connections:
            return peer.refused(RefusedError.FULL)
        if refusal := self._admission.refusal(handshake.hello):
            return peer.refused(refusal)
        peer.admitted = True
        self._waiting.pop(peer, None)
        return {"welcome": handshake.proof(self._key, "server")}

    def _done(self, line: bytes) -> bytes:
        """The answer to a request of a rank: an error for anything that is not a request."""
        try:
            message = parse(line)
            operation, arguments = message["do"], message["with"]
            if operation not in OPERATIONS:
                raise ValueError(f"expected one of {', '.join(OPERATIONS)}, received {operation!r}")
            found = getattr(self._held, operation)(*arguments)
            answer = encode({"is": found.decode() if isinstance(found, bytes) else found})
            if len(answer) > MOST_BYTES:
                raise ValueError(f"the answer has {len(answer):,} bytes: {MOST_BYTES:,} are allowed")
        except Exception as error:
            return encode({"error": f"{type(error).__name__}: {error}"[:MOST_ERROR]})
        return answer


class _Peer:
    """A client's connection, with what it has sent of requests and what it has not read of answers.

    Attributes:
        heard: When it connected or last sent a whole line, until it is admitted.
        counted: ``buffered`` as the server has counted it.
    """

    def __init__(self, connection: socket.socket, now: float) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # the host of a rank may fail without a word
        self.connection = connection
        self.handshake: Handshake | None = None
        self.admitted = self.is_refused = False
        self.outgoing = bytearray()
        self.heard, self.counted = now, 0
        self._received = bytearray()
        self._searched = 0

    @property
    def buffered(self) -> int:
        return len(self._received) + len(self.outgoing)

    @property
    def events(self) -> int:
        """The events to wait for. A client gets no further answer before it has read the one before."""
        return selectors.EVENT_WRITE if self.outgoing else selectors.EVENT_READ

    def refused(self, reason: str) -> dict[str, Any]:
        self.is_refused = True
        return {"refused": reason}

    def receive(self) -> None:
        """Raises ``OSError`` when the connection is closed or a line is too long."""
        most = MOST_BYTES if self.admitted else MOST_HELLO_BYTES
        with suppress(BlockingIOError):
            received = self.connection.recv(min(RECEIVED_AT_ONCE, most))
            self._received += received
            if not received or (not self.has_line() and len(self._received) > most):
                raise ProtocolError("the connection was closed, or a line has no end")

    def has_line(self) -> bool:
        end = self._received.find(b"\n", self._searched)
        self._searched = end if end >= 0 else len(self._received)
        return end >= 0

    def next_line(self) -> bytes:
        """The first of the received lines, of which there is one."""
        line = bytes(self._received[: self._searched])
        del self._received[: self._searched + 1]
        self._searched = 0
        self.heard = time.monotonic()
        return line

    def send(self) -> None:
        """Send what the system takes now."""
        with suppress(BlockingIOError):
            del self.outgoing[: self.connection.send(self.outgoing)]


def _descriptors_allowed() -> int:
    """The first number that no connection may have. The system gives the lowest free one, so training has those above."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 31 if limit == resource.RLIM_INFINITY else limit - max(LEAST_RESERVE, limit // 4)
