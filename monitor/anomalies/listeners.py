"""Listeners of the scanner: alerts in the log, the alarm that starts a closer look, and the event files of a rank."""

from __future__ import annotations

import json
import os
import shlex
import socket
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from time import monotonic
from typing import Final

from monitor.anomalies.events import EVENTS_FOLDER, Event, ScanSummary, events_file, judged_file, message
from monitor.anomalies.scanner import FindingGroup, RuleFinding, StepFindings, earliest, time_of
from monitor.coordinator.manifest_format import SCHEMA_VERSION, PipelineRecord, StepRanges, StepsByCause, StepsRecord
from monitor.coordinator.output import write_whole
from monitor.coordinator.rank_facts import RankFacts
from monitor.failures import LOGGER, Failures
from monitor.series import REPLICA_KIND, SeriesTable, underlying_series
from monitor.terminal import plain

RANKING: Final = "trainermon rank-anomalies"
"""The command that orders the events of all ranks."""

LINES: Final = 10
WINDOW_S: Final = 60.0
"""Within this time, at most ``LINES`` lines of each cause (a rule and a statistic) are shown, the earliest of each step. The
first line names the ranking command.
"""


@dataclass(slots=True)
class _Cause:
    """The lines of a cause in the current window.

    Attributes:
        begun: When the window began.
        left: Lines that may still be logged in it.
        silent: Number of events that were not logged, in the steps from ``first`` to ``last``.
    """

    begun: float
    left: int = LINES
    silent: int = 0
    first: int = 0
    last: int = 0

    def hide(self, step: int, count: int) -> None:
        self.first, self.last = (self.first if self.silent else step), step
        self.silent += count


class Alerts:
    """Logs what the rules found, through the monitor's logger.

    Args:
        where: The directory of this rank's event files; None if events are not written.
    """

    def __init__(
        self, rank: int, series: SeriesTable, where: Path | None = None, clock: Callable[[], float] = monotonic
    ) -> None:
        self._rank, self._series, self._clock = rank, series, clock
        self._see = f" See {where}" if where else ""
        self._ranking = _ranking(where)
        self._causes: dict[tuple[str, str], _Cause] = {}

    def judged(self, findings: StepFindings) -> None:
        """See ``FindingListener``."""
        by_cause: dict[tuple[str, str], list[FindingGroup]] = defaultdict(list)
        for group in findings.groups:
            by_cause[group.cause].append(group)
        begun = [cause for cause in by_cause if cause not in self._causes or self._past(self._causes[cause])]
        shown = {cause: self._shown(cause, groups) for cause, groups in by_cause.items()}
        firsts = {id(shown[cause][0]) for cause in begun}
        for finding in sorted(chain.from_iterable(shown.values()), key=partial(time_of, series=self._series)):
            self._say(self._line(findings.step, finding) + (self._ranking if id(finding) in firsts else ""))
        for cause, groups in by_cause.items():
            self._rest(cause, findings.step, sum(map(len, groups)) - len(shown[cause]), said=bool(shown[cause]))

    def not_judged(self, step: int, reason: str) -> None:
        """Do nothing: the manifest lists these steps, and some cause a warning elsewhere."""

    def save(self) -> None:
        """Log how many events were not shown, for windows that have ended."""
        for name, cause in self._causes.items():
            if self._past(cause):
                self._report_hidden(name, cause)

    def close(self) -> None:
        """Log how many events were not shown."""
        for name, cause in self._causes.items():
            self._report_hidden(name, cause)

    def _shown(self, name: tuple[str, str], groups: list[FindingGroup]) -> list[RuleFinding]:
        """The findings of a cause that may be logged now."""
        cause = self._causes.get(name)
        if cause is None or self._past(cause):
            if cause is not None:
                self._report_hidden(name, cause)
            cause = self._causes[name] = _Cause(self._clock())
        shown = earliest(groups, cause.left, self._series)
        cause.left -= len(shown)
        return shown

    def _rest(self, name: tuple[str, str], step: int, count: int, *, said: bool) -> None:
        """Log the number of hidden events: at once in the step that uses up the lines, later ones when the window ends."""
        if count and said:
            self._say(f"… and {count:,} more of {_cause_text(name)} in step {step}, not shown.{self._see}")
        elif count:
            self._causes[name].hide(step, count)

    def _report_hidden(self, name: tuple[str, str], cause: _Cause) -> None:
        if cause.silent:
            steps = f"step {cause.first}" if cause.first == cause.last else f"steps {cause.first} to {cause.last}"
            self._say(f"{cause.silent:,} more of {_cause_text(name)} in {steps}, not shown.{self._see}")
            cause.silent = 0

    def _past(self, cause: _Cause) -> bool:
        return self._clock() - cause.begun >= WINDOW_S

    def _line(self, step: int, finding: RuleFinding) -> str:
        return message(finding.signal, self._series[finding.series].tag(self._rank, finding.micro_step), step)

    def _say(self, line: str) -> None:
        LOGGER.warning("[rank %d] %s", self._rank, plain(line))


