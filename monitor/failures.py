"""How the monitor fails after it has been attached: said once, counted, never raised into training."""

from __future__ import annotations

import errno
import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class _LastResort(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to standard error as long as the program has set up no logging of its own: what the monitor says is for its
    users, and they seldom configure a logger for it.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            self.stream = sys.stderr
            super().emit(record)


def _logger() -> logging.Logger:
    logger = logging.getLogger("monitor")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not any(isinstance(handler, _LastResort) for handler in logger.handlers):
        handler = _LastResort()
        handler.setFormatter(logging.Formatter("[monitor] %(levelname)s %(message)s"))
        logger.addHandler(handler)
    return logger


LOGGER: Final = _logger()
MOST_CHARACTERS: Final = 500


class EarlierFailure(BaseException):
    """An operation of training's has failed, and reading a tensor of another was told so.

    Where operations run later than they are called, what goes wrong in one surfaces in the first call that waits, and then it
    is gone. So whoever meets it hands it back. It passes by ``except Exception``, which is for failures of ours.

    Attributes:
        error: What training would have been told at its next wait.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class _HookDepth(threading.local):
    """How many of our hooks this thread is in: what they call is none of the program's."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


IN_HOOK: Final = _HookDepth()


class Failures:
    """What went wrong, by cause. A cause is logged the first time and only counted afterwards.

    Safe to call from any thread, and from a process that was forked while another thread was inside it: it takes no lock of
    its own, so two threads that meet a cause for the first time at the same moment may both log it.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.counts: Counter[str] = Counter()
        self._deferred: EarlierFailure | None = None
        self._reraised: BaseException | None = None

    def report(self, where: str, error: BaseException, advice: str = "", of: str = "") -> None:
        """Count an exception that was caught, and log it with ``advice`` (what to do) if its cause is new.

        Args:
            of: What it happened to, for the message alone: the cause is the same for each of ten thousand parameters.
        """
        what = f"{where} of {of!r}" if of else where
        self._once(f"{where}: {_cause(error)}", f"{what} failed: {_error_text(error)}. Training goes on. {advice}", error)

    def warn(self, cause: str, message: str) -> None:
        """Count ``cause`` and log ``message`` the first time."""
        self._once(cause, message, None)

    def _once(self, cause: str, message: str, error: BaseException | None) -> None:
        self.counts[cause] += 1
        if self.counts[cause] == 1:
            LOGGER.warning("[rank %d] %s", self.rank, message.strip())
            if error is not None:
                LOGGER.debug("[rank %d] traceback of the above", self.rank, exc_info=error)

    def defer_error(self, failure: EarlierFailure) -> None:
        """Another thread than training's has met it: training is told when it comes by."""
        self._deferred = failure

    def reraise_deferred(self) -> None:
        """On the training thread, in what is ``guarded``: raise what training is still to be told."""
        if self._deferred is not None:
            owed, self._deferred = self._deferred, None
            raise owed

    def guarded(self, where: str, hook: Callable[P, T], advice: str = "", of: str = "") -> Callable[P, T | None]:
        """``hook`` with every exception reported and swallowed: what may be handed to a framework to call.

        What is no failure of the hook's is handed back: an ``EarlierFailure`` as the error that it carries.
        """

        def call(*args: P.args, **kwargs: P.kwargs) -> T | None:
            IN_HOOK.depth += 1
            try:
                return hook(*args, **kwargs)
            except Exception as error:
                if error is self._reraised:  # by a hook within this one
                    raise
                self.report(where, error, advice, of)
                return None
            except EarlierFailure as failure:
                self._reraised = failure.error
                raise failure.error from None
            finally:
                IN_HOOK.depth -= 1

        return call


def _cause(error: BaseException) -> str:
    """Of the system's errors one each: a full disk is not a limit on open files."""
    system = errno.errorcode.get(error.errno or 0, "") if isinstance(error, OSError) else ""
    return f"{type(error).__name__} {system}".strip()


def _error_text(error: BaseException) -> str:
    """The error as its ``repr``, and where it has to do with a file, that file."""
    path = error.filename if isinstance(error, OSError) else None
    said = repr(error)
    if len(said) > MOST_CHARACTERS:  # torch's dispatcher lists every kernel it has
        said = said[:MOST_CHARACTERS] + "…"
    return f"{said} at {path}" if path else said
