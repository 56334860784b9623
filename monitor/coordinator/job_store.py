"""How the monitor's threads use the key-value store that the ranks of a job share.

No operation waits for another rank: ``wait`` blocks every other call on the same connection, and ``get`` waits if the key does
not exist. So a key is read only once it is known to exist; the monitor deletes no key.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from threading import Event, Thread
from typing import Any, Final, Protocol

from monitor.failures import LOGGER, Failures

ASKED_PER_SECOND: Final = 2_000
"""Requests a second that one part of the monitor may send to a job's store, whatever the number of ranks. For a store in native
code.
"""


class SharedStore(Protocol):
    """The methods used of ``torch.distributed``'s stores: ``TCPStore``, ``FileStore``, ``HashStore``, ``PrefixStore``.

    ``clone`` is used too, if the store has it (torch 2.8).
    """

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys exist. Does not wait for them."""

    def get(self, key: str, /) -> bytes:
        """The value of ``key``. Waits until the key exists."""

    def set(self, key: str, value: str, /) -> None:
        """Set ``key``, whatever it holds."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter, which begins at 0, and return its new value."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set ``key`` if it holds ``expected``, or is new and ``expected`` is empty; return its value afterwards.

        If the key does not exist and ``expected`` is not empty, nothing is set and ``expected`` is returned.
        """


RECONNECT_TIMEOUT: Final = timedelta(seconds=10)
"""Timeout of the monitor's own connection. If it is lost, training has another."""


def own_connection(store: Any) -> Any:
    """The same store over a connection of the monitor's own.

    Training may wait on its connection for minutes, and a monitor call that hangs must not block training. A ``FileStore``
    counts its users, and its file is deleted with the last one: drop the reference to what this returns.
    """
    own = _cloned(store)
    if own is not store and has_server(own):  # clones of other stores share the timeout
        own.set_timeout(RECONNECT_TIMEOUT)
    return own


def _cloned(store: Any) -> Any:
    try:
        return store.clone()
    except (AttributeError, TypeError, NotImplementedError):  # before torch 2.8
        return _connected_anew(store)


def _connected_anew(store: Any) -> Any:
    """Another client of the server, without the prefix of ``store``; stores without a server can be shared by threads."""
    base = _base(store)
    return type(base)(base.host, base.port, is_master=False, timeout=RECONNECT_TIMEOUT) if has_server(base) else store


def _base(store: Any) -> Any:
    """The store below all prefixes."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def has_server(store: Any) -> bool:
    """Whether the store is the client of a server."""
    base = _base(store)
    return hasattr(base, "host") and hasattr(base, "port")


def is_file(store: Any) -> bool:
    """Whether it is a ``FileStore``, whose file grows with each change."""
    return hasattr(_base(store), "path")


@dataclass(frozen=True, slots=True)
class StoreConnection:
    """How a rank reaches the others.

    Attributes:
        store: The process group's store; None for a single process.
        prefix: Prefix of the keys, from the run's job id. No other run or recording may use it.
        alive: Whether the process group still exists. Once it does not, the store is not used any more and is released.
        asked_per_second: How many requests a second all ranks together may send to the store.
    """

    rank: int = 0
    world: int = 1
    store: Any = None
    prefix: str = ""
    alive: Callable[[], bool] = lambda: True
    asked_per_second: float = ASKED_PER_SECOND


# --- ``StoreThread``: asks the store again and again, until it is stopped.

LONGEST_PAUSE_S: Final = 300.0
SAY_AFTER_S: Final = 30.0
"""How long an error may last before it is reported: ranks do not start or end at the same moment."""

JOIN_S: Final = 1.0


class StoreThread(ABC):
    """A daemon thread that talks to the store over a connection of its own. Subclasses say what it does in a turn.

    After an error of the store it tries again with increasing pauses.

    Args:
        name: Of the thread.
        store: The process group's store.
        alive: Whether the process group still exists. Once it does not, the store is not used any more and is released.

    Attributes:
        busy_since: When the turn in progress began, in the time of ``time.monotonic``; None between turns.
    """

    def __init__(self, name: str, store: Any, alive: Callable[[], bool], failures: Failures) -> None:
        self._alive, self._failures = alive, failures
        self._job_store: Any = store
        self._connection: SharedStore | None = None
        self._failing_since: float | None = None
        self._retry_s = 0.0
        self._wake, self._stopped = Event(), Event()
        self._retired = False
        self.busy_since: float | None = None
        self._thread = Thread(target=self._run, name=name, daemon=True)

    @abstractmethod
    def turn(self, store: SharedStore) -> None:
        """Ask the store. May raise: then the next turn has a new connection."""

    @abstractmethod
    def pause(self) -> float:
        """Seconds until the next turn."""

    @abstractmethod
    def leave(self, store: SharedStore) -> None:
        """Do what is left, before the thread ends."""

    @abstractmethod
    def unreachable(self, error: Exception) -> None:
        """Report that the store has failed for ``SAY_AFTER_S``, or at once if it ``is_urgent``."""

    @abstractmethod
    def ended_early(self, error: Exception) -> None:
        """Report that the thread ends because of an error."""

    @property
    @abstractmethod
    def shortest_retry(self) -> float:
        """Half of the pause after the first error, in seconds."""

    @property
    def is_urgent(self) -> bool:
        """Whether an error is to be reported at once."""
        return False

    def begin(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Have the next turn begin now. Never waits."""
        self._wake.set()

    def stop(self) -> None:
        """End within about a second; a store call that hangs is abandoned."""
        waits = self._thread.ident is not None and not self._stopped.is_set()
        self._stopped.set()
        self._wake.set()
        if waits:
            self._thread.join(JOIN_S)

    def retire(self) -> None:
        """End after the next turn. Takes no lock."""
        self._retired = True

    def _run(self) -> None:
        try:
            while not (self._stopped.is_set() or self._retired) and self._alive():
                self._take_turn()
                self._wake.wait(self.pause() if self._failing_since is None else self._retry_s)
                self._wake.clear()
            self._leave()
        except Exception as error:
            self.ended_early(error)
        finally:
            self._connection = self._job_store = None  # a FileStore's file is deleted with its last reference

    def _take_turn(self) -> None:
        self.busy_since = time.monotonic()
        try:
            self.turn(self._connected())
        except Exception as error:
            self._failed(error)
        else:
            self._failing_since = None
        self.busy_since = None

    def _connected(self) -> SharedStore:
        """The first connection is made from the job's store; a lost one is replaced from the connection before."""
        if self._connection is None:
            self._connection = own_connection(self._job_store)
            self._job_store = self._connection  # a reference would keep training's store alive
        return self._connection

    def _failed(self, error: Exception) -> None:
        """Retry with increasing pauses. The store's process may only have ended a little earlier than this one."""
        now = time.monotonic()
        self._connection = None
        if self._failing_since is None:
            self._failing_since, self._retry_s = now, self.shortest_retry
        self._retry_s = min(2 * self._retry_s, LONGEST_PAUSE_S)
        if (now - self._failing_since >= SAY_AFTER_S or self.is_urgent) and self._alive():
            self.unreachable(error)

    def _leave(self) -> None:
        if self._connection is None or not self._alive():
            return
        try:
            self.leave(self._connection)
        except Exception as error:
            LOGGER.debug("the store was gone before this rank: %r", error)
