"""What happens to sealed steps: they are read, looked at by the watchers, handed to every sink, and entered in the journal."""

from __future__ import annotations

import errno
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, Final, Generic, TypeVar

from monitor.failures import EarlierFailure, Failures
from monitor.pipeline.protocols import Sealed, StepJournal, Watcher
from monitor.pipeline.step_queue import BATCH_LIMIT_BYTES, DroppedSteps
from monitor.sinks.protocol import BatchSink, Sink
from monitor.stats.rows import StepRows

# --- Code that is not the pipeline's own: a sink, a watcher, the journal. It may raise, and it may never return.

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


class ErrorGuard(Generic[T]):
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


S = TypeVar("S", bound=Sealed)


ConsumerFactory = Callable[[], tuple[Mapping[str, Sink], Mapping[str, Watcher]]]
"""Says which sinks and watchers are to be served, by name; those that are already are the same objects."""

UNREADABLE: Final = "could not be read"


@dataclass(frozen=True, slots=True)
class DeliveryProgress:
    """The steps that are being delivered.

    Attributes:
        steps: The one that is being handed on, and those that come after it.
        looked: By name, the watchers that have looked at the first of them.
        served: By name, the sinks that were served with it, and what went wrong.
    """

    steps: tuple[int, ...] = ()
    looked: set[str] = field(default_factory=set)
    served: dict[str, BaseException | None] = field(default_factory=dict)

    @property
    def half_way(self) -> int | None:
        """The step that some sink has by now."""
        return self.steps[0] if any(error is None for error in self.served.values()) else None


class Delivery(Generic[S]):
    """Every foreign piece of code is guarded on its own: what one of them does to a step is no concern of the others.

    Steps are delivered by one thread. ``flush``, ``close`` and ``leave`` may come from another one while that thread is stuck;
    with ``wait=False`` they serve whatever it is not stuck in.

    Attributes:
        latest: The rows delivered last.
    """

    def __init__(
        self,
        sinks: Mapping[str, Sink],
        journal: StepJournal,
        failures: Failures,
        gaps: DroppedSteps,
        put_back: Callable[[S], None],
        *,
        watchers: Mapping[str, Watcher],
        save_seconds: float,
    ) -> None:
        self._failures, self._dropped_steps, self._put_back = failures, gaps, put_back
        self._sinks = {name: self._guarded_sink(name, sink) for name, sink in sinks.items()}
        self._watchers = [ErrorGuard(name, watcher, failures) for name, watcher in watchers.items()]
        self._journal = ErrorGuard("the manifest", journal, failures)
        self._save_seconds, self._save_at, self._changed = save_seconds, 0.0, False
        self.latest: StepRows | None = None
        self._in_progress = DeliveryProgress()
        self._left = False  # what is in hand has been given up, should this thread ever come back

    def steps(self, submitted: Sequence[tuple[int, S]]) -> None:
        """Deliver steps, in this order.

        They are read together, and foretold, as many as hold ``BATCH_LIMIT_BYTES``, except that none stays behind while another is
        waited for: that one may never come.
        """
        left = deque(step for step, _ in submitted)
        self._in_progress = DeliveryProgress(tuple(left))
        for together in _batches(submitted):
            outcomes = [self._read(sealed) for _, sealed in together]
            self._prepare([rows for rows in outcomes if isinstance(rows, StepRows)])
            for outcome in outcomes:
                if self._left:
                    return
                if isinstance(outcome, StepRows):
                    self._deliver(outcome, self._in_progress)
                else:
                    self._give_up(left[0], outcome)
                left.popleft()
                self._in_progress = DeliveryProgress(tuple(left))
        self._changed = True

    @property
    def in_progress(self) -> tuple[int, ...]:
        """The steps being delivered."""
        return self._in_progress.steps

    def rearrange(self, arranged: ConsumerFactory) -> None:
        """Serve other sinks and watchers from the next step on. Sinks that are not among them are closed; watchers are saved,
        since whoever comes after them goes on with what they found.
        """
        try:
            sinks, watchers = arranged()
        except Exception as error:
            self._failures.report("changing what is written", error, "It goes on as before.")
            return
        before, watched = self._sinks, self._watchers
        self._sinks = {name: _among(before.values(), sink) or self._guarded_sink(name, sink) for name, sink in sinks.items()}
        self._watchers = [_among(watched, one) or ErrorGuard(name, one, self._failures) for name, one in watchers.items()]
        for sink in before.values():
            if sink not in self._sinks.values():
                sink.use(lambda sink: sink.close(), last=True)
        for watcher in watched:
            if watcher not in self._watchers:
                watcher.use(_save, last=True)
        self.save()  # what holds from when on is in the journal

    def flush(self, *, wait: bool = True) -> bool:
        """Make everything delivered so far visible; whether that went well everywhere."""
        errors = [sink.use(lambda sink: sink.flush(), wait=wait) for sink in self._sinks.values()]
        return _all_succeeded([*errors, *self.save(wait=wait)])

    def close(self, *, wait: bool = True, complete: bool = True) -> bool:
        """As ``flush``, and for good: nothing is used after this, whoever delivers.

        Watchers are closed only if the run is ``complete``, and the journal if every sink and watcher could be closed as well;
        otherwise they are saved.
        """
        errors = [sink.use(lambda sink: sink.close(), wait=wait, last=True) for sink in self._sinks.values()]
        self._journal.use(self._tell, wait=wait)
        errors += self._use_watchers(_close if complete else _save, wait=wait, last=True)
        end = self._tell_and_close if complete and _all_succeeded(errors) else self._tell_and_save
        errors.append(self._journal.use(end, wait=wait, last=True))
        return _all_succeeded(errors)

    def leave(self, steps: Sequence[int], reason: str) -> bool:
        """Close what can be closed while the writer is stuck, and tell the journal which ``steps`` stay unwritten.

        The step that is half way is lost only to the sinks that have not been served; those before them have it.
        """
        self._left = True
        in_progress = self._in_progress
        half_way = in_progress.half_way
        unwritten = [step for step in steps if step != half_way]
        self._dropped_steps.counts[reason] += len(unwritten)
        self._journal.use(lambda journal: _drop_all(journal, unwritten, reason), wait=False)
        for watcher in self._watchers:
            unseen = [step for step in steps if step not in in_progress.steps[:1] or watcher.name not in in_progress.looked]
            watcher.use(partial(_drop_all, steps=unseen, reason=reason), wait=False)
        if half_way is not None:
            rest = [name for name in self._sinks if name not in in_progress.served]
            self._journal.use(lambda journal: _lose(journal, half_way, rest, reason), wait=False)
        return self.close(wait=False, complete=False)

    def save(self, *, wait: bool = True) -> list[BaseException | None]:
        """Make visible what became of each step and what was found in it; what went wrong, if anything."""
        return [self._journal.use(self._tell_and_save, wait=wait), *self._use_watchers(_save, wait=wait)]

    def seconds_to_save(self) -> float | None:
        """When the journal is to be saved next; ``None`` while it has nothing new."""
        return max(self._save_at - monotonic(), 0.0) if self._changed or self._dropped_steps.unreported else None

    @property
    def stuck_in(self) -> str:
        """What the delivering thread is in the middle of."""
        guarded: list[ErrorGuard[Any]] = [*self._watchers, *self._sinks.values(), self._journal]
        return ", ".join(one.name for one in guarded if one.busy) or "reading a step from the device"

    def _guarded_sink(self, name: str, sink: Sink) -> ErrorGuard[Sink]:
        return ErrorGuard(f"sink {name!r}", sink, self._failures)

    def _read(self, sealed: S) -> StepRows | BaseException:
        try:
            return sealed.rows()
        except BaseException as error:
            return error
        finally:
            self._put_back(sealed)

    def _give_up(self, step: int, error: BaseException) -> None:
        """Nobody has a step that could not be read."""
        if isinstance(error, EarlierFailure):
            self._failures.owe(error)
        else:
            self._failures.report("reading a step", error, advice(error))
        self._dropped_steps.counts[UNREADABLE] += 1
        reason = f"{UNREADABLE}: {error!r}"
        self._journal.use(lambda journal: journal.dropped(step, reason))
        self._use_watchers(lambda watcher: watcher.dropped(step, reason))

    def _prepare(self, steps: Sequence[StepRows]) -> None:
        if len(steps) > 1:
            for sink in self._sinks.values():
                sink.use(lambda sink: _prepare(sink, steps))

    def _deliver(self, rows: StepRows, in_progress: DeliveryProgress) -> None:
        self.latest = rows
        for watcher in self._watchers:
            watcher.use(lambda watcher: watcher.look(rows))
            in_progress.looked.add(watcher.name)
        for name, sink in self._sinks.items():
            in_progress.served[name] = sink.use(lambda sink: sink.write(rows))
        self._journal.use(lambda journal: _enter(journal, rows, in_progress.served))

    def _tell_and_save(self, journal: StepJournal) -> None:
        self._save_at = monotonic() + self._save_seconds
        self._tell(journal)
        journal.save()
        self._changed = False

    def _tell_and_close(self, journal: StepJournal) -> None:
        self._tell(journal)
        journal.close()

    def _tell(self, journal: StepJournal) -> None:
        """Of steps that were dropped before they came here. A watcher that hangs does not hear of them, and keeps nobody up."""

        def dropped(step: int, reason: str) -> None:
            journal.dropped(step, reason)
            self._use_watchers(lambda watcher: watcher.dropped(step, reason), wait=False)

        self._dropped_steps.tell(dropped)

    def _use_watchers(
        self, call: Callable[[Watcher], object], *, wait: bool = True, last: bool = False
    ) -> list[BaseException | None]:
        return [watcher.use(call, wait=wait, last=last) for watcher in self._watchers]


