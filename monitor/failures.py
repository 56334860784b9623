"""The monitor's logger, and its handling of errors after attaching: log once, count, never raise into training."""

from __future__ import annotations

import errno
import logging
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class _LastResort(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to standard error until the program configures logging: users must see the monitor's messages, and seldom
    configure a logger for it.
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

NOTHING_OF: Final = "nothing of "
"""The beginning of causes that are no failures: rows were asked for that this training does not have."""

SHORT_STEPS: Final = "short steps"
"""What follows ``NOTHING_OF`` if steps had fewer micro-batches than others, and gradients changed before this was known."""

NEW_OPTIMIZERS: Final = "new_optimizers"
"""The note that counts calls of ``set_monitor`` with another optimizer, which has no moments before its first step."""


class EarlierFailure(BaseException):
    """An operation of the training program has failed, and the monitor's read of another tensor received the error.

    Where operations run asynchronously, the error of one surfaces in the first call that waits, and only there. So the monitor
    must raise the error in training. This class bypasses ``except Exception``, which handles the monitor's own failures.

    Attributes:
        error: The error that training would have received at its next wait.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def giving_way_to(raised: type[BaseException] | None) -> Iterator[None]:
    """A block whose error is only logged if something else was raised before, which is on its way to the program."""
    try:
        yield
    except Exception as error:
        if raised is None:
            raise
        LOGGER.warning("Closing the monitor raised %r. The error that ended the program's block is passed on.", error)


class _HookDepth(threading.local):
    """The number of monitor hooks that this thread is inside of. Calls made there are not the program's."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


IN_HOOK: Final = _HookDepth()


class Failures:
    """Failures of the monitor, by cause. A cause is logged the first time and only counted afterwards.

    Safe to call from any thread, and in a process that was forked while another thread was inside a method. It takes no lock:
    two threads that report a new cause at the same moment may both log it.

    Attributes:
        counts: How often each cause came.
        messages: Of each cause, what was logged.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.counts: Counter[str] = Counter()
        self.messages: dict[str, str] = {}
        self._advised: set[str] = set()
        self._deferred: EarlierFailure | None = None
        self._reraised: BaseException | None = None

    def report(self, where: str, error: BaseException, advice: str = "", of: str = "") -> None:
        """Count an exception that was caught, and log it with ``advice`` (what to do) if its cause is new.

        Args:
            of: The object that failed. Only the message contains it: ten thousand parameters share one cause.

        Raises:
            Exception: A signal handler of the program has raised ``error``, as a time limit does. It is the program's.
        """
        if _is_of_a_signal_handler(error):
            raise error
        what = f"{where} of {of!r}" if of else where
        self._once(f"{where}: {_cause(error)}", f"{what} failed: {_error_text(error)}. Training continues. {advice}", error)

    def warn(self, cause: str, message: str) -> None:
        """Count ``cause`` and log ``message`` the first time."""
        self._once(cause, message, None)

    def nothing_of(self, what: str, message: str) -> None:
        """Warn of rows or numbers that were requested, and that this training does not have: no failure."""
        self.warn(f"{NOTHING_OF}{what}", message)

    def advise(self, cause: str, message: str) -> None:
        """Log ``message`` the first time. Nothing is lost, so it is not counted."""
        if cause not in self._advised:
            self._advised.add(cause)
            LOGGER.warning("[rank %d] %s", self.rank, message)

    def _once(self, cause: str, message: str, error: BaseException | None) -> None:
        self.counts[cause] += 1
        if self.counts[cause] == 1:
            self.messages[cause] = message.strip()[:MOST_CHARACTERS]
            LOGGER.warning("[rank %d] %s", self.rank, message.strip())
            if error is not None:
                LOGGER.debug("[rank %d] traceback of the above", self.rank, exc_info=error)

    def defer_error(self, failure: EarlierFailure) -> None:
        """Keep an error that another thread received, until the training thread raises it."""
        self._deferred = failure

    def reraise_deferred(self) -> None:
        """Raise the deferred error, if there is one. Called on the training thread, inside a ``guarded`` function."""
        if self._deferred is not None:
            owed, self._deferred = self._deferred, None
            raise owed

    def guarded(self, where: str, hook: Callable[P, T], advice: str = "", of: str = "") -> Callable[P, T | None]:
        """``hook`` with every exception reported and swallowed, so that a framework may call it.

        An ``EarlierFailure`` is not a failure of the hook: the error that it carries is raised.
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
                raise failure.error from failure.error.__cause__
            finally:
                IN_HOOK.depth -= 1
                if not IN_HOOK.depth:
                    self._reraised = None  # its traceback holds the frames of training

        return call


def _is_of_a_signal_handler(error: BaseException) -> bool:
    """Whether a signal handler raised an error, which came up wherever the main thread was."""
    handlers = {_code_of(signal.getsignal(one)) for one in signal.valid_signals()}
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__))


def _code_of(handler: object) -> object:
    """The code that a signal handler runs; None if it is not written in Python."""
    function = getattr(handler, "func", handler)  # of a partial function
    return getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)


def _cause(error: BaseException) -> str:
    """The class of an error, with the error code of the system: a full disk is not a limit on open files."""
    system = errno.errorcode.get(error.errno or 0, "") if isinstance(error, OSError) else ""
    return f"{type(error).__name__} {system}".strip()


def _error_text(error: BaseException) -> str:
    """The ``repr`` of an error, and its file if it has one."""
    path = error.filename if isinstance(error, OSError) else None
    said = repr(error)
    if len(said) > MOST_CHARACTERS:  # torch's dispatcher lists every kernel it has
        said = said[:MOST_CHARACTERS] + "…"
    return f"{said} at {path}" if path else said
