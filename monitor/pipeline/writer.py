"""The writer: one daemon thread that takes sealed steps in the order in which they were submitted and delivers them."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Final, Generic, Literal, TypeVar

from monitor.failures import Failures
from monitor.pipeline.delivery import ConsumerFactory, Delivery
from monitor.pipeline.process import PROCESS, WRITERS_SHARE, Ticket
from monitor.pipeline.protocols import Sealed

# --- What the writer is asked to do, in the order in which it was asked.

S = TypeVar("S", bound=Sealed)

BATCH_WINDOW_SECONDS: Final = 0.1
"""At least so much lies between two times that steps are taken out, unless there is a hurry. Steps that take longer are taken
out one by one, as they come. Shorter ones come together, which costs training a fraction of what each by itself would: a thread
that wakes for a moment finds its code and its data gone from the caches, and takes the interpreter away each time."""


@dataclass(frozen=True, slots=True)
class SubmittedStep(Generic[S]):
    step: int
    sealed: S


@dataclass(frozen=True, slots=True)
class RearrangeRequest:
    """What follows goes to other sinks and watchers."""

    arranged: ConsumerFactory


@dataclass(frozen=True, slots=True)
class ControlRequest:
    """``drain``: everything submitted before was delivered. ``flush``: and is visible. ``close``: and nothing follows."""

    what: Literal["drain", "flush", "close"]
    ticket: Ticket


Request = RearrangeRequest | ControlRequest


class RequestQueue(Generic[S]):
    """Any thread puts in, one takes out. Requests stand in the same queue as steps, so that each covers exactly what was
    submitted before it.

    No lock is taken that a signal handler or a forked process could find held: ``SimpleQueue`` is reentrant.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[SubmittedStep[S] | Request] = SimpleQueue()
        self._wakeups: SimpleQueue[None] = SimpleQueue()
        self._behind: deque[Request] = deque()  # the request that ended a run of steps, taken out of the queue with them
        self._batch_until = 0.0

    def put(self, submitted: SubmittedStep[S], *, urgent: bool = False) -> None:
        """A step; ``urgent`` if there is little room for others behind it."""
        self._queue.put(submitted)
        if urgent:
            self._wake()

    def ask(self, request: Request) -> None:
        """Not to be waited for longer than what stands before it takes."""
        self._queue.put(request)
        self._wake()

    def take(self, timeout: float | None) -> list[SubmittedStep[S]] | Request | None:
        """All steps up to the next request, or that request; None if within ``timeout`` seconds there is neither."""
        if self._behind:
            return self._alone(self._behind.popleft())
        self._rest()
        try:
            first = self._queue.get(timeout=timeout)
        except Empty:
            return None
        return self._steps(first) if isinstance(first, SubmittedStep) else self._alone(first)

    def take_all(self) -> list[SubmittedStep[S] | Request]:
        """Everything, at once, for whoever takes over from a thread that is stuck."""
        left: list[SubmittedStep[S] | Request] = []
        with contextlib.suppress(IndexError):
            left.append(self._behind.popleft())
        with contextlib.suppress(Empty):
            while True:
                left.append(self._queue.get_nowait())
        return left

    def _alone(self, request: Request) -> Request:
        """There is no rest after it: behind it another may stand, whose hurry was this one's."""
        self._batch_until = 0.0
        return request

    def _steps(self, first: SubmittedStep[S]) -> list[SubmittedStep[S]]:
        self._batch_until = monotonic() + BATCH_WINDOW_SECONDS
        steps = [first]
        with contextlib.suppress(Empty):
            while isinstance(message := self._queue.get_nowait(), SubmittedStep):
                steps.append(message)
            self._behind.append(message)
        return steps

    def _rest(self) -> None:
        """One that nobody needed ends a rest early, and no more."""
        seconds = self._batch_until - monotonic()
        if seconds > 0:
            with contextlib.suppress(Empty):
                self._wakeups.get(timeout=seconds)

    def _wake(self) -> None:
        """Called after the message was put: a hurry that is still there wakes whoever then finds it."""
        if self._wakeups.empty():
            self._wakeups.put(None)


LEFT_BEHIND: Final = "left behind when the monitor was closed"


