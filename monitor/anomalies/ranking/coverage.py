"""The coverage of the rules: how many rows, ranks and steps they judged, and which steps they did not judge, and why."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from monitor.anomalies.ranking.job import Columns, Flags, Member, RankedJob
from monitor.coordinator.manifest_format import KILLED, THINNED, EarlierRun, ManifestRecord, StepsRecord
from monitor.merge.tables import distinct

# --- Steps of the earlier runs that a resumed run continues. Their events were renamed to directories of their own.


class EarlierSteps(NamedTuple):
    """Steps of an earlier run, whose events are not among those of this run.

    Attributes:
        first: The first step of that run; ``end`` is the first step of the run after it.
    """

    reason: str
    first: int
    end: int
    steps: StepsRecord


def earlier_steps(member: Member) -> Iterator[EarlierSteps]:
    """The steps that each earlier run wrote or lost when it was killed, latest run first."""
    manifest = member.manifest
    if manifest is None or any(run.job_id == manifest.job_id for run in manifest.resumed):
        return  # the events themselves are of an earlier run
    runs: list[EarlierRun | ManifestRecord] = [*manifest.resumed, manifest]
    end = manifest.first_step
    for run, following in reversed(list(pairwise(runs))):
        if run.first_step is None or end is None or following.first_step is None:
            continue
        end = min(end, following.first_step)
        found = _found_in(member, following)
        yield EarlierSteps(f"an earlier run recorded them{found}", run.first_step, end, manifest.steps.written)
        if KILLED in manifest.dropped:
            reason = f"an earlier run was killed before they were written{found}"
            yield EarlierSteps(reason, run.first_step, end, manifest.dropped[KILLED])
        for reason, steps in _thinned(manifest):
            yield EarlierSteps(f"an earlier run recorded them, later {reason}{found}", run.first_step, end, steps)


def _thinned(manifest: ManifestRecord) -> Iterator[tuple[str, StepsRecord]]:
    """Steps that were removed from the files, with the reason."""
    return ((f"{THINNED} (level {level})", steps) for level, steps in manifest.thinned.steps.items())


def _found_in(member: Member, following: EarlierRun | ManifestRecord) -> str:
    """Where the events of a run are: the next run renamed their directory."""
    own: Path = member.events.files.folder
    aside = own.parent.with_name(f"{own.parent.name}-before-{following.timestamp}-{following.job_id[:8]}")
    if (aside / own.name).is_dir():
        return f". Rank its events with -d {aside}"
    return f". Its events are not beside {own.parent}"


MOST_STEPS: Final = 5_000_000
"""Largest number of steps of a run. If a file claims more, it may be damaged: only the first are examined."""

StepFilter = Callable[[Columns], Flags]
"""Maps a column of steps to flags: which of them are chosen."""


@dataclass(frozen=True, slots=True)
class UnjudgedSteps:
    """Steps of training that were not judged.

    Attributes:
        ranks: The ranks that did not judge them.
    """

    reason: str
    ranks: tuple[int, ...]
    count: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of the chosen steps was judged.

    Attributes:
        rows: Number of judged rows; None if unknown: for a choice of steps, and in files of earlier versions.
        steps: Number of steps that some rank judged.
        ranks: Ranks that have judged rows.
        idle: Ranks whose rules had no row to judge, although others had.
        gaps: Steps that were not judged.
    """

    rows: int | None
    steps: int
    ranks: tuple[int, ...]
    idle: tuple[int, ...]
    gaps: tuple[UnjudgedSteps, ...]

    @property
    def is_empty(self) -> bool:
        """Whether nothing was judged."""
        return not self.ranks or not self.steps

    @property
    def is_whole(self) -> bool:
        """Whether every step of every rank was judged."""
        return not (self.is_empty or self.idle or self.gaps)


def coverage_of(job: RankedJob, step_filter: StepFilter | None) -> Coverage:
    """The coverage of the chosen steps by the ranks of a job; ``step_filter`` None: all steps."""
    chosen = {recording: _Chosen(*span, step_filter) for recording, span in _spans(job.members).items()}
    found: dict[str, dict[int, Columns]] = defaultdict(dict)
    for one in job.members:
        for reason, steps in chosen[one.recording].left_by(one):
            found[reason][one.rank] = steps
    rows = [one.events.judged.rows for one in job.members]
    idle = {one.rank for one in job.members if one.events.judged.rows == 0}
    busy = {one.rank for one in job.members} - idle
    return Coverage(
        sum(one or 0 for one in rows) if step_filter is None and None not in rows else None,
        sum(int(one.judged.sum()) for one in chosen.values()),
        tuple(sorted(busy)),
        tuple(sorted(idle)) if busy else (),
        tuple(_gaps(found)),
    )


