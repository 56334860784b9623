"""Ranks the events of a job: reads, orders and judges them, and describes the earliest ones and their origins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from monitor.anomalies.events import Event
from monitor.anomalies.ranking.coverage import Coverage, StepFilter, coverage_of
from monitor.anomalies.ranking.graph import Subject
from monitor.anomalies.ranking.job import EventTable, Flags, Member, RankedJob, job_of
from monitor.anomalies.ranking.loading import Flaw, NothingReadError, RecordingFiles, entries, files_in, read_all
from monitor.anomalies.ranking.location import FaultLocation, location_of
from monitor.anomalies.ranking.order import order_of
from monitor.anomalies.ranking.origins import origins
from monitor.anomalies.ranking.step_propagation import IN_PASSES
from monitor.coordinator.manifest_format import ManifestError

# --- How many data-parallel ranks have an event. One rank alone points at its data or device; all ranks at weights or
# software, which they share.


class LoneReplica(NamedTuple):
    """The only one of several data-parallel ranks that has an event."""

    rank: int
    of: int

    def __str__(self) -> str:
        return f"only on rank {self.rank} of its {self.of} data-parallel replicas"


def alone(job: RankedJob, table: EventTable, number: int) -> LoneReplica | None:
    """The only rank with the event; None if other replicas have it too, or too few of them judged it."""
    having, of = _having(job, table, number)
    return LoneReplica(having[0], of) if of > 1 and len(having) == 1 else None


def shared(job: RankedJob, table: EventTable, number: int) -> int | None:
    """The number of replicas, if all have the event; None if some do not, or too few of them judged it."""
    having, of = _having(job, table, number)
    return of if of > 1 and len(having) == of else None


def _having(job: RankedJob, table: EventTable, number: int) -> tuple[list[int], int]:
    """The ranks with the event, and the number of ranks that measure the tensor and have judged the step.

    Of a sharded tensor each rank holds another part, so only the rank itself counts.
    """
    of = table
    member, subject, step = of.members[of.member[number]], of.subjects[of.subject[number]], int(of.step[number])
    if member.graph is not None and subject.series in member.graph.sharded:
        return [], 0
    others = [
        one
        for one in job.replicas(member)
        if one is member or (one.has_judged_all(step) and one.graph is not None and subject.series in one.graph.numbers)
    ]
    return sorted({int(of.rank[one]) for one in _same(table, number, others)}), len(others)


def _same(of: EventTable, number: int, members: list[Member]) -> list[int]:
    """Events of the same tensor, step and micro-step on these members."""
    same = (of.step == of.step[number]) & (of.micro_step == of.micro_step[number]) & (of.meant == of.meant[number])
    among = [index for index, one in enumerate(of.members) if any(one is other for other in members)]
    found: list[int] = np.flatnonzero(same & np.isin(of.member, among)).tolist()
    return found


# --- Other events in the step of an event. A deviation of many tensors on all ranks needs other advice than that of one.


class Surroundings(NamedTuple):
    """The deviations in the step of an event. Those after the aggregation of gradients do not count: all ranks share them.

    Attributes:
        tensors: Number of deviating tensors.
        ranks: Number of ranks with deviations.
        all_ranks: Whether these are all ranks that judged the step.
        steps: Number of steps in which the event's tensor deviates.
    """

    tensors: int
    ranks: int
    all_ranks: bool
    steps: int


def surroundings(job: RankedJob, table: EventTable, number: int) -> Surroundings:
    """The surroundings of an event."""
    of = table
    step, member = int(of.step[number]), of.members[of.member[number]]
    deviates: Flags = of.finite & np.isin(of.role, IN_PASSES)
    here = deviates & (of.step == step) & (of.recording == of.recording[number])
    own = [one for one in of.members if one.recording == member.recording]
    replicas = job.replicas(member) if len(member.ranks("dp")) > 1 else own
    judged = {one.rank for one in replicas if one.has_judged_all(step)}
    ranks = set(of.rank[here].tolist())
    same = of.finite & (of.meant == of.meant[number]) & (of.rank == member.rank) & (of.recording == of.recording[number])
    return Surroundings(
        len(np.unique(of.meant[here])),
        len(ranks),
        bool(judged) and judged <= ranks,
        len(np.unique(of.step[same])),
    )


@dataclass(frozen=True)
class Ranked:
    """An event with its description.

    Attributes:
        location: The location of an origin; None for a propagated event.
        is_finite: Whether the tensor held neither NaN nor Inf.
        alone: Set if no other data-parallel rank has the event.
        mean: The running mean that the value was compared with.
        shared: The number of data-parallel ranks, if all have the event.
        around: Other deviations in the step; only for the first origin.
    """

    member: Member
    subject: Subject
    step: int
    micro_step: int
    call_id: int
    op: str
    rule: str
    value: float
    is_finite: bool
    location: FaultLocation | None
    alone: LoneReplica | None
    mean: float | None = None
    shared: int | None = None
    around: Surroundings | None = None

    @property
    def is_origin(self) -> bool:
        return self.location is not None


@dataclass
class Ranking:
    """The result of the ranking.

    Attributes:
        ranked: The earliest events of the chosen steps, in order.
        first_origin: The earliest origin among all chosen events.
        first_not_finite: The earliest chosen event of a tensor with a NaN or an Inf.
        events: Number of events in the chosen steps; ``origins``: number of origins among them.
        coverage: How much was judged.
        unordered: Why the order of micro-batches is not known, by recording.
    """

    job: RankedJob
    ranked: Sequence[Ranked]
    first_origin: Ranked | None
    first_not_finite: Ranked | None
    events: int
    origins: int
    ranks: int
    coverage: Coverage
    unordered: dict[int, str] = field(default_factory=dict)

    @property
    def is_well(self) -> bool:
        """Whether no rule fired, and everything was judged."""
        job = self.job
        ended = all(one.events.judged.closed for one in job.members)
        return not (self.events or job.flaws or job.missing) and ended and self.coverage.is_whole


def ranking_of(folder: Path, most: int, step_filter: StepFilter | None = None) -> Ranking:
    """Read, order and judge the events of all ranks.

    Args:
        most: How many events to keep.
        step_filter: Chooses the steps to list. Other steps still count as possible causes.

    Raises:
        NothingReadError: no file could be read.
    """
    job = job_of(folder, read_all(files_in(folder)))
    if not job.members:
        raise NothingReadError("\n".join([f"no rank's events in {folder} can be read:", *map(_said, job.flaws[:10])]))
    table = EventTable.of(job.members)
    order = order_of(table)
    are_origins = origins(job, table, order)
    listed = order.events if step_filter is None else order.events[step_filter(table.step[order.events])]
    first = listed[are_origins[listed]][:1].tolist()
    not_finite = listed[~table.finite[listed]][:1].tolist()
    described = {
        number: _described(job, table, number, is_origin=bool(are_origins[number]))
        for number in [*listed[:most].tolist(), *first, *not_finite]
    }
    origin = replace(described[first[0]], around=surroundings(job, table, first[0])) if first else None
    return Ranking(
        job,
        [described[number] for number in listed[:most].tolist()],
        origin,
        described[not_finite[0]] if not_finite else None,
        len(listed),
        int(are_origins[listed].sum()),
        len(np.unique(table.rank[listed])),
        coverage_of(job, step_filter),
        order.unknown,
    )


def _described(job: RankedJob, of: EventTable, number: int, *, is_origin: bool) -> Ranked:
    member, subject, step = of.members[of.member[number]], of.subjects[of.subject[number]], int(of.step[number])
    return Ranked(
        member,
        subject,
        step,
        int(of.micro_step[number]),
        int(of.call_id[number]),
        of.ops[of.op[number]],
        of.rules[of.rule[number]],
        float(of.value[number]),
        bool(of.finite[number]),
        location_of(job, member, subject, step) if is_origin else None,
        alone(job, of, number),
        None if math.isnan(of.mean[number]) else float(of.mean[number]),
        shared(job, of, number),
    )


def entries_of(ranked: Sequence[Ranked], flaws: list[Flaw]) -> dict[str, Event]:
    """The entries of the files that were ranked, in this order.

    Args:
        flaws: Files that have changed since they were read are appended.
    """
    files: dict[RecordingFiles, dict[str, Event]] = {}
    found: dict[str, Event] = {}
    for one in ranked:
        own = one.member.events.files
        if own not in files:
            try:
                files[own] = entries(own)
            except ManifestError as error:
                files[own] = {}
                flaws.append(Flaw(own.rank, own.label, f"has changed meanwhile: {error}"))
        key, event = next(((key, event) for key, event in files[own].items() if _is(one, event)), ("", None))
        if event is not None:
            found[_free(key, found, own.recording)] = event
    return found


def _is(one: Ranked, event: Event) -> bool:
    at = event.step, event.micro_step, event.call_id, event.tag_name
    return at == (one.step, one.micro_step, one.call_id, one.subject.recorded_as.tag(one.member.rank, one.micro_step)) and (
        event.signal.op == one.op
    )


def _free(key: str, taken: dict[str, Event], recording: int) -> str:
    """A key that is not taken: two recordings of a process may have the same key."""
    return f"{key}_recording_{recording}" if key in taken else key


def _said(flaw: Flaw) -> str:
    return f"  {flaw.path}: {flaw.reason}"
