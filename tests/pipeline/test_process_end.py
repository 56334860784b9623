"""How a process may end, and what is visible afterwards. Real processes, each with a pipeline whose record is still open."""

import gc
import os
import signal
import threading
import time

import pytest
from pipeline_parts import Program, journal_in, pipeline_in, record, steps_in

from monitor.failures import Failures
from monitor.pipeline import process
from monitor.pipeline.process import PROCESS

RECORD_20_STEPS = """
    pipeline = pipeline_in(directory, steps_per_record=1000, copies=50)
    for step in range(20):
        assert record(pipeline, step)
"""


@pytest.mark.parametrize(
    ("end", "status"),
    [("", 0), ("sys.exit(3)", 3), ("raise ValueError", 1), ("pipeline.close()", 0), ("del pipeline", 0)],
)
def test_everything_submitted_is_visible_however_the_interpreter_comes_to_exit(tmp_path, end, status):
    with Program(tmp_path, RECORD_20_STEPS + f"    {end}\n") as program:
        assert program.end()[0] == status
    assert steps_in(tmp_path / "steps.txt") == list(range(20))
    assert journal_in(tmp_path / "manifest.json")["written"] == list(range(20))


def test_pipelines_are_closed_side_by_side_at_exit_and_one_that_hangs_holds_up_no_other(tmp_path):
    code = """
        hanging = [HangingSink() for _ in range(3)]
        bounds = {"close_seconds": 1.0}
        stuck = [pipeline_of({"hangs": sink}, FileJournal(directory / f"{i}.json"), **bounds) for i, sink in enumerate(hanging)]
        pipeline = pipeline_in(directory, steps_per_record=1000)
        for one in (*stuck, pipeline):
            record(one, 0)
        for sink in hanging:
            sink.hanging.wait()
    """
    with Program(tmp_path, code) as program:
        status, said = program.end()
    assert status == 0
    assert steps_in(tmp_path / "steps.txt") == [0]
    assert said.count("Closing took longer than 0.8 s: the writer is in sink 'hangs'") == 3


def test_after_a_kill_every_closed_record_is_there_whole_and_only_the_open_one_is_missing(tmp_path):
    code = """
        pipeline = pipeline_in(directory, steps_per_record=10)
        step = 0
        while True:
            step += record(pipeline, step)
            if step == 500:
                print("training", flush=True)
    """
    for attempt in range(3):
        directory = tmp_path / str(attempt)
        directory.mkdir()
        with Program(directory, code) as program:
            program.wait_for("training")
            time.sleep(0.01 * attempt)
            program.process.kill()
            assert program.end()[0] == -signal.SIGKILL
        steps = steps_in(directory / "steps.txt")
        assert len(steps) % 10 == 0
        assert len(steps) >= 10
        assert steps == list(range(len(steps)))


def test_many_pipelines_one_after_the_other_leave_no_thread_no_descriptor_and_no_handler(tmp_path):
    def descriptors() -> set[str]:
        return set(os.listdir("/proc/self/fd"))

    gc.collect()  # what other tests left in cycles may have descriptors of its own
    threads, before, handler = set(threading.enumerate()), descriptors(), signal.getsignal(signal.SIGTERM)
    for step in range(300):
        pipeline = pipeline_in(tmp_path)
        record(pipeline, step)
        assert pipeline.close()
    assert steps_in(tmp_path / "steps.txt") == list(range(300))
    assert set(threading.enumerate()) == threads
    assert descriptors() == before
    assert signal.getsignal(signal.SIGTERM) is handler
    assert PROCESS.live() == []


def test_where_sigterm_cannot_be_watched_that_is_reported_with_what_it_means(monkeypatch, caplog):
    def refuse(_self):
        raise OSError("no descriptor is free")

    monkeypatch.setattr(process.Termination, "arm", refuse)
    failures = Failures()
    PROCESS.watch_signals(failures)
    assert sum(failures.counts.values()) == 1
    assert "If SIGTERM ends this run, the open record is lost." in caplog.text
