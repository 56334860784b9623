"""Orders events in time, across ranks whose clocks cannot be compared.

Steps come one after another. A step has the weights that it began with, then forwards and backwards, then the optimizer's
inputs, then its results. Forwards and backwards are in the turns of the schedule (``coordinator.pipeline_order``). If the
schedule is unknown, they are ordered by micro-step, and in each from stage to stage and back. Then, too, no event comes before
one that it depends on, but micro-batches that took turns are listed apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from monitor.anomalies.corruption import UNLIKE_COPIES
from monitor.anomalies.ranking.graph import Role
from monitor.anomalies.ranking.job import Columns, EventTable, Member
from monitor.anomalies.ranking.loading import MOST_CHUNKS
from monitor.coordinator.pipeline_order import IN_BACKWARD, IN_FORWARD, PipelineOrder, RankPasses, Spot
from monitor.coordinator.series_file import Pass
from monitor.series import NO_MICRO_STEP

_PHASE: Final = {
    Role.ORIGINAL_WEIGHT: 0,
    Role.FORWARD: 1,
    Role.BACKWARD: 1,
    Role.LOCAL_GRADIENT: 1,
    Role.GRADIENT: 2,
    Role.MOMENT: 2,
    Role.UPDATED_WEIGHT: 3,
    Role.OTHER: 3,
}
_LAST: Final = np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False)
class Order:
    """Events in order of time.

    Attributes:
        events: Their numbers, the earliest first.
        position: The index of each event in ``events``.
        unknown: By recording, why its schedule is not known.
    """

    events: Columns
    unknown: dict[int, str]
    position: Columns


def order_of(table: EventTable) -> Order:
    """Put all events in order."""
    phase = np.array([_PHASE[Role(role)] for role in range(len(Role))])[table.role]
    keys, unknown = _Keys(table), {}
    for recording in np.unique(table.recording).tolist():
        try:
            keys.by_schedule(recording, phase)
        except ValueError as error:
            keys.by_micro_step(recording)
            if keys.matter(recording):
                unknown[recording] = str(error)
    undecided = np.array([rule == UNLIKE_COPIES for rule in table.rules], dtype=np.bool_)[table.rule]
    last = (np.arange(len(table)), table.recording, table.rank, table.call_id, undecided)
    events = np.lexsort((*last, *keys.columns[::-1], phase, table.step))
    position = np.empty_like(events)
    position[events] = np.arange(len(events))
    return Order(events, unknown, position)


class _Keys:
    """Three sort keys per event, for events of one phase of a step."""

    def __init__(self, table: EventTable) -> None:
        self._table = table
        self.columns: Columns = np.zeros((3, len(table)), np.int64)

    def by_micro_step(self, recording: int) -> None:
        of, columns = self._table, self.columns
        own = of.recording == recording
        forward = of.role <= Role.FORWARD
        columns[0, own] = np.where(of.micro_step == NO_MICRO_STEP, _LAST, of.micro_step)[own]
        columns[1, own] = ~forward[own]
        columns[2, own] = np.where(forward, of.place, -of.place)[own]

    def by_schedule(self, recording: int, phase: Columns) -> None:
        """Raises ``ValueError`` if the schedule is not known: the message names the rank."""
        of = self._table
        own = np.flatnonzero((of.recording == recording) & (phase > 0))
        own = own[np.lexsort((of.call_id[own], of.member[own], of.step[own], of.group[own]))]
        begins = _changes(of.group[own], of.step[own], of.member[own], of.role[own], of.chunk[own], of.micro_step[own])
        lengths = np.diff(np.append(begins, len(own)))
        turns = self._turns(own[begins])
        self.columns[0, own] = np.repeat(turns, lengths)
        self.columns[1, own] = of.stage[own]

    def matter(self, recording: int) -> bool:
        """Whether a recording has micro-batches on several ranks, so that their order matters."""
        of = self._table
        several = np.array([len(group.mates) > 1 for group in of.groups])[of.group]
        return bool(((of.recording == recording) & several & (of.role <= Role.BACKWARD) & (of.micro_step >= 0)).any())

    def _turns(self, events: Columns) -> Columns:
        """The turns of events that are sorted by group and step."""
        of, schedules = self._table, _Schedules(self._table.members)
        turns = np.zeros(len(events), np.int64)
        begins = _changes(of.group[events], of.step[events])
        for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(events)], strict=True):
            members = [of.members[number] for number in np.unique(of.member[events[begin:end]])]
            turns[begin:end] = _turns(schedules.of(members), list(_spots(of, events[begin:end])))
        return turns


class _Schedules:
    """The order of passes of each pipeline. Pipelines of a job usually share one order."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._known: dict[tuple[object, ...], PipelineOrder] = {}
        self._passes: dict[tuple[int, int, int], tuple[Pass, ...]] = {}
        for one in members:
            if one.graph is not None and one.graph.passes:
                self._passes.setdefault(_stage_of(one), one.graph.passes)

    def of(self, members: Sequence[Member]) -> PipelineOrder:
        """The order of one pipeline, its ranks numbered by stage.

        A rank without a manifest gets the passes of its stage in other pipelines: they run the same schedule.

        Args:
            members: Members of the pipeline with events.

        Raises:
            ValueError: their passes are unknown.
        """
        group = members[0].group
        size, own = len(group.mates), {one.stage: one for one in members}
        ranks = {}
        for stage in range(size):
            passes = self._of_stage(own.get(stage), (group.recording, size, stage))
            if not passes and stage in own:
                raise ValueError(f"the order of micro-batches on rank {own[stage].rank} is not known")
            chunks = 1 + max((one.vpp_stage for one in passes), default=0)
            if chunks > MOST_CHUNKS:
                raise ValueError(f"the manifest of stage {stage} has a pass of chunk {chunks - 1}")
            ranks[stage] = RankPasses(tuple(range(stage, stage + chunks * size, size)), passes)
        key = tuple((stage, one.stages, one.passes) for stage, one in ranks.items())
        if key not in self._known:
            self._known[key] = PipelineOrder({stage: one for stage, one in ranks.items() if one.passes})
        return self._known[key]

    def _of_stage(self, member: Member | None, stage: tuple[int, int, int]) -> tuple[Pass, ...]:
        own = member.graph.passes if member is not None and member.graph is not None else ()
        return own or self._passes.get(stage, ())


def _stage_of(member: Member) -> tuple[int, int, int]:
    return member.recording, len(member.group.mates), member.stage


def _turns(order: PipelineOrder, spots: Sequence[Spot]) -> list[int]:
    for spot in spots:
        if spot.kind in IN_FORWARD | IN_BACKWARD and not order.knows(spot):
            raise ValueError(f"it is not known when stage {spot.rank} ran the pass of its {spot.kind}")
    return order.turns(spots)


def _spots(of: EventTable, events: Columns) -> Iterator[Spot]:
    kinds = [of.subjects[number].series.kind for number in of.subject[events]]
    columns = (column[events].tolist() for column in (of.stage, of.chunk, of.micro_step, of.call_id))
    for stage, chunk, micro_step, call_id, kind in zip(*columns, kinds, strict=True):
        yield Spot(stage, chunk, kind, micro_step, call_id)


def _changes(*columns: Columns) -> NDArray[np.intp]:
    """The indices of rows that differ from the row before; the first row counts as different."""
    if not len(columns[0]):
        return np.empty(0, np.intp)
    differs = np.ones(len(columns[0]), np.bool_)
    differs[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return np.flatnonzero(differs)
