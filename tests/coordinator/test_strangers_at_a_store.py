"""Strangers, and ranks that misbehave, connect to a store that a training process serves: what they can cause has bounds."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hanging import until
from serving import JOB, KEY, RANKS

from monitor.coordinator.store import Rendezvous, StoreClient, StoreLocator, greet
from monitor.coordinator.store_memory import LocalStore, StoreCapacity
from monitor.coordinator.store_messages import Handshake, Hello
from monitor.coordinator.store_server import (
    CONNECTIONS_OF_A_RANK,
    HELLO_S,
    MOST_BUFFERED,
    MOST_WAITING,
    ServerLimits,
    StoreServer,
)

HOST = "127.0.0.1"
ROOT = Path(__file__).resolve().parents[2]
SOON_S = 2.0
"""A request takes a millisecond, and the machine may be busy."""


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name == "monitor-store"] == []


@contextmanager
def serving(limits: ServerLimits | None = None, held: LocalStore | None = None) -> Iterator[int]:
    listener = socket.create_server((HOST, 0))
    server = StoreServer(listener, held or LocalStore(), Hello(JOB, 0, "process 0"), KEY, limits or ServerLimits(RANKS))
    try:
        yield listener.getsockname()[1]
    finally:
        server.close()


def client(port: int, rank: int = 1, key: bytes = KEY, first_s: float = 10.0) -> StoreClient:
    return StoreClient(StoreLocator(Rendezvous(HOST, (port,), JOB, RANKS), Hello(JOB, rank, f"process {rank}"), key, first_s))


def admitted(port: int, rank: int = 2) -> socket.socket:
    """The bare connection of a rank that knows the key."""
    connection, _ = greet(HOST, port, Hello(JOB, rank, f"process {rank}"), KEY)
    connection.settimeout(10.0)
    return connection


def is_closed(connection: socket.socket, within_s: float = 10.0) -> bool:
    """Whether the server closes a connection, after whatever it has sent."""
    connection.settimeout(within_s)
    try:
        while connection.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def request(operation: str, *arguments: Any) -> bytes:
    return json.dumps({"do": operation, "with": arguments}).encode() + b"\n"


def answer(connection: socket.socket) -> dict[str, Any]:
    line = b""
    while not line.endswith(b"\n"):
        received = connection.recv(1 << 16)
        assert received, "the server closed the connection"
        line += received
    found: dict[str, Any] = json.loads(line)
    return found


def drip(connection: socket.socket, pause_s: float = 0.02) -> None:
    """Send a hello byte by byte, until the connection is closed."""
    with suppress(OSError):
        for byte in b'{"hello": "a job", "rank": 1, ' + b" " * 1_000_000:
            connection.send(bytes([byte]))
            time.sleep(pause_s)


# --- Connections that prove nothing.


def test_who_says_nothing_and_who_sends_byte_by_byte_is_left_after_the_deadline() -> None:
    with serving(ServerLimits(RANKS, hello_s=0.3)) as port, ExitStack() as open_ones:
        silent, slow = (open_ones.enter_context(socket.create_connection((HOST, port), 10)) for _ in range(2))
        sending = threading.Thread(target=drip, args=(slow,))
        sending.start()
        assert is_closed(silent)
        assert is_closed(slow)
        sending.join()
        assert client(port).add("count", 1) == 1


def test_a_rank_that_has_proved_itself_may_be_silent_for_as_long_as_it_likes() -> None:
    with serving(ServerLimits(RANKS, hello_s=0.1, unread_s=0.1)) as port, admitted(port) as rank:
        assert not is_closed(rank, within_s=0.5)


def test_silent_strangers_take_a_bounded_number_of_places_and_ranks_come_in() -> None:
    with serving() as port, ExitStack() as open_ones:
        strangers = [open_ones.enter_context(socket.create_connection((HOST, port), 10)) for _ in range(3 * MOST_WAITING)]
        with ThreadPoolExecutor(8) as pool:
            counted = list(pool.map(lambda rank: client(port, rank).add("count", 1), range(1, 9)))
        assert sorted(counted) == list(range(1, 9))
        assert until(lambda: sum(is_closed(one, 0.001) for one in strangers) >= 2 * MOST_WAITING, 10.0)


def test_more_ranks_than_may_wait_connect_at_once_and_all_come_in() -> None:
    together = threading.Barrier(2 * MOST_WAITING)

    def of_a_rank(rank: int) -> int:
        store = client(port, rank)
        together.wait()
        return store.add("count", 1)

    with serving() as port, ThreadPoolExecutor(2 * MOST_WAITING) as pool:
        counted = list(pool.map(of_a_rank, range(1, 2 * MOST_WAITING + 1)))
    assert sorted(counted) == list(range(1, 2 * MOST_WAITING + 1))


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
        b'{"do": "get", "with": ["key"]}\n',
        b'{"hello": "a job", "rank": true, "process": "p", "nonce": "n"}\n',
        b'{"hello": "a job", "rank": NaN, "process": "p", "nonce": "n"}\n',
        b'{"hello": "a job", "rank": 1, "process": {}, "nonce": "n"}\n',
        b'{"hello": "a job", "rank": 1, "process": "p", "nonce": ""}\n',
        b'{"hello": "a job", "rank": 1, "process": "p"}\n',
        b"1" * 900 + b"\n",
        b"x" * 5_000,
        b"",
    ],
    ids=["http", "tls", "request", "bool", "nan", "object", "empty", "without", "number", "endless", "scan"],
)
def test_scanners_and_other_programs_are_left_without_a_word(sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with serving(ServerLimits(RANKS, hello_s=0.2)) as port:
        for _ in range(20):
            with socket.create_connection((HOST, port), 10) as stranger, suppress(OSError):
                stranger.sendall(sent)
                if not sent:
                    continue
                received = b""
                while more := stranger.recv(1_000):
                    received += more
                assert received == b""
        assert client(port).add("count", 1) == 1
    assert caplog.messages == []


def test_a_stranger_that_sends_and_never_reads_holds_up_no_one() -> None:
    hello = json.dumps(Hello(JOB, 3, "process 3").to_message("number")).encode() + b"\n"

    def flood() -> None:
        with socket.create_connection((HOST, port), 10) as stranger, suppress(OSError):
            for _ in range(2_000):
                stranger.sendall(hello * 20)

    with serving() as port:
        floods = [threading.Thread(target=flood) for _ in range(8)]
        for one in floods:
            one.start()
        begun = time.monotonic()
        assert client(port).add("count", 1) == 1
        assert time.monotonic() - begun < SOON_S
        for one in floods:
            one.join()


LIMITED = """
import resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
from serving import JOB, KEY, RANKS
from monitor.coordinator.store_memory import LocalStore
from monitor.coordinator.store_messages import Hello
from monitor.coordinator.store_server import ServerLimits, StoreServer
listener = socket.create_server(("127.0.0.1", 0))
server = StoreServer(listener, LocalStore(), Hello(JOB, 0, "process 0"), KEY, ServerLimits(RANKS))
print(listener.getsockname()[1], flush=True)
while sys.stdin.readline():
    try:
        files = [open("/dev/null") for _ in range(50)]
        print("training opens files", flush=True)
        for file in files: file.close()
    except OSError as error:
        print(error, flush=True)