def _ranking(where: Path | None) -> str:
    """How to find the first tensor and rank. Most alerts concern values that another tensor or rank passed on."""
    if where is None:
        return (
            ' It may come from another tensor or rank: set "dump": true in "alert"; trainermon rank-anomalies finds the first.'
        )
    return f" It may come from another tensor or rank. To find the first: {RANKING} {shlex.quote(str(where.parent))}"


def _cause_text(cause: tuple[str, str]) -> str:
    rule, op = cause
    return f"{rule} ({op})"


# --- The alarm: reports to a callback that a rule has fired.


class Alarm:
    """A listener of the scanner.

    Args:
        ring: Called with every step in which a rule fired, on the writer thread. Must not wait.
    """

    def __init__(self, ring: weakref.WeakMethod[Callable[[int], object]]) -> None:
        self._ring = ring

    def judged(self, findings: StepFindings) -> None:
        """See ``FindingListener``."""
        if findings.groups and (ring := self._ring()) is not None:
            ring(findings.step)

    def not_judged(self, step: int, reason: str) -> None:
        """Do nothing: no rule saw the step."""

    def save(self) -> None:
        """Do nothing: the alarm keeps no state."""

    def close(self) -> None:
        """Do nothing."""


# --- The event files of a rank: ``anomaly.json`` with the events, and ``judged.json`` with a summary of what was judged.
#
# Keeps a bounded number of events of a run of any length, the first fault among them.

MOST: Final = 10_000
MOST_OF_A_STEP: Final = 1_000


@dataclass(frozen=True, slots=True)
class EventEntry:
    """An event, formatted for the file.

    Attributes:
        place: Step, and index among the events of the step in call order.
        content: Key and value, as JSON.
    """

    place: tuple[int, int]
    rule: str
    content: bytes


