"""What is recorded of communication, whatever framework it is issued through."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from monitor.capture.call_sites import CallSites
from monitor.capture.communication_groups import Group
from monitor.capture.communication_log import CommunicationLog
from monitor.capture.operator_calls import Call, CallRows, CallSeries
from monitor.config.model import CcDistribution
from monitor.failures import LOGGER, Failures
from monitor.series import Series

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
