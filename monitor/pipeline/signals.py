"""SIGTERM: what is sealed becomes visible, and then happens what would have happened without the monitor.

The handler runs in the main thread, and only once that thread is back in Python code: a rank that hangs in a collective never
gets there. So a wake-up descriptor carries the signal to a thread of our own at once. That thread also does what the operating
system would have done if nobody had handled the signal: a rank that hangs must still die of SIGTERM.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from types import FrameType
from typing import Any, Final, Protocol

from monitor.pipeline.ticket import WRITERS_SHARE, Ticket

_STOP: Final = b"\0"
# signal.signal refuses to work outside the main thread
_SET_ACTION: Final = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)(("PyOS_setsig", ctypes.pythonapi))


class Flushable(Protocol):
    signal_seconds: float

    def ask_flush(self) -> Ticket: ...

    def flush_without(self) -> Ticket: ...


Live = Callable[[], Sequence[Flushable]]


class Termination:
    """Our part in the process's handling of SIGTERM, taken on with the first step and given back with the last pipeline.

    Armed only from the main thread, the only one that may, and only where the signal has its default action or a handler
    written in Python: one that is ignored stays ignored, one that is handled in C stays so.
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
        """In a forked child: as if we had never been there. The listener is the parent's and is not to be stopped."""
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
    """One object for each time we are armed: a handler put on top of an old one may still call it."""

    def __init__(self, live: Live, previous: Any) -> None:
        self.previous = previous
        self._live = live

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """Ask for everything sealed to become visible, wait for it in bounded time, hand the signal on. Takes no lock."""
        self._flush(share=1.0)
        if callable(self.previous):
            self.previous(signum, frame)
        else:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)

    def on_wakeup(self) -> None:
        """The same, on the listener's thread, as far as it does not take the main thread."""
        self._flush(share=WRITERS_SHARE)
        if not callable(self.previous) and _is_installed(self):
            _SET_ACTION(signal.SIGTERM, None)
            os.kill(os.getpid(), signal.SIGTERM)

    def _flush(self, share: float) -> None:
        with contextlib.suppress(Exception):  # whatever happens here, the signal is handed on
            flush_all(self._live(), share)


def flush_all(live: Sequence[Flushable], share: float) -> None:
    """Flush every pipeline at once. A writer that needs more than ``share`` of its time is done without for the rest of it."""
    began = monotonic()
    asked = [(one, one.ask_flush()) for one in live]
    late = [one for one, ticket in asked if not ticket.wait(began + share * one.signal_seconds - monotonic())]
    if share < 1.0:
        without = [(one, one.flush_without()) for one in late]
        for one, ticket in without:
            ticket.wait(began + one.signal_seconds - monotonic())


class WakeUp:
    """The descriptor into which the interpreter writes the number of each signal as it comes in, and a thread that reads it."""

    def __init__(self, on_sigterm: Callable[[], None]) -> None:
        self._on_sigterm = on_sigterm
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._thread = threading.Thread(target=self._listen, name="monitor-signals", daemon=True)

    @classmethod
    def install(cls, on_sigterm: Callable[[], None]) -> WakeUp | None:
        """``None`` if somebody else, an event loop, has a descriptor installed: theirs stays."""
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
        with contextlib.suppress(OSError):  # closed under us
            while (received := self._read.recv(4096)) and _STOP not in received:
                if signal.SIGTERM in received:
                    self._on_sigterm()


def _is_installed(handler: Handler) -> bool:
    return signal.getsignal(signal.SIGTERM) is handler


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
