"""The output directory: checks it before attaching, locks it, writes files atomically, and renames stale output."""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, TimeoutError as FutureTimeout
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from threading import Thread
from typing import Final, Protocol

from filelock import FileLock, Timeout

from monitor.failures import Failures

# --- The identity of a recording, which its ranks agree on through the job's key-value store, and the names made from it.
#
# Each rank proposes an identity with one ``compare_set`` and adopts the value that the store then holds: the first
# proposal. No rank waits for another, and no collective is issued. All processes that share the store agree on a launch
# name likewise.

# --- The format of a job's timestamp and of a rank's directory name: ``Dec03_21-34-40-rank0-1a2b3c4d``.

MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")

_LEAP_YEAR: Final = 2000
"""A timestamp has no year; in this one each of its days exists, February 29 too."""

_TIMESTAMP: Final = re.compile(r"([A-Z][a-z]{2})([0-9]{2})_([0-9]{2})-([0-9]{2})-([0-9]{2})")
_DIRECTORY: Final = re.compile(
    rf"(?P<timestamp>{_TIMESTAMP.pattern})-rank(?P<rank>0|[1-9][0-9]{{0,8}})-(?P<suffix>[0-9a-f]{{8}})"
)


def timestamp_of(moment: datetime) -> str:
    """``Dec03_21-34-40``, with the month in English whatever the locale."""
    return f"{MONTHS[moment.month - 1]}{moment:%d_%H-%M-%S}"


def timestamp_fields(timestamp: str) -> tuple[int, int, int, int, int]:
    """Month, day, hour, minute, second: tuples sort by time within one year.

    Raises:
        ValueError: ``timestamp`` is not one.
    """
    match = _TIMESTAMP.fullmatch(timestamp)
    if match is None or match[1] not in MONTHS:
        raise ValueError(f"{timestamp!r} is not a timestamp like 'Dec03_21-34-40'")
    day, hour, minute, second = (int(field) for field in match.groups()[1:])
    try:
        moment = datetime(_LEAP_YEAR, MONTHS.index(match[1]) + 1, day, hour, minute, second)
    except ValueError as error:
        raise ValueError(f"{timestamp!r} is not a timestamp like 'Dec03_21-34-40': {error}") from None
    return moment.month, moment.day, moment.hour, moment.minute, moment.second


@dataclass(frozen=True, slots=True)
class RankDirectory:
    """The name of the directory that one rank of one run writes into.

    Attributes:
        timestamp: When the job began, the same on all of its ranks, local time of the rank that proposed it.
        suffix: Eight hexadecimal characters that keep two runs of the same second apart.
    """

    timestamp: str
    rank: int
    suffix: str

    @classmethod
    def new(cls, timestamp: str, rank: int) -> RankDirectory:
        """A unique name. The suffix comes from the system, not from the training's random state."""
        return cls(timestamp, rank, secrets.token_hex(4))

    @classmethod
    def parse(cls, name: str) -> RankDirectory | None:
        """The parts of a directory's name; None if it is not a rank's directory."""
        match = _DIRECTORY.fullmatch(name)
        if match is None:
            return None
        try:
            timestamp_fields(match["timestamp"])
        except ValueError:
            return None
        return cls(match["timestamp"], int(match["rank"]), match["suffix"])

    def __str__(self) -> str:
        return f"{self.timestamp}-rank{self.rank}-{self.suffix}"


TIMEOUT_S: Final = 30.0
"""A new connection looks up the name of its peer; an unresponsive name server takes some ten seconds of this."""

LAUNCH: Final = "monitor/launch"
_IMPORTED: Final = uuid.uuid4()

_JOB_ID: Final = re.compile(r"[0-9a-f]{32}")


