"""The pipeline: takes sealed tables from the training thread to every sink, and delays training for a bounded time at most."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic
from types import MappingProxyType
from typing import Final, Generic, TypeVar

from monitor.failures import Failures
from monitor.pipeline.delivery import ConsumerFactory, Delivery, Sealed, StepJournal, Watcher
from monitor.pipeline.writer import BackpressureBudget, Ring, StepWriter
from monitor.sinks.protocol import Sink
from monitor.stats.table import StepRows

S = TypeVar("S", bound=Sealed)

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
