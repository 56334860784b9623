import gc
import threading
import time
import weakref

import pytest
from pipeline_parts import (
    ALWAYS,
    Copy,
    FileJournal,
    FillingDisk,
    HangingSink,
    Onlooker,
    RecordSink,
    journal_in,
    pipeline_in,
    pipeline_of,
    record,
    steps_in,
    until,
)

from monitor.failures import Failures
from monitor.pipeline import pipeline as writer
from monitor.pipeline.delivery import BATCH_LIMIT_BYTES


@pytest.fixture
def journal(tmp_path):
    return FileJournal(tmp_path / "manifest.json")


@pytest.fixture
def hanging():
    sink = HangingSink()
    yield sink
    sink.release.set()


def test_steps_reach_every_sink_in_the_order_in_which_they_were_submitted(tmp_path, journal):
    sinks = {name: RecordSink(tmp_path / name) for name in ("a", "b")}
    pipeline = pipeline_of(sinks, journal)
    for step in range(200):
        assert record(pipeline, step)
    assert pipeline.close()
    assert steps_in(tmp_path / "a") == steps_in(tmp_path / "b") == list(range(200))
    assert journal.entries == {"written": list(range(200)), "dropped": [], "lost": []}


def test_a_flush_makes_everything_submitted_visible_and_writing_continues(tmp_path):
    pipeline = pipeline_in(tmp_path, steps_per_record=10)
    for step in range(7):
        record(pipeline, step)
    assert pipeline.flush(20.0)
    assert steps_in(tmp_path / "steps.txt") == journal_in(tmp_path / "manifest.json")["written"] == list(range(7))
    record(pipeline, 7)
    assert pipeline.close()
    assert steps_in(tmp_path / "steps.txt") == list(range(8))


def test_no_more_copies_exist_than_fit_the_bytes_while_the_writer_is_stuck(journal, hanging):
    made: list[Copy] = []
    pipeline = pipeline_of(
        {"hangs": hanging}, journal, new_sealed=lambda: made.append(Copy()) or made[-1], copies=5, queue_wait_seconds=0.0
    )
    record(pipeline, 0)
    assert hanging.hanging.wait(20)
    assert [step for step in range(1, 20) if record(pipeline, step)] == [1, 2, 3, 4, 5]
    assert len(made) == 5
    hanging.release.set()
    assert pipeline.close()


def test_training_waits_once_for_a_budget_then_drops_at_once_then_continues_when_there_is_room(journal, hanging):
    pipeline = pipeline_of({"hangs": hanging}, journal, queue_wait_seconds=0.2)
    record(pipeline, 0)
    assert hanging.hanging.wait(20)
    assert record(pipeline, 1)
    assert record(pipeline, 2)
    began = time.monotonic()
    assert not record(pipeline, 3)
    assert time.monotonic() - began >= 0.2
    assert pipeline._backpressure.left == 0.0
    assert not record(pipeline, 4)
    hanging.release.set()
    assert until(lambda: pipeline._ring.mostly_free)
    assert record(pipeline, 5)
    assert pipeline._backpressure.left == 0.2
    assert pipeline.close()
    assert hanging.steps == journal.entries["written"] == [0, 1, 2, 5]
    assert journal.entries["dropped"] == [[3, "queue full"], [4, "queue full"]]
    assert pipeline.dropped == {"queue full": 2}


def test_a_step_that_meets_the_full_queue_takes_the_copy_that_comes_back_while_it_waits(journal, hanging):
    pipeline = pipeline_of({"hangs": hanging}, journal)
    record(pipeline, 0)
    assert hanging.hanging.wait(20)
    record(pipeline, 1)
    record(pipeline, 2)
    threading.Timer(0.05, hanging.release.set).start()
    assert record(pipeline, 3)
    assert pipeline.close()
    assert hanging.steps == [0, 1, 2, 3]


def test_what_is_dropped_and_what_is_written_make_up_all_steps(journal):
    class Slow(HangingSink):
        def write(self, rows):
            time.sleep(0.002)
            super().write(rows)

    slow = Slow(hangs_at=-1)
    pipeline = pipeline_of({"slow": slow}, journal, queue_wait_seconds=0.0)
    for step in range(300):
        record(pipeline, step)
        time.sleep(0.0005)
    assert pipeline.close()
    dropped = [step for step, _ in journal.entries["dropped"]]
    assert dropped
    assert slow.steps == journal.entries["written"]
    assert sorted(slow.steps + dropped) == list(range(300))
    assert pipeline.dropped["queue full"] == len(dropped)


