"""Making room: what an earlier run left under a fixed name in the base directory is renamed, never mixed or deleted.

All ranks of a job come here at the same moment, and one of them may already be writing when another arrives. So the first rank
that holds the lock renames what it finds and enters the job in a list; a rank that finds its job there leaves all as it is.
Locks are not to be trusted on every shared file system. Where they fail, the new name helps, which is the same for all ranks of
the job: a directory cannot be renamed onto one that has something in it.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from monitor.ranks.job import JobIdentity
from monitor.ranks.output import OutputError, unusable, write_whole

PATIENCE_S: Final = 30.0
"""How long a rank waits for another one that is renaming."""

_JOBS_REMEMBERED: Final = 64
_LOOK_AGAIN_S: Final = 0.1
_TAKEN: Final = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
_NO_LOCKS_HERE: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def set_aside(base: Path, name: str, identity: JobIdentity, patience_s: float = PATIENCE_S) -> Path | None:
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
        return _set_aside(base, name, identity, time.monotonic() + patience_s)
    except OSError as error:
        raise unusable(base / name, error) from error


def _set_aside(base: Path, name: str, identity: JobIdentity, deadline: float) -> Path | None:
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
