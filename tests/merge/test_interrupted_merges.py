"""Merges that are killed, interrupted, or meet another one: what has the final name is whole."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from evidence import sampled
from filelock import FileLock
from hanging import until
from recorded_job import files, merged, sharded

from monitor.merge import execution, merge
from monitor.merge.execution import MergeError

SPAWN = multiprocessing.get_context("spawn")
SOON = 60.0
"""Seconds in which everything here is over by far."""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Of which a merge has many pieces."""
    sharded(tmp_path, steps=20)
    return tmp_path


def started(work: Callable[..., None], *arguments: Any) -> Any:
    process = SPAWN.Process(target=work, args=arguments)
    process.start()
    return process


def merge_until(moment: int, base: Path) -> None:
    """Killed when so many pieces are done."""

    def die(done: int, _all: int) -> None:
        if done == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    merge.merge(merge.Wanted(base, base / "merged", rows=3), die)


def test_what_is_there_is_not_overwritten(job: Path) -> None:
    merged(job)
    before = files(job / "merged")
    with pytest.raises(MergeError, match=r"exists\. Remove it, or name another directory"):
        merged(job)
    assert files(job / "merged") == before


def test_while_one_merge_writes_another_one_is_refused(job: Path) -> None:
    with FileLock(job / ".merged.lock"), pytest.raises(MergeError, match="another merge"):
        merged(job)


def attempt(base: Path, start: Any, told: Any) -> None:
    """Wait for all the others, merge, and tell what came of it."""
    start.wait(SOON)
    try:
        merge.merge(merge.Wanted(base, base / "merged", rows=3))
        told.put("")
    except MergeError as error:
        told.put(str(error))


def test_of_merges_that_begin_at_once_one_writes_all(job: Path) -> None:
    start, told = SPAWN.Barrier(3), SPAWN.Queue()
    processes = [started(attempt, job, start, told) for _ in range(3)]
    said = sorted(told.get(timeout=SOON) for _ in processes)
    for process in processes:
        process.join(SOON)
    assert said[0] == ""
    assert all("another merge is writing" in one or "exists" in one for one in said[1:])
    merged(job, "alone", rows=3)
    assert files(job / "merged") == files(job / "alone")


@pytest.mark.parametrize("moment", sampled([1, 5, 14], 1))
def test_a_merge_that_is_killed_leaves_nothing_under_the_name_and_the_next_one_succeeds(job: Path, moment: int) -> None:
    process = started(merge_until, moment, job)
    process.join(SOON)
    assert process.exitcode == -signal.SIGKILL
    assert not (job / "merged").exists()
    merged(job)
    merged(job, "undisturbed")
    assert files(job / "merged") == files(job / "undisturbed")
    assert [path.name for path in job.iterdir() if path.name.endswith(".draft")] == []


COMMAND = (sys.executable, "-c", "from monitor.merge.cli import app; app()")


def command(base: Path) -> subprocess.Popen[bytes]:
    """In a session of its own, with two workers that do many pieces."""
    arguments = [*COMMAND, str(base), "--workers", "2"]
    return subprocess.Popen(arguments, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def running(session: int) -> list[str]:
    """The processes of a session that have not ended."""
    said = subprocess.run(["ps", "-s", str(session), "-o", "stat="], capture_output=True, text=True, check=False)
    return [state for state in said.stdout.split() if not state.startswith("Z")]


def at_some_moment(base: Path, process: subprocess.Popen[bytes], delay: float) -> None:
    """So long after its draft is there, or when it has ended."""
    assert until(lambda: list(base.glob(".merged.*.draft")) or process.poll() is not None, SOON)
    time.sleep(delay)


@pytest.mark.parametrize("delay", sampled([random.Random(seed).uniform(0, 0.8) for seed in range(3)]))
def test_a_command_that_is_killed_at_any_moment_leaves_no_half_and_no_process(job: Path, delay: float) -> None:
    process = command(job)
    at_some_moment(job, process, delay)
    process.kill()
    process.wait(SOON)
    assert until(lambda: not running(process.pid), SOON)
    assert not (job / "merged").exists() or (job / "merged" / "report.json").exists()
    if not (job / "merged").exists():
        merged(job)
    merged(job, "undisturbed")
    assert files(job / "merged") == files(job / "undisturbed")


def test_a_command_that_is_interrupted_ends_with_130_and_leaves_nothing(job: Path) -> None:
    process = command(job)
    at_some_moment(job, process, 0.0)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(SOON) == 130
    assert until(lambda: not running(process.pid), SOON)
    assert {path.name for path in job.iterdir() if "merged" in path.name} <= {".merged.lock"}


def kill_a_worker(base: Path, told: Any) -> None:
    def kill(_done: int, _all: int) -> None:
        for child in multiprocessing.active_children():
            os.kill(child.pid or 0, signal.SIGKILL)

    try:
        merge.merge(merge.Wanted(base, base / "merged", rows=3, workers=2), kill)
    except MergeError as error:
        told.put(str(error))


def test_where_a_worker_dies_that_is_said_and_nothing_is_left(job: Path) -> None:
    told = SPAWN.Queue()
    process = started(kill_a_worker, job, told)
    assert "a worker process has died" in told.get(timeout=SOON)
    process.join(SOON)
    assert {path.name for path in job.iterdir() if "merged" in path.name} <= {".merged.lock"}


class InterruptedPool(execution.Pool):
    """Interrupted when its first worker waits for work, and nothing would end that worker yet."""

    def _spawn_process(self) -> None:
        super()._spawn_process()  # type: ignore[misc]
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_while_the_first_worker_starts_is_not_lost_and_leaves_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "Pool", InterruptedPool)
    with pytest.raises(KeyboardInterrupt), execution.engine(2):
        pytest.fail("the interrupt was lost")
    assert until(lambda: not multiprocessing.active_children(), SOON)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_while_pieces_are_under_way_is_heeded() -> None:
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt), ThreadPoolExecutor(1) as executor:
        list(execution.run(executor, 1, time.sleep, [1.0]))