def test_a_full_disk_is_logged_once_and_writing_continues_when_space_is_free_again(tmp_path, journal, caplog):
    disk, other = FillingDisk(tmp_path / "disk"), RecordSink(tmp_path / "other")
    pipeline = pipeline_of({"disk": disk, "other": other}, journal)
    for step in range(12):
        disk.full = 3 <= step < 8
        record(pipeline, step)
        assert pipeline.flush(20.0)
    assert pipeline.close()
    assert steps_in(tmp_path / "disk") == journal.entries["written"] == [0, 1, 2, 8, 9, 10, 11]
    assert journal.closed
    assert steps_in(tmp_path / "other") == list(range(12))
    assert [(step, sink) for step, sink, _ in journal.entries["lost"]] == [(step, "disk") for step in range(3, 8)]
    [record_] = caplog.records
    assert "sink 'disk' failed" in record_.getMessage()
    assert "free some space" in record_.getMessage()


def test_a_sink_that_fails_to_flush_makes_the_flush_fail_and_nothing_else(journal):
    class Unflushable(HangingSink):
        def flush(self):
            raise PermissionError

    sink, failures = Unflushable(hangs_at=-1), Failures()
    pipeline = pipeline_of({"sink": sink}, journal, failures=failures)
    record(pipeline, 0)
    assert not pipeline.flush(20.0)
    record(pipeline, 1)
    assert pipeline.close()
    assert sink.steps == [0, 1]
    assert failures.counts == {"sink 'sink': PermissionError": 1}


def test_a_step_that_cannot_be_read_is_dropped_and_its_copy_used_again(tmp_path, journal):
    class Broken(Copy):
        def rows(self):
            if self.step == 1:
                raise RuntimeError("device lost")
            return super().rows()

    pipeline = pipeline_of({"record": RecordSink(tmp_path / "steps")}, journal, new_sealed=Broken)
    for step in range(6):
        record(pipeline, step)
        assert pipeline.flush(20.0)
    assert pipeline.close()
    assert steps_in(tmp_path / "steps") == [0, 2, 3, 4, 5]
    assert journal.entries["dropped"] == [[1, "could not be read: RuntimeError('device lost')"]]
    assert pipeline.dropped == {"could not be read": 1}


def test_of_steps_that_come_together_each_has_its_turn_whatever_becomes_of_the_others(tmp_path, journal, monkeypatch):
    class Broken(Copy):
        def rows(self):
            if self.step in (1, 4):
                raise RuntimeError("device lost")
            return super().rows()

    class Picky(RecordSink):
        def write(self, rows):
            if rows.step == 2:
                raise ValueError("not this one")
            super().write(rows)

    monkeypatch.setattr(writer, "BATCH_WINDOW_SECONDS", 1000.0)
    watcher = Onlooker()
    sinks = {"picky": Picky(tmp_path / "picky"), "other": RecordSink(tmp_path / "other")}
    pipeline = pipeline_of(sinks, journal, new_sealed=Broken, copies=100, watchers={"watcher": watcher})
    for step in range(6):
        record(pipeline, step)
    assert pipeline.close()
    lost = "could not be read: RuntimeError('device lost')"
    assert [one for one in watcher.told if one != "save"] == [0, (1, lost), 2, 3, (4, lost), 5, "close"]
    assert (steps_in(tmp_path / "picky"), steps_in(tmp_path / "other")) == ([0, 3, 5], [0, 2, 3, 5])
    assert journal.entries["written"] == [0, 3, 5]
    assert journal.entries["dropped"] == [[1, lost], [4, lost]]
    assert [(step, sink) for step, sink, _ in journal.entries["lost"]] == [(2, "picky")]


