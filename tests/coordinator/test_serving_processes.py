"""Processes act as ranks: whichever of them starts, hangs, forks or dies, none waits without a bound, and nothing is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import SystemRandom

import pytest

from monitor.coordinator.store import PORT_OFFSET, PORTS

ROOT = Path(__file__).resolve().parents[2]
RANK = """
import os, sys, threading, time
from monitor.failures import Failures
from monitor.coordinator.output import agree
from monitor.coordinator.store import STORES, Rendezvous
from monitor.coordinator.store_key import job_key
port, rank, world = map(int, sys.argv[1:4])
def store(rank=rank):
    return STORES.at(Rendezvous.beside("127.0.0.1", port, world), rank, rank == 0, job_key)
def identity():
    found = agree(store(), 0, Failures(rank))
    print(found.agreed, found.job_id, flush=True)
def wait():
    sys.stdin.readline()
"""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def port() -> int:
    """Of a launcher, with free ones beside. Below those that systems give to anyone who asks for any."""
    while True:
        port = SystemRandom().randrange(12_000, 30_000)
        with suppress(OSError):
            for beside in range(PORTS):
                with socket.socket() as free:
                    free.bind(("127.0.0.1", port + PORT_OFFSET + beside))
            return port


@pytest.fixture
def start(port: int, tmp_path: Path) -> Iterator[Start]:
    """Starts a rank that runs a script; ``wait()`` in it waits for a line."""
    started: list[subprocess.Popen[str]] = []

    def start(rank: int, script: str, world: int = 2, output: str = "output", **variables: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-X", "dev", "-c", RANK + script, *map(str, (port, rank, world))]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        environment = os.environ | {"PYTHONPATH": str(ROOT), "MONITOR_OUTPUT_DIR": str(tmp_path / output)} | variables
        started.append(subprocess.Popen(command, env=environment, text=True, start_new_session=True, **pipes))
        return started[-1]

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def end(process: subprocess.Popen[str]) -> tuple[int, list[str], str]:
    """Let it go on; its status, the rest of what it says, and its errors."""
    out, errors = process.communicate("\n", timeout=60)
    return process.returncode, out.splitlines(), errors


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_ranks_agree_on_one_name_and_end_without_a_word(start: Start) -> None:
    ranks = [start(rank, "identity(); wait()", world=3) for rank in (2, 1, 0)]
    names = {line(rank) for rank in ranks}
    assert len(names) == 1
    assert names.pop().startswith("True ")
    assert [end(rank) for rank in ranks] == [(0, [], "")] * 3


def test_ranks_that_share_no_directory_agree_with_a_key_in_their_environment(start: Start, tmp_path: Path) -> None:
    secret = "a secret of this job"
    ranks = [start(rank, "identity(); wait()", output=f"host {rank}", MONITOR_STORE_KEY=secret) for rank in range(2)]
    first, second = map(line, ranks)
    assert first == second
    assert first.startswith("True ")
    assert [end(rank) for rank in ranks] == [(0, [], "")] * 2
    assert list(tmp_path.iterdir()) == []


def test_a_rank_without_the_key_of_the_others_says_what_to_set(start: Start) -> None:
    serving = start(0, "store(); print('serves', flush=True); wait()", output="one host")
    line(serving)
    shorter = "from monitor.coordinator.store import StoreLocator\nStoreLocator.__init__.__defaults__ = (0.2,)\nidentity()"
    status, said, errors = end(start(1, shorter, output="another host"))
    assert status == 0
    assert said[0].startswith("False ")
    assert (
        "it has another key than this rank. Set MONITOR_STORE_KEY to one secret of at least 16 characters on all ranks"
        in errors
    )
    assert "or MONITOR_OUTPUT_DIR to one directory that all hosts share" in errors
    assert end(serving) == (0, [], "")


def test_the_next_job_of_the_same_environment_has_another_name(start: Start) -> None:
    names = []
    for _ in range(2):
        ranks = [start(rank, "identity(); wait()") for rank in range(2)]
        first, second = map(line, ranks)
        assert first == second
        names.append(first)
        assert [end(rank)[0] for rank in ranks] == [0, 0]
    assert names[0] != names[1]


def test_a_job_does_not_take_the_name_of_the_one_before_whose_ranks_hang(start: Start) -> None:
    before = [start(rank, "identity(); wait()") for rank in range(2)]
    old = {line(rank) for rank in before}
    ranks = [start(rank, "identity(); wait()") for rank in range(2)]
    new = {line(rank) for rank in ranks}
    assert len(old) == len(new) == 1
    assert not old & new
    assert all(name.startswith("True ") for name in new)
    assert [end(rank)[0] for rank in [*before, *ranks]] == [0] * 4


def test_a_rank_that_is_started_again_alone_has_a_name_of_its_own_and_says_so(start: Start) -> None:
    ranks = [start(rank, "identity(); wait()") for rank in range(2)]
    names = [line(rank) for rank in ranks]
    end(ranks[1])
    again = start(
        1, "from monitor.coordinator.store import StoreLocator\nStoreLocator.__init__.__defaults__ = (0.2,)\nidentity()"
    )
    status, said, errors = end(again)
    assert status == 0
    assert said[0].startswith("False ")
    assert said[0].split()[1] != names[0].split()[1]
    assert "it belongs to an earlier run: another process has used it as rank 1" in errors


def test_when_the_serving_process_is_killed_the_others_are_informed_at_once(start: Start) -> None:
    serving = start(0, "store(); print('serves', flush=True); wait()")
    line(serving)
    asks = """
