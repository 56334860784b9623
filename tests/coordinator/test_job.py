import fcntl
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from datetime import datetime, timedelta
from multiprocessing import get_context

import pytest
import torch.distributed as dist
from hypothesis import given, strategies as st
from serving import served

from monitor.coordinator.output import JobIdentity, agree
from monitor.coordinator.store import StoreClient
from monitor.failures import Failures

SOON = timedelta(seconds=60)


@pytest.fixture(autouse=True)
def _no_thread_left():
    yield
    for thread in threading.enumerate():
        if thread.name == "monitor-job-identity":
            thread.join(30)
            assert not thread.is_alive()


def server():
    return dist.TCPStore("127.0.0.1", 0, None, True, SOON, wait_for_workers=False)


@pytest.fixture
def own_store():
    with served() as meet:
        yield meet


@pytest.fixture(scope="module")
def tcp():
    """A server for all tests here; where they could meet, they ask it under a prefix of their own."""
    return server()


def client(port):
    return dist.TCPStore("127.0.0.1", port, None, False, SOON)


def agreed(store, ordinal=0):
    failures = Failures()
    identity = agree(store, ordinal, failures)
    assert not failures.counts
    return identity


@given(st.datetimes(min_value=datetime(1970, 1, 1)))
def test_an_identity_reads_back_as_it_was_written(moment):
    identity = JobIdentity.new(moment)
    assert JobIdentity.parse(identity.serialized()) == identity


@given(st.text(max_size=60))
def test_other_text_is_no_identity(text):
    with pytest.raises(ValueError, match="is not"):
        JobIdentity.parse(text)


def test_two_jobs_of_the_same_second_differ():
    moment = datetime(2024, 12, 3, 21, 34, 40)
    one, other = JobIdentity.new(moment), JobIdentity.new(moment)
    assert one.timestamp == other.timestamp == "Dec03_21-34-40"
    assert one.job_id != other.job_id


def test_a_process_of_its_own_makes_its_identity():
    assert agreed(None).agreed
    assert agreed(None) != agreed(None)


@pytest.fixture(params=["HashStore", "FileStore", "TCPStore", "PrefixStore", "StoreClient"])
def store_of_a_rank(request, tcp, tmp_path):
    """Makes one more rank's store of a job of four."""
    if request.param == "StoreClient":
        meet = request.getfixturevalue("own_store")
        return lambda: StoreClient(meet())
    if request.param == "HashStore":
        shared = dist.HashStore()
        return lambda: shared
    if request.param == "FileStore":
        path = str(tmp_path / "store")
        first = dist.FileStore(path, 4)  # kept, as a rank keeps its own: the last one to be released deletes the file
        return lambda: first and dist.FileStore(path, 4)
    if request.param == "TCPStore":
        return lambda: client(tcp.port)
    return lambda: dist.PrefixStore("default_pg", client(tcp.port))


def test_ranks_that_ask_at_once_share_one_identity_for_each_monitor(store_of_a_rank):
    """Four threads act as ranks, each with its own client where the store has clients."""

    def of_a_rank(_):
        store = store_of_a_rank()
        return agreed(store, 0), agreed(store, 1)

    with ThreadPoolExecutor(4) as pool:
        identities = set(pool.map(of_a_rank, range(4)))
    assert len(identities) == 1
    first, second = identities.pop()
    assert first.job_id != second.job_id


def test_processes_share_one_identity_through_a_file_and_through_tcp(tcp, tmp_path):
    path = str(tmp_path / "store")
    by_file = dist.FileStore(path, 3)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        identities = set(pool.map(_of_a_process, [(path, tcp.port)] * 2))
    assert identities == {(agreed(by_file), agreed(dist.PrefixStore("processes", tcp)))}


def _of_a_process(arguments):
    path, port = arguments
    return agreed(dist.FileStore(path, 3)), agreed(dist.PrefixStore("processes", client(port)))


def test_without_a_store_the_recordings_of_a_process_share_a_launch_and_those_of_a_forked_child_have_another():
    own = {agreed(None, number).launch for number in range(3)}
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        of_child = set(pool.map(_launch, range(3)))
    assert (len(own), len(of_child), own & of_child) == (1, 1, set())


def _launch(number):
    return agreed(None, number).launch


def test_no_rank_waits_for_another(tmp_path):
    """The store is made for 64 ranks and one is here."""
    assert agreed(dist.FileStore(str(tmp_path / "store"), 64)).agreed


def test_a_connection_on_which_training_waits_is_no_hindrance(tcp):
    """A ``wait`` holds every other call on the same client."""
    training = client(tcp.port)
    waits = threading.Thread(target=training.wait, args=(["from the other rank"],))
    waits.start()
    try:
        assert agreed(training).agreed
        assert waits.is_alive()
    finally:
        tcp.set("from the other rank", "here")
        waits.join()


def test_a_store_that_hangs_leaves_a_local_identity_and_one_warning(tmp_path, caplog):
    """The store's file is locked by somebody else for good."""
    store = dist.FileStore(str(tmp_path / "store"), 2)
    failures = Failures()
    with open(tmp_path / "store", "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        identity = agree(store, 0, failures, timeout_s=0.05)
    assert not identity.agreed
    assert sum(failures.counts.values()) == 1
    assert "did not answer within 0.05 s" in caplog.text
    assert "those of other ranks may differ" in caplog.text


def test_a_store_that_has_died_leaves_a_local_identity_and_one_warning():
    store = server()
    training = dist.TCPStore("127.0.0.1", store.port, None, False, timedelta(milliseconds=200))
    del store
    failures = Failures()
    assert not agree(training, 0, failures, timeout_s=5).agreed
    assert sum(failures.counts.values()) == 1


def test_a_store_that_holds_something_else_leaves_a_local_identity_and_one_warning(caplog):
    store = dist.HashStore()
    store.set("monitor/job/0", "nonsense")
    assert not agree(store, 0, Failures()).agreed
    assert "'nonsense' is not the identity of a job" in caplog.text


def test_nothing_is_drawn_from_the_random_state_of_training():
    import random

    import numpy as np
    import torch

    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    agreed(dist.HashStore())
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
