"""SIGTERM: what is sealed becomes visible, and then happens what would have happened without the monitor."""

import asyncio
import signal
import threading

import pytest
from pipeline_parts import Program, journal_in, pipeline_in, record, steps_in, until

from monitor.pipeline.process import PROCESS

TRAIN = """
    pipeline = pipeline_in(directory, steps_per_record=1000, copies=50)
    for step in range(20):
        assert record(pipeline, step)
"""
WAIT = """
    print("ready", flush=True)
    for _ in range(6000):
        time.sleep(0.01)
"""
BLOCK_IN_C = """
    import ctypes
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(256)
    libc.pthread_mutex_lock(mutex)
    print("ready", flush=True)
    libc.pthread_mutex_lock(mutex)  # waits for itself, in C, whatever signal comes
"""


def said_before_it_ended(program: Program, signum: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
    """Send ``signum`` once the program is ready."""
    program.wait_for("ready")
    program.process.send_signal(signum)
    return program.end()


@pytest.mark.parametrize("block", [WAIT, BLOCK_IN_C], ids=["in Python", "in C"])
def test_everything_sealed_is_visible_and_the_exit_status_is_that_of_an_unmonitored_process(tmp_path, block):
    with Program(tmp_path, TRAIN + block) as program:
        assert said_before_it_ended(program) == (-signal.SIGTERM, "")
    assert steps_in(tmp_path / "steps.txt") == list(range(20))
    assert journal_in(tmp_path / "manifest.json")["written"] == list(range(20))


def test_a_rank_that_hangs_in_a_collective_makes_its_steps_visible_and_dies_of_the_signal(tmp_path):
    code = """
        import torch, torch.distributed as dist
        rank = int(os.fork() == 0)
        dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
        dist.barrier()
        if rank == 1:
            while os.getppid() != 1 and not (directory / "over").exists():
                time.sleep(0.01)
            os._exit(0)
        pipeline = pipeline_in(directory, steps_per_record=1000, copies=50)
        for step in range(20):
            assert record(pipeline, step)
        print("ready", flush=True)
        dist.all_reduce(torch.ones(1))
    """
    with Program(tmp_path, code) as program:
        program.wait_for("ready")
        assert not until(lambda: program.process.poll() is not None, 0.3)
        program.process.terminate()
        status = program.process.wait(60)
        (tmp_path / "over").touch()
    assert status == -signal.SIGTERM
    assert steps_in(tmp_path / "steps.txt") == list(range(20))


def test_a_handler_installed_before_ours_is_called_and_the_open_record_is_continued(tmp_path):
    code = f"""
    received = []
    signal.signal(signal.SIGTERM, lambda signum, frame: received.append((signum, steps_in(directory / "steps.txt"))))
    {TRAIN}
    print("ready", flush=True)
    while not received:
        time.sleep(0.01)
    for step in range(20, 30):
        assert record(pipeline, step)
    assert pipeline.close()
    assert received == [(signal.SIGTERM, list(range(20)))], received
    """
    with Program(tmp_path, code) as program:
        assert said_before_it_ended(program) == (0, "")
    assert steps_in(tmp_path / "steps.txt") == list(range(30))


def test_signals_at_any_moment_of_a_busy_training_thread_cost_neither_a_step_nor_a_deadlock(tmp_path):
    code = """
        received = []
        signal.signal(signal.SIGTERM, lambda *_: received.append(None))
        pipeline = pipeline_in(directory, steps_per_record=7)
        sent = 0
        def send():
            global sent
            for sent in range(1, 101):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.001)
        record(pipeline, 0)
        sender = threading.Thread(target=send)
        sender.start()
        step = 1
        while sender.is_alive():
            assert record(pipeline, step)
            step += 1
        assert pipeline.close()
        assert received
        assert steps_in(directory / "steps.txt") == list(range(step))
    """
    with Program(tmp_path, code) as program:
        assert program.end() == (0, "")


def test_a_handler_that_exits_decides_the_exit_status(tmp_path):
    code = "    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n" + TRAIN + WAIT
    with Program(tmp_path, code) as program:
        assert said_before_it_ended(program)[0] == 7
    assert steps_in(tmp_path / "steps.txt") == list(range(20))


@pytest.mark.parametrize("block", [WAIT, BLOCK_IN_C], ids=["in Python", "in C"])
def test_a_handler_installed_after_ours_replaces_it_and_the_steps_become_visible_all_the_same(tmp_path, block):
    code = TRAIN + "    signal.signal(signal.SIGTERM, lambda *_: print('theirs', flush=True))\n" + block
    with Program(tmp_path, code) as program:
        program.wait_for("ready")
        program.process.terminate()
        assert until(lambda: steps_in(tmp_path / "steps.txt") == list(range(20)))
        assert until(lambda: journal_in(tmp_path / "manifest.json")["written"] == list(range(20)))
        if block == WAIT:
            program.wait_for("theirs")
        assert program.process.poll() is None


def test_a_handler_of_the_users_that_cannot_run_in_c_keeps_the_process_alive_as_it_would_without_us(tmp_path):
    code = "    signal.signal(signal.SIGTERM, lambda *_: None)\n" + TRAIN + BLOCK_IN_C
    with Program(tmp_path, code) as program:
        program.wait_for("ready")
        program.process.terminate()
        assert until(lambda: steps_in(tmp_path / "steps.txt") == list(range(20)))
        assert not until(lambda: program.process.poll() is not None, 0.2)


def test_a_process_that_ignores_the_signal_continues_ignoring_it(tmp_path):
    code = (
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + TRAIN + "    print('ready', flush=True)\n    sys.stdin.read()\n"
    )
    code = code.replace("sys.stdin.read()", "time.sleep(0.3)")
    with Program(tmp_path, code) as program:
        assert said_before_it_ended(program) == (0, "")


def test_every_pipeline_of_the_process_is_flushed(tmp_path):
    for name in "abc":
        (tmp_path / name).mkdir()
    code = """
        pipelines = [pipeline_in(directory / name, steps_per_record=1000) for name in "abc"]
        for pipeline in pipelines:
            assert record(pipeline, 4)
    """
    with Program(tmp_path, code + "    " + WAIT.replace("\n", "\n    ")) as program:
        assert said_before_it_ended(program) == (-signal.SIGTERM, "")
    assert [steps_in(tmp_path / name / "steps.txt") for name in "abc"] == [[4]] * 3


@pytest.mark.parametrize("block", [WAIT, BLOCK_IN_C], ids=["in Python", "in C"])
def test_a_sink_that_hangs_delays_the_end_by_no_more_than_its_bound_and_the_others_are_flushed(tmp_path, block):
    code = """
    hanging = HangingSink(hangs_at=3)
    sinks = {"record": RecordSink(directory / "steps.txt", 1000), "hangs": hanging}
    pipeline = pipeline_of(sinks, FileJournal(directory / "manifest.json"), signal_seconds=0.4)
    for step in range(4):
        assert record(pipeline, step)
    hanging.hanging.wait()
    """
    with Program(tmp_path, code + block) as program:
        assert said_before_it_ended(program) == (-signal.SIGTERM, "")
    assert steps_in(tmp_path / "steps.txt") == [0, 1, 2, 3]
    assert journal_in(tmp_path / "manifest.json")["written"] == [0, 1, 2]


def test_steps_before_one_that_the_device_never_finishes_become_visible(tmp_path):
    code = """
    sinks = {"record": RecordSink(directory / "steps.txt", 1000)}
    pipeline = pipeline_of(sinks, FileJournal(directory / "manifest.json"), signal_seconds=0.4)
    for step in range(3):
        assert record(pipeline, step)
    assert record(pipeline, 3, readable=threading.Event())
    """
    with Program(tmp_path, code + BLOCK_IN_C) as program:
        assert said_before_it_ended(program) == (-signal.SIGTERM, "")
    assert steps_in(tmp_path / "steps.txt") == [0, 1, 2]


def test_a_training_thread_that_waits_for_room_is_no_obstacle(tmp_path):
    code = """
        hanging = HangingSink()
        sinks = {"record": RecordSink(directory / "steps.txt", 1000), "hangs": hanging}
        pipeline = pipeline_of(sinks, FileJournal(directory / "manifest.json"), queue_wait_seconds=60.0)
        record(pipeline, 0)
        hanging.hanging.wait()
        record(pipeline, 1)
        record(pipeline, 2)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        threading.Timer(0.4, hanging.release.set).start()
        while True:
            record(pipeline, 3)
    """
    with Program(tmp_path, code) as program:
        assert program.end() == (-signal.SIGTERM, "")
    assert steps_in(tmp_path / "steps.txt")[:3] == [0, 1, 2]


def test_handlers_that_call_one_another_across_two_runs_each_run_once(tmp_path):
    code = """
        calls = []
        def on_top(name):
            below = signal.getsignal(signal.SIGTERM)
            def handler(*received):
                calls.append(name)
                if callable(below):
                    below(*received)
            signal.signal(signal.SIGTERM, handler)
        on_top("a")
        first = pipeline_in(directory)
        record(first, 0)
        on_top("b")
        first.close()
        second = pipeline_in(directory)
        record(second, 1)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0)
        print(calls)
    """
    with Program(tmp_path, code) as program:
        assert program.end() == (0, "['b', 'a']\n")


class TestRestoring:
    """In this process, which must come out of each test as it went in."""

    @pytest.fixture(autouse=True)
    def same_before_and_after(self, tmp_path_factory):
        for left in PROCESS.live():  # by a test that ran in this process before
            left.close()
        assert pipeline_in(tmp_path_factory.mktemp("next")).close()  # restores what one left that was closed in another thread
        before = signal.getsignal(signal.SIGTERM)
        yield
        assert signal.getsignal(signal.SIGTERM) is before
        assert signal.set_wakeup_fd(-1) == -1
        assert "monitor-signals" not in [thread.name for thread in threading.enumerate()]

    def test_nothing_is_installed_before_the_first_step(self, tmp_path):
        before = signal.getsignal(signal.SIGTERM)
        pipeline = pipeline_in(tmp_path)
        assert signal.getsignal(signal.SIGTERM) is before
        assert pipeline.close()

    def test_the_last_pipeline_to_close_restores_the_handler(self, tmp_path):
        before = signal.getsignal(signal.SIGTERM)
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
        first, second = (pipeline_in(tmp_path / name) for name in ("first", "second"))
        record(first, 0)
        record(second, 0)
        assert first.close()
        assert signal.getsignal(signal.SIGTERM) is not before
        assert second.close()
        assert signal.getsignal(signal.SIGTERM) is before

    def test_a_handler_that_was_put_in_place_of_ours_stays(self, tmp_path):
        before = signal.getsignal(signal.SIGTERM)
        pipeline = pipeline_in(tmp_path)
        record(pipeline, 0)

        def theirs(*_):
            raise AssertionError

        signal.signal(signal.SIGTERM, theirs)
        assert pipeline.close()
        assert signal.getsignal(signal.SIGTERM) is theirs
        signal.signal(signal.SIGTERM, before)

    def test_a_descriptor_that_was_put_in_place_of_ours_stays(self, tmp_path):
        pipeline = pipeline_in(tmp_path)
        record(pipeline, 0)
        loop = asyncio.new_event_loop()
        loop.add_signal_handler(signal.SIGUSR1, loop.stop)
        assert pipeline.close()
        signal.raise_signal(signal.SIGUSR1)
        loop.run_forever()
        loop.close()

    def test_training_in_another_thread_is_recorded_without_touching_signals(self, tmp_path):
        before = signal.getsignal(signal.SIGTERM)
        handlers = []

        def train():
            pipeline = pipeline_in(tmp_path)
            record(pipeline, 0)
            handlers.append(signal.getsignal(signal.SIGTERM))
            assert pipeline.close()

        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
        assert handlers == [before]
        assert steps_in(tmp_path / "steps.txt") == [0]

    def test_a_last_pipeline_closed_in_another_thread_leaves_the_rest_to_the_next_one(self, tmp_path):
        pipeline = pipeline_in(tmp_path)
        record(pipeline, 0)
        thread = threading.Thread(target=pipeline.close)
        thread.start()
        thread.join()
        assert PROCESS.live() == []
        assert pipeline_in(tmp_path).close()


def test_an_event_loop_that_was_there_first_keeps_its_descriptor_and_its_signals(tmp_path):
    code = """
        import asyncio
        async def train():
            loop, received = asyncio.get_running_loop(), asyncio.Event()
            loop.add_signal_handler(signal.SIGUSR1, received.set)
            pipeline = pipeline_in(directory, steps_per_record=1000)
            record(pipeline, 0)
            os.kill(os.getpid(), signal.SIGUSR1)
            await asyncio.wait_for(received.wait(), 20)
            received.clear()
            pipeline.flush(20.0)
            record(pipeline, 1)
            assert pipeline.latest(20.0) is not None
            print("ready", flush=True)
            await asyncio.sleep(60)
        asyncio.run(train())
    """
    with Program(tmp_path, code) as program:
        assert said_before_it_ended(program) == (-signal.SIGTERM, "")
    assert steps_in(tmp_path / "steps.txt") == [0, 1]


def test_an_event_loop_that_came_after_us_keeps_its_signals_too(tmp_path):
    code = """
        import asyncio
        pipeline = pipeline_in(directory, steps_per_record=1000)
        record(pipeline, 0)
        async def serve():
            loop, received = asyncio.get_running_loop(), asyncio.Event()
            loop.add_signal_handler(signal.SIGTERM, received.set)
            print("ready", flush=True)
            await asyncio.wait_for(received.wait(), 20)
            print("theirs")
        asyncio.run(serve())
    """
    with Program(tmp_path, code) as program:
        assert said_before_it_ended(program) == (0, "theirs\n")
    assert steps_in(tmp_path / "steps.txt") == [0]
