"""Where output goes, and that it can go there: found out before anything is attached."""

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
        OutputError: ``~`` stands for a home directory that is not known.
    """
    configured = environment.get(OUTPUT_VARIABLE) or DEFAULT_OUTPUT
    try:
        return Path(configured).expanduser().absolute()
    except RuntimeError as error:
        raise OutputError(f"{OUTPUT_VARIABLE} is {configured!r}: {error} Write the path out.") from error


def prepare(directory: Path, named_by: str = OUTPUT_VARIABLE) -> Path:
    """Make ``directory`` with its parents and prove, by writing a nameless file, that it can be written.

    Args:
        named_by: Where its name comes from.

    Raises:
        OutputError: it cannot.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as probe:
            probe.write(b"\0")
    except OSError as error:
        raise unusable(directory, error, named_by) from error
    return directory


def unusable(path: Path, error: OSError, named_by: str = OUTPUT_VARIABLE) -> OutputError:
    """What to tell the user when ``path`` could not be made, written or renamed."""
    return OutputError(
        f"no output can be written to {path}: {error.strerror or error}. "
        f"Make it a directory that this process may write, or name another one in {named_by}."
    )


def write_whole(path: Path, content: bytes, *, durable: bool = False, like: os.stat_result | None = None) -> None:
    """Write a file that is seen complete or not at all; an earlier one under this name is replaced in one move.

    Args:
        like: Of a file whose permissions it is to have, and as far as possible its owner.
        durable: Wait until the content has reached the disk, so that it also survives a crash of the machine.

    Raises:
        OSError: it could not be written; what stood under the name before still stands there.
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
    """The owner first: a change of owner takes the set-user-id bit away. Another's file stays with who writes it."""
    with suppress(PermissionError):
        os.fchown(descriptor, like.st_uid, like.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(like.st_mode))


def remove_drafts(directory: Path) -> None:
    """Remove what ``write_whole`` leaves when its process is killed: what was to be replaced still stands.

    Raises:
        OSError: one cannot be removed.
    """
    for path in directory.iterdir():
        if _DRAFT.fullmatch(path.name):
            path.unlink()


# --- A directory for one process alone, for as long as it lives: the system lets go of a claim with the process that holds
# it.

LOCK_FILE: Final = ".lock"
NO_LOCKS_HERE: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What a file system answers that has no locks."""


class DirectoryLock:
    """Held until ``release``, or until the process ends, however it ends. A process forked from it holds nothing.

    Attributes:
        before_ns: When a process that held it before and was killed began to write, in the time of the file system; 0 if
            there was none.
    """

    def __init__(self, path: Path, lock: FileLock, before_ns: int) -> None:
        self.before_ns = before_ns
        self._path, self._lock = path, lock
        self._pid = os.getpid()
        self._released = False

    def begin(self) -> None:
        """From here on this process writes. Raises OSError."""
        os.utime(self._path)

    def release(self) -> None:
        """Let others have the directory. Any number of times; must not raise."""
        if os.getpid() == self._pid and not self._released:
            self._released = True
            with suppress(OSError):  # while it is held: whoever has opened it meanwhile finds it gone, and opens another
                self._path.unlink()
            with suppress(OSError):
                self._lock.release()


def lock_directory(directory: Path) -> DirectoryLock | None:
    """DirectoryLock ``directory``, which must exist; None if another process, or another recording of this one, holds it.

    On a file system without locks nobody is kept out.

    Raises:
        OSError: the file of the lock cannot be made.
    """
    path = directory / LOCK_FILE
    before = _changed(path)
    # A lock that is a file would outlive its process.
    lock = FileLock(path, timeout=0, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        return None
    except OSError as error:
        if error.errno not in NO_LOCKS_HERE:
            raise
    if before:
        with suppress(OSError):  # some locks touch their file, and it is to tell of that process until ``begin``
            os.utime(path, ns=(before, before))
    return DirectoryLock(path, lock, before)


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


# --- Making room: what an earlier run left under a fixed name in the base directory is renamed, never mixed or deleted.
#
# All ranks of a job come here at the same moment, and one of them may already be writing when another arrives. So the
# first rank that holds the lock renames what it finds and enters the job in a list; a rank that finds its job there
# leaves all as it is. Locks are not to be trusted on every shared file system. Where they fail, the new name helps,
# which is the same for all ranks of the job: a directory cannot be renamed onto one that has something in it.

PATIENCE_S: Final = 30.0
"""How long a rank waits for another one that is renaming."""

_JOBS_REMEMBERED: Final = 64
_LOOK_AGAIN_S: Final = 0.1
_TAKEN: Final = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
_NO_LOCKS_HERE: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def rotate_stale_output(base: Path, name: str, identity: JobIdentity, patience_s: float = PATIENCE_S) -> Path | None:
    """Rename ``base/name`` if an earlier run left it, once for the job.

    Args:
        name: A file or directory that every run writes under the same name, ``anomaly_detected`` for one.
        identity: The job's, the same on all ranks. Of several monitors alive in one process, that of the first.
        patience_s: How long to wait for another rank that is at it.

    Returns:
        The new path if this call renamed, else None.

    Raises:
        OutputError: it cannot be renamed, or the lock was not to be had.
    """
    try:
        base.mkdir(parents=True, exist_ok=True)
        return _rotate(base, name, identity, time.monotonic() + patience_s)
    except OSError as error:
        raise unusable(base / name, error) from error


def _rotate(base: Path, name: str, identity: JobIdentity, deadline: float) -> Path | None:
    """Look at the list before every attempt on the lock: of ten thousand ranks, few will ever need it."""
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
    """Hold the lock at ``path``; on a file system that has no locks, go on without.

    Raises:
        Timeout: another rank holds it. Time to look at the list again.
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
    """``target``, or None where nothing was left to rename or another rank of the job has done it."""
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
    """The jobs that have made room, oldest first."""
    try:
        return jobs.read_text().split()
    except FileNotFoundError:
        return []
