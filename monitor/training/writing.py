"""The thread that shows metrics: training hands over what it knows of a step, and goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from typing import Final

from monitor.failures import Failures
from monitor.pipeline.process import PROCESS, Ticket
from monitor.training.facts import StepFacts, StepNorms
from monitor.training.joining import Joining
from monitor.training.reporting import Reporting

MOST_QUEUED: Final = 4096
"""Steps that may wait to be shown; further ones are dropped, and counted."""

FLUSH_SECONDS: Final = 10.0
"""What is held is written at the latest when nothing has come for so long."""

CLOSE_SECONDS: Final = 30.0

Task = Callable[[], object]


class Writing:
    """Takes facts from training and norms from a recording, joins them and has them shown.

    The queue has no lock that a forked process or a signal handler could find held. The thread is a daemon: who needs all to be
    there calls ``close``.
    """

    signal_seconds = 2.0

    def __init__(self, reporting: Reporting, failures: Failures) -> None:
        self._reporting = reporting
        self._failures = failures
        self._joining = Joining(reporting.step)
        self._inbox: SimpleQueue[Task | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"monitor-training-rank{failures.rank}", daemon=True)
        self._started = threading.Lock()
        self._closing = threading.Lock()
        self._adopted = self._expects_norms = self._abandoned = False
        self._born = PROCESS.forks

    @property
    def inert(self) -> bool:
        """Whether this is a copy in a process that was forked from the one that writes."""
        return self._born != PROCESS.forks

    def texts(self, texts: Mapping[str, str]) -> None:
        """The configuration of the run, to be shown."""
        self._put(lambda: self._reporting.texts(texts))

    def facts(self, facts: StepFacts) -> None:
        """What the training loop knows of a step. Does not wait."""
        if not self._adopted:
            # Not before: at exit the recording that norms come from is to be closed first, and it is there by now.
            self._adopted = True
            PROCESS.adopt(self)
            PROCESS.watch_signals(self._failures)
        if self._inbox.qsize() > MOST_QUEUED:
            self._failures.warn("training metrics dropped", "Training metrics are written too slowly: steps are not shown.")
        else:
            self._put(lambda: self._joining.facts(facts))

    def norms(self, step: int, norms: StepNorms | None) -> None:
        """What a recording has of a step; None where it is lost. From any thread."""
        self._put(lambda: self._joining.norms(step, norms))

    def flush(self, seconds: float) -> bool:
        """Whether within ``seconds`` all that was handed over is written, as far as its norms were there."""
        return self.ask_flush().wait(seconds)

    def ask_flush(self) -> Ticket:
        """The same without waiting; reentrant."""
        ticket = Ticket()
        if not self._started.locked() or self.inert:
            ticket.settle(True)
        else:
            self._inbox.put(lambda: self._flush(ticket))
        return ticket

    def _flush(self, ticket: Ticket) -> None:
        self._reporting.flush()
        ticket.settle(True)

    def flush_without(self) -> Ticket:
        """What cannot wait for this thread cannot be written."""
        ticket = Ticket()
        ticket.settle(False)
        return ticket

    def begin_close(self) -> None:
        """Nothing to do: norms may still come."""

    def close(self) -> bool:
        """Show what is left, within ``CLOSE_SECONDS``; whether that was done. Any number of times."""
        if self.inert or not self._started.locked():
            return True
        self._retire()
        self._thread.join(CLOSE_SECONDS)
        PROCESS.forget(self)
        return not self._thread.is_alive()

    def expect_norms(self) -> None:
        """A recording will hand over norms, until ``no_more_norms``."""
        self._expects_norms = self._reporting.expects_norms = True

    def no_more_norms(self) -> None:
        """The recording has ended."""
        self._expects_norms = False
        if self._abandoned:
            self._retire()

    def abandon(self) -> None:
        """Nobody is left who could tell of a step. Norms of the last ones may still come."""
        self._abandoned = True
        if not self._expects_norms:
            self._retire()

    def _retire(self) -> None:
        if not self.inert and self._closing.acquire(blocking=False):
            self._inbox.put(None)

    def _put(self, task: Task) -> None:
        if self.inert or self._closing.locked():
            return
        self._inbox.put(task)
        if self._started.acquire(blocking=False):
            self._thread.start()

    def _run(self) -> None:
        while (task := self._next()) is not None:
            self._failures.guarded("showing training metrics", task)()
        self._joining.rest()
        self._reporting.close()

    def _next(self) -> Task | None:
        try:
            return self._inbox.get(timeout=FLUSH_SECONDS)
        except Empty:
            return self._reporting.flush
