"""The output directory: checks it before attaching, locks it, writes files atomically, and renames stale output."""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from monitor.coordinator.identity import JobIdentity

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
        return jobs.read_text().split()
    except FileNotFoundError:
        return []
