"""The writer: one daemon thread that takes sealed steps in the order in which they were submitted and delivers them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from time import monotonic
from typing import Final, Generic, Literal, TypeVar

from monitor.failures import Failures
from monitor.pipeline.delivery import Arranged, Delivery
from monitor.pipeline.inbox import Asked, Inbox, Rearranged, Request, Submitted
from monitor.pipeline.process import PROCESS
from monitor.pipeline.sealed import Sealed
from monitor.pipeline.ticket import WRITERS_SHARE, Ticket

S = TypeVar("S", bound=Sealed)

LEFT_BEHIND: Final = "left behind when the monitor was closed"


class Writer(Generic[S]):
    """The thread starts with the first step: a process that forks before it trains has none."""

    def __init__(self, delivery: Delivery[S], failures: Failures, *, close_seconds: float, signal_seconds: float) -> None:
        self.signal_seconds = signal_seconds
        self._delivery = delivery
        self._failures = failures
        self._close_seconds = close_seconds
        self._close_deadline = 0.0
        self._closed = Ticket()
        self._inbox: Inbox[S] = Inbox()
        self._thread = threading.Thread(target=self._run, name=f"monitor-writer-rank{failures.rank}", daemon=True)
        self._start_once, self._close_once, self._give_up_once = threading.Lock(), threading.Lock(), threading.Lock()
        self._born = PROCESS.forks
        PROCESS.adopt(self)

    @property
    def inert(self) -> bool:
        """Whether this is the copy of somebody else's writer, in a process forked from theirs."""
        return self._born != PROCESS.forks

    @property
    def closing(self) -> bool:
        return self._close_once.locked()

    def put(self, step: int, sealed: S, *, hurry: bool = False) -> None:
        """``hurry`` if there is little room for more steps behind it: else it may be delivered together with them."""
        self._begin()
        self._inbox.put(Submitted(step, sealed), hurry=hurry)

    def rearrange(self, arranged: Arranged) -> None:
        """What is submitted from now on goes to other sinks and watchers. Never blocks."""
        self._begin()
        self._inbox.ask(Rearranged(arranged))

    def ask(self, what: Literal["drain", "flush"]) -> Ticket:
        """Never blocks; reentrant."""
        if self.closing:
            return self._closed
        ticket = Ticket()
        if self._start_once.locked():
            self._inbox.ask(Asked(what, ticket))
            if self._closed.done:  # meanwhile, and nobody may be left to look
                return self._closed
        else:
            ticket.settle(True)  # nothing was ever submitted
        return ticket

    def ask_flush(self) -> Ticket:
        return self.ask("flush")

    def flush_without(self) -> Ticket:
        """Make visible what can be while the writer is stuck. Never blocks."""
        return aside(lambda: self._delivery.flush(wait=False))

    def begin_close(self) -> None:
        """Never blocks."""
        if not self.inert and self._close_once.acquire(blocking=False):
            self._close_deadline = monotonic() + self._close_seconds
            self._inbox.ask(Asked("close", self._closed))

    def retire(self) -> None:
        """Nobody is left who could submit a step. Called when the pipeline is collected, so it starts no thread."""
        if self._start_once.locked():
            self.begin_close()

    def close(self) -> bool:
        """Deliver what is queued and close everything, within the time given; whether that went well."""
        if self.inert:
            return True
        self.begin_close()
        self._start_or_run_here()
        if threading.current_thread() is not self._thread:
            self._wait_for_close()
        PROCESS.forget(self)
        return self._closed.ok and not self._give_up_once.locked()

    def _wait_for_close(self) -> None:
        writers_time = self._close_deadline - (1 - WRITERS_SHARE) * self._close_seconds - monotonic()
        if self._closed.wait(writers_time) and self._thread.is_alive():
            self._thread.join(max(self._close_deadline - monotonic(), 0.0))
        elif not self._closed.done and self._give_up_once.acquire(blocking=False):
            self._give_up()

    def _give_up(self) -> None:
        where, steps = self._delivery.stuck_in, self._take_what_is_left()
        self._failures.warn(
            "close",
            f"Closing took longer than {WRITERS_SHARE * self._close_seconds:.1f} s: the writer is in {where}. Steps left "
            f"unwritten: {_listed(steps)}. The rest is closed without it. Raise close_seconds, or see what it waits for.",
        )
        aside(lambda: self._delivery.leave(steps, LEFT_BEHIND)).wait(self._close_deadline - monotonic())

    def _take_what_is_left(self) -> list[int]:
        """The steps that nobody will write. The request to close stays, for a writer that does come back."""
        steps = list(self._delivery.in_hand)
        for message in self._inbox.take_what_is_there():
            if isinstance(message, Submitted):
                steps.append(message.step)
            elif isinstance(message, Asked) and message.ticket is not self._closed:
                message.ticket.settle(False)
        self._inbox.ask(Asked("close", self._closed))
        return steps

    def _begin(self) -> None:
        if self._start():
            PROCESS.watch_signals(self._failures)

    def _start(self) -> bool:
        """Whether the thread was started now. Raises where the system has no thread left; the next step tries again."""
        if not self._start_once.acquire(blocking=False):
            return False
        try:
            self._thread.start()
        except BaseException:
            self._start_once.release()
            raise
        return True

    def _start_or_run_here(self) -> None:
        try:
            self._start()
        except RuntimeError:  # an interpreter that is exiting starts no thread; then no step was ever submitted
            self._run()

    def _run(self) -> None:
        while not self._closed.done:
            self._handle(self._next())  # without a name: while this waits it must not keep what the last message was about
        for message in self._inbox.take_what_is_there():
            if isinstance(message, Asked):  # in the moment of closing
                message.ticket.settle(self._closed.ok)

    def _next(self) -> list[Submitted[S]] | Request | None:
        """None when it is time to save."""
        return self._inbox.take(self._delivery.seconds_to_save())

    def _handle(self, message: list[Submitted[S]] | Request | None) -> None:
        if message is None:
            self._delivery.save()
        elif isinstance(message, list):
            self._delivery.steps([(one.step, one.sealed) for one in message])
            if self._delivery.seconds_to_save() == 0:
                self._delivery.save()
        elif isinstance(message, Rearranged):
            self._delivery.rearrange(message.arranged)
        elif message.what == "drain":
            message.ticket.settle(True)
        else:
            message.ticket.settle(self._delivery.flush() if message.what == "flush" else self._delivery.close())


def aside(call: Callable[[], bool]) -> Ticket:
    """Run ``call`` on a thread of its own: it may never return."""
    ticket = Ticket()
    with contextlib.suppress(RuntimeError):  # an interpreter that is exiting starts no thread
        threading.Thread(target=lambda: ticket.settle(call()), name="monitor-last-words", daemon=True).start()
    return ticket


def _listed(steps: list[int], most: int = 10) -> str:
    shown = ", ".join(map(str, steps[:most])) or "none"
    return f"{shown} and {len(steps) - most} more" if len(steps) > most else shown
