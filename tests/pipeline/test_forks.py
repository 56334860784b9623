"""A forked child is not the process that trains: it writes, flushes and closes nothing, and its parent does not notice it."""

import gc
import os
import signal
import threading

import pytest
from pipeline_parts import Program, journal_in, pipeline_in, record, steps_in, until

from monitor.pipeline.process import PROCESS, on_fork_child


def in_child(do) -> int:
    """The exit status of a forked child that does ``do`` and exits with what it returns."""
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            status = int(do() or 0)
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture
def pipeline(tmp_path):
    pipeline = pipeline_in(tmp_path, steps_per_record=100)
    record(pipeline, 0)
    yield pipeline
    pipeline.close()


def test_every_method_does_nothing_in_a_child(tmp_path, pipeline):
    sealed = pipeline.reserve(1)
    sealed.step = 1

    def use_all() -> bool:
        pipeline.submit(sealed)
        pipeline.give_back(sealed)
        nothing = pipeline.reserve(2) is None and pipeline.latest(0.0) is None and not pipeline.flush(0.0)
        return not (pipeline.inert and nothing and pipeline.close() and not pipeline.dropped)

    assert in_child(use_all) == 0
    assert steps_in(tmp_path / "steps.txt") == []
    assert not pipeline.inert
    pipeline.submit(sealed)
    assert pipeline.close()
    assert steps_in(tmp_path / "steps.txt") == [0, 1]


def test_a_grandchild_is_inert_too(pipeline):
    assert in_child(lambda: in_child(lambda: not pipeline.inert)) == 0


@pytest.mark.usefixtures("pipeline")
def test_a_child_may_record_through_a_pipeline_of_its_own(tmp_path):
    (tmp_path / "child").mkdir()

    def train() -> bool:
        own = pipeline_in(tmp_path / "child")
        return own.inert or not record(own, 5) or not own.close()

    assert in_child(train) == 0
    assert steps_in(tmp_path / "child" / "steps.txt") == [5]


@pytest.mark.usefixtures("pipeline")
def test_a_child_has_the_signal_handling_of_a_process_that_was_never_monitored():
    ours = signal.getsignal(signal.SIGTERM)

    def unmonitored() -> bool:
        restored = signal.getsignal(signal.SIGTERM) is not ours
        return not (restored and signal.set_wakeup_fd(-1) == -1 and not signal.pthread_sigmask(signal.SIG_BLOCK, ()))

    assert in_child(unmonitored) == 0
    assert signal.getsignal(signal.SIGTERM) is ours
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.usefixtures("pipeline")
def test_a_mask_that_the_user_set_is_the_same_before_and_after_a_fork():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
    try:
        blocked = {signal.SIGTERM, signal.SIGUSR1}
        assert in_child(lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()) != blocked) == 0
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == blocked
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_hooks_turn_themselves_off_in_a_child_as_long_as_they_live():
    class Hooks:
        active = True

        def turn_off(self):
            self.active = False

    class Broken(Hooks):
        def turn_off(self):
            raise ValueError

    broken, hooks, gone = Broken(), Hooks(), Hooks()
    for one in (broken, hooks, gone):
        on_fork_child(one.turn_off)
    known = len(PROCESS._forks._in_child)
    del gone, one
    gc.collect()
    assert in_child(lambda: hooks.active) == 0
    assert hooks.active
    on_fork_child(hooks.turn_off)
    assert len(PROCESS._forks._in_child) <= known


def test_children_forked_at_any_moment_of_a_busy_writer_exit_at_once_and_the_parent_loses_nothing(tmp_path):
    code = """
        pipeline = pipeline_in(directory, steps_per_record=7, copies=10)
        def fork():
            pid = os.fork()
            if pid == 0:
                pipeline.reserve(-1)
                pipeline.flush(60.0)
                pipeline.close()
                sys.exit(0)
            return pid
        children = []
        for step in range(300):
            assert record(pipeline, step)
            if step % 10 == 0:
                children.append(fork())
        assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 30
        assert pipeline.close()
    """
    with Program(tmp_path, code) as program:
        assert program.end() == (0, "")
    assert steps_in(tmp_path / "steps.txt") == list(range(300))
    assert journal_in(tmp_path / "manifest.json")["written"] == list(range(300))


