"""The thread that writes: what is in its queue is bounded, and what it cannot write is said."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from monitor.dump.backend import DumpFailures
from monitor.dump.files import DATA, FILE, MOST_BYTES, Damage, DumpEntry, DumpWriter, Records, read
from monitor.dump.values import TensorLeaf
from monitor.failures import EarlierFailure

DESCRIBED = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2]}


class Held:
    """A copy that arrives when it is let go, and says that it takes as much as all room."""

    def __init__(self) -> None:
        self.nbytes = MOST_BYTES
        self.dtype = None
        self.arrived = threading.Event()

    def array(self) -> NDArray[Any]:
        assert self.arrived.wait(30)
        return np.zeros(2, np.float32)


class Broken:
    nbytes = 8
    dtype = None

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def array(self) -> NDArray[Any]:
        raise self._error


class Place:
    """A writer, and where it writes."""

    def __init__(self, directory: Path) -> None:
        (directory / DATA).mkdir()
        self.directory = directory
        self.failures = DumpFailures()
        self.failures.directory = directory
        self.writer = DumpWriter(self.failures)
        self.records = Records(directory / FILE)

    def entry(self, name: str, copy: Any = None) -> DumpEntry:
        leaf = TensorLeaf(DESCRIBED, None, copy, f"{name}.npy" if copy else None)
        return DumpEntry(self.records, self.directory, {"entry": name, "content": [leaf]})

    def written(self) -> list[str]:
        self.writer.drain()
        return [record["entry"] for record in read(self.directory / FILE, Damage())]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_entries_are_written_in_the_order_in_which_they_came(place: Place) -> None:
    names = [f"entry{n}" for n in range(1000)]
    for name in names:
        place.writer.put(place.entry(name))
    assert place.written() == names


def test_who_brings_more_than_there_is_room_for_waits(place: Place) -> None:
    first, second = Held(), Held()
    place.writer.put(place.entry("first", first))
    waiting = threading.Thread(target=place.writer.put, args=(place.entry("second", second),))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    first.arrived.set()
    waiting.join(30)
    assert not waiting.is_alive()
    second.arrived.set()
    assert place.written() == ["first", "second"]


def test_what_cannot_be_written_is_said_beside_the_dump_and_the_rest_is_written(place: Place) -> None:
    place.writer.put(place.entry("broken", Broken(OSError(28, "No space left on device"))))
    place.writer.put(place.entry("whole"))
    assert place.written() == ["whole"]
    assert "No space left on device" in (place.directory / "dump_error_info.log").read_text()


def test_an_error_of_trainings_own_is_handed_back_to_it(place: Place) -> None:
    error = RuntimeError("of training's")
    place.writer.put(place.entry("late", Broken(EarlierFailure(error))))
    place.writer.drain()
    with pytest.raises(EarlierFailure) as owed:
        place.failures.reraise_deferred()
    assert owed.value.error is error


def test_a_tensor_is_in_its_file_before_its_record_names_it(place: Place) -> None:
    held = Held()
    held.arrived.set()
    place.writer.put(place.entry("kept", held))
    place.writer.drain()
    (record,) = read(place.directory / FILE, Damage())
    assert json.dumps(record["content"][0]["data_name"]) == '"kept.npy"'
    assert (place.directory / DATA / "kept.npy").is_file()


def test_a_writer_that_was_closed_begins_anew(place: Place) -> None:
    place.writer.put(place.entry("before"))
    place.writer.close()
    place.writer.put(place.entry("after"))
    assert place.written() == ["before", "after"]
    place.writer.close()


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "monitor-dump-writer"}


def test_no_thread_is_left_when_all_is_written_and_what_comes_later_is_written_all_the_same(tmp_path: Path) -> None:
    place, before = Place(tmp_path), threads()
    for name in ("first", "second"):
        place.writer.put(place.entry(name))
        assert len(threads() - before) == 1
        place.writer.drain()
        assert threads() <= before
    assert [record["entry"] for record in read(tmp_path / FILE, Damage())] == ["first", "second"]


def test_a_thread_that_no_one_asks_for_more_ends_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monitor.dump.files.IDLE_SECONDS", 0.2)
    place, before = Place(tmp_path), threads()
    place.writer.put(place.entry("first"))
    deadline = time.monotonic() + 20
    while threads() - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threads() <= before
    place.writer.put(place.entry("second"))
    place.writer.drain()
    assert [record["entry"] for record in read(tmp_path / FILE, Damage())] == ["first", "second"]
