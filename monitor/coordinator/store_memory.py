"""The dictionary of a store: used directly by a single process, and served to other ranks by ``StoreServer``.

Its keys and values are bounded, because other processes send them. An operation over a bound raises ``ValueError`` and changes
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock
from typing import Final

LONGEST_KEY: Final = 1_024
"""Bytes. The monitor's own keys have fewer than 200: the job id, a purpose, a rank."""

LARGEST_VALUE: Final = 1 << 19
"""Bytes. The largest values are what a rank publishes about its copies (128 KiB at most) and configurations (some KiB)."""

KEYS: Final = 100_000
"""Most keys besides those of the ranks: a name for each recording, and four keys for each change of the configuration."""

KEYS_OF_A_RANK: Final = 64
BYTES: Final = 64 << 20
BYTES_OF_A_RANK: Final = 256 << 10
BYTES_OF_AN_ENTRY: Final = 200
"""What Python needs for a key beside the bytes of key and value."""

LARGEST_NUMBER: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class StoreCapacity:
    """How much a store holds.

    Attributes:
        content: Bytes of all keys and values, ``BYTES_OF_AN_ENTRY`` for each key included.
    """

    keys: int
    content: int

    @classmethod
    def of(cls, world_size: int) -> StoreCapacity:
        """For a job of so many ranks."""
        return cls(KEYS + KEYS_OF_A_RANK * world_size, BYTES + BYTES_OF_A_RANK * world_size)


class LocalStore:
    """A store in the memory of this process."""

    def __init__(self, capacity: StoreCapacity | None = None) -> None:
        self._lock = Lock()
        self._capacity = capacity or StoreCapacity.of(1)
        self._held: dict[str, bytes] = {}
        self._content = 0

    def check(self, keys: list[str], /) -> bool:
        with self._lock:
            return all(key in self._held for key in keys)

    def get(self, key: str, /) -> bytes:
        """Raises ``KeyError`` if the key does not exist, where torch's stores would wait."""
        with self._lock:
            return self._held[key]

    def set(self, key: str, value: str, /) -> None:
        with self._lock:
            self._put(key, value.encode())

    def add(self, key: str, amount: int, /) -> int:
        if type(amount) is not int:
            raise TypeError(f"expected an integer to add, received {type(amount).__name__}")
        with self._lock:
            held = int(self._held.get(key, b"0")) + amount
            if abs(held) > LARGEST_NUMBER:
                raise ValueError(f"the sum has more than 64 bits: {LARGEST_NUMBER:,} is the largest number")
            self._put(key, str(held).encode())
            return held

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        with self._lock:
            held = self._held.get(key)
            if held == expected.encode() or (held is None and not expected):
                self._put(key, desired.encode())
                return self._held[key]
            return expected.encode() if held is None else held

    def _put(self, key: str, value: bytes) -> None:
        """Set a key, with the lock held."""
        length = len(key.encode())
        if length > LONGEST_KEY:
            raise ValueError(f"a key has {length:,} bytes: {LONGEST_KEY:,} are allowed")
        if len(value) > LARGEST_VALUE:
            raise ValueError(f"a value has {len(value):,} bytes: {LARGEST_VALUE:,} are allowed")
        before = self._held.get(key)
        replaced = len(before) if before is not None else -length - BYTES_OF_AN_ENTRY
        content = self._content + len(value) - replaced
        if content > self._capacity.content or (before is None and len(self._held) >= self._capacity.keys):
            raise ValueError(f"the store is full: {len(self._held):,} keys with {self._content:,} bytes")
        self._held[key], self._content = value, content
