"""The events of a job in order, and of those that are shown where they come from."""

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

# --- How many data-parallel ranks have an event: one alone has other data and another device, all share weights and
# software.


class LoneReplica(NamedTuple):
    """The only one of several ranks."""

    rank: int
    of: int

    def __str__(self) -> str:
        return f"only on rank {self.rank} of its {self.of} data-parallel replicas"


def alone(job: RankedJob, table: EventTable, number: int) -> LoneReplica | None:
    """None if other replicas have the event too, or too few of them can tell."""
    having, of = _having(job, table, number)
    return LoneReplica(having[0], of) if of > 1 and len(having) == 1 else None


def shared(job: RankedJob, table: EventTable, number: int) -> int | None:
    """How many replicas have the event, if all have it; None if some do not, or too few of them can tell."""
    having, of = _having(job, table, number)
    return of if of > 1 and len(having) == of else None


def _having(job: RankedJob, table: EventTable, number: int) -> tuple[list[int], int]:
    """The ranks that have the event, and of how many. Those count that measure the tensor and have judged the step. Of a tensor
    in parts each rank holds another.
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


# --- What else fired in the step of an event: a deviation of many tensors on all ranks is another matter than that of one.


class Surroundings(NamedTuple):
    """The deviations in the step of an event. What came after the aggregation of gradients does not count: all ranks share it.

    Attributes:
        tensors: How many tensors deviate.
        ranks: On how many ranks.
        all_ranks: Whether that is every rank that can tell.
        steps: In how many steps the tensor of the event deviates.
    """

    tensors: int
    ranks: int
    all_ranks: bool
    steps: int


def surroundings(job: RankedJob, table: EventTable, number: int) -> Surroundings:
    """Those of an event."""
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
    """An event, and what there is to say of it.

    Attributes:
        location: Of an origin; None for what was propagated.
        is_finite: Whether the tensor had neither NaN nor Inf in it.
        alone: Where no other data-parallel rank has it.
        mean: The running mean that the value was compared with.
        shared: How many data-parallel ranks there are, where all have it.
        around: What else deviates in the step; of the first origin alone.
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
    """What came of it.

    Attributes:
        ranked: The earliest events of the chosen steps, in order.
        first_origin: The earliest of all chosen events that is an origin.
        first_not_finite: The earliest of all chosen events that is of a tensor with a NaN or an Inf.
        events: How many there are of the chosen steps; ``origins`` among them.
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
        """Whether no rule has fired, and everything was looked at."""
        job = self.job
        ended = all(one.events.judged.closed for one in job.members)
        return not (self.events or job.flaws or job.missing) and ended and self.coverage.is_whole


def ranking_of(folder: Path, most: int, step_filter: StepFilter | None = None) -> Ranking:
    """Read, order and judge the events of all ranks.

    Args:
        most: How many to keep.
        step_filter: Which of a column of steps to list. The others still tell what these come from.

    Raises:
        NothingReadError: there is nothing that could be read.
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
        flaws: Takes in what has changed since it was read.
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
    """Two recordings of a process may have the same key."""
    return f"{key}_recording_{recording}" if key in taken else key


def _said(flaw: Flaw) -> str:
    return f"  {flaw.path}: {flaw.reason}"