class IdentityStore(Protocol):
    """The method used of a torch store (``TCPStore``, ``FileStore``, ``HashStore``, ``PrefixStore``).

    ``clone`` is used too, if the store has it.
    """

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set ``key`` if it holds ``expected``, or is new and ``expected`` is empty; return its value afterwards."""


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """Identifies the run that a file belongs to.

    Attributes:
        job_id: 32 hexadecimal characters. The timestamp alone does not identify a job: two may start in one second.
        timestamp: When the job began, as in the names of its directories.
        agreed: False if the store did not answer, and other ranks may have other identities.
        launch: The same for all recordings of processes that share a store; without a store, for those of one process.
    """

    job_id: str
    timestamp: str
    agreed: bool = True
    launch: str = ""

    @classmethod
    def new(cls, moment: datetime | None = None) -> JobIdentity:
        """A new identity. Draws from the system, not from the training's random state."""
        return cls(uuid.uuid4().hex, timestamp_of(moment or datetime.now()))

    def of_launch(self) -> JobIdentity:
        """An identity that all recordings of the launch share."""
        return replace(self, job_id=self.launch or self.job_id)

    def serialized(self) -> str:
        return f"{self.job_id} {self.timestamp}"

    @classmethod
    def parse(cls, text: str) -> JobIdentity:
        """Raises ``ValueError`` for what is not an identity."""
        job_id, _, timestamp = text.partition(" ")
        if not _JOB_ID.fullmatch(job_id):
            raise ValueError(f"{text!r} is not the identity of a job")
        timestamp_fields(timestamp)
        return cls(job_id, timestamp)


def agree(store: IdentityStore | None, name: str | int, failures: Failures, timeout_s: float = TIMEOUT_S) -> JobIdentity:
    """The identity that all ranks of the job share.

    Args:
        store: The process group's store; None for a single process.
        name: Name of the recording. Ranks that use the same name agree.
        timeout_s: Timeout for the store's answer. If the store is slower or fails, this rank uses its own identity, and
            the failure is reported to ``failures``.
    """
    proposal = replace(JobIdentity.new(), launch=uuid.uuid5(_IMPORTED, str(os.getpid())).hex)  # a forked child has its own
    if store is None:
        return proposal
    try:
        return _within(timeout_s, lambda: _first_proposals(store, f"monitor/job/{name}", proposal))
    except Exception as error:
        advice = "This rank uses its own job id and timestamp; those of other ranks may differ."
        failures.report("agreeing with the other ranks on the name of the job", error, advice)
        return replace(proposal, agreed=False)


def _first_proposals(store: IdentityStore, key: str, proposal: JobIdentity) -> JobIdentity:
    """The first proposal for the recording, with the first one for the launch."""
    connection = _own_connection(store)
    launch, found = (
        JobIdentity.parse(connection.compare_set(one, "", proposal.serialized()).decode()) for one in (LAUNCH, key)
    )
    return replace(found, launch=launch.job_id)


def _own_connection(store: IdentityStore) -> IdentityStore:
    """A clone, if the store supports it: a call that hangs on the job's connection would block training's calls on it."""
    try:
        clone: IdentityStore = store.clone()  # type: ignore[attr-defined]
    except (AttributeError, NotImplementedError):
        return store
    return clone


def _within(seconds: float, ask: Callable[[], JobIdentity]) -> JobIdentity:
    """Run ``ask`` on a daemon thread, which is abandoned after the timeout.

    A store call can hang past the store's own timeout, and cannot be interrupted.
    """
    answer: Future[JobIdentity] = Future()
    Thread(target=_answer, args=(answer, ask), name="monitor-job-identity", daemon=True).start()
    try:
        return answer.result(seconds)
    except FutureTimeout:
        raise TimeoutError(f"the job's store did not answer within {seconds:g} s") from None


def _answer(answer: Future[JobIdentity], ask: Callable[[], JobIdentity]) -> None:
    try:
        answer.set_result(ask())
    except BaseException as error:
        answer.set_exception(error)


OUTPUT_VARIABLE: Final = "MONITOR_OUTPUT_DIR"
_DRAFT: Final = re.compile(r"\..+\.[0-9a-f]{8}")
DEFAULT_OUTPUT: Final = "./monitor_output"


