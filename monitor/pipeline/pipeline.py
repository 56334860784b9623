"""The pipeline: takes sealed tables from the training thread to every sink, and delays training for a bounded time at most."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import monotonic
from types import MappingProxyType
from typing import Final, Generic, Literal, TypeVar

from monitor.failures import LOGGER, Failures
from monitor.pipeline.delivery import BATCH_LIMIT_BYTES, ConsumerFactory, Delivery, Sealed, StepJournal, Watcher
from monitor.pipeline.process import PROCESS, WRITERS_SHARE, Ticket
from monitor.sinks.protocol import Sink
from monitor.stats.table import StepRows

# --- The writer: one daemon thread that delivers sealed steps in the order in which they were submitted.
#
# A ring of reused copies bounds what waits for it; training waits for a free copy for a bounded time.

# --- Requests to the writer, in the order in which they were made.

S = TypeVar("S", bound=Sealed)

BATCH_WINDOW_SECONDS: Final = 0.1
"""Least time between two batches of steps, unless a request is urgent. Training steps that take longer are delivered one by
one. Shorter ones are delivered together, at a fraction of the cost to training: a thread that wakes for a moment finds its code
and data gone from the caches, and takes the interpreter's lock each time."""


@dataclass(frozen=True, slots=True)
class SubmittedStep(Generic[S]):
    step: int
    sealed: S


@dataclass(frozen=True, slots=True)
class RearrangeRequest:
    """Steps submitted later go to other sinks and watchers."""

    arranged: ConsumerFactory


@dataclass(frozen=True, slots=True)
class ControlRequest:
    """``drain``: deliver every earlier step. ``flush``: also make them visible. ``close``: also end the writer."""

    what: Literal["drain", "flush", "close"]
    ticket: Ticket


Request = RearrangeRequest | ControlRequest


