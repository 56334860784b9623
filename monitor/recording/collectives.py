"""Records the tensors of communication operators, for every framework."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from monitor.config.model import CcDistribution
from monitor.failures import LOGGER, Failures
from monitor.recording.collective_log import CallSites, CommunicationLog
from monitor.series import Series
from monitor.stats.table import Page, RowSlot

# --- Names of process groups in rows and in the log.

WORLD: Final = "world"


@dataclass(frozen=True, slots=True)
class NamedGroup:
    """A process group as rows and the log name it.

    Attributes:
        label: Its role (``dp``, ``tp``, ``pp``) if known, else its ranks; ``world`` for all ranks of the job.
        rank: The rank of this process in the group.
    """

    label: str
    rank: int

    @property
    def suffix(self) -> str:
        """The group's suffix of an operator's name; empty if the group has all ranks of the job."""
        return "" if self.label == WORLD else f"@{self.label}"


class Labels:
    """The labels of groups, by their ranks."""

    def __init__(self) -> None:
        self._roles: dict[tuple[int, ...], str] = {}

    def learn(self, roles: Mapping[str, Sequence[int]]) -> None:
        """Set the roles of groups. If the same ranks have several roles, the first is used."""
        for role, ranks in roles.items():
            self._roles.setdefault(tuple(sorted(ranks)), role)

    def of(self, ranks: Sequence[int], world_size: int) -> str:
        """The label of the group with these ranks."""
        ordered = tuple(sorted(ranks))
        if len(ordered) == world_size:
            return WORLD
        return self._roles.get(ordered) or ranks_label(ordered)


def ranks_label(ranks: Sequence[int]) -> str:
    """Ranks in ascending order as text, short if they are evenly spaced: ``0-7``, ``0-28by4``, ``0+3+5``."""
    interval = ranks[1] - ranks[0] if len(ranks) > 2 else 0
    if interval and list(ranks) == list(range(ranks[0], ranks[-1] + 1, interval)):
        return f"{ranks[0]}-{ranks[-1]}" + (f"by{interval}" if interval > 1 else "")
    return "+".join(map(str, ranks))


# --- Rows of calls: one row for each tensor of each call of a step. They are combined when the step is written.

LOCK_SECONDS: Final = 1.0
"""Timeout for the lock: a signal handler that communicates may have interrupted the thread that holds it."""


class CallSeries:
    """A series whose rows are the calls of a step.

    Attributes:
        calls: Number of calls in the step ``step``.
        slots: The row of each tensor: by device, number of the call, and number of the tensor in the call.
        staged_rows: The rows of first tensors that are read later, on the host, by number of the call.
    """

    __slots__ = ("calls", "series", "slots", "staged_rows", "step")

    def __init__(self, series: Series) -> None:
        self.series = series
        self.step = -1
        self.calls = 0
        self.slots: dict[tuple[Hashable, int, int], RowSlot] = {}
        self.staged_rows: list[int] = []


class CollectiveCall:
    """One call of an operator. Each tensor has a row, and the tensors may be read at different times.

    The call is numbered in the step of its first read, which may be later than the step of the call.

    Args:
        issued: The step of the call.
    """

    __slots__ = ("issued", "number", "read", "series", "step")

    def __init__(self, series: CallSeries, issued: int) -> None:
        self.series = series
        self.issued = issued
        self.step = -1
        self.number = 0
        self.read = 0

    def begin(self, step: int) -> None:
        """Take the next number of ``step``, unless the call has one."""
        if self.step != step:
            series = self.series
            if series.step != step:
                series.step, series.calls = step, 0
            self.step, self.number, self.read = step, series.calls, 0
            series.calls += 1


class CallRows(ABC):
    """Reduces the tensors of calls into the table of a recorder. Safe on any thread."""

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder
        self._series: dict[Series, CallSeries] = {}

    @abstractmethod
    def _device_of(self, x: Any) -> Hashable:
        """The device of a tensor, as the recorder names it; None if the tensor has no data."""

    def series(self, series: Series) -> CallSeries:
        """The rows of ``series``."""
        known = self._series.get(series)
        if known is None:
            known = self._series[series] = CallSeries(series)
        return known

    def read(self, call: CollectiveCall, tensors: Sequence[Any]) -> bool:
        """Reduce the tensors of a call, one row per tensor.

        Returns:
            Whether all tensors were read. Otherwise none has a row.
        """
        lock = self._recorder.lock
        if not lock.acquire(timeout=LOCK_SECONDS):
            return False
        try:
            return bool(self._recorder.active) and self._read(call, tensors)
        finally:
            lock.release()

    def _read(self, call: CollectiveCall, tensors: Sequence[Any]) -> bool:
        call.begin(self._recorder.steps)
        written: list[tuple[Page, int]] = []
        complete = False
        try:
            complete = all(self._read_one(call, x, written) for x in tensors)
        finally:
            if not complete:
                self._forget(written)
        return complete

    def _read_one(self, call: CollectiveCall, x: Any, written: list[tuple[Page, int]]) -> bool:
        recorder = self._recorder
        device = self._device_of(x)
        if device is None:
            return False
        slot = self._slot(call.series, device, call.number, call.read)
        written.append((slot.page, slot.local_row))  # first, so that a failure below clears the row
        if not recorder.reduce(x, slot.page, slot.local_row):
            return False
        recorder.table.note(slot.row, recorder.layout(x))
        call.read += 1
        return True

    def _forget(self, written: Sequence[tuple[Page, int]]) -> None:
        for page, row in written:
            page.memory.forget(row)

    def _slot(self, series: CallSeries, device: Hashable, number: int, part: int) -> RowSlot:
        key = (device, number, part)
        slot = series.slots.get(key)
        if slot is None:
            page = self._recorder.page_for(device, 1)
            slot = series.slots[key] = self._recorder.table.allot(page, series.series, (number,))
        return slot


UNREAD_OUTPUTS: Final = (
    "the outputs of {} calls have no rows: the program did not wait for them, they did not arrive in time, or they were "
    "changed before the monitor could read them"
)


class Operator(Protocol):
    """A way to call an operator."""

    @property
    def name(self) -> str:
        """Its name in rows and in the log."""

    @property
    def rooted(self) -> str:
        """The side that only the root has: ``inputs``, ``outputs``, or empty."""

    @property
    def functional(self) -> bool:
        """Whether the outputs are in the result, and not among the arguments."""

    def taken(self, args: Sequence[Any]) -> Sequence[Any]:
        """The input tensors; the tensors of a list together are one input. Empty for a call that will be rejected."""

    def given(self, args: Sequence[Any], result: Any) -> Sequence[Any]:
        """The output tensors, valid when the call has completed."""

    def root(self, args: Sequence[Any]) -> int:
        """The root's rank in the group, for an operator that is ``rooted``."""

    def group_of(self, args: Sequence[Any]) -> Any:
        """The group of the call, as the framework represents it."""


