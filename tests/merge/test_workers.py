"""How the processes begin that do the work."""

from __future__ import annotations

import subprocess
import sys

import pytest

WORKERS = """
import sys, threading
from monitor.merge import execution
{first}
sys.mark = "made before the workers"
with execution.engine(2) as (executor, _):
    print(executor.submit(eval, "getattr(__import__('sys'), 'mark', None)").result())
"""


def said_by(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.strip()


@pytest.mark.skipif(sys.platform != "linux", reason="a process is copied on Linux alone")
def test_without_other_threads_workers_are_copies_of_the_process() -> None:
    assert said_by(WORKERS.format(first="")) == "made before the workers"


@pytest.mark.parametrize("first", ["threading.Thread(target=threading.Event().wait, daemon=True).start()", "import torch"])
def test_beside_another_thread_or_a_framework_workers_are_new_interpreters(first: str) -> None:
    if first == "import torch":
        pytest.importorskip("torch")
    assert said_by(WORKERS.format(first=first)) == "None"


def test_the_progress_bar_of_the_command_is_no_thread() -> None:
    script = """
import threading
from rich.console import Console
from monitor.merge.cli import _bar
with _bar(Console(stderr=True)) as progress:
    progress(1, 2)
    print(threading.active_count())
"""
    assert said_by(script) == "1"


def test_a_worker_that_is_a_copy_does_not_handle_signals_as_the_command_does() -> None:
    script = """
import os, signal
from monitor.cli import interruptible
from monitor.merge import execution
with interruptible(), execution.engine(2) as (executor, _):
    print(executor.submit(signal.getsignal, signal.SIGTERM).result() is signal.SIG_DFL)
    print(executor.submit(signal.getsignal, signal.SIGINT).result() is signal.SIG_IGN)
"""
    assert said_by(script).split() == ["True", "True"]


def test_workers_end_when_the_process_is_killed() -> None:
    script = """
import os, signal
from monitor.merge import execution
with execution.engine(3) as (executor, _):
    print(*executor._processes, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        workers = [int(one) for one in process.stdout.readline().split()]
        rest = process.stdout.read()  # ends when every process that has the pipe has ended
    assert len(workers) == 3
    assert rest == ""
