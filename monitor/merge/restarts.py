"""Restarts: which runs continued each other, and which steps of each count. They are one line of steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from monitor.config import AUTO
from monitor.coordinator import manifest_format as schema
from monitor.coordinator.manifest_format import ManifestRecord, StepRange, StepRanges, StepsRecord
from monitor.coordinator.resume import moment, order_in_time

# Jobs that continued each other are one line of steps. A step belongs to the last run that began at or before it.
#
# A restart is either listed in the manifests (``resumed``: it continued in the directories of the run before), or it has
# directories and a job id of its own. For these only the manifests of both jobs together can tell whether one continued the
# other. Ranks of a killed run may have begun to record at different steps, or not at all. What such a rank still holds of the
# run before belongs to steps that other ranks recorded anew, so it does not count.


@dataclass(frozen=True, slots=True)
class RunPart:
    """The part that one run has in a line of steps, on one rank or on all.

    Attributes:
        place: How many runs it continued in a directory, at most: puts runs that began in the same second in order.
        first: Its first step; None if it recorded none.
        last: The last step that was written when the next run began; -1 if that is not known.
    """

    job_id: str
    begun: float
    place: int
    first: int | None
    last: int

    @property
    def order(self) -> tuple[float, int, int, str]:
        return *order_in_time(self.begun, self.place, self.first), self.job_id


def parts_of(manifests: Iterable[ManifestRecord]) -> tuple[RunPart, ...]:
    """The runs that recorded to the directories of these manifests, in order of time."""
    found: dict[str, list[RunPart]] = defaultdict(list)
    for manifest in manifests:
        for part in _parts_in(manifest):
            found[part.job_id].append(part)
    together = (
        RunPart(
            job,
            min(one.begun for one in parts),
            max(one.place for one in parts),
            min((one.first for one in parts if one.first is not None), default=None),
            max(one.last for one in parts),
        )
        for job, parts in found.items()
    )
    return tuple(sorted(together, key=lambda one: one.order))


def _parts_in(manifest: ManifestRecord) -> Iterator[RunPart]:
    """The runs that recorded to a directory, oldest first."""
    for place, one in enumerate(manifest.resumed):
        try:
            begun = moment(one.started)
        except (ValueError, OverflowError):  # damaged; the place keeps the order
            begun = moment(manifest.started)
        yield RunPart(one.job_id, begun, place, one.first_step, -1 if one.last_step is None else one.last_step)
    begun, last = moment(manifest.started), manifest.steps.written.newest
    yield RunPart(manifest.job_id, begun, len(manifest.resumed), manifest.first_step, last)


def cut(manifest: ManifestRecord, parts: Sequence[RunPart]) -> tuple[int, ManifestRecord]:
    """The step from which on a directory's steps were recorded anew elsewhere, and the manifest without earlier such steps.

    Args:
        parts: The runs of the line, in order of time, of all ranks.
    """
    own = {part.job_id: part.first for part in _parts_in(manifest)}
    oldest = next(index for index, part in enumerate(parts) if part.job_id in own)
    end = until = schema.LAST_STEP
    anew: list[StepRange] = []
    for part in reversed(parts[oldest + 1 :]):
        mine = own.get(part.job_id)
        until = until if mine is None else min(until, mine)
        if part.first is not None and until == schema.LAST_STEP:
            end = min(end, part.first)
        elif part.first is not None and part.first < until:
            anew.append(StepRange(part.first, until - 1))
    return end, _abandoned(manifest, anew) if anew else manifest


def _abandoned(manifest: ManifestRecord, ranges: Sequence[StepRange]) -> ManifestRecord:
    """The manifest with these steps among the abandoned ones, and not among the written ones."""
    steps = manifest.steps
    most = len(steps.written.ranges) + len(steps.abandoned.ranges) + 3 * len(ranges)  # so that every range is kept as one
    written, abandoned = (
        StepRanges.restored(one.ranges, schema.Rest(**dict(one.rest)) if one.rest else None, most)
        for one in (steps.written, steps.abandoned)
    )
    for one in ranges:
        written.take(one.first, one.last)
        abandoned.take(one.first, one.last)
        abandoned.add_all([one])
    cut = {"written": StepsRecord.of(written), "abandoned": StepsRecord.of(abandoned)}
    return manifest.model_copy(update={"steps": steps.model_copy(update=cut)})


class Joint(NamedTuple):
    """Where a run of a line continued an earlier one.

    Attributes:
        step: Its first step.
        redone: The steps from there on that manifests list as written by earlier runs.
    """

    job_id: str
    continued: str
    step: int
    redone: StepsRecord


def joints(line: Iterable[RunPart], interval: int) -> Iterator[Joint]:
    """Where the runs of a line continued each other, in order of time. Runs that recorded no step are left out.

    Args:
        interval: Between two collected steps.
    """
    last, earlier = -1, ""
    for part in line:
        if part.first is not None:
            if earlier:
                again = schema.steps_between(part.first - interval, last + 1, interval)
                redone = schema.NO_STEPS if again is None else StepsRecord(count=again.size, ranges=(again,))
                yield Joint(part.job_id, earlier, part.first, redone)
            last, earlier = max(last, part.last), part.job_id


@dataclass(frozen=True, slots=True)
class _JobFacts:
    """What tells whether a job continued another, of all its ranks.

    Attributes:
        ranks: By rank, what a restart has in common with the run before: model, number of ranks, groups.
        interval: Between two collected steps.
        auto: Whether the job was started with ``"append_output": "auto"``.
    """

    part: RunPart
    ranks: Mapping[int, object]
    saved: float
    closed: bool
    interval: int
    auto: bool

    @classmethod
    def of(cls, manifests: Sequence[ManifestRecord]) -> _JobFacts | None:
        """The facts of a job; None if they cannot be known."""
        ranks: dict[int, object] = {}
        for one in manifests:
            facts = one.watched, one.world_size, one.groups
            if one.watched is None or not one.job_agreed or ranks.setdefault(one.rank, facts) != facts:
                return None
        parts = [part for one in manifests for part in _parts_in(one)]
        begun, last = min(one.begun for one in parts), max(one.last for one in parts)
        first = min((one.first for one in parts if one.first is not None), default=None)
        return cls(
            RunPart(manifests[0].job_id, begun, 0, first, last),
            ranks,
            max(moment(one.saved) for one in manifests),
            all(one.closed for one in manifests),
            schema.collected_every(manifests[0]),
            any(one.config.get("append_output") == AUTO[0] for one in manifests),
        )

    def is_alike(self, other: _JobFacts) -> bool:
        shared = self.ranks.keys() & other.ranks.keys()
        return bool(shared) and all(self.ranks[rank] == other.ranks[rank] for rank in shared)

    def continues(self, line: Sequence[_JobFacts]) -> bool:
        """Whether this job, which began after the last one of a line had ended, continued it.

        A job that begins where the line did may also be another one. So may a job that leaves steps out after one that ended
        cleanly.
        """
        last, first = line[-1], self.part.first
        begins = [one.part.first for one in line if one.part.first is not None]
        if not last.closed and (first is None or not begins or self.auto):
            return True
        if first is None or not begins:
            return False
        if not last.closed or last.part.first is None:
            return first > min(begins)
        return last.part.first < first <= last.part.last + last.interval


def continued_jobs(jobs: Mapping[str, Sequence[ManifestRecord]]) -> dict[str, str]:
    """By job, the earlier job that it continued in directories of its own, as far as their manifests tell for certain."""
    every = {job: facts for job, each in jobs.items() if (facts := _JobFacts.of(each)) is not None}
    listed = {run.job_id for job, each in jobs.items() for one in each for run in one.resumed if run.job_id != job}
    found: dict[str, str] = {}
    lines: list[list[tuple[str, _JobFacts]]] = []
    for job, facts in sorted(every.items(), key=lambda one: one[1].part.order):
        if job in listed:
            continue
        alike = [line for line in lines if facts.is_alike(line[-1][1])]
        before = [line for line in alike if facts.continues([one for _, one in line])]
        if len(before) == 1 and all(one.saved <= facts.part.begun for line in alike for _, one in line):
            found[job] = before[0][-1][0]
            before[0].append((job, facts))
        else:
            lines.append([(job, facts)])
    return found
