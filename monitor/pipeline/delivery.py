"""Delivers sealed steps on the writer thread: reads each one, passes it to watchers and sinks, and enters it in the journal."""

from __future__ import annotations

import errno
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, Final, Generic, Protocol, TypeVar, runtime_checkable

from monitor.failures import EarlierFailure, Failures
from monitor.sinks.protocol import BatchSink, RemovedFileError, Sink, ThinnableSink
from monitor.stats.table import StepRows

# --- Interfaces of the pipeline: a sealed copy of the table, the journal of each step's outcome, and watchers of steps.


class Sealed(Protocol):
    """A copy of the live table, made at the end of a step. Copies are reused: they are the slots of the ring."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the copy holds now. They may change with every step sealed into it, since the table grows."""

    @property
    def ready(self) -> bool:
        """True if ``rows`` will not wait. Does not wait itself."""

    def rows(self) -> StepRows:
        """The step in new columns, on the writer thread. May wait for the device, and until ``finish``. Never called after the
        copy was put back.
        """

    def finish(self) -> None:
        """Training adds nothing to the step any more. Safe on any thread; does not block."""


class StepJournal(Protocol):
    """Records the outcome of each step: the rank's manifest.

    Called by one thread at a time, never by the training thread. It may raise: the error is reported once and stops nothing.
    """

    def written(self, rows: StepRows) -> None:
        """Every sink has the step."""

    def dropped(self, step: int, reason: str) -> None:
        """No sink has the step: the queue was full, or the step could not be read."""

    def lost(self, step: int, sink: str, reason: str, *, was_written: bool = False) -> None:
        """One sink does not have the step.

        Args:
            was_written: The step was reported as written; the sink has lost it since.
        """

    def save(self) -> None:
        """Make all entries so far visible."""

    def close(self) -> None:
        """Save for the last time: the run has ended, and every sink has closed."""


@runtime_checkable
class ThinningJournal(Protocol):
    """A journal that has old steps removed when the files reach a bound on disk. Used like ``StepJournal``."""

    @property
    def is_bounded(self) -> bool:
        """Whether there is a bound."""

    def recount(self) -> None:
        """The sinks are others from now on: count the bytes of the directory again before the next answer."""

    def excess(self, grown: int) -> Collection[int]:
        """The steps to remove now, which are saved as removed; none if the files are within the bound.

        Args:
            grown: See ``ThinnableSink``; the sum over all sinks.
        """

    def removed(self) -> None:
        """No file has rows of the steps that ``excess`` returned last."""


class Watcher(Protocol):
    """Sees every readable step before the sinks do, such as the alert rules.

    Called by one thread at a time, never by the training thread. It may raise: the error is reported once and stops nothing.
    """

    def look(self, rows: StepRows) -> None:
        """Examine a step. The sinks wait until this returns."""

    def dropped(self, step: int, reason: str) -> None:
        """The step is lost and cannot be examined."""

    def save(self) -> None:
        """Make all findings so far visible."""

    def close(self) -> None:
        """Save for the last time: the run has ended, and no step is missing."""


# --- Sinks, watchers and the journal may raise, or never return. Each is used through a guard.

T = TypeVar("T")

_ADVICE: Final = {
    errno.ENOSPC: "The disk is full: free some space.",
    errno.EDQUOT: "The disk quota is used up: free some space.",
    errno.EACCES: "Permission is missing: allow this user to write there.",
    errno.EPERM: "Permission is missing: allow this user to write there.",
    errno.EROFS: "The file system is read-only: mount it writable.",
    errno.ENOTDIR: "A file has taken the place of the directory: move the file away.",
    errno.EEXIST: "A file has taken the place of the directory: move the file away.",
    errno.EMFILE: "This process has too many files open: raise its limit (ulimit -n).",
    errno.ENOENT: "The directory may have been removed: the monitor makes it again where possible.",
}


class ErrorGuard(Generic[T]):
    """Calls ``inner`` from one thread at a time, and reports and returns its exceptions instead of raising them.

    Each guard has its own lock. So while the writer is stuck in one call, another thread can use the others. The training
    thread, signal handlers and forked processes never take the lock.
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
        """Run ``call(inner)``. After a call with ``last``, later calls are refused.

        Returns:
            The exception if the call failed or was refused, or if ``inner`` is in use and ``wait`` is false; else None.
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
        except BaseException as error:  # a panic in native code is not an Exception, and no user code runs in this thread
            self._failures.report(self.name, error, advice(error))
            return error
        return None


