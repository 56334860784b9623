"""How a command works: the executors of its tasks, and output that appears whole or not at all."""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import re
import secrets
import shutil
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, InvalidStateError, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from importlib import import_module
from itertools import islice
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar
from weakref import WeakSet

from filelock import FileLock, Timeout
from pyarrow import set_memory_pool, system_memory_pool

from monitor.sinks.arrow import do_without_pandas

# --- What stops a merge.


class MergeError(Exception):
    """Nothing was merged. The message says what is wrong, and what to change."""


class NothingRecordedError(MergeError):
    """The ranks of the job can be read, and have recorded no row."""


def is_url(path: str | Path) -> bool:
    """Whether fsspec opens it."""
    return "://" in str(path)


def without_password(url: str) -> str:
    """A URL that can be shown."""
    return re.sub(r"(?<=://)[^/@]*@", "", url)


@contextmanager
def draft_of(output: Path, work: str, elsewhere: str) -> Iterator[Path]:
    """The path of a draft, a directory or a file, which becomes ``output`` if all goes well, and is removed otherwise.

    What drafts of the same output have left whose process was killed is removed.

    Args:
        output: Nothing stands there yet, or an empty directory.
        work: What another process would be doing that writes there.
        elsewhere: What to name instead.

    Raises:
        MergeError: something stands there, or another process is writing there.
    """
    output = output.absolute()
    output.parent.mkdir(parents=True, exist_ok=True)
    with alone(output, work, elsewhere):
        if os.path.lexists(output) and not is_empty(output):
            raise MergeError(f"{output} exists. Remove it, or name {elsewhere}.")
        _remove_drafts(output)
        draft = output.with_name(f".{output.name}.{secrets.token_hex(4)}.draft")
        try:
            yield draft
            os.rename(draft, output)
        except BaseException:
            with suppress(OSError):
                _remove(draft)
            raise


def is_empty(output: Path) -> bool:
    """Whether it is a directory with nothing in it."""
    return output.is_dir() and not output.is_symlink() and not any(output.iterdir())


@contextmanager
def alone(output: Path, work: str, elsewhere: str) -> Iterator[None]:
    """Exclude other processes that would write to ``output``.

    Args:
        output, work, elsewhere: See ``draft_of``.

    Raises:
        MergeError: another process is writing there.
    """
    # A lock that is a file would outlive a process that is killed.
    path = output.with_name(f".{output.name}.lock")
    lock = FileLock(path, timeout=0, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        raise MergeError(f"another {work} is writing to {output}. Wait for it, or name {elsewhere}.") from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is held: who opened it meanwhile sees that it has no name, and makes another
        lock.release()


def _remove_drafts(output: Path) -> None:
    draft = re.compile(rf"\.{re.escape(output.name)}\.[0-9a-f]{{8}}\.draft")
    for path in output.parent.iterdir():
        if draft.fullmatch(path.name):
            _remove(path)


def _remove(draft: Path) -> None:
    if draft.is_dir() and not draft.is_symlink():
        shutil.rmtree(draft)
    else:
        draft.unlink(missing_ok=True)


# --- Where the work is done: in this process, in a pool of processes, or on a Dask cluster. All of them are executors.

P = ParamSpec("P")
T = TypeVar("T")
Task = TypeVar("Task")

PATIENCE: Final = 10.0
"""Seconds in which a scheduler must answer and have a worker."""


class InProcess(Executor):
    """Does what it is given at once."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


class Pool(ProcessPoolExecutor):
    """Processes, whose executor no interrupt leaves in the middle of something.

    An interrupt may come after a process was started and before there is a thread that ends it. It may also come right after a
    lock was taken and before the statement that releases it. Then the command would wait without end.
    """

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        with _interrupted_afterwards():
            return super().submit(fn, *args, **kwargs)


@contextmanager
def _interrupted_afterwards() -> Iterator[None]:
    """Hold an interrupt back until the block has ended."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python interrupts no other thread
        return
    interrupts: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _frame: interrupts.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler or signal.SIG_DFL)
    if interrupts:
        signal.raise_signal(signal.SIGINT)


@contextmanager
def engine(workers: int = 1, dask: str | None = None, needs: str = "json") -> Iterator[tuple[Executor, int]]:
    """An executor, and how many tasks it works on at a time.

    Args:
        workers: Processes; 1: this one.
        dask: Address of the scheduler of a cluster, which sees the same files under the same paths.
        needs: A module that processes import at once.

    Raises:
        MergeError: there is no such cluster, or the package for it is not installed, or a process that did the work has died.
    """
    if dask is not None:
        with _cluster(dask) as cluster:
            yield cluster
    elif workers > 1:
        with _pool(workers, needs) as pool:
            yield pool, workers
    else:
        with InProcess() as here:
            yield here, 1


@contextmanager
def _pool(workers: int, needs: str) -> Iterator[Executor]:
    try:
        with Pool(workers, mp_context=_beginning(), initializer=_begin_work, initargs=(needs,)) as pool:
            try:
                for _ in range(workers):  # each starts a process, which gets ready while this one looks for work
                    pool.submit(os.getpid)
                yield pool
            except BaseException:
                pool.shutdown(cancel_futures=True)  # what has not begun is wanted no more
                raise
    except BrokenProcessPool as error:
        raise MergeError(f"{_DIED} Try fewer --workers.") from error


