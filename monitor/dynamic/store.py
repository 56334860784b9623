"""The key-value store that the ranks of a job share, and the few operations on it that are used here.

None of them waits for another rank: ``wait`` blocks every other call on the same connection, and ``get`` waits where there is
no such key. So a key is read only once it is known to exist; nothing here deletes one.
"""

from __future__ import annotations

from collections.abc import Generator
from datetime import timedelta
from typing import Any, Final, NamedTuple, Protocol, TypeVar

RECONNECT_TIMEOUT: Final = timedelta(seconds=10)
"""Of a connection of our own. A lost one is not missed for minutes by training, which has another."""

T = TypeVar("T")


class Store(Protocol):
    """What is used of the stores of ``torch.distributed``: ``TCPStore``, ``FileStore``, ``HashStore``, ``PrefixStore``.

    ``clone`` is used too where there is one (torch 2.8).
    """

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys exist. Does not wait for them."""

    def get(self, key: str, /) -> bytes:
        """What ``key`` holds. Waits until there is such a key."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter, which begins at 0, and return what it holds then."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set ``key`` if it holds ``expected``, or is new and ``expected`` is empty; return what it then holds.

        Of a key that does not exist, where ``expected`` is not empty, nothing is set and ``expected`` is returned.
        """


class Check(NamedTuple):
    """Whether ``key`` exists: a bool."""

    key: str


class Get(NamedTuple):
    """What ``key``, which exists, holds: a text."""

    key: str


class Add(NamedTuple):
    """Add to the counter ``key``: the integer that it then holds."""

    key: str
    amount: int


class CompareSet(NamedTuple):
    """Set ``key`` if it holds ``expected`` ("": if there is no such key): the text that it then holds."""

    key: str
    expected: str
    desired: str


Operation = Check | Get | Add | CompareSet | None
"""One indivisible step. None touches nothing: between two steps others may take theirs."""

Talk = Generator[Operation, Any, T]
"""What a rank does with the store, as a generator of operations that is sent the result of each. So whoever runs it decides
what happens between any two of them: in production nothing in particular, in the tests everything that can.
"""


def talk(conversation: Talk[T], store: Store, prefix: str) -> T:
    """Carry a conversation out, under keys that begin with ``prefix``.

    Raises:
        Exception: Whatever the store raised. The conversation ends there, and can be begun anew.
    """
    try:
        operation = next(conversation)
        while True:
            operation = conversation.send(_done(operation, store, prefix))
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        conversation.close()


def _done(operation: Operation, store: Store, prefix: str) -> Any:
    match operation:
        case Check(key):
            return store.check([prefix + key])
        case Get(key):
            return store.get(prefix + key).decode()
        case Add(key, amount):
            return store.add(prefix + key, amount)
        case CompareSet(key, expected, desired):
            return store.compare_set(prefix + key, expected, desired).decode()
    return None


def own_connection(store: Any) -> Any:
    """The same store over a connection that nobody else uses: training may wait on its own for minutes, and a call of ours that
    hangs must not be in its way.

    A ``FileStore`` counts its users, and its file goes with the last one: let go of what this returns.
    """
    own = _cloned(store)
    if own is not store and _is_client(_base(own)):  # other stores share their timeout with their clones
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
    return type(base)(base.host, base.port, is_master=False, timeout=RECONNECT_TIMEOUT) if _is_client(base) else store


def _base(store: Any) -> Any:
    """What the prefixes stand before."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def _is_client(store: Any) -> bool:
    """Whether it is the client of a server."""
    return hasattr(store, "host") and hasattr(store, "port")
