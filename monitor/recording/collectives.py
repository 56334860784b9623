"""What is recorded of communication, whatever framework it is issued through."""

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

# --- What a group of ranks is called in rows and in the log.

WORLD: Final = "world"


@dataclass(frozen=True, slots=True)
class Group:
    """A process group as rows and the log name it.

    Attributes:
        label: Its role (``dp``, ``tp``, ``pp``) where that is known, else its ranks; ``world`` for all ranks of the job.
        rank: Of this process in the group.
    """

    label: str
    rank: int

    @property
    def suffix(self) -> str:
        """What the group adds to an operator's name: nothing where it is all of the job."""
        return "" if self.label == WORLD else f"@{self.label}"


class Labels:
    """What groups are called, by their ranks."""

    def __init__(self) -> None:
        self._roles: dict[tuple[int, ...], str] = {}

    def learn(self, roles: Mapping[str, Sequence[int]]) -> None:
        """Say what groups of ranks are called. The first of several roles of the same ranks stands."""
        for role, ranks in roles.items():
            self._roles.setdefault(tuple(sorted(ranks)), role)

    def of(self, ranks: Sequence[int], world_size: int) -> str:
        """The label of a group of these ranks of the job."""
        ordered = tuple(sorted(ranks))
        if len(ordered) == world_size:
            return WORLD
        return self._roles.get(ordered) or spelled(ordered)


def spelled(ranks: Sequence[int]) -> str:
    """Ranks in ascending order, short where they are evenly spaced: ``0-7``, ``0-28by4``, ``0+3+5``."""
    interval = ranks[1] - ranks[0] if len(ranks) > 2 else 0
    if interval and list(ranks) == list(range(ranks[0], ranks[-1] + 1, interval)):
        return f"{ranks[0]}-{ranks[-1]}" + (f"by{interval}" if interval > 1 else "")
    return "+".join(map(str, ranks))


# --- Rows of calls of operators: a row for each tensor of each call of a step, combined when the step is written.

LOCK_SECONDS: Final = 1.0
"""A handler of a signal may communicate, too, and may have interrupted its own thread in here: it must not wait for ever."""


class CallSeries:
    """A series whose rows are the calls of a step.

    Attributes:
        calls: How many there were in the step ``step``.
        slots: The row of each call's each tensor: by device, number of the call, and number of the tensor in it.
        staged_rows: Where first tensors are put off: on the host, their rows, by number of the call.
    """

    __slots__ = ("calls", "series", "slots", "staged_rows", "step")

    def __init__(self, series: Series) -> None:
        self.series = series
        self.step = -1
        self.calls = 0
        self.slots: dict[tuple[Hashable, int, int], RowSlot] = {}
        self.staged_rows: list[int] = []


class Call:
    """One call: its tensors may be read at different times, and each has a row.

    A call has its number from the step in which it is first read, which need not be the one in which it was issued.

    Args:
        issued: The step in which it was issued.
    """

    __slots__ = ("issued", "number", "read", "series", "step")

    def __init__(self, series: CallSeries, issued: int) -> None:
        self.series = series
        self.issued = issued
        self.step = -1
        self.number = 0
        self.read = 0

    def begin(self, step: int) -> None:
        """Take the next number of ``step``, unless it has one there."""
        if self.step != step:
            series = self.series
            if series.step != step:
                series.step, series.calls = step, 0
            self.step, self.number, self.read = step, series.calls, 0
            series.calls += 1


class CallRows(ABC):
    """Reads what calls have moved, on any thread, into the table of a recorder."""

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder
        self._series: dict[Series, CallSeries] = {}

    @abstractmethod
    def _device_of(self, x: Any) -> Hashable:
        """Where a tensor is, as the recorder names it; None where it has no data."""

    def series(self, series: Series) -> CallSeries:
        """The rows of ``series``."""
        known = self._series.get(series)
        if known is None:
            known = self._series[series] = CallSeries(series)
        return known

    def read(self, call: Call, tensors: Sequence[Any]) -> bool:
        """Reduce what a call has moved, a row a tensor.

        Returns:
            Whether all of them were read. Otherwise none has a row.
        """
        lock = self._recorder.lock
        if not lock.acquire(timeout=LOCK_SECONDS):
            return False
        try:
            return bool(self._recorder.active) and self._read(call, tensors)
        finally:
            lock.release()

    def _read(self, call: Call, tensors: Sequence[Any]) -> bool:
        call.begin(self._recorder.steps)
        written: list[tuple[Page, int]] = []
        complete = False
        try:
            complete = all(self._read_one(call, x, written) for x in tensors)
        finally:
            if not complete:
                self._forget(written)
        return complete

    def _read_one(self, call: Call, x: Any, written: list[tuple[Page, int]]) -> bool:
        recorder = self._recorder
        device = self._device_of(x)
        if device is None:
            return False
        slot = self._slot(call.series, device, call.number, call.read)
        written.append((slot.page, slot.local_row))  # whatever happens to it from here on
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


UNREAD: Final = (
    "the outputs of {} calls have no rows: nobody waited for them, they were not there in time, or they were changed before "
    "they could be read"
)