class OutputError(Exception):
    """The output directory cannot be used. The message names the path, the reason and what to do."""


def base_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """The base directory, absolute: a training script that changes its directory later does not move its output.

    Raises:
        OutputError: the path begins with ``~``, and the home directory is not known.
    """
    configured = environment.get(OUTPUT_VARIABLE) or DEFAULT_OUTPUT
    try:
        return Path(configured).expanduser().absolute()
    except RuntimeError as error:
        raise OutputError(f"{OUTPUT_VARIABLE} is {configured!r}: {error} Write the path out.") from error


def prepare(directory: Path, named_by: str = OUTPUT_VARIABLE) -> Path:
    """Make ``directory`` with its parents, and check that it is writable by writing an unnamed file.

    Args:
        named_by: The variable or option that names the directory.

    Raises:
        OutputError: the directory cannot be made or written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as probe:
            probe.write(b"\0")
    except OSError as error:
        raise unusable(directory, error, named_by) from error
    return directory


def unusable(path: Path, error: OSError, named_by: str = OUTPUT_VARIABLE) -> OutputError:
    """The error for a ``path`` that could not be made, written or renamed."""
    return OutputError(
        f"no output can be written to {path}: {error.strerror or error}. "
        f"Make it a directory that this process may write, or name another one in {named_by}."
    )


def write_whole(path: Path, content: bytes, *, durable: bool = False, like: os.stat_result | None = None) -> None:
    """Write a file atomically: readers see all of it or the file before.

    Args:
        like: Status of a file whose permissions, and if possible owner, the new file gets.
        durable: Wait until the content has reached the disk, so that it also survives a crash of the machine.

    Raises:
        OSError: the file could not be written; an earlier file of this name is unchanged.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(draft, "xb") as file:
            file.write(content)
            file.flush()
            if like is not None:
                _resemble(file.fileno(), like)
            if durable:
                os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


def _resemble(descriptor: int, like: os.stat_result) -> None:
    """Copy owner, then mode: a change of owner clears the set-user-id bit. Without the right to, the writer stays owner."""
    with suppress(PermissionError):
        os.fchown(descriptor, like.st_uid, like.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(like.st_mode))


def remove_drafts(directory: Path) -> None:
    """Remove the drafts that ``write_whole`` leaves when its process is killed. The files to be replaced are unchanged.

    Raises:
        OSError: a draft cannot be removed.
    """
    for path in directory.iterdir():
        if _DRAFT.fullmatch(path.name):
            path.unlink()


# --- An exclusive lock on a directory. The system releases it when the process that holds it ends.

