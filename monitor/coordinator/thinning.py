"""A bound on a rank's directory: when its files are too large, old steps are removed, and the manifest lists them.

The files keep every second of the oldest steps, then every fourth, and so on: the older a step, the fewer of its neighbours
stay. So a job of any length leaves its whole course, and the newest steps completely. Ranks choose alone.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Final

from monitor.coordinator.manifest_format import MANIFEST_FILE, StepRanges, StepsRecord, ThinnedRecord
from monitor.failures import Failures
from monitor.sinks.files import StepSpan, size_of

# --- Which steps were removed, and which must stay.

MOST_KEPT: Final = 600
"""Steps that stay because of alerts, the earliest ones: a rule that fires in every step must not fill the disk."""

MOST_WAITING: Final = 1000


class ThinnedSteps:
    """The steps that were removed from the files. Not safe across threads, except for ``alert``.

    Attributes:
        removed: By level: 4 for steps that were removed so that every fourth stayed.
        unfinished: Those of them that files may still hold.
        kept: Steps with alerts and their neighbours, which stay.
        alerts: Steps with alerts, of which the neighbours may not be written yet.
    """

    def __init__(self) -> None:
        self.removed: dict[int, StepRanges] = {}
        self.unfinished = StepRanges()
        self.kept = StepRanges()
        self.alerts: deque[int] = deque(maxlen=MOST_WAITING)

    @classmethod
    def restored(cls, record: ThinnedRecord) -> ThinnedSteps:
        """The thinned steps of earlier runs, to be continued."""
        steps = cls()
        steps.removed = {int(level): one.restored() for level, one in record.steps.items() if level.isdecimal()}
        steps.unfinished, steps.kept = record.unfinished.restored(), record.kept.restored()
        return steps

    def record(self, written: StepRanges) -> ThinnedRecord:
        """For the manifest. ``written`` are the steps in the files."""
        self._keep(written, list(self.alerts))
        return ThinnedRecord(
            steps={str(level): StepsRecord.of(steps) for level, steps in sorted(self.removed.items()) if steps.count},
            unfinished=StepsRecord.of(self.unfinished),
            kept=StepsRecord.of(self.kept),
        )

    def alert(self, step: int) -> None:
        """There is an alert at this step, which may not be written yet. Any thread; never waits."""
        self.alerts.append(step)

    def reach(self, written: StepRanges, step: int) -> None:
        """``step`` was written: steps with alerts before it have both neighbours now."""
        for _ in range(len(self.alerts)):
            alert = self.alerts.popleft()
            if alert < step:
                self._keep(written, [alert])
            else:
                self.alerts.append(alert)

    def _keep(self, written: StepRanges, alerts: Iterable[int]) -> None:
        for alert in alerts:
            for step in written.around(alert) if self.kept.count < MOST_KEPT else ():
                self.kept.add(step)

    def remove(self, chosen: Mapping[int, Sequence[int]], written: Iterable[StepRanges]) -> None:
        """Move steps from these sets to the removed ones.

        Args:
            chosen: By level, ascending.
        """
        for level, steps in chosen.items():
            gone = frozenset(steps)
            for ranges in written:
                left = [step for one in ranges.take(steps[0], steps[-1]) for step in one.steps() if step not in gone]
                for step in left:
                    ranges.add(step)
            for step in steps:
                self.removed.setdefault(level, StepRanges()).add(step)
                self.unfinished.add(step)

    def leave(self, first: int, last: int, abandoned: StepRanges) -> None:
        """Move the steps of an earlier run in this range to the abandoned ones: a later run does them again."""
        for steps in (*self.removed.values(), self.unfinished, self.kept):
            taken = steps.take(first, last)
            if steps is self.unfinished:
                abandoned.add_all(taken)


# --- Which steps to remove next.

NEWEST: Final = 8
"""The number of newest collected steps that always stay, beside the open record and the one before it."""


@dataclass(frozen=True, slots=True)
class ThinningRule:
    """Chooses the steps to remove.

    A record is thinned further the older it is: its age over its level is the same for all records, as nearly as possible. So
    the oldest half is halved first. Steps are counted from 0 at the interval of collection: all ranks keep the same ones.

    Attributes:
        per_record: Steps in a file; files are rewritten one by one.
        interval: Between two collected steps.
    """

    per_record: int
    interval: int

    def choose(self, written: StepRanges, thinned: ThinnedSteps, count: int) -> dict[int, list[int]]:
        """At least so many steps by level; fewer if no more can be removed."""
        first, newest, last = next(written.between(0, written.newest), 0), written.newest, self._last(written.newest)
        levels = [2**power for power in range(1, ((newest - first) // self.interval + 1).bit_length())]
        begins = {level: max(first, _newest(thinned.removed.get(level)) + 1) for level in levels}
        chosen: dict[int, list[int]] = {}
        gone: set[int] = set()
        while count > 0 and (left := [level for level, begin in begins.items() if begin <= last]):
            level = max(left, key=lambda one: (newest - begins[one]) / one)
            steps, begins[level] = self._of_record(written, begins[level], last)
            found = [one for one in steps if one // self.interval % level and not thinned.kept.holds(one) and one not in gone]
            count -= len(found)
            gone.update(found)
            if found:
                chosen.setdefault(level, []).extend(found)
        return chosen

    def _last(self, newest: int) -> int:
        """The last step that may be removed: the end of a record."""
        before = min(StepSpan.of_record(newest, self.per_record).first - self.per_record, newest - NEWEST * self.interval)
        return StepSpan.of_record(max(before, 0), self.per_record).first - 1

    def _of_record(self, written: StepRanges, begin: int, last: int) -> tuple[list[int], int]:
        """The steps of the first record from ``begin`` on, and where the next one begins."""
        steps = written.between(begin, last)
        first = next(steps, None)
        if first is None:
            return [], last + 1
        end = StepSpan.of_record(first, self.per_record).last
        return [first, *takewhile(lambda step: step <= end, steps)], end + 1


def _newest(steps: StepRanges | None) -> int:
    return -1 if steps is None else steps.newest


# --- When to remove steps: an account of the directory's bytes.

SLACK: Final = 50
"""A fiftieth of the bound is freed beyond what is needed, so that files are not rewritten after every step."""

MOST_SLACK: Final = 8 << 20
MOST_AT_ONCE: Final = 64 << 20
"""Bytes to free at a time."""


class DiskBound:
    """The account of a rank's directory. On the writer thread.

    The directory is listed when counting begins, and again after twice as many steps each time. In between, the sinks report
    the change.

    Attributes:
        most: The bound in bytes; 0: none.
        rule: Chooses the steps to remove.
    """

    def __init__(self, directory: Path, failures: Failures, most: int, rule: ThinningRule) -> None:
        self.most, self.rule = most, rule
        self._directory, self._failures = directory, failures
        self._others: int | None = None  # bytes that the sinks have not reported
        self._asked = 0
        self._warned = False

    def use(self, most: int, rule: ThinningRule) -> None:
        """Another configuration has come into force. Any thread; never waits."""
        self.most, self.rule = most, rule

    def recount(self) -> None:
        """Count again before the next answer."""
        self._others = None

    def excess(self, grown: int, steps: int) -> int:
        """How many steps to remove; 0 if the directory is within the bound.

        Args:
            grown: Bytes that the sinks have reported.
            steps: In the files.
        """
        self._asked += 1
        if self._others is None or self._asked & (self._asked - 1) == 0:
            self._others = _bytes_in(self._directory) - grown
        size = self._size(grown)
        over = size - self.most
        if not self.most or over <= 0:
            return 0
        need = min(over + min(self.most // SLACK, MOST_SLACK), MOST_AT_ONCE)
        return -(-need * max(steps, 1) // max(size, 1))

    def warn(self, grown: int) -> None:
        """No more can be removed. Reported once."""
        if self._warned:
            return
        self._warned = True
        self._failures.warn(
            "max_output_bytes",
            f"{self._directory} has {self._size(grown):,} bytes, more than max_output_bytes ({self.most:,}), and no more steps "
            "can be thinned: the newest steps and steps with alerts stay. Recording continues above the bound. Raise "
            "max_output_bytes, reduce targets, or increase step_interval.",
        )

    def _size(self, grown: int) -> int:
        return (self._others or 0) + grown + size_of(self._directory / MANIFEST_FILE)


def _bytes_in(directory: Path) -> int:
    """The bytes of all files but the manifest, which is rewritten all the time."""
    return sum(size_of(directory / name) for name in os.listdir(directory) if name != MANIFEST_FILE)