def test_steps_before_one_that_is_waited_for_do_not_wait_with_it(tmp_path, journal, monkeypatch):
    monkeypatch.setattr(writer, "BATCH_WINDOW_SECONDS", 1000.0)
    watcher = Onlooker()
    pipeline = pipeline_of({"record": RecordSink(tmp_path / "steps")}, journal, copies=100, watchers={"watcher": watcher})
    arrives = threading.Event()
    for step in range(6):
        record(pipeline, step, readable=arrives if step in (3, 4) else ALWAYS)
    flushed = threading.Thread(target=pipeline.flush, args=(20.0,))
    flushed.start()
    assert until(lambda: steps_in(tmp_path / "steps") == [0, 1, 2])
    arrives.set()
    flushed.join(20)
    assert pipeline.close()
    assert steps_in(tmp_path / "steps") == journal.entries["written"] == list(range(6))


class Seer(RecordSink):
    """A record sink that learns what comes."""

    def __init__(self, path, error=None):
        super().__init__(path)
        self.prepared: list[list[int]] = []
        self._error = error

    def prepare(self, steps):
        self.prepared.append([rows.step for rows in steps])
        if self._error is not None:
            raise self._error


def test_a_sink_that_can_make_use_of_it_learns_what_comes(tmp_path, journal, monkeypatch):
    monkeypatch.setattr(writer, "BATCH_WINDOW_SECONDS", 1000.0)
    seer = Seer(tmp_path / "seer")
    pipeline = pipeline_of({"seer": seer, "other": RecordSink(tmp_path / "other")}, journal, copies=100)
    record(pipeline, 0)
    assert pipeline.latest(20.0) is not None
    for step in range(1, 4):
        record(pipeline, step)
    assert pipeline.close()
    assert seer.prepared == [[1, 2, 3]]
    assert steps_in(tmp_path / "seer") == steps_in(tmp_path / "other") == [0, 1, 2, 3]


