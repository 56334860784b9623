"""What a store holds, and what it refuses to hold."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, strategies as st

from monitor.coordinator.store_memory import (
    BYTES_OF_AN_ENTRY,
    LARGEST_NUMBER,
    LARGEST_VALUE,
    LONGEST_KEY,
    LocalStore,
    StoreCapacity,
)

KEYS = st.sampled_from(["a", "b", "é", "c", "counter"])
TEXTS = st.sampled_from(["", "1", "é", "x" * 30, "x" * 400])
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), KEYS, TEXTS),
        st.tuples(st.just("add"), KEYS, st.integers()),
        st.tuples(st.just("compare_set"), KEYS, TEXTS, TEXTS),
    ),
    max_size=30,
)


@given(OPERATIONS)
def test_whatever_is_asked_the_store_keeps_its_size(operations: list[tuple[Any, ...]]) -> None:
    capacity = StoreCapacity(keys=3, content=3 * BYTES_OF_AN_ENTRY + 500)
    store = LocalStore(capacity)
    for name, *arguments in operations:
        with suppress(ValueError):
            getattr(store, name)(*arguments)
        held = {key: store.get(key) for key in ["a", "b", "é", "c", "counter"] if store.check([key])}
        assert len(held) <= capacity.keys
        content = sum(len(key.encode()) + len(value) + BYTES_OF_AN_ENTRY for key, value in held.items())
        assert content <= capacity.content
        assert content == store._content


def test_a_full_store_still_changes_what_it_holds() -> None:
    store = LocalStore(StoreCapacity(keys=1, content=1_000))
    store.set("key", "x" * 700)
    with pytest.raises(ValueError, match="the store is full: 1 keys with 903 bytes"):
        store.set("other", "")
    store.set("key", "x" * 797)
    with pytest.raises(ValueError, match="the store is full"):
        store.set("key", "x" * 798)
    assert store.get("key") == b"x" * 797


def test_keys_values_and_numbers_have_a_largest_size() -> None:
    store = LocalStore()
    store.set("k" * LONGEST_KEY, "v" * LARGEST_VALUE)
    assert store.add("count", LARGEST_NUMBER) == LARGEST_NUMBER
    with pytest.raises(ValueError, match="a key has 1,025 bytes"):
        store.set("k" * (LONGEST_KEY + 1), "")
    with pytest.raises(ValueError, match="a value has 524,289 bytes"):
        store.compare_set("key", "", "v" * (LARGEST_VALUE + 1))
    with pytest.raises(ValueError, match="more than 64 bits"):
        store.add("count", 1)
    assert store.get("count") == b"%d" % LARGEST_NUMBER
    assert not store.check(["key"])


def test_room_grows_with_the_number_of_ranks() -> None:
    """Each rank publishes at most 128 KiB about its copies, under two keys."""
    few, many = StoreCapacity.of(2), StoreCapacity.of(1_002)
    assert many.content - few.content >= 1_000 * 2 * (128 << 10)
    assert many.keys - few.keys >= 1_000 * 2