class RequestQueue(Generic[S]):
    """A queue of steps and requests, with many producers and one consumer.

    Both are in one queue, so a request covers exactly the steps submitted before it. Takes no lock that a signal handler or a
    forked process could find held: ``SimpleQueue`` is reentrant.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[SubmittedStep[S] | Request] = SimpleQueue()
        self._wakeups: SimpleQueue[None] = SimpleQueue()
        self._next_request: deque[Request] = deque()  # the request after a batch of steps, taken out of the queue with them
        self._batch_until = 0.0
        self._newest: S | None = None

    def put(self, submitted: SubmittedStep[S], *, urgent: bool = False) -> None:
        """Add a step; ``urgent`` if there is little room for later steps."""
        self._newest = submitted.sealed
        self._queue.put(submitted)
        if urgent:
            self._wake()

    def ask(self, request: Request) -> None:
        """Add a request. It ends the batch window, so it waits only for the steps before it. Training adds nothing to these."""
        if self._newest is not None and isinstance(request, ControlRequest):
            self._newest.finish()
        self._queue.put(request)
        self._wake()

    def take(self, timeout: float | None) -> list[SubmittedStep[S]] | Request | None:
        """All steps up to the next request, or that request; None if neither arrives within ``timeout`` seconds."""
        if self._next_request:
            return self._single(self._next_request.popleft())
        self._wait_for_batch()
        try:
            first = self._queue.get(timeout=timeout)
        except Empty:
            return None
        return self._steps(first) if isinstance(first, SubmittedStep) else self._single(first)

    def take_all(self) -> list[SubmittedStep[S] | Request]:
        """Everything in the queue, without waiting: for the thread that takes over when the writer is stuck."""
        left: list[SubmittedStep[S] | Request] = []
        with contextlib.suppress(IndexError):
            left.append(self._next_request.popleft())
        with contextlib.suppress(Empty):
            while True:
                left.append(self._queue.get_nowait())
        return left

    def _single(self, request: Request) -> Request:
        """No batch window follows a request: another request may be queued whose wake-up this one has used."""
        self._batch_until = 0.0
        return request

    def _steps(self, first: SubmittedStep[S]) -> list[SubmittedStep[S]]:
        self._batch_until = monotonic() + BATCH_WINDOW_SECONDS
        steps = [first]
        with contextlib.suppress(Empty):
            while isinstance(message := self._queue.get_nowait(), SubmittedStep):
                steps.append(message)
            self._next_request.append(message)
        return steps

    def _wait_for_batch(self) -> None:
        """Wait until the batch window ends. A wake-up left over from earlier ends it early, which is harmless."""
        seconds = self._batch_until - monotonic()
        if seconds > 0:
            with contextlib.suppress(Empty):
                self._wakeups.get(timeout=seconds)

    def _wake(self) -> None:
        """Called after the message was put: a wake-up that is still queued serves this message as well."""
        if self._wakeups.empty():
            self._wakeups.put(None)


LEFT_BEHIND: Final = "left behind when the monitor was closed"


class StepWriter(Generic[S]):
    """Owns the writer thread. The thread starts with the first step, so a process that forks before training has none."""

    def __init__(self, delivery: Delivery[S], failures: Failures, *, close_seconds: float, signal_seconds: float) -> None:
        self.signal_seconds = signal_seconds
        self._delivery = delivery
        self._failures = failures
        self._close_seconds = close_seconds
        self._close_deadline = 0.0
        self._closed = Ticket()
        self._queue: RequestQueue[S] = RequestQueue()
        self._thread: threading.Thread | None = None
        self._start_once, self._close_once, self._time_out_once = threading.Lock(), threading.Lock(), threading.Lock()
        self._born = PROCESS.forks
        PROCESS.adopt(self)

    @property
    def inert(self) -> bool:
        """True in a forked process: the writer's thread exists only in the parent."""
        return self._born != PROCESS.forks

    @property
    def closing(self) -> bool:
        return self._close_once.locked()

    def put(self, step: int, sealed: S, *, urgent: bool = False) -> None:
        """Queue a step. Unless ``urgent``, it may wait for later steps, to be delivered together with them."""
        self._begin()
        self._queue.put(SubmittedStep(step, sealed), urgent=urgent)

    def rearrange(self, arranged: ConsumerFactory) -> None:
        """Pass steps submitted from now on to other sinks and watchers. Never blocks."""
        self._begin()
        self._queue.ask(RearrangeRequest(arranged))

    def ask(self, what: Literal["drain", "flush"]) -> Ticket:
        """Queue a request. Never blocks; reentrant."""
        if self.closing:
            return self._closed
        ticket = Ticket()
        if self._start_once.locked():
            self._queue.ask(ControlRequest(what, ticket))
            if self._closed.done:  # the writer closed meanwhile, and may not see the request any more
                return self._closed
        else:
            ticket.settle(True)  # nothing was ever submitted
        return ticket

    def ask_flush(self) -> Ticket:
        return self.ask("flush")

    def flush_without_writer(self) -> Ticket:
        """Flush what can be flushed while the writer is stuck. Never blocks."""
        return run_in_thread(lambda: self._delivery.flush(wait=False))

    def begin_close(self) -> None:
        """Ask the writer to close. Never blocks."""
        if not self.inert and self._close_once.acquire(blocking=False):
            self._close_deadline = monotonic() + self._close_seconds
            self._queue.ask(ControlRequest("close", self._closed))

    def retire(self) -> None:
        """Close because the pipeline was garbage-collected: no more steps can be submitted. Starts no thread."""
        if self._start_once.locked():
            self.begin_close()

    def close(self) -> bool:
        """Deliver what is queued and close everything within ``close_seconds``. True if everything succeeded."""
        if self.inert:
            return True
        self.begin_close()
        self._start_or_run_here()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._wait_for_close(self._thread)
        PROCESS.forget(self)
        return self._closed.ok and not self._time_out_once.locked()

    def _wait_for_close(self, thread: threading.Thread) -> None:
        writers_time = self._close_deadline - (1 - WRITERS_SHARE) * self._close_seconds - monotonic()
        if self._closed.wait(writers_time) and thread.is_alive():
            thread.join(max(self._close_deadline - monotonic(), 0.0))
        elif not self._closed.done and self._time_out_once.acquire(blocking=False):
            self._close_without_writer()

    def _close_without_writer(self) -> None:
        where, steps = self._delivery.stuck_in, self._take_unwritten()
        self._failures.warn(
            "close",
            f"Closing took longer than {WRITERS_SHARE * self._close_seconds:.1f} s: the writer is in {where}. Steps left "
            f"unwritten: {_listed(steps)}. Everything else is closed without the writer. Raise close_seconds, or find out what "
            "the writer waits for.",
        )
        run_in_thread(lambda: self._delivery.abandon(steps, LEFT_BEHIND)).wait(self._close_deadline - monotonic())

    def _take_unwritten(self) -> list[int]:
        """Empty the queue; the steps in it stay unwritten. The request to close is put back, for a writer that returns late."""
        steps = list(self._delivery.in_progress)
        for message in self._queue.take_all():
            if isinstance(message, SubmittedStep):
                steps.append(message.step)
            elif isinstance(message, ControlRequest) and message.ticket is not self._closed:
                message.ticket.settle(False)
        self._queue.ask(ControlRequest("close", self._closed))
        return steps

    def _begin(self) -> None:
        if self._start():
            PROCESS.watch_signals(self._failures)

    def _start(self) -> bool:
        """True if this call started the thread. Raises if the system has no thread left; the next step tries again."""
        if not self._start_once.acquire(blocking=False):
            return False
        name = f"monitor-writer-rank{self._failures.rank}"
        # Made only now: one that never starts would keep this object, and so the run.
        thread = self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            thread.start()
        except BaseException:
            self._thread = None
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
            self._handle(self._next())  # no variable for the message: it would keep the last one alive while this waits
        for message in self._queue.take_all():
            if isinstance(message, ControlRequest):  # it arrived while the writer closed
                message.ticket.settle(self._closed.ok)

    def _next(self) -> list[SubmittedStep[S]] | Request | None:
        """The next message; None when it is time to save."""
        return self._queue.take(self._delivery.seconds_to_save())

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
    """Run ``call``, which may never return, on a new daemon thread."""
    ticket = Ticket()
    with contextlib.suppress(RuntimeError):  # an interpreter that is exiting starts no thread
        threading.Thread(target=lambda: ticket.settle(call()), name="monitor-final-flush", daemon=True).start()
    return ticket


