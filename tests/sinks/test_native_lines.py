"""What the call into C refuses, what it releases, and that threads may make it side by side."""

from __future__ import annotations

import importlib
import sys
import threading
from typing import Any

import numpy as np
import pytest

from monitor.sinks import csv, csv as row_text
from monitor.sinks.csv import (
    Column,
    CountColumn,
    CsvLines,
    NumberColumn,
    TextCache,
    TextColumn,
    native_lines as joined,
    python_lines,
)
from monitor.stats.host.array_kernel import VARIABLE

_lines: Any = importlib.import_module("monitor.sinks._lines")


def columns(rows: int, seed: int = 0) -> list[Column]:
    random = np.random.default_rng(seed)
    values, valid = random.standard_normal(rows) * 10.0 ** random.integers(-9, 9, rows), random.random(rows) < 0.9
    names = TextCache([f"ünï.{i}" for i in range(7)], str)
    return [TextColumn(names, random.integers(0, 7, rows)), NumberColumn(values, valid), CountColumn(np.rint(values), valid)]


@pytest.mark.parametrize("lengths", [[1], [3, 1], [5, 100, 2], [700, 1300]])
def test_pieces_are_those_of_python(lengths: list[int]) -> None:
    some = columns(sum(lengths))
    texts = [bytes(text) for text in joined(some, lengths, 6)]
    assert texts == [bytes(text) for text in python_lines(some, lengths, 6)]
    assert [text.count(b"\n") for text in texts] == lengths


def test_texts_that_come_later_are_found() -> None:
    names = ["a"]
    cells = TextCache(names, str)
    assert [bytes(text) for text in joined([TextColumn(cells, np.array([0]))], [1], 6)] == [b"a\n"]
    names += ["", "é"]
    assert [bytes(text) for text in joined([TextColumn(cells, np.array([2, 1, 0]))], [1, 2], 6)] == ["é\n".encode(), b"\na\n"]


def told(**changes: Any) -> tuple[Any, ...]:
    call = {
        "columns": ((1, np.ones(3), np.ones(3, dtype=bool)),),
        "ends": np.array([1, 3]),
        "powers": row_text._powers_of_ten(),
        "first": row_text.LEAST_POWER,
        "ndigits": 6,
        "fixed_from": 1e-3,
        "positions": np.zeros(2, dtype=np.int64),
    }
    return tuple((call | changes).values())


def test_what_it_returns_are_text_and_where_pieces_end() -> None:
    positions = np.zeros(2, dtype=np.int64)
    assert _lines.lines(*told(positions=positions)) == b"1.000000\n" * 3
    assert positions.tolist() == [9, 27]