own = store()
print(own.add("count", 1), flush=True)
wait()
for _ in range(3):
    try:
        own.add("count", 1)
    except OSError as error:
        print(isinstance(error, ConnectionError), flush=True)
"""
    other = start(1, asks)
    assert line(other) == "1"
    serving.kill()
    serving.wait()
    assert end(other) == (0, ["True"] * 3, "")


def test_a_process_ends_though_one_of_its_threads_still_looks_for_the_store(start: Start) -> None:
    looks = "threading.Thread(target=store().check, args=(['key'],), daemon=True).start(); time.sleep(0.3)"
    assert end(start(1, looks)) == (0, [], "")


def test_a_process_ends_while_others_ask_it(start: Start) -> None:
    serving = start(0, "store(); print('serves', flush=True); wait()")
    line(serving)
    asks = """
own = store()
try:
    while True:
        if own.add("count", 1) == 1:
            print("asks", flush=True)
except ConnectionError:
    print("gone")
"""
    other = start(1, asks)
    assert line(other) == "asks"
    assert end(serving) == (0, [], "")
    assert end(other) == (0, ["gone"], "")


def test_a_forked_child_neither_serves_nor_keeps_the_port_nor_the_name(start: Start) -> None:
    forks = """
from monitor.coordinator.store import StoreLocator
StoreLocator.__init__.__defaults__ = (0.2,)
identity()
store().add("count", 1)
if os.fork() == 0:
    identity()
    print(type(store()).__name__, flush=True)
    wait()
    os._exit(0)
wait()
os._exit(0)
"""
    parent = start(0, forks)
    name = line(parent)
    of_child = line(parent)
    assert name.startswith("True ")
    assert of_child.startswith("False ")
    assert line(parent) == "StoreClient"
    parent.kill()  # the child lives on
    parent.wait()
    heir = start(0, "listening = STORES; store(); print(listening._servers[0]._listener.getsockname()[1], flush=True)")
    assert int(line(heir)) == int(heir.args[-3]) + PORT_OFFSET  # type: ignore[index, call-overload]


def test_a_process_on_another_host_than_the_meeting_point_does_not_serve(start: Start) -> None:
    """192.0.2.1 is no one's: it stands in documents."""
    script = "print(type(STORES.at(Rendezvous.beside('192.0.2.1', port, world), 0, True, job_key)).__name__)"
    assert end(start(0, script)) == (0, ["StoreClient"], "")


def test_where_no_port_is_free_that_is_said(start: Start, port: int) -> None:
    taken = [socket.create_server(("127.0.0.1", port + PORT_OFFSET + beside)) for beside in range(PORTS)]
    status, said, errors = end(start(0, "print(type(store()).__name__)"))
    for one in taken:
        one.close()
    assert (status, said) == (0, ["StoreClient"])
    assert f"another program uses 127.0.0.1, ports {port + PORT_OFFSET} to {port + PORT_OFFSET + PORTS - 1}." in errors