class StepWriter(Generic[S]):
    """The thread starts with the first step: a process that forks before it trains has none."""

    def __init__(self, delivery: Delivery[S], failures: Failures, *, close_seconds: float, signal_seconds: float) -> None:
        self.signal_seconds = signal_seconds
        self._delivery = delivery
        self._failures = failures
        self._close_seconds = close_seconds
        self._close_deadline = 0.0
        self._closed = Ticket()
        self._requests: RequestQueue[S] = RequestQueue()
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

    def put(self, step: int, sealed: S, *, urgent: bool = False) -> None:
        """``urgent`` if there is little room for more steps behind it: else it may be delivered together with them."""
        self._begin()
        self._requests.put(SubmittedStep(step, sealed), urgent=urgent)

    def rearrange(self, arranged: ConsumerFactory) -> None:
        """What is submitted from now on goes to other sinks and watchers. Never blocks."""
        self._begin()
        self._requests.ask(RearrangeRequest(arranged))

    def ask(self, what: Literal["drain", "flush"]) -> Ticket:
        """Never blocks; reentrant."""
        if self.closing:
            return self._closed
        ticket = Ticket()
        if self._start_once.locked():
            self._requests.ask(ControlRequest(what, ticket))
            if self._closed.done:  # meanwhile, and nobody may be left to look
                return self._closed
        else:
            ticket.settle(True)  # nothing was ever submitted
        return ticket

    def ask_flush(self) -> Ticket:
        return self.ask("flush")

    def flush_without_writer(self) -> Ticket:
        """Make visible what can be while the writer is stuck. Never blocks."""
        return run_in_thread(lambda: self._delivery.flush(wait=False))

    def begin_close(self) -> None:
        """Never blocks."""
        if not self.inert and self._close_once.acquire(blocking=False):
            self._close_deadline = monotonic() + self._close_seconds
            self._requests.ask(ControlRequest("close", self._closed))

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
        where, steps = self._delivery.stuck_in, self._take_unwritten()
        self._failures.warn(
            "close",
            f"Closing took longer than {WRITERS_SHARE * self._close_seconds:.1f} s: the writer is in {where}. Steps left "
            f"unwritten: {_listed(steps)}. The rest is closed without it. Raise close_seconds, or see what it waits for.",
        )
        run_in_thread(lambda: self._delivery.leave(steps, LEFT_BEHIND)).wait(self._close_deadline - monotonic())

    def _take_unwritten(self) -> list[int]:
        """The steps that nobody will write. The request to close stays, for a writer that does come back."""
        steps = list(self._delivery.in_progress)
        for message in self._requests.take_all():
            if isinstance(message, SubmittedStep):
                steps.append(message.step)
            elif isinstance(message, ControlRequest) and message.ticket is not self._closed:
                message.ticket.settle(False)
        self._requests.ask(ControlRequest("close", self._closed))
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
        for message in self._requests.take_all():
            if isinstance(message, ControlRequest):  # in the moment of closing
                message.ticket.settle(self._closed.ok)

    def _next(self) -> list[SubmittedStep[S]] | Request | None:
        """None when it is time to save."""
        return self._requests.take(self._delivery.seconds_to_save())

    def _handle(self, message: list[SubmittedStep[S]] | Request | None) -> None:
        if message is None:
            self._delivery.save()
        elif isinstance(message, list):
            self._delivery.steps([(one.step, one.sealed) for one in message])
            if self._delivery.seconds_to_save() == 0:
                self._delivery.save()
        elif isinstance(message, RearrangeRequest):
            self._delivery.rearrange(message.arranged)
        elif message.what == "drain":
            message.ticket.settle(True)
        else:
            message.ticket.settle(self._delivery.flush() if message.what == "flush" else self._delivery.close())


def run_in_thread(call: Callable[[], bool]) -> Ticket:
    """Run ``call`` on a thread of its own: it may never return."""
    ticket = Ticket()
    with contextlib.suppress(RuntimeError):  # an interpreter that is exiting starts no thread
        threading.Thread(target=lambda: ticket.settle(call()), name="monitor-last-words", daemon=True).start()
    return ticket


def _listed(steps: list[int], most: int = 10) -> str:
    shown = ", ".join(map(str, steps[:most])) or "none"
    return f"{shown} and {len(steps) - most} more" if len(steps) > most else shown