class Groups(Protocol):
    """The groups of a framework."""

    def learn(self, roles: Mapping[str, Sequence[int]]) -> None:
        """Set the roles of groups."""

    def of(self, given: Any) -> NamedGroup | None:
        """The name of a group; None if its ranks are unknown."""


class Communication(ABC):
    """Observes communication from its creation until ``close``.

    Attributes:
        wanted: The configuration.
        unread: Number of calls whose outputs were not read: not completed, never waited for, or changed before the read.

    Args:
        dtype_name: Returns the name of a dtype for the log.
    """

    def __init__(
        self, wanted: CcDistribution, failures: Failures, groups: Groups, dtype_name: Callable[[Any], str] = str
    ) -> None:
        self.unread = 0
        self.wanted = wanted
        self._failures = failures
        self._groups = groups
        self._recorder: Any = None
        self._rows: CallRows | None = None
        self._note: Callable[[str, str], None] | None = None
        self._sites = CallSites(wanted.cc_codeline)
        self._log: CommunicationLog | None = CommunicationLog(dtype_name)
        self._series: dict[tuple[str, str, str], CallSeries] = {}
        # Whether inputs are read before the call is issued.
        self._looks_first = bool(wanted.cc_codeline or wanted.cc_pre_hook)
        self._measures = not wanted.cc_log_only

    @abstractmethod
    def _begin(self, recorder: Any) -> CallRows:
        """Training begins: create the rows of calls in ``recorder``."""

    @abstractmethod
    def _stop(self) -> None:
        """Stop observing. May be called repeatedly."""

    @abstractmethod
    def _among_ranks(self) -> bool:
        """Whether there is a process group, or one will be created."""

    @abstractmethod
    def _real(self, tensors: Sequence[Any]) -> bool:
        """Whether the tensors are communicated; False while a compiler or another tracer runs the code."""

    @property
    def log_only(self) -> bool:
        """Whether only the log is written, after which the run ends."""
        return self.wanted.cc_log_only

    def record_into(self, recorder: Any, roles: Mapping[str, Sequence[int]], note: Callable[[str, str], None]) -> None:
        """Record communication from now on in ``recorder``, unless another recorder was set before.

        Args:
            roles: The ranks of groups, by role.
            note: Called at the end with a key and a text for the manifest about calls without rows.
        """
        if self._recorder is None:
            self._recorder, self._note = recorder, note
            self._rows = self._begin(recorder)
        self._groups.learn(roles)
        if not self._among_ranks():
            LOGGER.warning(
                "[rank %d] cc_distribution: there is no process group, so there is no communication to record. "
                "All other configured data is recorded.",
                self._failures.rank,
            )

    def end_log(self, directory: Path) -> Path | None:
        """Write the log, and take no more stacks. None if the log was written before."""
        log, self._log = self._log, None
        if log is None:
            return None
        path = log.write(directory)
        calls, sites = log.counts.total(), len(log.counts)
        LOGGER.info("[rank %d] communication: %d calls from %d sites, listed in %s", self._failures.rank, calls, sites, path)
        return path

    def close(self) -> None:
        """Stop observing. May be called repeatedly."""
        self._stop()
        if self.unread and self._note is not None:
            self._note("communication", UNREAD_OUTPUTS.format(self.unread))
        self._recorder = self._log = self._note = self._rows = None

    @property
    def _recording(self) -> bool:
        """Whether communication is recorded now."""
        return self._recorder is not None and self._recorder.active and self._measures

    def _look(self, operator: Operator, args: Sequence[Any], recording: bool) -> bool:
        """Add the call to the log, and record its inputs.

        Returns:
            Whether its outputs are to be recorded.
        """
        inputs = operator.taken(args)
        if not self._real(inputs):
            return False
        group = self._groups.of(operator.group_of(args))
        if group is None:
            return False
        wanted = self._site_wanted(operator, args, inputs, group)
        if not recording or not wanted:
            return False
        if self.wanted.cc_pre_hook and inputs and not (operator.rooted == "inputs" and operator.root(args) != group.rank):
            call, rows = self._new_call(operator, group, "pre_0"), self._rows
            if call is not None and rows is not None:
                rows.read(call, inputs)
        return True

    def _site_wanted(self, operator: Operator, args: Sequence[Any], inputs: Sequence[Any], group: NamedGroup) -> bool:
        """Whether calls from this call site are recorded. While there is a log, the call is added to it."""
        if self._log is None and not self._sites.has_patterns:
            return True
        site = self._sites.at(sys._getframe(1))
        if self._log is not None:
            tensors = inputs or ([] if operator.functional else operator.given(args, None))
            self._log.add(operator.name, group.label, tensors, site)
        return site.wanted

    def _expected(self, operator: Operator, args: Sequence[Any], result: Any) -> tuple[CollectiveCall, Sequence[Any]] | None:
        """The call and its outputs, counted as unread until they are read; None if this rank has no outputs."""
        outputs = operator.given(args, result)
        if not outputs or not self._real(outputs):
            return None
        group = self._groups.of(operator.group_of(args))
        if group is None or (operator.rooted == "outputs" and operator.root(args) != group.rank):
            return None
        call = self._new_call(operator, group, "post_0")
        if call is None:
            return None
        self.unread += 1
        return call, outputs

    def _new_call(self, operator: Operator, group: NamedGroup, what: str) -> CollectiveCall | None:
        """A new call; None if another thread has called ``close`` since the call began."""
        rows, recorder = self._rows, self._recorder
        if rows is None or recorder is None:
            return None
        key = (operator.name, group.label, what)
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = rows.series(Series("other", 0, f"{operator.name}{group.suffix}.{what}"))
        return CollectiveCall(series, recorder.steps)
