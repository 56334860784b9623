"""Where the work is done: in this process, in a pool of processes, or on a Dask cluster. All of them are executors."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from itertools import islice
from typing import Any, ParamSpec, TypeVar

from monitor.merge.errors import MergeError

P = ParamSpec("P")
T = TypeVar("T")
Task = TypeVar("Task")


class InProcess(Executor):
    """Does what it is given at once."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


@contextmanager
def engine(workers: int = 1, dask: str | None = None) -> Iterator[tuple[Executor, int]]:
    """An executor, and how many tasks it works on at a time.

    Args:
        workers: Processes; 1: this one.
        dask: Address of the scheduler of a cluster, which sees the same files under the same paths.

    Raises:
        MergeError: there is no such cluster, or the package for it is not installed.
    """
    if dask is not None:
        with _cluster(dask) as cluster:
            yield cluster
    elif workers > 1:
        # A forked child of a process with threads may hang; a new interpreter does not.
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            yield pool, workers
    else:
        with InProcess() as here:
            yield here, 1


@contextmanager
def _cluster(address: str) -> Iterator[tuple[Executor, int]]:
    try:
        from distributed import Client  # installed where there is a cluster
    except ImportError as error:
        raise MergeError("--dask needs the package distributed: pip install 'trainermon[dask]'") from error
    try:
        client: Any = Client(address, set_as_default=False)
    except (OSError, ValueError) as error:
        raise MergeError(f"no Dask scheduler answers at {address}: {error}") from error
    with client, client.get_executor() as executor:
        yield executor, max(1, sum(client.nthreads().values()))


def run(executor: Executor, workers: int, work: Callable[[Task], T], tasks: Iterable[Task]) -> Iterator[tuple[Task, T]]:
    """Each task with its result, as they are done. Few are under way at a time, however many there are."""
    waiting = iter(tasks)
    under_way = {executor.submit(work, task): task for task in islice(waiting, 2 * workers)}
    while under_way:
        done, _ = wait(under_way, return_when=FIRST_COMPLETED)
        for future in done:
            yield under_way.pop(future), future.result()
            for task in islice(waiting, 1):
                under_way[executor.submit(work, task)] = task