def _beginning() -> BaseContext:
    """How processes begin: as copies of this one, which have imported everything, or as new interpreters.

    A copy has none of the other threads. It may wait without end for a lock that one of them held. Arrow and OpenBLAS, which
    begin threads of their own when they are imported, put their locks in order in a copy; frameworks may not.
    """
    alone = threading.active_count() == 1 and sys.modules.keys().isdisjoint(("torch", "mindspore"))
    return multiprocessing.get_context("fork" if alone and sys.platform == "linux" else "spawn")


_DIED: Final = "a worker process has died, most often because memory ran out."


def _begin_work(needs: str) -> None:
    _follow_parent()
    keep_freed_memory()
    do_without_pandas()
    import_module(needs)


def keep_freed_memory() -> None:
    """Have this process keep memory that it frees.

    Each piece of work allocates columns of megabytes by the hundred, and tables of hundreds of megabytes. The C library would
    return each to the system, which would clear every page again: a tenth of the time.
    """
    set_memory_pool(system_memory_pool())
    with suppress(AttributeError, OSError):  # another C library than glibc
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_MAX, 0)  # also large blocks come from the heap
        library.mallopt(_TRIM_THRESHOLD, 2**31 - 1)


_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""Parameters of ``mallopt``."""


def _follow_parent() -> None:
    """A worker leaves it to its parent what an interrupt means, and ends with it: if that is killed, a worker would wait for
    work forever.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a copy of a command has its handler
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent.sentinel,), daemon=True).start()


def _end_after(sentinel: int) -> None:
    wait_for_any([sentinel])
    os._exit(1)


@contextmanager
def _cluster(address: str) -> Iterator[tuple[Executor, int]]:
    try:
        from distributed import Client, KilledWorker  # installed where there is a cluster
    except ImportError as error:
        raise MergeError("--dask needs the package distributed: pip install 'trainermon[dask]'") from error
    _greet(address)
    with Client(address, set_as_default=False, timeout=PATIENCE) as client, _OfClient(client) as executor:
        _wait_for_workers(client, address)
        try:
            yield executor, sum(client.nthreads().values())
        except KilledWorker as error:
            raise MergeError(f"{_DIED} {error}") from error
        except Exception as error:
            if client.status == "running":
                raise
            raise MergeError(f"the Dask scheduler at {address} is gone. Begin again when it is back.") from error


class _OfClient(Executor):
    """The executor of a Dask client, whose futures all end when the client does.

    A client that closes cancels the futures that it knows. One that is submitted meanwhile would never end.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._executor = client.get_executor()
        self._futures: WeakSet[Future[Any]] = WeakSet()
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._end_with_client, daemon=True)
        self._watch.start()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = self._executor.submit(fn, *args, **kwargs)
        self._futures.add(future)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002
        # Dask's own would wait for a future that never ends. The scheduler drops what the client still wants when that closes.
        self._over.set()
        self._watch.join()

    def _end_with_client(self) -> None:
        while not self._over.wait(INTERRUPTIBLE):
            if self._client.status in ("closing", "closed"):
                for future in list(self._futures):
                    with suppress(InvalidStateError):  # it has ended
                        future.set_exception(ConnectionError("the client has closed"))


def _greet(address: str) -> None:
    """Shake hands with the scheduler. A client would wait for an answer without end where something else listens."""
    from distributed.comm.core import connect
    from distributed.security import Security

    async def greeted() -> None:
        comm = await connect(address, timeout=PATIENCE, **Security().get_connection_args("client"))
        await comm.close()

    try:
        asyncio.run(asyncio.wait_for(greeted(), PATIENCE))
    except Exception as error:  # whatever comes of reading what another program says
        reason = str(error) or f"nothing came within {PATIENCE:g} s"
        raise MergeError(f"no Dask scheduler answers at {address}: {reason}") from error


def _wait_for_workers(client: Any, address: str) -> None:
    try:
        client.wait_for_workers(1, timeout=PATIENCE)
    except TimeoutError as error:
        raise MergeError(f"the Dask scheduler at {address} has no workers. Start some: dask worker {address}") from error


def run(executor: Executor, workers: int, work: Callable[[Task], T], tasks: Iterable[Task]) -> Iterator[tuple[Task, T]]:
    """Each task with its result, as they are done. Few are under way at a time, however many there are."""
    waiting = iter(tasks)
    under_way = {executor.submit(work, task): task for task in islice(waiting, 2 * workers)}
    while under_way:
        for future in _done(under_way):
            yield under_way.pop(future), future.result()
            for task in islice(waiting, 1):
                under_way[executor.submit(work, task)] = task


def run_in_order(executor: Executor, workers: int, work: Callable[[Task], T], tasks: Iterable[Task]) -> Iterator[T]:
    """The results in the order of the tasks. Few are under way, or wait for their turn, at a time."""
    waiting = iter(tasks)
    under_way = deque(executor.submit(work, task) for task in islice(waiting, 2 * workers))
    while under_way:
        _done([under_way[0]])
        result = under_way.popleft().result()
        for task in islice(waiting, 1):
            under_way.append(executor.submit(work, task))
        yield result


def _done(under_way: Collection[Future[T]]) -> set[Future[T]]:
    """The tasks that are done, as soon as one is."""
    done: set[Future[T]] = set()
    while not done:
        with _interrupted_afterwards():
            done, _ = wait(under_way, timeout=INTERRUPTIBLE, return_when=FIRST_COMPLETED)
    return done


INTERRUPTIBLE: Final = 0.2
"""Seconds after which a wait heeds an interrupt."""
