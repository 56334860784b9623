"""The store of a process that has no other ranks, and what a ``StoreServer`` serves to those that it has."""

from __future__ import annotations

from threading import Lock


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