def advice(error: BaseException) -> str:
    """What the user can do about ``error``, and what it means for the recording."""
    known = _ADVICE.get(error.errno or 0, "") if isinstance(error, OSError) else ""
    return f"{known} The data of this call is missing; the monitor tries again at the next step.".strip()


S = TypeVar("S", bound=Sealed)


ConsumerFactory = Callable[[], tuple[Mapping[str, Sink], Mapping[str, Watcher]]]
"""Returns the sinks and watchers to serve from now on, by name. Those that stay are the same objects as before."""

UNREADABLE: Final = "could not be read"

MOST_THINNED: Final = 4
"""How often steps are removed after each step that is written. Removal must not delay the writer for long."""

BATCH_LIMIT_BYTES: Final = 4 << 20
"""Most bytes of a batch of copies that are read together. Larger batches gain nothing."""


@dataclass(frozen=True, slots=True)
class DeliveryProgress:
    """How far the delivery of a batch has come.

    Attributes:
        steps: The step that is being delivered, then those that follow it.
        looked: Names of the watchers that have seen the first step.
        served: Sinks that were called with the first step, by name, with the error or None.
    """

    steps: tuple[int, ...] = ()
    looked: set[str] = field(default_factory=set)
    served: dict[str, BaseException | None] = field(default_factory=dict)

    @property
    def half_way(self) -> int | None:
        """The step that at least one sink already has."""
        return self.steps[0] if any(error is None for error in self.served.values()) else None