OFFSETS = np.array([0, 1, 2])
TRUE = np.ones(3, dtype=bool)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"columns": ()}, ValueError),
        ({"columns": ((1, np.ones(3), TRUE),) * 65}, ValueError),
        ({"columns": [1, 2]}, TypeError),
        ({"columns": ("text",)}, TypeError),
        ({"columns": ((7, np.ones(3), TRUE),)}, ValueError),
        ({"columns": ((0, b"ab", OFFSETS),)}, ValueError),
        ({"columns": ((1, np.ones(2), TRUE),)}, ValueError),
        ({"columns": ((1, np.ones(3), TRUE[:2]),)}, ValueError),
        ({"columns": ((2, np.ones(3, dtype=np.float32), TRUE),)}, ValueError),
        ({"columns": ((1, np.ones(3), np.ones(3)),)}, ValueError),
        ({"columns": ((1, np.ones(6)[::2], TRUE),)}, (ValueError, BufferError)),
        ({"columns": ((0, b"ab", OFFSETS, np.array([0, 1])),)}, ValueError),
        ({"columns": ((0, b"ab", OFFSETS, np.array([0, 1, 2])),)}, IndexError),
        ({"columns": ((0, b"ab", OFFSETS, np.array([0, -1, 1])),)}, IndexError),
        ({"columns": ((0, b"a", OFFSETS, np.array([0, 1, 1])),)}, IndexError),
        ({"columns": ((0, b"ab", np.array([1, 0, 2]), np.array([0, 0, 0])),)}, IndexError),
        ({"columns": ((0, b"ab", np.array([-1, 0, 2]), np.array([0, 0, 0])),)}, IndexError),
        ({"columns": ((0, b"ab", np.array([], dtype=np.int64), np.array([0, 0, 0])),)}, IndexError),
        ({"ends": np.array([3, 1])}, ValueError),
        ({"ends": np.array([-1, 3])}, ValueError),
        ({"ends": np.array([1, 3], dtype=np.int32)}, ValueError),
        ({"positions": np.zeros(1, dtype=np.int64)}, ValueError),
        ({"positions": np.frombuffer(bytes(16), dtype=np.int64)}, ValueError),
        ({"positions": np.zeros(2)}, ValueError),
        ({"powers": np.zeros(3)}, ValueError),
        ({"ndigits": 17}, ValueError),
        ({"ndigits": -1}, ValueError),
        ({"fixed_from": 1e-4}, ValueError),
        ({"fixed_from": float("nan")}, ValueError),
    ],
)
def test_what_does_not_fit_together_is_refused(changes: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        _lines.lines(*told(**changes))


def test_without_its_powers_numbers_are_those_of_python() -> None:
    """As where what is cut off a power could decide."""
    values = np.array([1.5e-7, -2.5e20, 1e-300, 12.0, np.nan])
    call = told(columns=((1, values, np.ones(5, dtype=bool)),), ends=np.array([5, 5]), powers=np.zeros(0, dtype=np.uint64))
    assert _lines.lines(*call) == b"1.500000e-07\n-2.500000e+20\n1.000000e-300\n12.000000\nnan\n"


def test_where_there_is_no_memory_nothing_is_written() -> None:
    limited = pytest.importorskip("_testcapi", reason="this Python has no way to run out of memory")
    call = told(columns=((1, np.array([-2.5e15, 2.5e15]), TRUE[:2]),), ends=np.array([1, 2]), ndigits=0)
    whole = _lines.lines(*call)
    assert whole == b"-2e+15\n2e+15\n"
    failed = 0
    for number in range(1, 25):
        limited.set_nomemory(number, number + 1)
        try:
            made = _lines.lines(*call)
        except MemoryError:
            made, failed = whole, failed + 1
        finally:
            limited.remove_mem_hooks()
        assert made == whole
    assert failed


def test_it_releases_what_it_was_given() -> None:
    arrays = [
        np.ones(3),
        TRUE.copy(),
        OFFSETS.copy(),
        np.zeros(3, dtype=np.int64),
        np.array([1, 3]),
        np.zeros(2, dtype=np.int64),
    ]
    values, valid, offsets, index, ends, positions = arrays
    texts = bytearray(b"ab")
    sound = ((1, values, valid), (2, values, valid), (0, texts, offsets, index))
    before = [sys.getrefcount(one) for one in arrays]
    for _ in range(20):
        _lines.lines(*told(columns=sound, ends=ends, positions=positions))
        for broken in (
            (*sound, (1, values, valid[:2])),
            (*sound, (0, texts, offsets, index - 1)),
            (*sound, "text"),
            sound[:2] * 40,
        ):
            with pytest.raises((ValueError, IndexError, TypeError)):
                _lines.lines(*told(columns=broken, ends=ends, positions=positions))
    assert [sys.getrefcount(one) for one in arrays] == before
    texts.extend(b"c")  # which it could not while somebody reads it


def test_other_threads_go_on_meanwhile() -> None:
    """Another one gets its turn in no other way: nothing else here releases the lock, and none is taken from who has it."""
    began, turns = threading.Event(), []

    def wait() -> None:
        began.wait()
        turns.append(threading.get_ident())

    call = told(
        columns=tuple(map(row_text._native_column, columns(200_000))),
        ends=np.array([200_000]),
        positions=np.zeros(1, dtype=np.int64),
    )
    interval = sys.getswitchinterval()
    other = threading.Thread(target=wait)
    other.start()
    try:
        sys.setswitchinterval(100)
        began.set()
        calls = 0
        while not turns and calls < 100:
            _lines.lines(*call)
            calls += 1
        had = bool(turns)
    finally:
        sys.setswitchinterval(interval)
        other.join()
    assert had


def test_any_threads_may_make_lines() -> None:
    expected = [[bytes(text) for text in python_lines(columns(5000, seed), [5000], 6)] for seed in range(4)]
    made: list[list[bytes]] = [[] for _ in range(4)]

    def make(seed: int) -> None:
        for _ in range(5):
            made[seed] = [bytes(text) for text in joined(columns(5000, seed), [5000], 6)]

    threads = [threading.Thread(target=make, args=(seed,)) for seed in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert made == expected


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    series = csv.SeriesTable()
    assert CsvLines(series, 6)._join is joined
    monkeypatch.setenv(VARIABLE, "0")
    assert CsvLines(series, 6)._join is python_lines
