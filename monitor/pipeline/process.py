"""Handles the events of a whole process for all pipelines in it: exit, fork and SIGTERM."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from threading import get_ident
from time import monotonic, sleep
from types import FrameType, MethodType
from typing import Any, Final, Protocol

from monitor.failures import LOGGER, Failures

SHORTEST_PAUSE: Final = 20e-6
LONGEST_PAUSE: Final = 5e-3

WRITERS_SHARE: Final = 0.75
"""The fraction of a time limit that the writer gets. The rest is for what can be done without the writer."""


class Ticket:
    """The result of a request to the writer. The writer settles it once; any thread, or a signal handler, may wait for it.

    ``wait`` polls a plain attribute. ``threading.Event`` has a lock inside: a signal handler that waits for an event while the
    interrupted code is in the same wait never returns.
    """

    def __init__(self) -> None:
        self.done = False
        self.ok = False

    def settle(self, ok: bool) -> None:
        self.ok = ok
        self.done = True

    def wait(self, seconds: float) -> bool:
        """True if the ticket was settled within ``seconds``."""
        deadline, pause = monotonic() + seconds, SHORTEST_PAUSE
        while not self.done and monotonic() < deadline:
            sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return self.done


# --- Forks: a child must not inherit the pipeline's threads, files and signal handling.

Callback = Callable[[], None]
Weakly = Callable[[], Callback | None]


class Forks:
    """Counts the forks between the first process and this one, and calls the registered callbacks in each child.

    SIGTERM is blocked from just before a fork until the child has removed what it inherited. Until then a signal to the child
    would be written into the descriptor that it shares with its parent, and would wake the parent.
    """

    def __init__(self, in_child: Callback) -> None:
        self.count = 0
        self._first = in_child
        self._in_child: list[Weakly] = []
        self._masks: dict[int, set[signal.Signals | int]] = {}

    def watch(self) -> None:
        """Start to watch for forks. Cannot be undone, so it is called once per process."""
        os.register_at_fork(before=self._before, after_in_parent=self._after, after_in_child=self._after_in_child)

    def register(self, callback: Callback) -> None:
        """Call the bound method ``callback`` in every child for as long as its object lives."""
        reference: Weakly = weakref.WeakMethod(callback) if isinstance(callback, MethodType) else weakref.ref(callback)
        self._in_child = [*(known for known in self._in_child if known() is not None), reference]

    def _before(self) -> None:
        self._masks[get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def _after(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._masks.pop(get_ident()))

    def _after_in_child(self) -> None:
        self.count += 1
        try:
            self._first()
        finally:
            self._after()
            self._masks.clear()
        for reference in self._in_child:
            if (callback := reference()) is not None:
                _call(callback)


def _call(callback: Callback) -> None:
    try:
        callback()
    except Exception:
        LOGGER.warning("%r failed in a forked process. The process continues.", callback, exc_info=True)


# --- SIGTERM: flush every sealed step, then let the signal have the effect that it has without the monitor.
#
# The handler runs in the main thread, and only once that thread is back in Python code; a rank that hangs in a
# collective never gets there. So a wake-up descriptor passes the signal to a separate thread at once. If the signal has
# its default action, that thread also ends the process: a rank that hangs must still die of SIGTERM.

_STOP: Final = b"\0"
# signal.signal refuses to work outside the main thread
_SET_ACTION: Final = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)(("PyOS_setsig", ctypes.pythonapi))


class Flushable(Protocol):
    signal_seconds: float

    def ask_flush(self) -> Ticket: ...

    def flush_without_writer(self) -> Ticket: ...


Live = Callable[[], Sequence[Flushable]]


class Termination:
    """The monitor's handling of SIGTERM, installed with the first step and removed with the last pipeline.

    It is installed only from the main thread, as Python requires, and only if the signal has its default action or a handler
    in Python. An ignored signal stays ignored, and a handler in C stays in place.
    """

    def __init__(self, live: Live) -> None:
        self._live = live
        self._handler: Handler | None = None
        self._wakeup: WakeUp | None = None

    def arm(self) -> None:
        previous = signal.getsignal(signal.SIGTERM)
        if self._handler is not None or not _in_main_thread() or previous is None or previous == signal.SIG_IGN:
            return
        handler = Handler(self._live, previous)
        signal.signal(signal.SIGTERM, handler)
        self._handler = handler
        self._wakeup = WakeUp.install(handler.on_wakeup)

    def disarm(self) -> None:
        if self._handler is not None and _in_main_thread():
            self._restore()
            if self._wakeup is not None:
                self._wakeup.stop()
            self._handler = self._wakeup = None

    def forget(self) -> None:
        """In a forked child: restore the previous handling. The listener thread belongs to the parent and is not stopped."""
        if self._handler is not None:
            self._restore()
            if self._wakeup is not None:
                self._wakeup.close()
            self._handler = self._wakeup = None

    def _restore(self) -> None:
        if self._handler is not None and _is_installed(self._handler):
            signal.signal(signal.SIGTERM, self._handler.previous)
        if self._wakeup is not None:
            self._wakeup.uninstall()


class Handler:
    """The signal handler, a new object for each ``arm``: a handler installed on top of an old one may still call that one."""

    def __init__(self, live: Live, previous: Any) -> None:
        self.previous = previous
        self._live = live

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """Request a flush of every pipeline, wait for it in bounded time, and pass the signal on. Takes no lock."""
        self._flush(share=1.0)
        if callable(self.previous):
            self.previous(signum, frame)
        else:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)

    def on_wakeup(self) -> None:
        """Do the same on the listener's thread, except for what only the main thread may do."""
        self._flush(share=WRITERS_SHARE)
        if not callable(self.previous) and _is_installed(self):
            _SET_ACTION(signal.SIGTERM, None)
            os.kill(os.getpid(), signal.SIGTERM)

    def _flush(self, share: float) -> None:
        with contextlib.suppress(Exception):  # the signal must be passed on in any case
            flush_all(self._live(), share)