LOCK_FILE: Final = ".lock"
NO_LOCKS_HERE: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Error numbers of file systems without locks."""


class DirectoryLock:
    """Held until ``release``, or until the process ends in any way. A forked child does not hold it.

    Attributes:
        before_ns: The time at which an earlier holder that was killed began to write, by the file system's clock; 0 if there
            was none.
    """

    def __init__(self, path: Path, lock: FileLock, before_ns: int) -> None:
        self.before_ns = before_ns
        self._path, self._lock = path, lock
        self._pid = os.getpid()
        self._released = False

    def begin(self) -> None:
        """Note that this process begins to write. Raises OSError."""
        os.utime(self._path)

    def release(self) -> None:
        """Release the directory. May be called any number of times; must not raise."""
        if os.getpid() == self._pid and not self._released:
            self._released = True
            with suppress(OSError):  # while held: a process that has opened the file finds it removed, and opens another
                self._path.unlink()
            with suppress(OSError):
                self._lock.release()


def lock_directory(directory: Path) -> DirectoryLock | None:
    """Lock ``directory``, which must exist; None if another process, or another recording of this one, holds it.

    A file system without locks excludes no process.

    Raises:
        OSError: the lock file cannot be made.
    """
    path = directory / LOCK_FILE
    before = _changed(path)
    # A lock by a file's mere existence would outlive its process.
    lock = FileLock(path, timeout=0, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        return None
    except OSError as error:
        if error.errno not in NO_LOCKS_HERE:
            raise
    if before:
        with suppress(OSError):  # some locks touch their file; until ``begin`` its time must be the earlier process's
            os.utime(path, ns=(before, before))
    return DirectoryLock(path, lock, before)


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


# --- Renames stale output: files that an earlier run left under a fixed name in the base directory. It is never mixed or
# deleted.
#
# All ranks of a job call this at the same moment, and one of them may already write when another arrives. So the first
# rank that holds the lock renames the stale output and enters the job in a list. A rank that finds its job in the list
# changes nothing. Some shared file systems have unreliable locks. There the new name protects, which is the same for all
# ranks of the job: a directory cannot be renamed onto one that is not empty.

PATIENCE_S: Final = 30.0
"""How long a rank waits for another rank that is renaming."""

_JOBS_REMEMBERED: Final = 64
_LOOK_AGAIN_S: Final = 0.1
_TAKEN: Final = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
_NO_LOCKS_HERE: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def rotate_stale_output(base: Path, name: str, identity: JobIdentity, patience_s: float = PATIENCE_S) -> Path | None:
    """Rename ``base/name`` if an earlier run left it, once for the job.

    Args:
        name: A file or directory that every run writes under the same name, for example ``anomaly_detected``.
        identity: The job's, the same on all ranks. If several monitors live in one process, the identity of the first.
        patience_s: How long to wait for another rank that is renaming.

    Returns:
        The new path if this call renamed, else None.

    Raises:
        OutputError: it cannot be renamed, or the lock was not free in time.
    """
    try:
        base.mkdir(parents=True, exist_ok=True)
        return _rotate(base, name, identity, time.monotonic() + patience_s)
    except OSError as error:
        raise unusable(base / name, error) from error


def _rotate(base: Path, name: str, identity: JobIdentity, deadline: float) -> Path | None:
    """Read the list before each attempt to lock: of ten thousand ranks, few ever need the lock."""
    jobs, lock = base / f".{name}.jobs", base / f".{name}.lock"
    while identity.job_id not in _entered(jobs):
        try:
            with _locked(lock):
                return _first_of_job(base / name, jobs, identity)
        except Timeout:
            if time.monotonic() > deadline:
                raise OutputError(f"{lock} is held by another process. If none is running, delete it.") from None
    return None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock at ``path``; on a file system without locks, proceed without it.

    Raises:
        Timeout: another rank holds it. Read the list again.
    """
    lock = FileLock(path, timeout=_LOOK_AGAIN_S, poll_interval=0.01)
    try:
        lock.acquire()
    except (OSError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno not in _NO_LOCKS_HERE:
            raise
    try:
        yield
    finally:
        lock.release()


def _first_of_job(path: Path, jobs: Path, identity: JobIdentity) -> Path | None:
    """With the lock held: rename unless another rank has been here, then enter the job in the list."""
    entered = _entered(jobs)
    if identity.job_id in entered:
        return None
    renamed = _renamed(path, path.with_name(f"{path.name}-before-{identity.timestamp}-{identity.job_id[:8]}"))
    write_whole(jobs, "\n".join([*entered, identity.job_id][-_JOBS_REMEMBERED:]).encode())
    return renamed


def _renamed(path: Path, target: Path) -> Path | None:
    """``target``, or None if there was nothing to rename or another rank of the job has renamed it."""
    if os.path.lexists(target):
        return None
    try:
        os.rename(path, target)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in _TAKEN:
            return None
        raise
    return target


def _entered(jobs: Path) -> list[str]:
    """The jobs that have renamed stale output, oldest first."""
    try:
        if not stat.S_ISREG(os.lstat(jobs).st_mode):  # to open a pipe would wait for ever
            raise OSError(errno.EINVAL, "this is no regular file", str(jobs))
        return jobs.read_text().split()
    except FileNotFoundError:
        return []
