"""What the writer is asked to do: steps that come quickly are taken out together, requests wait for no one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given, strategies as st
from pipeline_parts import Copy, FileJournal, Onlooker, journal_in, pipeline_in, pipeline_of, record, steps_in, until

from monitor.pipeline import pipeline as writer
from monitor.pipeline.pipeline import ControlRequest, Request, RequestQueue, SubmittedStep
from monitor.pipeline.process import Ticket

FOR_EVER = 1000.0


@pytest.fixture
def long_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only an urgent message ends the batch window."""
    monkeypatch.setattr(writer, "BATCH_WINDOW_SECONDS", FOR_EVER)


def put(box: RequestQueue[Copy], *steps: int, urgent: bool = False) -> None:
    for step in steps:
        box.put(SubmittedStep(step, Copy()), urgent=urgent)


def flush() -> ControlRequest:
    return ControlRequest("flush", Ticket())


def taken(box: RequestQueue[Copy]) -> list[int] | Request | None:
    """The steps that are taken out together, or a request."""
    found = box.take(20.0)
    return [one.step for one in found] if isinstance(found, list) else found


@pytest.mark.usefixtures("long_rests")
def test_a_step_after_a_long_pause_is_taken_out_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    box: RequestQueue[Copy] = RequestQueue()
    for step in range(3):
        now = step * (FOR_EVER + 1.0)
        monkeypatch.setattr(writer, "monotonic", lambda now=now: now)
        put(box, step)
        assert taken(box) == [step]


def test_steps_that_follow_quickly_are_taken_out_together_when_the_rest_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "BATCH_WINDOW_SECONDS", 0.2)
    box: RequestQueue[Copy] = RequestQueue()
    put(box, 0)
    assert taken(box) == [0]
    began = time.monotonic()
    put(box, 1)
    threading.Timer(0.05, put, (box, 2, 3)).start()
    assert taken(box) == [1, 2, 3]
    assert time.monotonic() - began >= 0.15


@pytest.mark.usefixtures("long_rests")
def test_a_request_ends_a_rest_and_covers_what_stands_before_it() -> None:
    box: RequestQueue[Copy] = RequestQueue()
    put(box, 0)
    assert taken(box) == [0]
    put(box, 1, 2)
    request = flush()
    box.ask(request)
    put(box, 3)
    assert taken(box) == [1, 2]
    assert taken(box) is request
    box.ask(flush())
    assert taken(box) == [3]


@pytest.mark.usefixtures("long_rests")
def test_requests_that_share_a_hurry_wait_for_none() -> None:
    box: RequestQueue[Copy] = RequestQueue()
    put(box, 0)
    assert taken(box) == [0]
    put(box, 1)
    requests = [flush(), flush(), flush()]
    for request in requests:
        box.ask(request)
    assert [taken(box) for _ in range(4)] == [[1], *requests]


@pytest.mark.usefixtures("long_rests")
@pytest.mark.parametrize("end", [lambda box: put(box, 1, urgent=True), lambda box: box.ask(flush())], ids=["urgent", "request"])
def test_a_request_in_a_hurry_wakes_a_queue_that_rests(end: Callable[[RequestQueue[Copy]], None]) -> None:
    box: RequestQueue[Copy] = RequestQueue()
    put(box, 0)
    assert taken(box) == [0]
    found: list[object] = []
    resting = threading.Thread(target=lambda: found.append(taken(box)))
    resting.start()
    time.sleep(0.05)
    assert not found
    end(box)
    resting.join(20)
    assert len(found) == 1


def test_an_empty_queue_gives_nothing() -> None:
    assert RequestQueue[Copy]().take(0.0) is None


@pytest.mark.usefixtures("long_rests")
def test_a_thread_that_takes_over_gets_everything_in_order() -> None:
    box: RequestQueue[Copy] = RequestQueue()
    put(box, 0, 1)
    first, second = flush(), flush()
    box.ask(first)
    put(box, 2)
    box.ask(second)
    assert taken(box) == [0, 1]
    left = box.take_all()
    assert [one.step if isinstance(one, SubmittedStep) else one for one in left] == [first, 2, second]
    assert box.take_all() == []


@given(st.lists(st.integers(-1, 3)))
def test_what_is_taken_out_is_what_was_put_in_and_no_step_passes_a_request(messages: list[int]) -> None:
    box: RequestQueue[Copy] = RequestQueue()
    box._rest = lambda: None  # type: ignore[method-assign]
    put_in: list[object] = []
    for number, urgent in enumerate(messages):
        if urgent < 0:
            request = flush()
            box.ask(request)
            put_in.append(request)
        else:
            put(box, number, urgent=urgent == 0)
            put_in.append(number)
    out: list[object] = []
    while (found := box.take(0.0)) is not None:
        out += [one.step for one in found] if isinstance(found, list) else [found]
    assert out == put_in


@pytest.mark.usefixtures("long_rests")
class TestPipelines:
    """A writer that rests for ever unless it is woken."""

    def test_flushing_asking_and_closing_wait_for_no_rest(self, tmp_path):
        pipeline = pipeline_in(tmp_path, steps_per_record=10, copies=100)
        for step in range(5):
            record(pipeline, step)
        assert pipeline.flush(20.0)
        assert steps_in(tmp_path / "steps.txt") == list(range(5))
        record(pipeline, 5)
        rows = pipeline.latest(20.0)
        assert rows is not None
        assert rows.step == 5
        record(pipeline, 6)
        assert pipeline.close()
        assert steps_in(tmp_path / "steps.txt") == list(range(7))

    @pytest.mark.parametrize("copies", [2, 5])
    def test_a_training_thread_that_fills_the_ring_waits_for_no_rest(self, tmp_path, copies):
        pipeline = pipeline_in(tmp_path, copies=copies, queue_wait_seconds=20.0)
        for step in range(50):
            assert record(pipeline, step)
        assert pipeline.close()
        assert journal_in(tmp_path / "manifest.json")["written"] == list(range(50))

    def test_a_change_of_sinks_waits_for_no_rest(self, tmp_path):
        journal = FileJournal(tmp_path / "manifest.json")
        pipeline = pipeline_of({}, journal, copies=100)
        for step in range(3):
            record(pipeline, step)
        watcher = Onlooker()
        pipeline.rearrange(lambda: ({}, {"new": watcher}))
        assert until(lambda: journal.entries["written"] == [0, 1, 2])
        record(pipeline, 3)
        assert pipeline.close()
        assert [one for one in watcher.told if one != "save"] == [3, "close"]