class Operator(Protocol):
    """A way to call an operator."""

    @property
    def name(self) -> str:
        """What people call it."""

    @property
    def rooted(self) -> str:
        """What only the root has: ``inputs``, ``outputs``, or nothing."""

    @property
    def functional(self) -> bool:
        """Whether its outputs are its result, and not among its arguments."""

    def taken(self, args: Sequence[Any]) -> Sequence[Any]:
        """The tensors that go in; those of a list together are one input. None of a call that will be refused."""

    def given(self, args: Sequence[Any], result: Any) -> Sequence[Any]:
        """The tensors that come out once it has completed."""

    def root(self, args: Sequence[Any]) -> int:
        """The root's rank in the group, of an operator that is ``rooted``."""

    def group_of(self, args: Sequence[Any]) -> Any:
        """The group that it runs on, as the framework has it."""


class Groups(Protocol):
    """The groups of a framework."""

    def learn(self, roles: Mapping[str, Sequence[int]]) -> None:
        """Say what groups of ranks are called."""

    def of(self, given: Any) -> Group | None:
        """What is known of a group; None where nobody knows its ranks."""


class Communication(ABC):
    """Listens from its making until ``close``.

    Attributes:
        wanted: What it was made for.
        unread: Calls whose outputs have not been read: still under way, never waited for, or changed before they could be.

    Args:
        dtype_name: Spells a dtype for the log.
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
        # Nothing of a call is looked at before it is issued.
        self._looks_first = bool(wanted.cc_codeline or wanted.cc_pre_hook)
        self._measures = not wanted.cc_log_only

    @abstractmethod
    def _begin(self, recorder: Any) -> CallRows:
        """Training begins, and what it communicates has rows in ``recorder``."""

    @abstractmethod
    def _stop(self) -> None:
        """Listen no longer. Any number of times."""

    @abstractmethod
    def _among_ranks(self) -> bool:
        """Whether there is a process group, or one is to come."""

    @abstractmethod
    def _real(self, tensors: Sequence[Any]) -> bool:
        """False where a compiler or another tracer is at work, and nothing is communicated."""

    @property
    def log_only(self) -> bool:
        """Whether nothing is measured, and the run ends when the log is written."""
        return self.wanted.cc_log_only

    def record_into(self, recorder: Any, roles: Mapping[str, Sequence[int]], note: Callable[[str, str], None]) -> None:
        """Give what is communicated from now on rows in ``recorder``, unless it has them in another already.

        Args:
            roles: What groups of ranks are called.
            note: Told what the rows do not say, with a key, at the end.
        """
        if self._recorder is None:
            self._recorder, self._note = recorder, note
            self._rows = self._begin(recorder)
        self._groups.learn(roles)
        if not self._among_ranks():
            LOGGER.warning(
                "[rank %d] cc_distribution: there is no process group, so there is no communication to record. "
                "Everything else is recorded.",
                self._failures.rank,
            )

    def end_log(self, directory: Path) -> Path | None:
        """Write the log; None if that was done before. No stacks are taken for it from now on."""
        log, self._log = self._log, None
        if log is None:
            return None
        path = log.write(directory)
        calls, sites = log.counts.total(), len(log.counts)
        LOGGER.info("[rank %d] communication: %d calls from %d sites, listed in %s", self._failures.rank, calls, sites, path)
        return path

    def close(self) -> None:
        """Listen no longer. Any number of times."""
        self._stop()
        if self.unread and self._note is not None:
            self._note("communication", UNREAD.format(self.unread))
        self._recorder = self._log = self._note = self._rows = None

    @property
    def _recording(self) -> bool:
        """Whether what is communicated now has rows."""
        return self._recorder is not None and self._recorder.active and self._measures

    def _look(self, operator: Operator, args: Sequence[Any], recording: bool) -> bool:
        """Enter the call in the log, and measure what goes in.

        Returns:
            Whether its outputs are to be measured.
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

    def _site_wanted(self, operator: Operator, args: Sequence[Any], inputs: Sequence[Any], group: Group) -> bool:
        """Whether the call comes from where calls are recorded; while there is a log, it is entered there."""
        if self._log is None and not self._sites.choosy:
            return True
        site = self._sites.at(sys._getframe(1))
        if self._log is not None:
            tensors = inputs or ([] if operator.functional else operator.given(args, None))
            self._log.add(operator.name, group.label, tensors, site)
        return site.wanted

    def _expected(self, operator: Operator, args: Sequence[Any], result: Any) -> tuple[Call, Sequence[Any]] | None:
        """The call whose outputs are to come, which is unread until they do; None where this rank gets none."""
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

    def _new_call(self, operator: Operator, group: Group, what: str) -> Call | None:
        """None if another thread has closed this since the call began."""
        rows, recorder = self._rows, self._recorder
        if rows is None or recorder is None:
            return None
        key = (operator.name, group.label, what)
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = rows.series(Series("other", 0, f"{operator.name}{group.suffix}.{what}"))
        return Call(series, recorder.steps)
