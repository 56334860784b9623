"""A store that one process serves and the others ask: what it does, whom it lets in, and what it does about strangers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest
from serving import JOB, KEY, RANKS, served

from monitor.coordinator.store import Rendezvous, StoreClient, StoreLocator, greet
from monitor.coordinator.store_memory import LocalStore
from monitor.coordinator.store_messages import MOST_BYTES, Hello, RefusedError
from monitor.coordinator.store_server import ServerLimits, StoreServer

HOST = "127.0.0.1"
MakeLocator = Callable[[], StoreLocator]


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name == "monitor-store"] == []


@pytest.fixture
def meet() -> Iterator[MakeLocator]:
    with served() as meet:
        yield meet


@contextmanager
def serving(port: int = 0, job: str = JOB, process: str = "process 0", rank: int = 0) -> Iterator[int]:
    """A server at ``port``, or any; its port."""
    listener = socket.create_server((HOST, port))
    server = StoreServer(listener, LocalStore(), Hello(job, rank, process), KEY, ServerLimits(RANKS))
    try:
        yield listener.getsockname()[1]
    finally:
        server.close()


@contextmanager
def stranger(reply: Callable[[bytes], bytes]) -> Iterator[int]:
    """Something else that listens; its port."""
    listener = socket.create_server((HOST, 0))

    def answer() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connections.append(connection)
                connection.sendall(reply(connection.recv(1_000)))

    connections: list[socket.socket] = []
    thread = threading.Thread(target=answer)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    thread.join()
    for one in [listener, *connections]:
        one.close()


def client(*ports: int, rank: int = 1, process: str = "process 1", first_s: float = 0.0) -> StoreClient:
    return StoreClient(StoreLocator(Rendezvous(HOST, ports, JOB, RANKS), Hello(JOB, rank, process), KEY, first_s))


def test_a_key_is_set_by_who_expects_what_it_holds_and_by_no_one_else(meet: MakeLocator) -> None:
    one, other = StoreClient(meet()), StoreClient(meet())
    assert one.compare_set("key", "", "first") == b"first"
    assert other.compare_set("key", "", "second") == b"first"
    assert other.compare_set("key", "first", "second") == b"second"
    assert one.get("key") == b"second"
    assert one.compare_set("no such key", "expected", "desired") == b"expected"
    assert not one.check(["no such key"])


def test_keys_exist_once_they_are_set(meet: MakeLocator) -> None:
    one, other = StoreClient(meet()), StoreClient(meet())
    assert not one.check(["counter"])
    assert other.add("counter", 2) == 2
    assert one.add("counter", -3) == -1
    assert one.check(["counter"])
    assert not one.check(["counter", "other"])
    assert other.get("counter") == b"-1"


def test_a_key_that_is_not_there_is_an_error_and_not_waited_for(meet: MakeLocator) -> None:
    store = StoreClient(meet())
    with pytest.raises(KeyError):
        store.get("missing")
    store.compare_set("text", "", "no number")
    with pytest.raises(RuntimeError, match="ValueError"):
        store.add("text", 1)
    assert store.get("text") == b"no number"


@pytest.mark.parametrize("text", ['{"a": 1}\n\n', "é\0\u2028 \\", "x" * 300_000], ids=["lines", "characters", "long"])
def test_any_text_comes_back_as_it_was_set(meet: MakeLocator, text: str) -> None:
    assert StoreClient(meet()).compare_set(text[:1_000], "", text).decode() == text


def test_of_many_that_ask_at_once_each_is_counted_and_one_is_first(meet: MakeLocator) -> None:
    """32 threads act as ranks."""

    def of_a_rank(rank: int) -> tuple[bytes, list[int]]:
        store = StoreClient(meet())
        return store.compare_set("first", "", str(rank)), [store.add("count", 1) for _ in range(50)]

    with ThreadPoolExecutor(32) as pool:
        told = list(pool.map(of_a_rank, range(32)))
    assert len({first for first, _ in told}) == 1
    assert sorted(count for _, counts in told for count in counts) == list(range(1, 32 * 50 + 1))


def test_threads_that_share_a_client_get_their_own_answers(meet: MakeLocator) -> None:
    store = StoreClient(meet())
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda n: store.compare_set(str(n), "", str(n)), range(400))) == [b"%d" % n for n in range(400)]


def test_a_clone_has_a_connection_of_its_own(meet: MakeLocator) -> None:
    store = StoreClient(meet())
    store.add("count", 1)
    assert store.clone().add("count", 1) == 2
    assert store.add("count", 1) == 3


def test_a_store_that_comes_late_is_waited_for() -> None:
    with serving() as port:
        pass
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client(port, first_s=30).add, "count", 1)
        time.sleep(0.3)
        with serving(port):
            assert asked.result() == 1


def test_where_there_is_no_store_one_sentence_says_where_it_was_looked_for() -> None:
    with serving() as port:
        pass
    with pytest.raises(ConnectionError, match=rf"no store of this job at 127\.0\.0\.1, port {port}: .*refused"):
        client(port, first_s=0.2).check(["key"])


def test_a_store_that_has_gone_is_not_waited_for_again() -> None:
    with serving() as port:
        store = client(port, first_s=1_000)
        store.add("count", 1)
    for _ in range(3):
        with pytest.raises(ConnectionError):
            store.add("count", 1)


def test_a_store_that_came_up_in_place_of_ours_is_not_taken_for_it() -> None:
    with serving() as port:
        store = client(port)
        store.add("count", 1)
    with serving(port):
        with pytest.raises(ConnectionError):  # the old connection
            store.add("count", 1)
        with pytest.raises(ConnectionError, match="another process replaced its server"):
            store.add("count", 1)
        with pytest.raises(ConnectionError, match="another process replaced its server"):
            store.clone().add("count", 1)


@pytest.mark.parametrize(
    "reply", [lambda hello: hello, lambda _: b"HTTP/1.1 400\r\n", lambda _: b'{"welcome": 1}\n'], ids=["echo", "http", "json"]
)
def test_a_stranger_on_the_first_port_is_passed_over(reply: Callable[[bytes], bytes]) -> None:
    with stranger(reply) as first, serving() as second:
        assert client(first, second).add("count", 1) == 1
        with pytest.raises(ConnectionError):
            client(first).add("count", 1)


def test_a_stranger_who_says_nothing_is_passed_over_in_time() -> None:
    with stranger(lambda _: b"") as port, pytest.raises(TimeoutError):
        greet(HOST, port, Hello(JOB, 1, "process 1"), KEY, timeout_s=0.1)


def test_another_jobs_store_is_passed_over() -> None:
    with serving(job="another") as first, serving() as second:
        assert client(first, second).add("count", 1) == 1
        with pytest.raises(ConnectionError, match="it belongs to another job"):
            client(first).add("count", 1)


def test_the_store_of_an_earlier_run_is_passed_over_by_its_ranks_successors() -> None:
    with serving() as first, serving() as second:
        assert client(first, second, process="the earlier").add("count", 1) == 1
        assert client(first, second, process="the later").add("count", 1) == 1
        with pytest.raises(ConnectionError, match="an earlier run: another process has used it as rank 1"):
            client(first, process="the later").add("count", 1)
        assert client(first, second, process="the earlier").add("count", 1) == 2


def test_a_store_whose_own_rank_has_a_successor_lets_in_no_rank_that_it_does_not_know() -> None:
    with serving() as port:
        known = client(port)
        known.add("count", 1)
        with pytest.raises(RefusedError, match="as rank 0"):
            greet(HOST, port, Hello(JOB, 0, "its successor"), KEY)
        with pytest.raises(ConnectionError, match="an earlier run"):
            client(port, rank=2, process="process 2").add("count", 1)
        assert known.clone().add("count", 1) == 2


@pytest.mark.parametrize(
    "garbage",
    [
        b"\n\n",
        b"\xff\xfe\n",
        b"[1]\n",
        b'{"hello": 1, "rank": [], "process": {}}\n',
        b"[" * 100_000 + b"\n",
        b"x" * (MOST_BYTES + 1),
    ],
    ids=["empty", "bytes", "list", "unhashable", "deep", "endless"],
)
def test_who_sends_something_else_is_left_and_disturbs_no_one(garbage: bytes) -> None:
    with serving() as port:
        store = client(port)
        store.add("count", 1)
        with socket.create_connection((HOST, port), 10) as intruder:
            with suppress(OSError):
                intruder.sendall(garbage)
            with suppress(ConnectionError):
                assert b"welcome" not in intruder.recv(1_000)
        assert store.add("count", 1) == 2


def test_who_is_not_let_in_can_change_nothing() -> None:
    with serving() as port:
        with socket.create_connection((HOST, port), 10) as intruder:
            intruder.sendall(b'{"do": "add", "with": ["count", 1]}\n')
            assert intruder.recv(1_000) == b""
        assert client(port).add("count", 1) == 1


def test_only_the_operations_of_a_store_can_be_asked_for() -> None:
    with serving() as port:
        store = client(port)
        with pytest.raises(RuntimeError, match="expected one of check, get, set, add, compare_set, received '__init__'"):
            store._ask("__init__")
        with pytest.raises(RuntimeError, match="TypeError"):
            store._ask("add", "count")
        assert store.add("count", 1) == 1


@pytest.mark.parametrize(("port", "first"), [(8118, 9118), (64_532, 65_532), (64_533, 63_533), (65_535, 64_535)])
def test_ports_lie_beside_the_launchers(port: int, first: int) -> None:
    rendezvous = Rendezvous.beside("host", port, 8)
    assert rendezvous.ports == (first, first + 1, first + 2, first + 3)
    assert rendezvous != Rendezvous.beside("host", port, 16)


@pytest.mark.parametrize(
    ("address", "host"), [("10.0.0.1:29501", "10.0.0.1"), (" [::1]:29501 ", "::1"), ("node-0:29501", "node-0")]
)
def test_an_address_that_is_given_holds_for_one_port(address: str, host: str) -> None:
    assert (Rendezvous.at(address, 8).host, Rendezvous.at(address, 8).ports) == (host, (29501,))


@pytest.mark.parametrize("address", ["", "10.0.0.1", "10.0.0.1:", ":29501", "host:0", "host:65536", "host:²", "host:port"])
def test_what_is_no_address_is_named(address: str) -> None:
    with pytest.raises(ValueError, match="is not the address of a store: expected HOST:PORT"):
        Rendezvous.at(address, 8)
