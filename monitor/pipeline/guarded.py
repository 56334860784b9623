"""Code that is not the pipeline's own: a sink, a watcher, the journal. It may raise, and it may never return."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from monitor.failures import Failures

T = TypeVar("T")

_ADVICE: Final = {
    errno.ENOSPC: "The disk is full: free some space.",
    errno.EDQUOT: "The disk quota is used up: free some space.",
    errno.EACCES: "Permission is missing: allow this user to write there.",
    errno.EPERM: "Permission is missing: allow this user to write there.",
    errno.EROFS: "The file system is read-only: mount it writable.",
    errno.ENOTDIR: "A file stands where the directory was: move it away.",
    errno.EEXIST: "A file stands where the directory was: move it away.",
    errno.EMFILE: "This process has too many files open: raise its limit (ulimit -n).",
    errno.ENOENT: "The directory may have been removed: it is made again where possible.",
}


class Guarded(Generic[T]):
    """``inner``, used by one thread at a time; what it raises is reported and handed back, never raised.

    The lock lets another thread serve the rest while the writer is stuck in one of them. Neither the training thread, nor a
    signal handler, nor a forked process ever takes it.
    """

    def __init__(self, name: str, inner: T, failures: Failures) -> None:
        self.name = name
        self.inner = inner
        self._failures = failures
        self._lock = threading.Lock()
        self._retired = False

    @property
    def busy(self) -> bool:
        return self._lock.locked()

    def use(self, call: Callable[[T], object], *, wait: bool = True, last: bool = False) -> BaseException | None:
        """Call with ``inner``, for the ``last`` time if so: later calls are refused.

        The exception if the call failed or was refused, or if ``inner`` is in use and ``wait`` is false.
        """
        if not self._lock.acquire(blocking=wait):
            return TimeoutError(f"{self.name} is still in an earlier call")
        try:
            return self._call(call, last)
        finally:
            self._lock.release()

    def _call(self, call: Callable[[T], object], last: bool) -> BaseException | None:
        if self._retired:
            return None if last else ValueError(f"{self.name} was closed")
        self._retired = last
        try:
            call(self.inner)
        except BaseException as error:  # a panic in native code is no Exception, and this thread is nobody's to interrupt
            self._failures.report(self.name, error, advice(error))
            return error
        return None


def advice(error: BaseException) -> str:
    """What the user can do about ``error``."""
    known = _ADVICE.get(error.errno or 0, "") if isinstance(error, OSError) else ""
    return f"{known} What this call was for is missing; the next step is tried again.".strip()