class EventBuffer:
    """The first events of each step, for as many steps as fit.

    The bound per step is halved whenever there would be more than ``most`` events. So a stream of harmless events does not
    displace a later one, and the earliest events of every step stay.

    Attributes:
        most_of_a_step: The current bound per step.
    """

    def __init__(self, most: int = MOST, most_of_a_step: int = MOST_OF_A_STEP) -> None:
        self.most_of_a_step = most_of_a_step
        self._most = most
        self._steps: dict[int, Sequence[EventEntry]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[EventEntry]:
        return (entry for entries in self._steps.values() for entry in entries)

    def add(self, step: int, entries: Sequence[EventEntry]) -> None:
        """Add a step's events in call order. Earlier events of the same step are replaced."""
        self._count -= len(self._steps.pop(step, ()))
        if not entries:
            return
        self._put(step, entries)
        while self._count > self._most and self.most_of_a_step > 1:
            self.most_of_a_step //= 2
            for held, before in list(self._steps.items()):
                self._put(held, before)
        if self._count > self._most:
            self._count -= len(self._steps.pop(step))

    def extend(self, step: int, entries: Sequence[EventEntry]) -> None:
        """Add more events of a step, after those that are there."""
        self.add(step, [*self._steps.get(step, ()), *entries])

    def _put(self, step: int, entries: Sequence[EventEntry]) -> None:
        self._count -= len(self._steps.get(step, ()))
        self._steps[step] = entries[: self.most_of_a_step]
        self._count += len(self._steps[step])


REPLACED: Final = (
    "Another job writes its events to {folder}, too. Each of the two replaces the other's events, so trainermon rank-anomalies "
    "finds those of one job only. Give each job an output directory of its own (MONITOR_OUTPUT_DIR)."
)

SHARE: Final = 20
"""After a write, the next automatic write waits this many times the duration of the write."""

PAUSE_S: Final = 1.0
"""Shortest pause after a failed write."""


class EventFiles:
    """Writes ``anomaly.json`` as soon as something fires, and ``judged.json`` with it and whenever the run is saved.

    Each file is replaced atomically. ``judged.json`` is written second: after a kill it may lag behind. Without an event there
    is no ``anomaly.json``. A forked child writes nothing.

    Args:
        base: The directory of all ranks and runs.
        directory: Name of the rank's own directory.
        failures: Warns if another job writes the same files.

    Attributes:
        trained: The first and the last step of the watched training; None while training runs. Any thread sets it.
    """

    trained: tuple[int, int] | None = None

    def __init__(
        self,
        base: Path,
        directory: str,
        facts: RankFacts,
        series: SeriesTable,
        failures: Failures,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._failures = failures
        self.folder = base / EVENTS_FOLDER / f"rank{facts.rank}"
        self._events, self._judged = self.folder / events_file(facts.recording), self.folder / judged_file(facts.recording)
        self._directory, self._facts, self._clock, self._pid = directory, facts, clock, os.getpid()
        self._formatter = _EventFormatter(facts, series)
        self._host: Final = socket.gethostname()
        self._kept = {False: EventBuffer(), True: EventBuffer()}
        self._added = EventBuffer()
        self._found: Counter[str] = Counter()
        self._steps, self._not_judged = StepRanges(), StepsByCause()
        self._kinds: dict[str, StepRanges] = defaultdict(StepRanges)
        self._meant: dict[int, str] = {}
        self._rows = 0
        self._changed = self._more_events = self._closed = False
        self._not_before = -float("inf")

    def judged(self, findings: StepFindings) -> None:
        """See ``FindingListener``.

        Raises:
            OSError: A file could not be written. The next call tries again.
        """
        self._changed = True
        if findings.groups:
            self._keep(findings)
            self._more_events = True
        self._rows += findings.rows
        for kind in self._kinds_of(findings):
            self._kinds[kind].add(findings.step)
        self._steps.add(findings.step)  # last: a step listed as judged has all its events
        if self._more_events and self._clock() >= self._not_before:
            self.save()

    def not_judged(self, step: int, reason: str) -> None:
        """See ``FindingListener``."""
        self._not_judged.add(step, reason)
        self._changed = True

    def add(self, step: int, finding: RuleFinding) -> None:
        """Keep an event that no rule found, of this step or an earlier one. It is written with the next ``save``."""
        self._found[finding.signal.rule] += 1
        self._added.extend(step, [self._formatter.added_entry(step, finding)])
        self._changed = self._more_events = True

    def save(self) -> None:
        """Write the files that have changed.

        Raises:
            OSError: A file could not be written; its earlier content is unchanged.
        """
        if not self._changed or os.getpid() != self._pid:
            return
        begun, more_events = self._clock(), self._more_events
        if more_events:
            self._not_before = begun + PAUSE_S
        self._write()
        if more_events:
            ended = self._clock()
            self._not_before = ended + SHARE * (ended - begun)

    def close(self) -> None:
        """Write for the last time, marked as ended, and wait for the disk.

        Raises like ``save``.
        """
        self._changed = self._closed = True
        self.save()

    def _kinds_of(self, findings: StepFindings) -> set[str]:
        """The kinds of judged rows. Replicas are of the kinds that they replicate."""
        found = set(findings.judged)
        if REPLICA_KIND in found:
            replicas = set(findings.judged[REPLICA_KIND].tolist())
            for new in replicas - self._meant.keys():
                self._meant[new] = underlying_series(self._formatter.series[new]).kind
            found.update(self._meant[one] for one in replicas)
        return found - {REPLICA_KIND}

    def _write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if _directory_in(self._judged) not in (None, self._directory):
            self._failures.warn("events of two jobs", REPLACED.format(folder=self.folder))
        if self._more_events:
            entries = sorted((*self._added, *self._kept[False], *self._kept[True]), key=attrgetter("place"))
            content = b",\n".join(entry.content for entry in entries)
            write_whole(self._events, b"{\n" + content + b"\n}\n", durable=self._closed)
            self._more_events = False
        write_whole(self._judged, self._record().model_dump_json().encode() + b"\n", durable=self._closed)
        self._changed = False

    def _keep(self, findings: StepFindings) -> None:
        """Keep the earliest events. Only events that are kept are formatted, so a flood stays cheap."""
        self._found += findings.by_rule()
        chosen: list[RuleFinding] = []
        for nonfinite, kept in self._kept.items():
            groups = [group for group in findings.groups if group.fired.nonfinite == nonfinite]
            chosen += earliest(groups, kept.most_of_a_step, self._formatter.series)
        chosen.sort(key=attrgetter("call_id"))
        entries = list(self._formatter.entries(findings.step, chosen))
        for nonfinite, kept in self._kept.items():
            kept.add(findings.step, [entry for entry, one in zip(entries, chosen, strict=True) if one.nonfinite == nonfinite])

    def _record(self) -> ScanSummary:
        kept = Counter(entry.rule for one in (self._added, *self._kept.values()) for entry in one)
        return ScanSummary(
            schema_version=SCHEMA_VERSION,
            job_id=self._facts.identity.job_id,
            rank=self._facts.rank,
            directory=self._directory,
            recording=self._facts.recording,
            host=self._host,
            events=kept.total(),
            not_kept=dict(self._found - kept),
            steps=StepsRecord.of(self._steps),
            rows=self._rows,
            trained=self.trained,
            not_judged={reason: StepsRecord.of(steps) for reason, steps in self._not_judged.items()},
            kinds={kind: StepsRecord.of(one) for kind, one in self._kinds.items()},
            closed=self._closed,
        )


def _directory_in(judged: Path) -> str | None:
    """The rank's directory that a ``judged.json`` names; None if there is no such file, or it cannot be read."""
    try:
        found = json.loads(judged.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return found.get("directory") if isinstance(found, dict) else None


class EndOnlyListener:
    """A listener that replaces event files after their rules were switched off: it passes on only ``save`` and ``close``."""

    def __init__(self, files: EventFiles) -> None:
        self._files = files

    def judged(self, findings: StepFindings) -> None:
        """Do nothing: the files' rules are off."""

    def not_judged(self, step: int, reason: str) -> None:
        """Do nothing: the files' rules are off."""

    def save(self) -> None:
        """See ``EventFiles``."""
        self._files.save()

    def close(self) -> None:
        """See ``EventFiles``."""
        self._files.close()


class _EventFormatter:
    """Formats findings as entries of ``anomaly.json``."""

    def __init__(self, facts: RankFacts, series: SeriesTable) -> None:
        pipeline = PipelineRecord.of(facts.rank, facts.groups.get("pp", ()), facts.chunks)
        self._rank, self.series = facts.rank, series
        self._stage, self._mates = (pipeline.stage, pipeline.ranks) if pipeline else (0, (facts.rank,))

    def entries(self, step: int, findings: list[RuleFinding]) -> Iterator[EventEntry]:
        """The entries of a step, in call order. Further entries of one tensor have the statistic in their key."""
        keys: set[str] = set()
        for place, finding in enumerate(findings):
            event = self._event(step, finding)
            key = f"{event.key}_{finding.signal.op}" if event.key in keys else event.key
            keys.add(key)
            content = f"{json.dumps(key)}: {event.model_dump_json()}"
            yield EventEntry((step, place), finding.signal.rule, content.encode())

    def added_entry(self, step: int, finding: RuleFinding) -> EventEntry:
        """The entry of an event that no rule found. Its key ends with what found it, as rules may have fired on the tensor."""
        event = self._event(step, finding)
        content = f"{json.dumps(f'{event.key}_{finding.signal.rule}')}: {event.model_dump_json()}"
        return EventEntry((step, finding.call_id), finding.signal.rule, content.encode())

    def _event(self, step: int, finding: RuleFinding) -> Event:
        series = self.series[finding.series]
        tag = series.tag(self._rank, finding.micro_step)
        return Event(
            rank=self._rank,
            step=step,
            micro_step=finding.micro_step,
            pp_stage=self._stage,
            vpp_stage=series.vpp_stage,
            call_id=finding.call_id,
            tag_name=tag,
            message=message(finding.signal, tag, step),
            group_mates=self._mates,
        )
