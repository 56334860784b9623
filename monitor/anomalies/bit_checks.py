"""The watcher that compares the bits of tensors: between two steps on this rank, and with the copies of other ranks."""

from __future__ import annotations

import atexit
import os
import socket
import weakref
from collections.abc import Callable, Collection, Mapping
from time import monotonic

from monitor.anomalies.between_steps import BetweenSteps
from monitor.anomalies.checked_rows import CheckedRows, ChecksumReader
from monitor.anomalies.copies import CopyHistory
from monitor.anomalies.copy_exchange import MERGE_COMPARES, CopyExchange
from monitor.anomalies.corruption import ODD_COPY, UNLIKE_COPIES, CorruptionAlerts
from monitor.coordinator import job_store
from monitor.coordinator.job_store import StoreConnection
from monitor.failures import Failures
from monitor.series import SeriesTable
from monitor.stats.table import StepRows


class BitChecks:
    """A watcher of the rows (``Watcher``).

    Args:
        monitored: The monitored ranks; empty for all.
    """

    def __init__(
        self, rank: int, series: SeriesTable, alerts: CorruptionAlerts, failures: Failures, monitored: Collection[int] = ()
    ) -> None:
        self._alerts, self._failures = alerts, failures
        self._reader = ChecksumReader(series)
        self._between = BetweenSteps(series, alerts)
        self._history = CopyHistory(rank, socket.gethostname(), series, monitored)
        self._job: StoreConnection | None = None
        self._exchange: CopyExchange | None = None
        self._pid = os.getpid()

    def compare_with(self, job: StoreConnection) -> None:
        """Compare copies with other ranks from now on, if any holds one."""
        self._job = job if job.world > 1 else None

    def use(self, monitored: Collection[int]) -> None:
        """Use other monitored ranks from the next step on. Any thread."""
        self._history.use(monitored)

    def look(self, rows: StepRows) -> None:
        """See ``Watcher``."""
        checked = self._reader.read(rows)
        self._between.look(rows.step, checked, rows.rewritten)
        if self._job is not None:
            self._compare(self._job, rows.step, checked)

    def _compare(self, job: StoreConnection, step: int, checked: Mapping[str, CheckedRows]) -> None:
        self._history.add(step, checked, monotonic())
        if self._exchange is None and self._history.groups:
            if job.store is None or job_store.is_file(job.store):
                why = "not known" if job.store is None else "in a file, which would grow with each step"
                self._alerts.note("copies", f"The job's store is {why}: copies are compared by a merge alone.")
                self._job = None
                return
            self._begin(job)
        self._report_silent_store()
        self._report_odd_copies()

    def dropped(self, step: int, reason: str) -> None:
        """See ``Watcher``. Nothing is compared with the weights that this step left."""
        del step, reason
        self._between.forget()

    def save(self) -> None:
        """See ``Watcher``."""
        self._report_odd_copies()

    def close(self) -> None:
        """See ``Watcher``. Ends the comparison with other ranks, within about a second."""
        self.stop()
        self._report_odd_copies()

    def stop(self) -> None:
        """End the thread. May be called repeatedly, on any thread."""
        if self._exchange is not None and os.getpid() == self._pid:
            self._exchange.stop()

    def _begin(self, job: StoreConnection) -> None:
        exchange = CopyExchange(job, self._history, self._alerts, self._failures)
        self._exchange = exchange
        exchange.begin()
        at_exit = _stopping(weakref.ref(exchange), self._pid)
        atexit.register(at_exit)  # a thread inside a store call when the interpreter exits would abort the process
        weakref.finalize(self, exchange.retire).atexit = False

    def _report_silent_store(self) -> None:
        """A call that hangs cannot be interrupted, nor can its thread report it."""
        began = None if self._exchange is None else self._exchange.busy_since
        if began is not None and monotonic() - began > job_store.SAY_AFTER_S:
            said = f"The job's store has not answered for {monotonic() - began:.0f} s."
            self._failures.warn("the store is silent", f"{said} {MERGE_COMPARES}")

    def _report_odd_copies(self) -> None:
        """Make events of the verdicts about this rank."""
        while self._exchange is not None and self._exchange.verdicts:
            verdict = self._exchange.verdicts.popleft()
            rule = ODD_COPY if verdict.most_agree else UNLIKE_COPIES
            for series, call_id in self._history.find(verdict):
                self._alerts.event(rule, verdict.step, series, call_id)


def _stopping(exchange: weakref.ref[CopyExchange], pid: int) -> Callable[[], None]:
    def stop() -> None:
        if (found := exchange()) is not None and os.getpid() == pid:
            found.stop()

    return stop
