"""A sink, a rule or a device that does not return: training continues, and closing stays within its bound."""

import threading
import time

import pytest
from pipeline_parts import (
    ALWAYS,
    FileJournal,
    HangingSink,
    Onlooker,
    RecordSink,
    journal_in,
    pipeline_of,
    record,
    steps_in,
    until,
)

from monitor.pipeline import pipeline as writer

CLOSE_SECONDS = 0.4
LEFT = "left behind when the monitor was closed"


@pytest.fixture
def journal(tmp_path):
    return FileJournal(tmp_path / "manifest.json")


@pytest.fixture
def hanging():
    sink = HangingSink(hangs_at=2)
    yield sink
    sink.release.set()
    for thread in threading.enumerate():
        if thread.name.startswith("monitor-"):
            thread.join(20)


def hang(pipeline, hanging: HangingSink, steps: int) -> list[int]:
    """Record until well after the sink hangs; the steps that were taken in."""
    for step in range(hanging.hangs_at):
        record(pipeline, step)
        assert pipeline.latest(20.0) is not None
    record(pipeline, hanging.hangs_at)
    assert hanging.hanging.wait(20)
    return [step for step in range(hanging.hangs_at + 1, steps) if record(pipeline, step)]


def test_training_continues_and_steps_are_dropped_by_the_bound(journal, hanging):
    pipeline = pipeline_of({"hangs": hanging}, journal, queue_wait_seconds=0.0, close_seconds=CLOSE_SECONDS)
    assert hang(pipeline, hanging, 50) == [3, 4]
    assert pipeline.dropped == {"queue full": 45}
    pipeline.close()


def test_closing_gives_up_in_time_and_says_what_was_left_behind(journal, hanging, caplog):
    pipeline = pipeline_of({"hangs": hanging}, journal, queue_wait_seconds=0.0, close_seconds=CLOSE_SECONDS)
    hang(pipeline, hanging, 5)
    caplog.clear()
    assert not pipeline.close()
    [record_] = caplog.records
    assert "the writer is in sink 'hangs'. Steps left unwritten: 2, 3, 4." in record_.getMessage()
    assert not pipeline.close()


def test_the_other_sinks_are_closed_and_the_journal_tells_of_every_missing_step(journal, hanging, tmp_path):
    other = RecordSink(tmp_path / "other", steps_per_record=10)
    pipeline = pipeline_of({"other": other, "hangs": hanging}, journal, queue_wait_seconds=0.0, close_seconds=CLOSE_SECONDS)
    hang(pipeline, hanging, 8)
    assert not pipeline.close()
    assert steps_in(tmp_path / "other") == [0, 1, 2]
    assert other.closed
    entries = journal_in(journal.path)
    assert entries["written"] == [0, 1]
    left = "left behind when the monitor was closed"
    assert entries["lost"] == [[2, "hangs", left]]
    assert sorted(entries["dropped"]) == [
        [3, left],
        [4, left],
        [5, "queue full"],
        [6, "queue full"],
        [7, "queue full"],
    ]
    assert pipeline.dropped == {"queue full": 3, left: 2}
    assert not journal.closed


def test_a_device_that_never_finishes_a_step_keeps_no_sink_from_being_closed(journal, tmp_path):
    never = threading.Event()

    sink = RecordSink(tmp_path / "steps", steps_per_record=10)
    pipeline = pipeline_of({"record": sink}, journal, close_seconds=CLOSE_SECONDS)
    record(pipeline, 0)
    record(pipeline, 1, readable=never)
    assert not pipeline.close()
    assert steps_in(tmp_path / "steps") == journal_in(journal.path)["written"] == [0]
    assert not journal.closed
    never.set()


@pytest.mark.parametrize("with_sink", [True, False])
def test_of_steps_that_came_together_those_before_the_stuck_one_are_not_given_up(
    journal, tmp_path, monkeypatch, caplog, with_sink
):
    monkeypatch.setattr(writer, "BATCH_WINDOW_SECONDS", 1000.0)
    sinks = {"record": RecordSink(tmp_path / "steps")} if with_sink else {}
    watcher = Onlooker()
    pipeline = pipeline_of(sinks, journal, copies=100, close_seconds=CLOSE_SECONDS, watchers={"watcher": watcher})
    never = threading.Event()
    record(pipeline, 0)
    assert pipeline.latest(20.0) is not None
    for step in range(1, 5):
        record(pipeline, step, readable=never if step in (2, 3) else ALWAYS)
    assert not pipeline.close()
    assert "Steps left unwritten: 2, 3, 4." in caplog.text
    assert journal.entries["written"] == [0, 1]
    assert journal.entries["dropped"] == [[step, LEFT] for step in (2, 3, 4)]
    assert [one for one in watcher.told if one != "save"] == [0, 1, *((step, LEFT) for step in (2, 3, 4))]
    assert pipeline.dropped == {LEFT: 3}
    never.set()


def test_a_sink_that_returns_after_closing_gave_up_is_given_none_of_the_steps_that_were_given_up(journal, hanging, monkeypatch):
    monkeypatch.setattr(writer, "BATCH_WINDOW_SECONDS", 1000.0)
    pipeline = pipeline_of({"hangs": hanging}, journal, copies=100, close_seconds=CLOSE_SECONDS)
    for step in range(6):
        record(pipeline, step)
    assert not pipeline.close()
    hanging.release.set()
    assert until(lambda: not pipeline._writer._thread.is_alive())
    assert hanging.steps == [0, 1, 2]  # it was in the middle of step 2
    assert journal.entries["written"] == [0, 1]
    assert journal.entries["dropped"] == [[step, LEFT] for step in (2, 3, 4, 5)]


def test_a_sink_that_returns_after_closing_gave_up_is_closed_by_the_writer_which_then_ends(journal, tmp_path):
    class Late(RecordSink):
        release = threading.Event()

        def write(self, rows):
            super().write(rows)
            self.release.wait()

    late = Late(tmp_path / "late", steps_per_record=10)
    pipeline = pipeline_of({"late": late}, journal, close_seconds=CLOSE_SECONDS)
    record(pipeline, 0)
    assert until(lambda: late._open == [0])
    assert not pipeline.close()
    assert steps_in(tmp_path / "late") == []
    late.release.set()
    assert until(lambda: late.closed)
    assert steps_in(tmp_path / "late") == [0]
    assert until(lambda: not pipeline._writer._thread.is_alive())


def test_flush_and_latest_come_back_in_time(journal, hanging):
    pipeline = pipeline_of({"hangs": hanging}, journal, queue_wait_seconds=0.0, close_seconds=CLOSE_SECONDS)
    hang(pipeline, hanging, 5)
    began = time.monotonic()
    assert not pipeline.flush(0.05)
    assert pipeline.latest(0.05) is None
    assert time.monotonic() - began >= 0.1
    pipeline.close()