def flush_all(live: Sequence[Flushable], share: float) -> None:
    """Flush every pipeline at once. If a writer uses up its ``share`` of the time, the rest is spent on a flush without it."""
    began = monotonic()
    asked = [(one, one.ask_flush()) for one in live]
    late = [one for one, ticket in asked if not ticket.wait(began + share * one.signal_seconds - monotonic())]
    if share < 1.0:
        without = [(one, one.flush_without_writer()) for one in late]
        for one, ticket in without:
            ticket.wait(began + one.signal_seconds - monotonic())


class WakeUp:
    """The descriptor into which the interpreter writes the number of each signal, and the thread that reads it."""

    def __init__(self, on_sigterm: Callable[[], None]) -> None:
        self._on_sigterm = on_sigterm
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._thread = threading.Thread(target=self._listen, name="monitor-signals", daemon=True)

    @classmethod
    def install(cls, on_sigterm: Callable[[], None]) -> WakeUp | None:
        """``None`` if another library, such as an event loop, has installed a descriptor: that one stays."""
        theirs = signal.set_wakeup_fd(-1)
        if theirs != -1:
            signal.set_wakeup_fd(theirs)
            return None
        wakeup = cls(on_sigterm)
        wakeup._thread.start()
        signal.set_wakeup_fd(wakeup._write.fileno(), warn_on_full_buffer=False)
        return wakeup

    def uninstall(self) -> None:
        installed = signal.set_wakeup_fd(-1)
        if installed not in (-1, self._write.fileno()):
            signal.set_wakeup_fd(installed)

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._write.send(_STOP)
        self._thread.join(1.0)
        self.close()

    def close(self) -> None:
        self._read.close()
        self._write.close()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):  # another thread closed the socket
            while (received := self._read.recv(4096)) and _STOP not in received:
                if signal.SIGTERM in received:
                    self._on_sigterm()


def _is_installed(handler: Handler) -> bool:
    return signal.getsignal(signal.SIGTERM) is handler


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


class Closable(Flushable, Protocol):
    def begin_close(self) -> None: ...

    def close(self) -> bool: ...


class Process:
    """Keeps weak references to every live pipeline of this process. Takes no lock: signals and forks come at any moment."""

    def __init__(self) -> None:
        self._live: dict[int, weakref.ref[Closable]] = {}
        self._forks = Forks(self._in_forked_child)
        self._termination = Termination(self.live)
        self._watching = False
        self._at_end: list[Callable[[], None]] = []

    @property
    def forks(self) -> int:
        """Number of forks between the first process that loaded this module and this one."""
        return self._forks.count

    def adopt(self, pipeline: Closable) -> None:
        self._watch()
        self.end_first()
        key = id(pipeline)
        self._live[key] = weakref.ref(pipeline, lambda _: self._live.pop(key, None))

    def forget(self, pipeline: Closable) -> None:
        self._live.pop(id(pipeline), None)
        if not self.live():
            self._termination.disarm()

    def live(self) -> list[Closable]:
        return [one for reference in list(self._live.values()) if (one := reference()) is not None]

    def watch_signals(self, failures: Failures) -> None:
        try:
            self._termination.arm()
        except Exception as error:
            failures.report("watching for SIGTERM", error, "If SIGTERM ends this run, the open record is lost.")

    def on_fork_child(self, callback: Callable[[], None]) -> None:
        self._watch()
        self._forks.register(callback)

    def at_end(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` at exit, before pipelines are closed. Adding it again has no effect."""
        if callback not in self._at_end:
            self._at_end.append(callback)
        self.end_first()

    def end_first(self) -> None:
        """Register to run at exit before every module loaded so far: after h5py's own exit handler nothing can be written."""
        atexit.unregister(self._end)
        atexit.register(self._end)

    def _end(self) -> None:
        try:
            for callback in self._at_end:
                callback()
        finally:
            self.close_all()

    def close_all(self) -> None:
        """At exit, before daemon threads die: start to close all pipelines, then wait for each."""
        live = self.live()
        for one in live:
            one.begin_close()
        for one in live:
            one.close()

    def _watch(self) -> None:
        if not self._watching:
            self._watching = True
            self._forks.watch()

    def _in_forked_child(self) -> None:
        self._live.clear()
        self._termination.forget()


PROCESS: Final = Process()
"""The only global state of this package: the operating system has one exit, one fork and one SIGTERM per process."""


def on_fork_child(callback: Callable[[], None]) -> None:
    """Call the bound method ``callback`` in every process forked from this one, for as long as its object lives."""
    PROCESS.on_fork_child(callback)