class _Chosen:
    """The chosen steps of a recording, from ``first`` to before ``end``.

    Attributes:
        judged: Flags: which steps some rank has judged.
    """

    def __init__(self, first: int, end: int, step_filter: StepFilter | None) -> None:
        self._steps = np.arange(first, end)
        self._chosen = np.ones(len(self._steps), np.bool_) if step_filter is None else step_filter(self._steps)
        self._known: dict[object, list[tuple[str, Columns]]] = {}
        self.judged = np.zeros(len(self._steps), np.bool_)

    def left_by(self, member: Member) -> list[tuple[str, Columns]]:
        """The steps that a rank has not judged, by reason. Cached, since most ranks have judged the same steps."""
        judged, manifest = member.events.judged, member.manifest
        dropped = () if manifest is None else (manifest.steps.written, *manifest.dropped.items(), *_thinned(manifest))
        key = (judged.steps, *judged.not_judged.items(), judged.closed, *dropped, *earlier_steps(member))
        if key not in self._known:
            here = _held(self._steps, judged.steps) & self._chosen
            self.judged |= here
            left = _reasons(member, self._steps, self._chosen & ~here)
            self._known[key] = [(reason, self._steps[steps]) for reason, steps in left]
        return self._known[key]


def _spans(members: Sequence[Member]) -> Mapping[int, tuple[int, int]]:
    """By recording, the first known step of training, and the step after the last."""
    spans: dict[int, tuple[int, int]] = {}
    for one in members:
        judged = one.events.judged
        ends = [*_ends(judged.steps), *(end for steps in judged.not_judged.values() for end in _ends(steps))]
        ends += judged.trained or ()
        if not judged.closed and one.manifest is not None:  # the event files may not list its latest steps yet
            ends += [end for end in _ends(one.manifest.steps.written) if ends and end > max(ends)]
        for earlier in earlier_steps(one) if ends else ():
            ends += [end for end in _ends(earlier.steps) if end < earlier.end]
        if ends:
            first, last = spans.get(one.recording, (min(ends), max(ends)))
            spans[one.recording] = min(first, *ends), max(last, *ends)
    none = (0, -1)
    found = {one.recording: spans.get(one.recording, none) for one in members}
    return {recording: (first, min(last, first + MOST_STEPS) + 1) for recording, (first, last) in found.items()}


def _ends(steps: StepsRecord) -> list[int]:
    listed = [end for first, last, _ in (*steps.ranges[:1], *steps.ranges[-1:]) for end in (first, last)]
    return [*listed, steps.rest.first, steps.rest.last] if steps.rest else listed


def _held(steps: Columns, record: StepsRecord) -> Flags:
    """Which of the consecutive ``steps`` the record holds. Steps that it only counts may be any within their bounds."""
    held = np.zeros(len(steps), np.bool_)
    if not len(steps):
        return held
    begin, rest = int(steps[0]), record.rest
    for first, last, interval in (*record.ranges, *(((rest.first, rest.last, 1),) if rest else ())):
        skipped = max(0, -(-(begin - first) // interval)) * interval
        held[max(first + skipped - begin, 0) : max(last + 1 - begin, 0) : interval] = True
    return held


def _reasons(member: Member, steps: Columns, left: Flags) -> Iterator[tuple[str, Flags]]:
    """The reasons why steps were not judged, with the steps of each."""
    manifest, judged = member.manifest, member.events.judged
    if not judged.closed:
        after = left & (steps > max(_ends(judged.steps), default=-1))
        yield from _if_any("the rank did not end cleanly, or still runs", after)
        left = left & ~after
    for earlier in earlier_steps(member):
        here = left & (steps >= earlier.first) & (steps < earlier.end) & _held(steps, earlier.steps)
        yield from _if_any(earlier.reason, here)
        left = left & ~here
    known = dict(judged.not_judged)
    if manifest is not None:
        known |= {reason: lost for reason, lost in manifest.dropped.items() if reason not in known}
        known |= dict(_thinned(manifest))
        known["they were recorded, but no alert rule was on or could judge them"] = manifest.steps.written
    for reason, listed in known.items():
        here = left & _held(steps, listed)
        if here.any():
            yield reason, here
            left = left & ~here
    if left.any():
        yield from _not_collected(member, steps, left)


def _not_collected(member: Member, steps: Columns, left: Flags) -> Iterator[tuple[str, Flags]]:
    judged = member.events.judged
    config = {} if member.manifest is None else member.manifest.config
    start, interval, times = (config.get(name) for name in ("start_step", "step_interval", "collect_times"))
    if isinstance(times, int) and judged.steps.count >= times:
        after = left & (steps > max(_ends(judged.steps), default=-1))
        yield from _if_any(f"collect_times is {times}", after)
        left = left & ~after
    if isinstance(start, int) and not (member.manifest and member.manifest.configurations):
        yield from _if_any(f"start_step is {start}", left & (steps < start))
        left = left & (steps >= start)
    dynamic = member.manifest is not None and member.manifest.configurations
    if member.manifest is not None and "micro_steps" in member.manifest.notes:
        before = left & (steps < min((first for first, *_ in member.manifest.steps.written.ranges), default=0))
        yield from _if_any("they showed how many micro-batches a step has", before)
        left = left & ~before
    plain = "monitoring was switched off, or had not begun" if dynamic else "they were not collected"
    yield from _if_any(plain if dynamic or interval in (None, 1) else f"step_interval is {interval}", left)


def _if_any(reason: str, left: Flags) -> Iterator[tuple[str, Flags]]:
    if left.any():
        yield reason, left


def _gaps(found: Mapping[str, Mapping[int, Columns]]) -> Iterator[UnjudgedSteps]:
    for reason, by_rank in found.items():
        steps = distinct(np.concatenate(list(by_rank.values())))
        yield UnjudgedSteps(reason, tuple(sorted(by_rank)), len(steps), int(steps[0]), int(steps[-1]))