def _batches(submitted: Sequence[tuple[int, S]]) -> Iterator[Sequence[tuple[int, S]]]:
    """Steps one behind the other, of which none but the first is waited for and which hold no more than is gathered; each
    when those before are dealt with.
    """
    start, held = 0, 0
    for end in range(1, len(submitted) + 1):
        held += submitted[end - 1][1].nbytes
        if end == len(submitted) or held >= BATCH_LIMIT_BYTES or not submitted[end][1].ready:
            yield submitted[start:end]
            start, held = end, 0


def _prepare(sink: Sink, steps: Sequence[StepRows]) -> None:
    if isinstance(sink, BatchSink):
        sink.prepare(steps)


def _among(guarded: Iterable[ErrorGuard[T]], inner: T) -> ErrorGuard[T] | None:
    return next((one for one in guarded if one.inner is inner), None)


def _all_succeeded(errors: Iterable[BaseException | None]) -> bool:
    return all(error is None for error in errors)


def _enter(journal: StepJournal, rows: StepRows, errors: Mapping[str, BaseException | None]) -> None:
    if _all_succeeded(errors.values()):
        journal.written(rows)
    for name, error in errors.items():
        if error is not None:
            journal.lost(rows.step, name, repr(error))


def _save(watcher: Watcher) -> None:
    watcher.save()


def _close(watcher: Watcher) -> None:
    watcher.close()


def _drop_all(told: StepJournal | Watcher, steps: Iterable[int], reason: str) -> None:
    for step in steps:
        told.dropped(step, reason)


def _lose(journal: StepJournal, step: int, sinks: Iterable[str], reason: str) -> None:
    for sink in sinks:
        journal.lost(step, sink, reason)
