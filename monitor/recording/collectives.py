"""Records the tensors of communication operators, for every framework."""

from __future__ import annotations

import csv
import io
import re
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple, Protocol, final

from monitor.config.model import CcDistribution
from monitor.coordinator.output import write_whole
from monitor.failures import LOGGER, EarlierFailure, Failures
from monitor.recording.recorder import Due, Recorder, TensorReader
from monitor.series import COLLECTIVE_INPUT, COLLECTIVE_OUTPUT, Series
from monitor.stats.table import RowSlot

# --- The communication log: every call site of the first step once, with its count.

# --- Call sites: where the user's program issues communication.

INTERNAL: Final = frozenset({"torch", "mindspore", "monitor"})
"""Packages whose frames do not belong to a call site."""

MAX_SITES: Final = 8192
"""Maximum number of cached call sites. A site that is dropped from the cache is only examined again."""


@dataclass(frozen=True, slots=True)
class CallSite:
    """A call site: the user's frames on the call stack.

    Attributes:
        stack: ``file[line] function`` for each frame, innermost first; empty if the stack has no Python frame of the user,
            as on a thread of the autograd engine.
        wanted: Whether one of the patterns matches a ``file[line]`` of the stack.
    """

    stack: tuple[str, ...]
    wanted: bool


class CallSites:
    """Finds call sites, and caches them.

    Args:
        patterns: Regular expressions for ``file[line]``. Empty: every site is wanted.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = [re.compile(pattern) for pattern in patterns]
        self._sites: dict[tuple[tuple[CodeType, int], ...], CallSite] = {}

    @property
    def has_patterns(self) -> bool:
        """Whether there are patterns."""
        return bool(self._patterns)

    def at(self, frame: FrameType | None) -> CallSite:
        """The call site that ``frame`` belongs to."""
        frames = []
        while frame is not None:
            if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in INTERNAL:
                frames.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
        key = tuple(frames)
        site = self._sites.get(key)
        if site is None:
            if len(self._sites) >= MAX_SITES:
                self._sites.clear()
            site = self._sites[key] = self._described(key)
        return site

    def _described(self, frames: Sequence[tuple[CodeType, int]]) -> CallSite:
        lines = [f"{code.co_filename}[{line}]" for code, line in frames]
        stack = tuple(f"{where} {code.co_name}" for where, (code, _) in zip(lines, frames, strict=True))
        wanted = not self._patterns or any(pattern.search(where) for pattern in self._patterns for where in lines)
        return CallSite(stack, wanted)


LOG_FILE: Final = "communication_log.csv"
COLUMNS: Final = ("op", "group", "dtype", "shape", "calls", "stack")


class LoggedCall(NamedTuple):
    """A row of the log: calls with the same values are counted."""

    op: str
    group: str
    dtype: str
    shape: str
    stack: tuple[str, ...]


class CommunicationLog:
    """Counts calls by operator, group, dtype, shape and call site.

    Args:
        dtype_name: Returns the name of a dtype of the framework.
    """

    def __init__(self, dtype_name: Callable[[Any], str] = str) -> None:
        self._dtype_name = dtype_name
        self.counts: Counter[LoggedCall] = Counter()

    def add(self, op: str, group: str, tensors: Sequence[Any], site: CallSite) -> None:
        """Count one call."""
        dtypes = dict.fromkeys(self._dtype_name(one.dtype) for one in tensors)
        shapes = [str(list(one.shape)) for one in tensors]
        self.counts[LoggedCall(op, group, " ".join(dtypes), " ".join(shapes), site.stack)] += 1

    def write(self, directory: Path) -> Path:
        """Write the log atomically, with sites in the order of their first calls.

        Raises:
            OSError: The file cannot be written.
        """
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow(COLUMNS)
        for entry, calls in self.counts.items():
            rows.writerow([*entry[:4], calls, "\n".join(entry.stack)])
        path = directory / LOG_FILE
        write_whole(path, text.getvalue().encode())
        return path


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


@final
class CallRows:
    """The rows of calls in the live table. The caller holds the lock of the recorder."""

    def __init__(self, reader: TensorReader) -> None:
        self._reader = reader
        self._series: dict[Series, CallSeries] = {}

    def series(self, series: Series) -> CallSeries:
        """The rows of ``series``."""
        return self._series.setdefault(series, CallSeries(series))

    def slot(self, series: CallSeries, device: Hashable, number: int, part: int) -> RowSlot:
        """The row of a tensor, the number ``part`` of the call ``number``."""
        key = (device, number, part)
        slot = series.slots.get(key)
        if slot is None:
            slot = series.slots[key] = self._reader.rows.new_slot(series.series, device, (number,))
        return slot

    def read(self, call: CollectiveCall, x: Any, device: Hashable, written: list[RowSlot]) -> bool:
        """Reduce the next tensor of a call. False if it has no data.

        Args:
            written: Receives the row, even if reading fails.
        """
        slot = self.slot(call.series, device, call.number, call.read)
        written.append(slot)
        if not self._reader.read_into(x, slot):
            return False
        call.read += 1
        return True

    def forget(self, written: Sequence[RowSlot]) -> None:
        """Clear rows of a call that was not read completely."""
        for slot in written:
            slot.page.memory.forget(slot.local_row)


class CallReader(Protocol):
    """Reads the tensors of calls into rows. Safe on any thread."""

    rows: CallRows

    def read(self, call: CollectiveCall, tensors: Sequence[Any]) -> bool:
        """Reduce the tensors of a call, one row per tensor.

        Returns:
            Whether all tensors were read. Otherwise none has a row.
        """


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


class Collectives(Protocol):
    """The communication operators of a framework."""

    @property
    def groups(self) -> Groups:
        """Names process groups."""

    def listen(self, communication: Communication) -> None:
        """Intercept every call from now on, and pass it to ``communication``."""

    def begin(self, recorder: Recorder) -> CallReader:
        """Training begins: create the reader of calls for ``recorder``."""

    def stop(self) -> None:
        """Stop intercepting. May be called repeatedly."""

    def among_ranks(self) -> bool:
        """Whether there is a process group, or one will be created."""

    def are_real(self, tensors: Sequence[Any]) -> bool:
        """Whether the tensors are communicated; False while a compiler or another tracer runs the code."""

    def computing(self) -> AbstractContextManager[object]:
        """A context for reading tensors before a call."""

    def dtype_name(self, dtype: Any) -> str:
        """The name of a dtype in the log."""


@final
class Communication:
    """Observes communication from its creation until ``close``.

    Attributes:
        wanted: The configuration.
        unread: Number of calls whose outputs were not read: not completed, never waited for, or changed before the read.
    """

    def __init__(self, wanted: CcDistribution, failures: Failures, collectives: Collectives) -> None:
        self.unread = 0
        self.wanted = wanted
        self._failures = failures
        self._collectives = collectives
        self._recorder: Recorder | None = None
        self._due = Due()
        self._reader: CallReader | None = None
        self._note: Callable[[str, str], None] | None = None
        self._sites = CallSites(wanted.cc_codeline)
        self._log: CommunicationLog | None = CommunicationLog(collectives.dtype_name)
        self._found_wanted = False
        self._series: dict[tuple[str, str, str], CallSeries] = {}
        # Whether inputs are read before the call is issued.
        self._looks_first = bool(wanted.cc_codeline or wanted.cc_pre_hook)
        self._measures = not wanted.cc_log_only
        collectives.listen(self)

    def record_into(self, recorder: Recorder, roles: Mapping[str, Sequence[int]], note: Callable[[str, str], None]) -> None:
        """Record communication from now on in ``recorder``, unless another recorder was set before.

        Args:
            roles: The ranks of groups, by role.
            note: Called at the end with a key and a text for the manifest about calls without rows.
        """
        if self._recorder is None:
            self._recorder, self._note, self._due = recorder, note, recorder.due("cc_distribution")
            self._reader = self._collectives.begin(recorder)
        self._collectives.groups.learn(roles)
        if not self._collectives.among_ranks():
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
        if calls and self._sites.has_patterns and not self._found_wanted:
            said = f"cc_codeline {list(self.wanted.cc_codeline)} finds none of the call sites of the first step"
            self._failures.advise("cc_codeline", f"{said}: none is recorded. Take file[line] from the column stack of {path}.")
        return path

    def close(self) -> None:
        """Stop observing. May be called repeatedly."""
        self._collectives.stop()
        if self.unread and self._note is not None:
            self._note("communication", UNREAD_OUTPUTS.format(self.unread))
        self._recorder = self._log = self._note = self._reader = None
        self._due = Due()

    def call_begins(self, operator: Operator, args: Sequence[Any]) -> bool:
        """Add the call to the log, and record its inputs.

        Returns:
            Whether its outputs are to be recorded.

        Raises:
            Exception: An earlier operation of training has failed.
        """
        recording = self._due.now and self._measures
        if self._log is None and not (recording and self._looks_first):
            return recording
        try:
            with self._collectives.computing():
                return self._look(operator, args, recording)
        except EarlierFailure as failure:
            raise failure.error from None
        except Exception as error:
            self._failures.report("looking at a communication operator", error)
            return False

    def _look(self, operator: Operator, args: Sequence[Any], recording: bool) -> bool:
        inputs = operator.taken(args)
        if not self._collectives.are_real(inputs):
            return False
        group = self._collectives.groups.of(operator.group_of(args))
        if group is None:
            return False
        wanted = self._site_wanted(operator, args, inputs, group)
        if not recording or not wanted:
            return False
        if self.wanted.cc_pre_hook and inputs and not (operator.rooted == "inputs" and operator.root(args) != group.rank):
            call, reader = self._new_call(operator, group, COLLECTIVE_INPUT), self._reader
            if call is not None and reader is not None:
                reader.read(call, inputs)
        return True

    def _site_wanted(self, operator: Operator, args: Sequence[Any], inputs: Sequence[Any], group: NamedGroup) -> bool:
        """Whether calls from this call site are recorded. While there is a log, the call is added to it."""
        if self._log is None and not self._sites.has_patterns:
            return True
        site = self._sites.at(sys._getframe(1))
        if self._log is not None:
            tensors = inputs or ([] if operator.functional else operator.given(args, None))
            self._log.add(operator.name, group.label, tensors, site)
            self._found_wanted |= site.wanted
        return site.wanted

    def expected(self, operator: Operator, args: Sequence[Any], result: Any) -> tuple[CollectiveCall, Sequence[Any]] | None:
        """The call and its outputs, counted as unread until they are read; None if this rank has no outputs."""
        outputs = operator.given(args, result)
        if not outputs or not self._collectives.are_real(outputs):
            return None
        group = self._collectives.groups.of(operator.group_of(args))
        if group is None or (operator.rooted == "outputs" and operator.root(args) != group.rank):
            return None
        call = self._new_call(operator, group, COLLECTIVE_OUTPUT)
        if call is None:
            return None
        self.unread += 1
        return call, outputs

    def _new_call(self, operator: Operator, group: NamedGroup, what: str) -> CollectiveCall | None:
        """A new call; None if another thread has called ``close`` since the call began."""
        reader, recorder = self._reader, self._recorder
        if reader is None or recorder is None:
            return None
        key = (operator.name, group.label, what)
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = reader.rows.series(Series("other", 0, f"{operator.name}{group.suffix}.{what}"))
        return CollectiveCall(series, recorder.steps)
