"""Watchers: told of every step, guarded each on its own, and saved and closed with the rest."""

from __future__ import annotations

import threading

import pytest
from pipeline_parts import Copy, FileJournal, HangingSink, Onlooker, RecordSink, pipeline_of, record, until

LEFT = "left behind when the monitor was closed"


@pytest.fixture
def journal(tmp_path):
    return FileJournal(tmp_path / "manifest.json")


@pytest.fixture
def hanging():
    sink = HangingSink(hangs_at=1)
    yield sink
    sink.release.set()
    for thread in threading.enumerate():
        if thread.name.startswith("monitor-"):
            thread.join(20)


def heard(watcher: Onlooker) -> list:
    return [one for one in watcher.told if one != "save"]


def test_a_slow_sink_delays_no_watcher(journal, hanging):
    watcher = Onlooker()
    pipeline = pipeline_of({"hangs": hanging}, journal, watchers={"watcher": watcher})
    for step in range(2):
        record(pipeline, step)
    assert hanging.hanging.wait(20)
    assert heard(watcher) == [0, 1]
    hanging.release.set()
    assert pipeline.close()


def test_it_hears_of_steps_that_found_no_room(journal, hanging):
    watcher = Onlooker()
    pipeline = pipeline_of({"hangs": hanging}, journal, queue_wait_seconds=0.0, watchers={"watcher": watcher})
    record(pipeline, 0)
    assert pipeline.latest(20.0) is not None
    record(pipeline, 1)
    assert hanging.hanging.wait(20)
    for step in range(2, 7):
        record(pipeline, step)
    hanging.release.set()
    assert pipeline.close()
    assert heard(watcher) == [0, 1, 2, 3, *((step, "queue full") for step in (4, 5, 6)), "close"]


def test_it_hears_of_a_step_that_could_not_be_read(journal):
    class Broken(Copy):
        def rows(self):
            if self.step == 1:
                raise RuntimeError("device lost")
            return super().rows()

    watcher = Onlooker()
    pipeline = pipeline_of({}, journal, new_sealed=Broken, watchers={"watcher": watcher})
    for step in range(3):
        record(pipeline, step)
    assert pipeline.close()
    assert heard(watcher) == [0, (1, "could not be read: RuntimeError('device lost')"), 2, "close"]


def test_it_is_saved_whenever_the_journal_is(tmp_path):
    journal, watcher = FileJournal(tmp_path / "manifest.json"), Onlooker()
    pipeline = pipeline_of({}, journal, save_seconds=1000.0, watchers={"watcher": watcher})
    record(pipeline, 0)
    assert pipeline.latest(20.0) is not None
    record(pipeline, 1)
    assert pipeline.flush(20.0)
    assert watcher.told == [0, "save", 1, "save"]
    assert pipeline.close()
    assert watcher.told[4:] == ["close"]


def test_one_that_cannot_be_saved_fails_the_flush_and_one_that_cannot_be_closed_leaves_the_journal_open(journal):
    class Unwritable(Onlooker):
        def save(self):
            raise OSError("disk")

        close = save

    pipeline = pipeline_of({}, journal, watchers={"unwritable": Unwritable()})
    record(pipeline, 0)
    assert not pipeline.flush(20.0)
    assert not pipeline.close()
    assert journal.entries["written"] == [0]
    assert not journal.closed


def test_when_closing_gives_up_it_hears_of_steps_that_it_has_not_seen_and_is_saved_but_not_closed(journal, hanging):
    watcher = Onlooker()
    pipeline = pipeline_of({"hangs": hanging}, journal, copies=3, close_seconds=0.4, watchers={"watcher": watcher})
    for step in range(4):
        record(pipeline, step)
    assert hanging.hanging.wait(20)
    assert not pipeline.close()
    assert heard(watcher) == [0, 1, (2, LEFT), (3, LEFT)]
    assert watcher.told[-1] == "save"


def test_a_watcher_that_hangs_keeps_no_other_one_and_no_sink_from_being_closed(journal, tmp_path, caplog):
    release = threading.Event()
    stuck, other = Onlooker(lambda _: release.wait()), Onlooker()
    sink = RecordSink(tmp_path / "steps")
    watchers = {"other": other, "the stuck one": stuck}
    pipeline = pipeline_of({"record": sink}, journal, close_seconds=0.4, watchers=watchers)
    record(pipeline, 0)
    assert until(lambda: stuck.told)
    record(pipeline, 1)
    assert not pipeline.close()
    assert sink.closed
    assert any("the writer is in the stuck one" in message for message in caplog.messages)
    assert heard(other) == [0, (1, LEFT)]
    release.set()
