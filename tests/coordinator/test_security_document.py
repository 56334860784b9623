"""``docs/security.md`` states the figures that the code has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from monitor.coordinator import store, store_key, store_memory, store_messages, store_server

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
TABLE = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", TEXT.partition("## Bounds of the store")[2], re.M))
FIGURES = {
    "time to prove that a client knows the key, however slowly it sends": [store_server.HELLO_S],
    "connections that have not proved it": [store_server.MOST_WAITING, store_server.GRACE_S],
    "size of a message before that proof": [store_server.MOST_HELLO_BYTES],
    "connections of all ranks": [store_server.CONNECTIONS_OF_A_RANK, 3],
    "descriptors": [store_server.LEAST_RESERVE],
    "size of a message": [store_messages.MOST_BYTES],
    "incomplete requests and unread answers of all clients": [store_server.MOST_BUFFERED],
    "time to read an answer": [store_server.UNREAD_S],
    "requests of a client in one turn": [store_server.AT_ONCE],
    "key, value": [store_memory.LONGEST_KEY, store_memory.LARGEST_VALUE],
    "number of keys": [store_memory.KEYS, store_memory.KEYS_OF_A_RANK],
    "bytes of keys and values": [store_memory.BYTES, store_memory.BYTES_OF_A_RANK],
    "counters": [store_memory.LARGEST_NUMBER.bit_length() + 1],
}


def test_the_table_has_each_bound() -> None:
    assert TABLE.keys() - {"bound", "---"} == FIGURES.keys()


@pytest.mark.parametrize("bound", FIGURES)
def test_each_figure_is_that_of_the_code(bound: str) -> None:
    found = [float(number.replace(",", "")) for number in re.findall(r"(?<!\w)\d[\d,]*(?:\.\d+)?", TABLE[bound])]
    assert found == FIGURES[bound]


def test_the_names_of_the_key_are_those_of_the_code() -> None:
    assert f"`{store_key.KEY_VARIABLE}` in the environment of every rank" in TEXT
    assert f"a secret of at least {store_key.SHORTEST_KEY} characters" in TEXT
    assert f"the file `{store_key.KEY_FILE}` in the output directory" in TEXT
    assert f"tries again for {store.FIRST_S:g} seconds" in TEXT