"""
CROWD = """
import socket, sys
from contextlib import suppress
open_ones = []
for _ in range(3_000):
    one = socket.socket()
    one.settimeout(0.5)
    with suppress(OSError):
        one.connect(("127.0.0.1", int(sys.argv[1])))
        one.send(b"{")
    open_ones.append(one)
print(len(open_ones), flush=True)
sys.stdin.readline()
"""


@contextmanager
def process(script: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "PATH": ""}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as started:
        try:
            yield started
        finally:
            started.kill()


def line(started: subprocess.Popen[str]) -> str:
    assert started.stdout is not None
    return started.stdout.readline().strip()


def asked(started: subprocess.Popen[str]) -> str:
    """What a ``LIMITED`` process says of its files."""
    assert started.stdin is not None
    started.stdin.write("\n")
    started.stdin.flush()
    return line(started)


def test_thousands_of_connections_take_no_file_from_training_and_keep_no_rank_out() -> None:
    with process(LIMITED) as training:
        port = int(line(training))
        with process(CROWD, port) as crowd:
            assert client(port, 1, first_s=20.0).add("count", 1) == 1  # while they connect
            assert asked(training) == "training opens files"
            assert line(crowd) == "3000"
            assert asked(training) == "training opens files"
            assert client(port, 2, first_s=20.0).add("count", 1) == 2
        assert client(port, 3, first_s=20.0).add("count", 1) == 3
        assert asked(training) == "training opens files"


def test_ranks_leave_training_its_files_and_the_limit_is_named_once() -> None:
    with process(LIMITED) as training, ExitStack() as open_ones:
        port = int(line(training))
        refused = 0
        for rank in range(1, 210):
            with suppress(ConnectionError):
                open_ones.enter_context(admitted(port, rank))
                continue
            refused += 1
        assert 0 < refused < 60
        assert asked(training) == "training opens files"
        training.kill()
        _, errors = training.communicate()
    assert errors.count("Raise the limit (ulimit -n)") == 1
    assert "as many as the limit of 256 open files leaves it" in errors


# --- The key.


def test_a_rank_with_another_key_is_refused_and_says_what_to_set() -> None:
    with serving() as port:
        with pytest.raises(ConnectionError, match=r"another key than this rank\. Set MONITOR_STORE_KEY to one secret"):
            client(port, key=b"another key of a job", first_s=0.0).set("key", "value")
        assert not client(port).check(["key"])


def test_a_server_that_does_not_know_the_key_is_not_believed() -> None:
    def impostor(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            sent = json.loads(connection.recv(1_000))
            handshake = Handshake(Hello.parse(sent), sent["nonce"], "challenge", "instance")
            connection.sendall(json.dumps(handshake.to_message()).encode() + b"\n")
            proof = json.loads(connection.recv(1_000))["proof"]
            connection.sendall(json.dumps({"welcome": proof}).encode() + b"\n")  # all that it knows

    with socket.create_server((HOST, 0)) as listener, ThreadPoolExecutor(1) as pool:
        pool.submit(impostor, listener)
        with pytest.raises(ConnectionError, match="another key than this rank"):
            greet(HOST, listener.getsockname()[1], Hello(JOB, 1, "process 1"), KEY)


@contextmanager
def overheard(port: int) -> Iterator[tuple[int, list[bytes], list[bytes]]]:
    """A port that passes one connection on to ``port``, and what client and server have sent."""
    sent: list[bytes] = []
    returned: list[bytes] = []

    def copy(source: socket.socket, target: socket.socket, said: list[bytes]) -> None:
        with suppress(OSError):
            while received := source.recv(1 << 16):
                said.append(received)
                target.sendall(received)
            target.shutdown(socket.SHUT_WR)

    def listen() -> None:
        near, _ = listener.accept()
        with near, socket.create_connection((HOST, port)) as far:
            back = threading.Thread(target=copy, args=(far, near, returned))
            back.start()
            copy(near, far, sent)
            back.join()

    with socket.create_server((HOST, 0)) as listener:
        thread = threading.Thread(target=listen)
        thread.start()
        yield listener.getsockname()[1], sent, returned
        thread.join()


def test_the_key_is_not_sent_and_what_was_overheard_opens_nothing() -> None:
    with serving() as port:
        with overheard(port) as (way, sent, returned), greet(HOST, way, Hello(JOB, 1, "process 1"), KEY)[0] as rank:
            rank.sendall(request("add", "count", 1))
            assert answer(rank) == {"is": 1}
        assert KEY not in b"".join([*sent, *returned])
        hello, proof, _ = b"".join(sent).splitlines(keepends=True)
        with socket.create_connection((HOST, port), 10) as thief:
            thief.sendall(hello)
            assert "challenge" in answer(thief)
            thief.sendall(proof)
            assert answer(thief) == {"refused": "key"}
            thief.sendall(proof)
            assert is_closed(thief, HELLO_S / 2)
        assert client(port).add("count", 1) == 2


def test_a_refusal_in_words_of_another_program_does_not_reach_the_log() -> None:
    def refuse(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1_000)
            connection.sendall(json.dumps({"refused": "\x1b[31mcall this number"}).encode() + b"\n")

    with socket.create_server((HOST, 0)) as listener, ThreadPoolExecutor(1) as pool:
        pool.submit(refuse, listener)
        with pytest.raises(ConnectionError, match=r"^it refuses this rank$"):
            greet(HOST, listener.getsockname()[1], Hello(JOB, 1, "process 1"), KEY)


def test_a_number_that_is_no_rank_of_the_job_is_refused() -> None:
    with serving(ServerLimits(4)) as port:
        for rank in (4, -1, 10**30):
            with pytest.raises(ConnectionError, match="another job"):
                greet(HOST, port, Hello(JOB, rank, "process"), KEY)
        assert client(port, rank=3).add("count", 1) == 1


# --- Ranks that misbehave.


def test_ranks_have_as_many_connections_as_their_number_allows() -> None:
    with serving(ServerLimits(2)) as port, ExitStack() as open_ones:
        held = [open_ones.enter_context(admitted(port, 1)) for _ in range(2 * CONNECTIONS_OF_A_RANK)]
        with pytest.raises(ConnectionError, match="reached its limit of connections"):
            admitted(port, 1)
        held[0].close()
        assert until(lambda: _comes_in(port, 1), 10.0)


def _comes_in(port: int, rank: int) -> bool:
    with suppress(ConnectionError), admitted(port, rank):
        return True
    return False


def test_ranks_that_never_read_hold_up_no_one_and_are_left() -> None:
    held = LocalStore()
    held.set("long", "x" * 100_000)
    with serving(ServerLimits(RANKS, unread_s=1.0), held) as port, ExitStack() as open_ones:
        deaf = [open_ones.enter_context(admitted(port, rank)) for rank in range(2, 10)]
        with ThreadPoolExecutor(len(deaf)) as pool:
            floods = [pool.submit(_sends_until_closed, one, request("get", "long") * 100) for one in deaf]
            store = client(port)
            for count in range(1, 21):
                begun = time.monotonic()
                assert store.add("count", 1) == count
                assert time.monotonic() - begun < SOON_S
            assert [flood.result() for flood in floods] == [True] * len(deaf)
        assert store.add("count", 1) == 21


def _sends_until_closed(connection: socket.socket, sent: bytes) -> bool:
    """False if the server only stops to read."""
    try:
        while True:
            connection.sendall(sent)
    except TimeoutError:
        return False
    except OSError:
        return True


class GatedStore(LocalStore):
    """A store that holds up the server in the first ``add``, until ``gate`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.entered = threading.Event(), threading.Event()

    def add(self, key: str, amount: int, /) -> int:
        self.entered.set()
        assert self.gate.wait(30)
        return super().add(key, amount)


def test_of_many_waiting_requests_of_one_rank_a_few_are_answered_before_another_has_its_turn() -> None:
    held = GatedStore()
    with serving(held=held) as port, admitted(port, 2) as greedy, admitted(port, 3) as other:
        greedy.sendall(request("add", "count", 1))
        assert held.entered.wait(10)
        greedy.sendall(request("add", "count", 1) * 1_000)
        other.sendall(request("add", "count", 1))
        held.gate.set()
        assert answer(other)["is"] <= 50


def test_ranks_that_read_late_get_all_their_answers_and_wait_in_little_memory() -> None:
    held = LocalStore()
    held.set("long", "x" * 500_000)
    number, many = 25, 16  # more than MOST_BUFFERED, if the server kept all answers that it can compute
    with serving(held=held) as port, ExitStack() as open_ones:
        late = [open_ones.enter_context(admitted(port, rank)) for rank in range(2, 2 + number)]
        for one in late:
            one.sendall(request("get", "long") * many)
        assert client(port).add("count", 1) == 1
        time.sleep(0.2)
        for one in late:
            received = 0
            while received < many * 500_000:
                received += len(more := one.recv(1 << 20))
                assert more


def test_a_rank_that_sends_many_requests_in_one_go_lets_others_have_their_turn() -> None:
    many = 20_000
    with serving() as port, admitted(port) as greedy:
        sending = threading.Thread(target=greedy.sendall, args=(request("add", "count", 1) * many,))
        sending.start()
        assert greedy.recv(1) == b"{"
        store = client(port)
        assert store.add("count", 1) < many
        received = b"{"
        while received.count(b"\n") < many:
            received += greedy.recv(1 << 20)
        sending.join()
        assert store.add("count", 1) == many + 2


def test_a_rank_that_floods_the_store_gets_errors_and_the_store_keeps_its_size() -> None:
    with serving(held=LocalStore(StoreCapacity(keys=50, content=1 << 20))) as port:
        flooding, other = client(port, 2), client(port)
        other.set("kept", "here")
        for number in range(20):
            flooding.set(f"key {number}", "x" * 50_000)
        for number in range(20, 100):
            with pytest.raises(RuntimeError, match="the store is full"):
                flooding.set(f"key {number}", "x" * 50_000)
        assert other.get("kept") == b"here"
        other.set("kept", "changed")
        flooding.set("key 0", "")
        assert other.compare_set("kept", "changed", "again") == b"again"


MALFORMED: list[bytes] = [
    b"\n",
    b"\xff\xfe\n",
    b"[1]\n",
    b"[" * 100_000 + b"\n",
    b"1" * 5_000 + b"\n",
    b'{"with": ["key"]}\n',
    b'{"do": "get"}\n',
    b'{"do": [], "with": []}\n',
    b'{"do": "get", "with": 5}\n',
    b'{"do": "get", "with": [[]]}\n',
    b'{"do": "get", "with": [{"a": 1}]}\n',
    b'{"do": "check", "with": [5]}\n',
    b'{"do": "check", "with": [[{}]]}\n',
    b'{"do": "set", "with": ["key", 5]}\n',
    b'{"do": "set", "with": [5, "value"]}\n',
    b'{"do": "set", "with": ["\\ud800", "value"]}\n',
    b'{"do": "set", "with": ["key", "\\ud800"]}\n',
    b'{"do": "compare_set", "with": ["\\ud800", "", "a"]}\n',
    b'{"do": "compare_set", "with": ["key", null, "a"]}\n',
    b'{"do": "add", "with": ["key", NaN]}\n',
    b'{"do": "add", "with": ["key", 0.5]}\n',
    b'{"do": "add", "with": ["key", true]}\n',
    b'{"do": "add", "with": ["key", "1"]}\n',
    b'{"do": "add", "with": ["key", 1' + b"0" * 400 + b"]}\n",
    b'{"do": "__class__", "with": []}\n',
    b'{"do": "set", "with": ["' + b"k" * 2_000 + b'", "value"]}\n',
    b'{"do": "set", "with": ["key", "' + b"v" * 600_000 + b'"]}\n',
]


@pytest.mark.parametrize("sent", MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_request_of_a_rank_gets_an_error_and_changes_nothing(sent: bytes) -> None:
    with serving() as port, admitted(port) as rank:
        rank.sendall(sent)
        assert answer(rank).keys() == {"error"}
        rank.sendall(request("check", ["key"]))
        assert answer(rank) == {"is": False}


def test_an_answer_that_no_client_would_take_is_an_error() -> None:
    text = "é" * 200_000
    with serving() as port, admitted(port) as rank:
        rank.sendall(b'{"do": "set", "with": ["key", "' + text.encode() + b'"]}\n')
        assert answer(rank) == {"is": None}
        rank.sendall(request("get", "key"))
        assert "1,048,576 are allowed" in answer(rank)["error"]


def test_a_line_without_an_end_is_not_kept() -> None:
    with serving() as port, admitted(port) as rank:
        with suppress(OSError):
            rank.sendall(b"x" * (3 << 20))
        assert is_closed(rank)
        assert client(port).add("count", 1) == 1


def test_incomplete_requests_of_many_ranks_take_a_bounded_part_of_the_memory() -> None:
    part, number = b"x" * 1_000_000, 80
    with serving() as port, ExitStack() as open_ones:
        for rank in range(2, 2 + number):
            connection = open_ones.enter_context(admitted(port, rank))
            with suppress(ConnectionError):
                connection.sendall(part)
            if rank * len(part) > MOST_BUFFERED + 10 * len(part):
                assert is_closed(connection)
        assert client(port).add("count", 1) == 1