class Delivery(Generic[S]):
    """Passes steps to watchers, sinks and journal. Each has a guard of its own, so one that fails does not affect the others.

    One thread delivers steps. Another thread may call ``flush``, ``close`` and ``abandon`` while the first one is stuck; with
    ``wait=False`` they skip the object that the first thread is stuck in.

    Attributes:
        dropped_steps: Steps that never reach the writer. The training thread adds them.
        latest: The rows delivered last.
    """

    def __init__(
        self,
        sinks: Mapping[str, Sink],
        journal: StepJournal,
        failures: Failures,
        put_back: Callable[[S], None],
        *,
        watchers: Mapping[str, Watcher],
        save_seconds: float,
    ) -> None:
        self._failures, self._put_back = failures, put_back
        self.dropped_steps = DroppedSteps()
        self._sinks = {name: self._guarded_sink(name, sink) for name, sink in sinks.items()}
        self._watchers = [ErrorGuard(name, watcher, failures) for name, watcher in watchers.items()]
        self._journal = ErrorGuard("the manifest", journal, failures)
        self._thinning = journal if isinstance(journal, ThinningJournal) else None
        self._save_seconds, self._save_at, self._changed = save_seconds, 0.0, False
        self.latest: StepRows | None = None
        self._in_progress = DeliveryProgress()
        self._abandoned = False  # ``close`` timed out: a writer that returns late must discard its batch

    def steps(self, submitted: Sequence[tuple[int, S]]) -> None:
        """Deliver steps, in this order.

        They are read and announced to the sinks in batches of up to ``BATCH_LIMIT_BYTES``. Only the first step of a batch may
        wait for the device: it may hang, and steps that are ready must not wait behind it.
        """
        left = deque(step for step, _ in submitted)
        self._in_progress = DeliveryProgress(tuple(left))
        for together in _batches(submitted):
            outcomes = [self._read(sealed) for _, sealed in together]
            self._prepare([rows for rows in outcomes if isinstance(rows, StepRows)])
            for outcome in outcomes:
                if self._abandoned:
                    return
                if isinstance(outcome, StepRows):
                    self._deliver(outcome, self._in_progress)
                else:
                    self._drop_unreadable(left[0], outcome)
                left.popleft()
                self._in_progress = DeliveryProgress(tuple(left))
        self._changed = True

    @property
    def in_progress(self) -> tuple[int, ...]:
        """The steps being delivered."""
        return self._in_progress.steps

    def rearrange(self, arranged: ConsumerFactory) -> None:
        """Serve other sinks and watchers from the next step on.

        Sinks that are left out are closed. Watchers are only saved, because their successors continue from what they found.
        """
        try:
            sinks, watchers = arranged()
        except Exception as error:
            self._failures.report("changing what is written", error, "Sinks and alert rules stay as they were.")
            return
        before, watched = self._sinks, self._watchers
        self._sinks = {name: _guard_of(before.values(), sink) or self._guarded_sink(name, sink) for name, sink in sinks.items()}
        self._watchers = [_guard_of(watched, one) or ErrorGuard(name, one, self._failures) for name, one in watchers.items()]
        for sink in before.values():
            if sink not in self._sinks.values():
                sink.use(lambda sink: sink.close(), last=True)
        for watcher in watched:
            if watcher not in self._watchers:
                watcher.use(_save, last=True)
        self.save()  # the journal records from which step on the change holds
        if self._thinning is not None:
            self._thinning.recount()

    def flush(self, *, wait: bool = True) -> bool:
        """Make everything delivered so far visible. True if every call succeeded."""
        errors = [sink.use(lambda sink: sink.flush(), wait=wait) for sink in self._sinks.values()]
        return _all_succeeded([*errors, *self.save(wait=wait)])

    def close(self, *, wait: bool = True, complete: bool = True) -> bool:
        """Flush and close everything. Later calls are refused, also those of a thread that is still delivering.

        Watchers are closed only if the run is ``complete``, otherwise saved. The journal is closed only if the run is complete
        and every sink and watcher closed without an error, otherwise saved.
        """
        errors = [sink.use(lambda sink: sink.close(), wait=wait, last=True) for sink in self._sinks.values()]
        self._journal.use(self._report_dropped, wait=wait)
        errors += self._use_watchers(_close if complete else _save, wait=wait, last=True)
        end = self._report_and_close if complete and _all_succeeded(errors) else self._report_and_save
        errors.append(self._journal.use(end, wait=wait, last=True))
        return _all_succeeded(errors)

    def abandon(self, steps: Sequence[int], reason: str) -> bool:
        """Close what can be closed while the writer is stuck, and enter in the journal which ``steps`` stay unwritten.

        The step that is half way is lost only for the sinks that have not been called; the sinks before them have it.
        """
        self._abandoned = True
        in_progress = self._in_progress
        half_way = in_progress.half_way
        unwritten = [step for step in steps if step != half_way]
        self.dropped_steps.counts[reason] += len(unwritten)
        self._journal.use(lambda journal: _drop_all(journal, unwritten, reason), wait=False)
        for watcher in self._watchers:
            unseen = [step for step in steps if step not in in_progress.steps[:1] or watcher.name not in in_progress.looked]
            watcher.use(partial(_drop_all, steps=unseen, reason=reason), wait=False)
        if half_way is not None:
            rest = [name for name in self._sinks if name not in in_progress.served]
            self._journal.use(lambda journal: _lose(journal, half_way, rest, reason), wait=False)
        return self.close(wait=False, complete=False)

    def save(self, *, wait: bool = True) -> list[BaseException | None]:
        """Save the journal and the watchers. Returns the error of each, or None."""
        return [self._journal.use(self._report_and_save, wait=wait), *self._use_watchers(_save, wait=wait)]

    def seconds_to_save(self) -> float | None:
        """Seconds until the journal is to be saved; ``None`` while it has nothing new."""
        return max(self._save_at - monotonic(), 0.0) if self._changed or self.dropped_steps.unreported else None

    @property
    def stuck_in(self) -> str:
        """What the delivering thread is busy with."""
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

    def _drop_unreadable(self, step: int, error: BaseException) -> None:
        """A step that could not be read reaches no sink and no watcher."""
        if isinstance(error, EarlierFailure):
            self._failures.defer_error(error)
        else:
            self._failures.report("reading a step", error, advice(error))
        self.dropped_steps.counts[UNREADABLE] += 1
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
        for _ in range(MOST_THINNED):
            if self._thinning is None or not self._thinning.is_bounded or not self._thin(self._thinning):
                break

    def _thin(self, thinning: ThinningJournal) -> bool:
        """Remove old steps if the files reach the bound. False if there was nothing to remove, or it failed."""
        grown = sum(sink.inner.grown for sink in self._sinks.values() if isinstance(sink.inner, ThinnableSink))
        steps: list[int] = []
        self._journal.use(lambda _: steps.extend(thinning.excess(grown)))
        if not steps or not _all_succeeded([sink.use(lambda sink: _remove(sink, steps)) for sink in self._sinks.values()]):
            return False
        return self._journal.use(lambda _: thinning.removed()) is None

    def _report_and_save(self, journal: StepJournal) -> None:
        self._save_at = monotonic() + self._save_seconds
        self._report_dropped(journal)
        journal.save()
        self._changed = False

    def _report_and_close(self, journal: StepJournal) -> None:
        self._report_dropped(journal)
        journal.close()

    def _report_dropped(self, journal: StepJournal) -> None:
        """Report the steps that were dropped before they reached the writer. A watcher that hangs is skipped."""

        def dropped(step: int, reason: str) -> None:
            journal.dropped(step, reason)
            self._use_watchers(lambda watcher: watcher.dropped(step, reason), wait=False)

        self.dropped_steps.report(dropped)

    def _use_watchers(
        self, call: Callable[[Watcher], object], *, wait: bool = True, last: bool = False
    ) -> list[BaseException | None]:
        return [watcher.use(call, wait=wait, last=last) for watcher in self._watchers]


