"""A merge on a real Dask scheduler of the loopback, and what is said where there is none."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import dask
import pytest
from distributed import LocalCluster
from evidence import sampled
from recorded_job import alone, files, merged, sharded

from monitor.merge import execution
from monitor.merge.execution import MergeError
from monitor.merge.merge import Wanted, merge
from monitor.merge.parts import Part, finish, merge_part


@pytest.fixture(scope="module", autouse=True)
def _scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Dask leaves the folder in which workers keep files."""
    with dask.config.set({"temporary-directory": str(tmp_path_factory.mktemp("dask"))}):
        yield


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with started(2) as cluster:
        yield cluster


def started(workers: int) -> LocalCluster:
    """A scheduler in this process, and workers that are processes of their own; no port is fixed."""
    return LocalCluster(
        n_workers=workers,
        threads_per_worker=1,
        processes=True,
        host="127.0.0.1",
        dashboard_address="127.0.0.1:0",
        scheduler_kwargs={"dashboard": False},
    )


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "PATIENCE", 0.3)


@pytest.fixture
def mute() -> Iterator[str]:
    """The address of a program that takes calls and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("format", sampled(["hdf5", "csv", "parquet"]))
def test_the_bytes_are_those_of_a_pool_and_of_one_process(tmp_path: Path, cluster: LocalCluster, format: str) -> None:  # noqa: A002
    sharded(tmp_path, steps=20)
    merged(tmp_path, "here", format=format, rows=20)
    merged(tmp_path, "pool", format=format, rows=20, workers=2)
    merged(tmp_path, "cluster", format=format, rows=20, dask=cluster.scheduler_address)
    assert files(tmp_path / "here") == files(tmp_path / "pool") == files(tmp_path / "cluster")
    assert len(files(tmp_path / "cluster")) > 5


def test_the_work_is_done_by_the_cluster(tmp_path: Path, cluster: LocalCluster) -> None:
    sharded(tmp_path, steps=20)
    cluster.scheduler.transition_log.clear()
    merged(tmp_path, rows=10, dask=cluster.scheduler_address)
    done = {key for key, _, became, *_ in cluster.scheduler.transition_log if became == "memory" and key.startswith("worked")}
    assert len(done) >= len(files(tmp_path / "merged" / "global")) > 3


def test_parts_are_done_by_a_cluster_and_not_behind_a_url(tmp_path: Path, cluster: LocalCluster) -> None:
    sharded(tmp_path, steps=20)
    wanted = Wanted(tmp_path, tmp_path / "parts", rows=20, dask=cluster.scheduler_address)
    for part in (Part(1, 2), Part(2, 2)):
        merge_part(wanted, part, lambda _done, _all: None)
    finish(wanted)
    merged(tmp_path, rows=20)
    assert files(tmp_path / "parts") == files(tmp_path / "merged")
    with pytest.raises(MergeError, match="--dask cannot write to a URL"):
        merge_part(replace(wanted, output="memory://parts"), Part(1, 2), lambda _done, _all: None)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "127.0.0.1:99999", "nowhere", "foo://127.0.0.1:1", ""])
def test_where_no_scheduler_answers_that_is_said_in_time_and_nothing_is_left(tmp_path: Path, address: str) -> None:
    alone(tmp_path)
    with pytest.raises(MergeError, match=f"no Dask scheduler answers at {address}: .+"):
        merged(tmp_path, dask=address)
    assert {path.name for path in tmp_path.iterdir() if "merged" in path.name} <= {".merged.lock"}


@pytest.mark.usefixtures("impatient")
def test_where_something_else_listens_that_is_said_in_time(tmp_path: Path, mute: str) -> None:
    alone(tmp_path)
    with pytest.raises(MergeError, match=f"no Dask scheduler answers at {mute}: nothing came within 0.3 s"):
        merged(tmp_path, dask=mute)


def test_a_cluster_without_workers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "PATIENCE", 5.0)  # a busy machine connects in that time
    alone(tmp_path)
    with started(0) as empty, pytest.raises(MergeError, match=f"at {empty.scheduler_address} has no workers"):
        merged(tmp_path, dask=empty.scheduler_address)


def test_where_the_cluster_goes_away_in_the_middle_that_is_said_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "PATIENCE", 3.0)
    sharded(tmp_path, steps=60)
    with started(1) as short_lived:
        wanted = Wanted(tmp_path, tmp_path / "merged", rows=3, dask=short_lived.scheduler_address)
        with pytest.raises(MergeError, match=f"the Dask scheduler at {short_lived.scheduler_address} is gone"):
            merge(wanted, lambda _done, _all: short_lived.close())
    assert {path.name for path in tmp_path.iterdir() if "merged" in path.name} <= {".merged.lock"}


def test_a_task_that_a_closing_client_has_missed_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "PATIENCE", 3.0)
    with started(1) as short_lived, pytest.raises(MergeError, match="is gone"):
        _lose_a_task(short_lived)


def _lose_a_task(cluster: LocalCluster) -> None:
    with execution.engine(dask=cluster.scheduler_address) as (executor, _):
        future = executor.submit(time.sleep, 600)
        executor._client.futures.clear()  # as of one that is submitted while the client closes
        cluster.close()
        future.result()


def test_without_the_package_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    alone(tmp_path)
    with pytest.raises(MergeError, match=r"pip install 'trainermon\[dask\]'"):
        merged(tmp_path, dask="tcp://127.0.0.1:1")