def _listed(steps: list[int], most: int = 10) -> str:
    shown = ", ".join(map(str, steps[:most])) or "none"
    return f"{shown} and {len(steps) - most} more" if len(steps) > most else shown


# --- The ring: reused sealed copies, which bound the queue.


MIN_COPIES: Final = 2
"""One copy is filled while the other is read, whatever their size."""


class Ring(Generic[S]):
    """The training thread takes copies; any thread puts them back.

    A copy grows to the size of the table when the next step is sealed into it, and a table never shrinks. So every copy counts
    with the largest size seen. When the table grows, copies that come back are discarded until the ring fits again.

    Takes no lock that a signal handler or a forked process could find held: ``SimpleQueue`` is reentrant.
    """

    def __init__(self, new_sealed: Callable[[], S], queue_bytes: int) -> None:
        self._new_sealed = new_sealed
        self._queue_bytes = queue_bytes
        self._largest = 1
        self._copies: list[S] = []
        self._free: SimpleQueue[S] = SimpleQueue()

    def __len__(self) -> int:
        return len(self._copies)

    @property
    def nbytes(self) -> int:
        return sum(sealed.nbytes for sealed in self._copies)

    @property
    def mostly_free(self) -> bool:
        return 2 * self._free.qsize() > len(self._copies)

    @property
    def may_batch(self) -> bool:
        """True if the writer may wait for more steps before it reads those taken."""
        taken, most = len(self._copies) - self._free.qsize(), self._most()
        return 2 * taken < most and taken * self._largest < BATCH_LIMIT_BYTES

    def take(self, seconds: float) -> S | None:
        """A free copy, else a new one if there is room, else the first that comes back within ``seconds``, else None."""
        deadline = monotonic() + seconds
        while True:
            if self._free.empty() and len(self._copies) < self._most():
                return self._make()
            sealed = self._next(deadline - monotonic())
            if sealed is None or len(self._copies) <= self._most():
                return sealed
            self._copies = [kept for kept in self._copies if kept is not sealed]

    def put_back(self, sealed: S) -> None:
        self._free.put(sealed)

    def _most(self) -> int:
        self._largest = max(self._largest, *(sealed.nbytes for sealed in self._copies), 0)
        return max(MIN_COPIES, self._queue_bytes // self._largest)

    def _make(self) -> S:
        sealed = self._new_sealed()
        self._copies.append(sealed)
        return sealed

    def _next(self, seconds: float) -> S | None:
        try:
            return self._free.get(timeout=max(seconds, 0.0))
        except Empty:
            return None


# --- How long a full queue may delay training.

MAX_WARNINGS: Final = 10
"""Incidents that get a warning each; later ones are only counted."""


class BackpressureBudget:
    """The seconds that training may wait for the writer per incident, shared by all steps that find the queue full.

    An incident begins when the queue is full and ends when most of the ring is free again. One free copy does not end it:
    every step that the writer finishes frees one. A writer that is always slower than training would then restore the whole
    budget with each step, and training would run at the writer's pace.
    """

    def __init__(self, seconds: float, failures: Failures) -> None:
        self._seconds = seconds
        self._failures = failures
        self._incidents = 0
        self._began: float | None = None
        self._dropped = 0
        self.left = seconds

    def spend(self, seconds: float) -> None:
        """Subtract ``seconds`` that training waited because the queue was full."""
        if self._began is None:
            self._began = monotonic() - seconds
            self._incidents += 1
        self.left = max(self.left - seconds, 0.0)

    def drop(self, step: int) -> None:
        """Count ``step`` as dropped; warn at the first one of an incident."""
        self._dropped += 1
        if self._dropped == 1:
            self._warn(step)

    def restore(self) -> None:
        """The queue has room again: end the incident, if there is one."""
        if self._began is None:
            return
        if self._dropped and self._incidents <= MAX_WARNINGS:
            took = monotonic() - self._began
            LOGGER.info(
                "[rank %d] The writer caught up after %.1f s; %d steps dropped.", self._failures.rank, took, self._dropped
            )
        self._began, self._dropped, self.left = None, 0, self._seconds

    def _warn(self, step: int) -> None:
        number = min(self._incidents, MAX_WARNINGS + 1)
        cause = f"queue full, incident {number}" if number <= MAX_WARNINGS else "queue full, later incidents"
        self._failures.warn(
            cause,
            f"The writer is too slow: training waited {self._seconds - self.left:.1f} s and the queue is still full. "
            f"From step {step} on, steps are dropped without waiting until the queue has room; the manifest lists them. Record "
            "fewer tensors or fewer steps (targets, step_interval), raise queue_bytes, or write to a faster disk.",
        )


QUEUE_FULL: Final = "queue full"
NO_COPY: Final = "no copy could be made"
NOT_SEALED: Final = "could not be sealed"
NOT_SUBMITTED: Final = "could not be submitted"
CLOSED: Final = "submitted after closing"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineLimits:
    """Bounds on the memory of a pipeline, and on its waits.

    Attributes:
        queue_bytes: Bound on the memory of all sealed copies together; two may exist whatever their size.
        queue_wait_seconds: How long a full queue may delay training, per incident.
        close_seconds: ``close`` returns within this time.
        signal_seconds: A SIGTERM is delayed for this time at most.
        save_seconds: Time between two saves of the journal while steps are written.
    """

    queue_bytes: int
    queue_wait_seconds: float
    close_seconds: float
    signal_seconds: float
    save_seconds: float = 30.0


class Pipeline(Generic[S]):
    """One training thread reserves a sealed copy, fills it and submits it; one writer thread delivers it.

    No method raises, and the methods for the training thread take no lock. In a process forked from the one that made it, the
    pipeline is inert: it reserves, writes, flushes and closes nothing.

    Args:
        sinks: By name, served in this order.
        journal: Records the outcome of each step; used by one thread at a time, never by the training thread.
        new_sealed: Makes one more copy.
        limits: Bounds on the pipeline's memory, and on the time that training waits for it.
        watchers: See the rows of each step before any sink does. The keys name them in failure reports.
    """

    def __init__(
        self,
        sinks: Mapping[str, Sink],
        journal: StepJournal,
        failures: Failures,
        new_sealed: Callable[[], S],
        limits: PipelineLimits,
        *,
        watchers: Mapping[str, Watcher] = MappingProxyType({}),
    ) -> None:
        self._failures = failures
        self._ring = Ring(new_sealed, limits.queue_bytes)
        self._backpressure = BackpressureBudget(limits.queue_wait_seconds, failures)
        self._delivery: Delivery[S] = Delivery(
            sinks, journal, failures, self._ring.put_back, watchers=watchers, save_seconds=limits.save_seconds
        )
        self._dropped_steps = self._delivery.dropped_steps
        self._writer = StepWriter(
            self._delivery, failures, close_seconds=limits.close_seconds, signal_seconds=limits.signal_seconds
        )
        self._reserved: dict[int, int] = {}
        self._newest: int | None = None
        weakref.finalize(self, self._writer.retire).atexit = False  # at exit the process closes its writers, within bounds

    @property
    def inert(self) -> bool:
        """Whether this process was forked from the one that the pipeline belongs to."""
        return self._writer.inert

    @property
    def dropped(self) -> Counter[str]:
        """Steps that no sink has, by reason."""
        return self._dropped_steps.counts

    def reserve(self, step: int) -> S | None:
        """A sealed copy to fill with ``step``; ``None`` if the step is dropped."""
        if self._writer.inert or self._writer.closing:
            return None
        self._newest = step
        try:
            sealed = self._copy()
        except Exception as error:
            self._failures.report("making room for a step", error, "The step is dropped, the next one is tried.")
            self._dropped_steps.add(step, NO_COPY)
            return None
        if sealed is None:
            self._backpressure.drop(step)
            self._dropped_steps.add(step, QUEUE_FULL)
        else:
            self._reserved[id(sealed)] = step
        return sealed

    def submit(self, sealed: S) -> None:
        """Pass a filled copy to the writer. Ignores a copy that was not reserved here."""
        step = self._reserved.pop(id(sealed), None)
        if step is None or self._writer.inert:
            return
        if self._writer.closing:
            self._dropped_steps.add(step, CLOSED)
            self._failures.warn(CLOSED, f"Step {step} has no rows: the monitor was closed while the step ended.")
            return
        try:
            self._writer.put(step, sealed, urgent=not self._ring.may_batch)
        except Exception as error:
            self._failures.report("submitting a step", error, "The step is dropped, the next one is tried.")
            self._put_back(sealed, step, NOT_SUBMITTED)

    def give_back(self, sealed: S) -> None:
        """Return a reserved copy that could not be filled. Its step is dropped."""
        step = self._reserved.pop(id(sealed), None)
        if step is not None and not self._writer.inert:
            self._put_back(sealed, step, NOT_SEALED)

    def rearrange(self, arranged: ConsumerFactory) -> None:
        """Pass steps submitted from now on to other sinks and watchers. Does not wait.

        Args:
            arranged: Called on the writer thread after all earlier steps have been delivered.
        """
        if not self._writer.inert and not self._writer.closing:
            self._writer.rearrange(arranged)

    def latest(self, timeout: float) -> StepRows | None:
        """The rows of the step reserved last; ``None`` if it was dropped, or was not read within ``timeout`` seconds."""
        if self._writer.inert or not self._writer.ask("drain").wait(timeout):
            return None
        rows = self._delivery.latest
        return rows if rows is not None and rows.step == self._newest else None

    def flush(self, timeout: float) -> bool:
        """True if every sink made every step submitted so far visible within ``timeout`` seconds."""
        if self._writer.inert:
            return False
        ticket = self._writer.ask("flush")
        return ticket.wait(timeout) and ticket.ok

    def close(self) -> bool:
        """Deliver what is queued and close everything within ``close_seconds``. True if everything succeeded.

        May be called from any thread, any number of times.
        """
        if self._writer.inert:
            return True
        complete = self._writer.close()
        if complete:
            self._backpressure.restore()
        return complete

    def _copy(self) -> S | None:
        if self._ring.mostly_free:
            self._backpressure.restore()
        sealed = self._ring.take(0.0)
        if sealed is None:
            began = monotonic()
            sealed = self._ring.take(self._backpressure.left)
            self._backpressure.spend(monotonic() - began)
        return sealed

    def _put_back(self, sealed: S, step: int, reason: str) -> None:
        self._dropped_steps.add(step, reason)
        self._ring.put_back(sealed)