def _batches(submitted: Sequence[tuple[int, S]]) -> Iterator[Sequence[tuple[int, S]]]:
    """Split into batches of up to ``BATCH_LIMIT_BYTES``; only the first step of a batch may block on the device.

    Each batch is computed when those before it have been delivered.
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


def _remove(sink: Sink, steps: Collection[int]) -> None:
    if isinstance(sink, ThinnableSink):
        sink.remove(steps)


def _guard_of(guarded: Iterable[ErrorGuard[T]], inner: T) -> ErrorGuard[T] | None:
    return next((one for one in guarded if one.inner is inner), None)


def _all_succeeded(errors: Iterable[BaseException | None]) -> bool:
    return all(error is None for error in errors)


def _enter(journal: StepJournal, rows: StepRows, errors: Mapping[str, BaseException | None]) -> None:
    if _all_succeeded(errors.values()):
        journal.written(rows)
    for name, error in errors.items():
        if error is not None:
            journal.lost(rows.step, name, repr(error))
        for step in error.steps if isinstance(error, RemovedFileError) else ():
            journal.lost(step, name, repr(error), was_written=True)


def _save(watcher: Watcher) -> None:
    watcher.save()


def _close(watcher: Watcher) -> None:
    watcher.close()


def _drop_all(listener: StepJournal | Watcher, steps: Iterable[int], reason: str) -> None:
    for step in steps:
        listener.dropped(step, reason)


def _lose(journal: StepJournal, step: int, sinks: Iterable[str], reason: str) -> None:
    for sink in sinks:
        journal.lost(step, sink, reason)


# --- Steps that never reached the writer. The training thread counts them; the writer reports them to the journal.


class DroppedRange:
    """Evenly spaced steps dropped for one reason. So the steps dropped while a writer hangs for a day take a few bytes."""

    def __init__(self, step: int, reason: str) -> None:
        self.reason = reason
        self.steps = range(step, step + 1)
        self.reported = 0

    def reach(self, step: int, reason: str) -> bool:
        """Extend the range by ``step``. False if ``step`` does not continue it."""
        first, last = self.steps[0], self.steps[-1]
        stride = self.steps.step if len(self.steps) > 1 else step - first
        if reason != self.reason or stride < 1 or step != last + stride:
            return False
        self.steps = range(first, step + 1, stride)
        return True

    def report(self, dropped: Callable[[int, str], None]) -> None:
        for step in self.steps[self.reported :]:
            dropped(step, self.reason)
            self.reported += 1


class DroppedSteps:
    """Ranges of dropped steps. One thread adds steps, another reports them, and neither waits for the other.

    Only the last range grows, and only the training thread replaces its ``steps``; earlier ranges never change.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._ranges: deque[DroppedRange] = deque()

    def add(self, step: int, reason: str) -> None:
        """Count a dropped step. Called on the training thread."""
        self.counts[reason] += 1
        if not self._ranges or not self._ranges[-1].reach(step, reason):
            self._ranges.append(DroppedRange(step, reason))

    def report(self, dropped: Callable[[int, str], None]) -> None:
        """Report the steps that are new since the last call. One caller at a time."""
        while self._ranges:
            final = len(self._ranges) > 1
            self._ranges[0].report(dropped)
            if not final:
                return
            self._ranges.popleft()

    @property
    def unreported(self) -> bool:
        ranges = self._ranges
        return len(ranges) > 1 or (len(ranges) == 1 and ranges[0].reported < len(ranges[0].steps))