def test_a_child_forked_while_every_lock_of_the_pipeline_is_held_exits_at_once(tmp_path):
    code = """
        import logging
        sink = HangingSink()
        pipeline = pipeline_of({"hangs": sink}, FileJournal(directory / "manifest.json"), close_seconds=0.1)
        record(pipeline, 0)
        sink.hanging.wait()
        locks = [pipeline._delivery._journal._lock, *(h.lock for h in logging.getLogger("monitor").handlers)]
        for lock in locks:
            threading.Thread(target=lock.acquire).start()
        pid = os.fork()
        if pid == 0:
            pipeline.reserve(1)
            pipeline.close()
            sys.exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        os._exit(0)
    """
    with Program(tmp_path, code) as program:
        assert program.end() == (0, "")


def test_a_signal_to_a_child_leaves_the_parent_untouched_even_right_after_the_fork(tmp_path):
    code = """
        pipeline = pipeline_in(directory, steps_per_record=1000)
        record(pipeline, 0)
        assert pipeline.latest(20.0) is not None
        for _ in range(200):
            pid = os.fork()
            if pid == 0:
                time.sleep(60)
                os._exit(1)
            os.kill(pid, signal.SIGTERM)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
        print("visible:", steps_in(directory / "steps.txt"))
    """
    with Program(tmp_path, code) as program:
        assert program.end() == (0, "visible: []\n")
    assert steps_in(tmp_path / "steps.txt") == [0]


def test_the_handler_that_the_user_had_before_us_is_the_one_a_child_calls(tmp_path):
    code = """
        signal.signal(signal.SIGTERM, lambda *_: os._exit(42))
        pipeline = pipeline_in(directory, steps_per_record=1000)
        record(pipeline, 0)
        assert pipeline.latest(20.0) is not None
        pid = os.fork()
        if pid == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42
        print("visible:", steps_in(directory / "steps.txt"))
    """
    with Program(tmp_path, code) as program:
        assert program.end() == (0, "visible: []\n")


def test_a_handler_put_on_top_of_ours_still_reaches_the_default_in_a_child(tmp_path):
    code = """
        pipeline = pipeline_in(directory)
        record(pipeline, 0)
        ours = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda *received: ours(*received))
        pid = os.fork()
        if pid == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
    """
    with Program(tmp_path, code) as program:
        assert program.end() == (0, "")


@pytest.mark.usefixtures("pipeline")
def test_a_fork_from_another_thread_is_inert_and_may_be_terminated(tmp_path):
    status: list[int] = []

    def terminate_itself():
        os.kill(os.getpid(), signal.SIGTERM)
        return 1

    thread = threading.Thread(target=lambda: status.append(in_child(terminate_itself)))
    thread.start()
    thread.join()
    assert status == [-signal.SIGTERM]
    assert steps_in(tmp_path / "steps.txt") == []


DATA_LOADER = """
    import torch
    from torch.utils.data import DataLoader, Dataset
    import pyarrow, pyarrow.csv, io

    class Text(Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, index):
            import polars
            table = pyarrow.table({"x": [index] * 100})
            pyarrow.csv.write_csv(table, io.BytesIO())
            return float(polars.DataFrame({"x": [index] * 100})["x"].sum())

    class ArrowSink(RecordSink):
        def write(self, rows):
            pyarrow.csv.write_csv(pyarrow.table({"x": list(range(1000))}), io.BytesIO())
            super().write(rows)

    sinks = {"record": ArrowSink(directory / "steps.txt", 10)}
    pipeline = pipeline_of(sinks, FileJournal(directory / "manifest.json"), copies=10)
    step = 0
    for epoch in range(2):
        for batch in DataLoader(Text(), batch_size=4, num_workers=2, multiprocessing_context="fork", timeout=60):
            assert record(pipeline, step)
            step += 1
    print(step, float(batch[-1]))
"""


def test_data_loader_workers_that_use_polars_and_pyarrow_work_while_the_writer_writes(tmp_path):
    with Program(tmp_path, DATA_LOADER) as program:
        assert program.end(120.0) == (0, "32 6300.0\n")
    assert steps_in(tmp_path / "steps.txt") == list(range(32))


def test_a_child_takes_down_its_copies_of_the_wakeup_descriptors_and_keeps_the_parents_listener(pipeline):
    assert pipeline.latest(20.0) is not None  # the writer has no file open
    descriptors = os.listdir("/proc/self/fd")

    def fewer() -> bool:
        return len(os.listdir("/proc/self/fd")) != len(descriptors) - 2

    assert in_child(fewer) == 0
    listeners = [thread for thread in threading.enumerate() if thread.name == "monitor-signals"]
    assert len(listeners) == 1
    assert not until(lambda: not listeners[0].is_alive(), 0.05)