def test_no_more_is_announced_at_once_than_is_gathered(tmp_path, journal, hanging):
    """However much has come together while a sink was slow: alerts do not wait for all of it, nor does memory hold it."""
    seer = Seer(tmp_path / "seer")
    pipeline = pipeline_of(
        {"seer": seer, "hangs": hanging}, journal, new_sealed=lambda: Copy(BATCH_LIMIT_BYTES // 2), copies=BATCH_LIMIT_BYTES
    )
    record(pipeline, 0)
    assert hanging.hanging.wait(20)
    for step in range(1, 8):
        assert record(pipeline, step)
    hanging.release.set()
    assert pipeline.close()
    assert seer.prepared == [[1, 2], [3, 4], [5, 6]]
    assert steps_in(tmp_path / "seer") == list(range(8))


def test_one_that_fails_to_foresee_is_given_every_step_all_the_same(tmp_path, journal, monkeypatch):
    monkeypatch.setattr(writer, "BATCH_WINDOW_SECONDS", 1000.0)
    failures = Failures()
    pipeline = pipeline_of({"seer": Seer(tmp_path / "seer", MemoryError())}, journal, copies=100, failures=failures)
    record(pipeline, 0)
    assert pipeline.latest(20.0) is not None
    for step in range(1, 4):
        record(pipeline, step)
    assert pipeline.close()
    assert steps_in(tmp_path / "seer") == journal.entries["written"] == [0, 1, 2, 3]
    assert failures.counts == {"sink 'seer': MemoryError": 1}


def test_a_copy_is_free_again_as_soon_as_it_was_read_and_not_only_when_it_was_written(journal, hanging):
    pipeline = pipeline_of({"hangs": hanging}, journal)
    record(pipeline, 0)
    assert hanging.hanging.wait(20)
    assert pipeline._ring.mostly_free
    hanging.release.set()
    assert pipeline.close()


def test_watchers_see_the_rows_before_the_sinks_and_one_that_raises_costs_nothing_else(tmp_path, journal):
    seen: list[tuple[int, list[int]]] = []

    def look(rows):
        seen.append((rows.step, steps_in(tmp_path / "steps")))
        raise ValueError("watcher")

    failures = Failures()
    watchers = {"raising": Onlooker(look), "other": Onlooker()}
    pipeline = pipeline_of({"record": RecordSink(tmp_path / "steps")}, journal, failures=failures, watchers=watchers)
    for step in range(3):
        record(pipeline, step)
        assert pipeline.flush(20.0)
    assert pipeline.close()
    assert seen == [(0, []), (1, [0]), (2, [0, 1])]
    assert steps_in(tmp_path / "steps") == [0, 1, 2]
    assert [one for one in watchers["other"].told if one != "save"] == [0, 1, 2, "close"]
    assert failures.counts == {"raising: ValueError": 3}


def test_a_journal_that_raises_is_reported_and_every_step_is_written_all_the_same(tmp_path, caplog):
    class Unsavable(FileJournal):
        def save(self):
            raise OSError("manifest")

    pipeline = pipeline_of({"record": RecordSink(tmp_path / "steps")}, Unsavable(tmp_path / "none"))
    for step in range(3):
        record(pipeline, step)
    assert not pipeline.close()
    assert steps_in(tmp_path / "steps") == [0, 1, 2]
    [record_] = caplog.records
    assert "the manifest failed" in record_.getMessage()


def test_the_journal_is_saved_with_the_first_step_and_after_that_on_a_timer(tmp_path):
    path = tmp_path / "manifest.json"
    pipeline = pipeline_in(tmp_path, save_seconds=0.05)
    record(pipeline, 0)
    assert until(path.exists)
    record(pipeline, 1)
    assert until(lambda: journal_in(path)["written"] == [0, 1])
    assert pipeline.close()


def test_the_journal_is_left_alone_between_two_times_of_the_timer(tmp_path):
    pipeline = pipeline_in(tmp_path, save_seconds=1000.0)
    for step in range(5):
        record(pipeline, step)
        assert pipeline.latest(20.0) is not None
    assert journal_in(tmp_path / "manifest.json")["written"] == [0]
    assert pipeline.close()


def test_the_journal_hears_of_everything_from_the_writer_thread(journal, hanging):
    pipeline = pipeline_of({"hangs": hanging}, journal, queue_wait_seconds=0.0)
    record(pipeline, 0)
    assert hanging.hanging.wait(20)
    for step in range(1, 6):
        record(pipeline, step)
    hanging.release.set()
    assert pipeline.close()
    assert journal.threads == {"monitor-writer-rank0"}


def test_latest_is_the_step_just_submitted(tmp_path):
    pipeline = pipeline_in(tmp_path)
    assert pipeline.latest(1.0) is None
    for step in range(5):
        record(pipeline, step)
        assert pipeline.latest(20.0).step == step
    assert pipeline.close()


def test_latest_is_nothing_when_the_step_was_dropped_and_never_that_of_an_earlier_step(journal, hanging):
    hanging.hangs_at = 1
    pipeline = pipeline_of({"hangs": hanging}, journal, queue_wait_seconds=0.0)
    record(pipeline, 0)
    assert pipeline.latest(20.0) is not None
    record(pipeline, 1)
    assert hanging.hanging.wait(20)
    for step in range(2, 5):
        record(pipeline, step)
    assert pipeline.dropped == {"queue full": 1}
    assert pipeline.latest(0.01) is None
    hanging.release.set()
    assert pipeline.flush(20.0)
    assert pipeline.latest(20.0) is None
    assert pipeline.close()


def test_a_copy_given_back_unfilled_drops_its_step_and_is_used_again(journal, tmp_path):
    pipeline = pipeline_of({"record": RecordSink(tmp_path / "steps")}, journal)
    for step in range(4):
        pipeline.give_back(pipeline.reserve(step))
    assert record(pipeline, 4)
    assert pipeline.close()
    assert journal.entries["dropped"] == [[step, "could not be sealed"] for step in range(4)]
    assert steps_in(tmp_path / "steps") == [4]


def test_a_copy_is_submitted_or_given_back_once_whatever_the_caller_does(journal, tmp_path):
    pipeline = pipeline_of({"record": RecordSink(tmp_path / "steps")}, journal)
    sealed = pipeline.reserve(0)
    sealed.step = 0
    for use in (pipeline.submit, pipeline.submit, pipeline.give_back):
        use(sealed)
    assert pipeline.close()
    assert journal.entries == {"written": [0], "dropped": [], "lost": []}


def test_a_copy_that_cannot_be_made_drops_the_step_and_raises_nothing(journal, caplog):
    def no_memory():
        raise MemoryError

    pipeline = pipeline_of({}, journal, new_sealed=no_memory)
    assert [pipeline.reserve(step) for step in range(3)] == [None] * 3
    assert pipeline.close()
    assert journal.entries["dropped"] == [[step, "no copy could be made"] for step in range(3)]
    assert len(caplog.records) == 1


def test_a_thread_that_cannot_be_started_drops_the_step_and_is_tried_again_with_the_next(journal, tmp_path, monkeypatch):
    pipeline = pipeline_of({"record": RecordSink(tmp_path / "steps")}, journal)

    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        record(pipeline, 0)
    record(pipeline, 1)
    assert pipeline.close()
    assert steps_in(tmp_path / "steps") == [1]
    assert journal.entries["dropped"] == [[0, "could not be submitted"]]


def test_no_thread_exists_before_the_first_step(journal):
    before = threading.active_count()
    pipeline = pipeline_of({}, journal)
    assert pipeline.flush(1.0)
    pipeline.reserve(0)
    assert threading.active_count() == before
    assert pipeline.close()


def test_a_pipeline_that_never_got_a_step_closes_its_sinks_and_saves_the_journal(journal, tmp_path):
    sink = RecordSink(tmp_path / "steps")
    assert pipeline_of({"record": sink}, journal).close()
    assert sink.closed
    assert journal_in(journal.path)["written"] == []


def test_an_interpreter_that_starts_no_more_threads_still_closes_a_pipeline_that_never_got_a_step(
    journal, tmp_path, monkeypatch
):
    sink = RecordSink(tmp_path / "steps")
    pipeline = pipeline_of({"record": sink}, journal)

    def refuse(_thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert pipeline.close()
    assert sink.closed
    assert journal.path.exists()


def test_closing_is_final_and_may_be_repeated_from_any_thread(tmp_path):
    pipeline = pipeline_in(tmp_path)
    record(pipeline, 0)
    results: list[bool] = []
    threads = [threading.Thread(target=lambda: results.append(pipeline.close())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [*results, pipeline.close()] == [True] * 5
    assert pipeline.reserve(1) is None
    assert pipeline.flush(1.0)
    assert steps_in(tmp_path / "steps.txt") == [0]


def test_a_journal_is_saved_and_not_closed_if_a_sink_could_not_be(journal):
    class Unclosable(HangingSink):
        def close(self):
            raise OSError

    pipeline = pipeline_of({"sink": Unclosable(hangs_at=-1)}, journal)
    record(pipeline, 0)
    assert not pipeline.close()
    assert journal_in(journal.path)["written"] == [0]
    assert not journal.closed


def test_a_step_submitted_after_closing_is_counted(tmp_path):
    pipeline = pipeline_in(tmp_path)
    sealed = pipeline.reserve(0)
    assert pipeline.close()
    pipeline.submit(sealed)
    assert pipeline.dropped == {"submitted after closing": 1}


def test_a_watcher_may_close_the_pipeline_without_waiting_for_itself(tmp_path, journal):
    pipelines = []
    closing = Onlooker(lambda _: pipelines[0].close())
    pipeline = pipeline_of({"record": RecordSink(tmp_path / "steps")}, journal, watchers={"closing": closing})
    pipelines.append(pipeline)
    record(pipeline, 0)
    assert until(lambda: steps_in(tmp_path / "steps") == [0])
    assert pipeline.close()


def test_a_pipeline_that_no_one_holds_any_more_writes_what_it_was_given_and_ends_its_thread(tmp_path):
    before = set(threading.enumerate())
    pipeline = pipeline_in(tmp_path, steps_per_record=10)
    record(pipeline, 0)
    del pipeline
    writers = [thread for thread in set(threading.enumerate()) - before if "writer" in thread.name]
    for thread in writers:
        thread.join(20)
    assert steps_in(tmp_path / "steps.txt") == [0]
    pipeline_in(tmp_path).close()  # the last to close takes down what listens for signals


def test_a_pipeline_without_a_step_that_no_one_holds_any_more_is_freed_at_once(journal):
    pipeline = pipeline_of({}, journal)
    delivery = weakref.ref(pipeline._delivery)
    gc.disable()
    try:
        del pipeline
        assert delivery() is None
    finally:
        gc.enable()
