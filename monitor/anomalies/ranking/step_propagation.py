"""Forwards and backwards of one step: which of their events had nothing to come from.

A tensor is made from what comes into the smallest module around it whose entries were measured, and from what happens within
that module. So events are gone through in the order of their calls, and of each module it is kept whether anything has fired
in it.

No NaN comes through a tensor that has none. A deviation does come through one that has not deviated enough for a rule to fire:
where it was first seen says nothing of where it began, as long as anything upstream of it has fired. Nor does it where nothing
between the loss and a parameter's gradient was measured: the gradients of other parameters are then all that shows what came.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeVar

from monitor.anomalies.ranking.graph import ROOT, DataflowGraph, Role, Subject
from monitor.anomalies.ranking.job import Member, PipelineGroup, RankedJob
from monitor.series import NO_MICRO_STEP, Series

_NEVER: Final = 2**62
_ALL: Final = 2**61
"""The micro-step of a row that stands for all of the step's: every other one came before."""

StageChunk = tuple[int, int, int]
"""Recording, stage and chunk."""

PASSES: Final = (Role.FORWARD, Role.BACKWARD)
IN_PASSES: Final = (*PASSES, Role.LOCAL_GRADIENT)


K = TypeVar("K", bound=Hashable)


class Sighting(NamedTuple):
    """One event, as far as the propagation is concerned.

    Attributes:
        finite: Whether it is a deviation, which may have come through tensors that no rule fired on.
    """

    call_id: int
    number: int
    member: Member
    subject: Subject
    micro_step: int
    finite: bool

    @property
    def place(self) -> int:
        """Of the chunk, in the pipeline."""
        return self.member.place(self.subject.series.vpp_stage)

    @property
    def until(self) -> int:
        """The last micro-step that may have come before."""
        return _ALL if self.micro_step == NO_MICRO_STEP else self.micro_step


@dataclass
class Chunk:
    """What has fired in a chunk so far.

    Attributes:
        passes: Modules by direction and micro-step.
        modules: With the first micro-step in which anything in them did; ``entries`` likewise, what comes into them.
        series: With the first micro-step.
        local_gradient: The first micro-step in which a parameter's gradient did.
    """

    passes: set[tuple[Role, str, int]] = field(default_factory=set)
    modules: dict[tuple[Role, str], int] = field(default_factory=dict)
    entries: dict[tuple[Role, str], int] = field(default_factory=dict)
    series: dict[Series, int] = field(default_factory=dict)
    local_gradient: int = _NEVER

    def add(self, seen: Sighting) -> None:
        subject, micro_step = seen.subject, seen.micro_step
        _lower(self.series, subject.series, micro_step)
        role = subject.role
        if role not in PASSES:
            self.local_gradient = min(self.local_gradient, micro_step)
            return
        if subject.is_entry:
            _lower(self.entries, (role, subject.module), micro_step)
        for module in subject.around:
            if (role, module, micro_step) in self.passes:
                break  # then all around it are, too
            self.passes.add((role, module, micro_step))
            _lower(self.modules, (role, module), micro_step)

    def has_reached(self, role: Role, module: str, seen: Sighting) -> bool:
        """Whether anything has fired in the module in the same pass, or before that what comes into it."""
        return (role, module, seen.micro_step) in self.passes or self.entries.get((role, module), _NEVER) <= seen.until

    def fired_in(self, role: Role, module: str, until: int) -> bool:
        return self.modules.get((role, module), _NEVER) <= until

    def fired(self, series: Series, until: int) -> bool:
        return self.series.get(series, _NEVER) <= until


@dataclass
class PipelineEvents:
    """What fires in one pipeline in the step, wherever it stands in the order of calls.

    Attributes:
        first_forward: The first place with an event of the micro-step's forward; ``last_backward`` likewise.
        boundaries: What of a root came in or went out, as (direction, is input, place, micro-step).
    """

    first_forward: dict[int, int] = field(default_factory=dict)
    last_backward: dict[int, int] = field(default_factory=dict)
    boundaries: set[tuple[Role, bool, int, int]] = field(default_factory=set)

    def add(self, seen: Sighting) -> None:
        subject, place = seen.subject, seen.place
        if subject.role not in PASSES:
            return
        forward, first, last = subject.role == Role.FORWARD, self.first_forward, self.last_backward
        for micro_step in (seen.micro_step, NO_MICRO_STEP):
            if forward:
                first[micro_step] = min(place, first.get(micro_step, place))
            else:
                last[micro_step] = max(place, last.get(micro_step, place))
        if subject.module == ROOT:
            self.boundaries.add((subject.role, subject.is_input, place, seen.micro_step))


@dataclass
class Weights:
    """What is known of the weights that a step began with.

    Attributes:
        modules: By recording, stage and chunk, those that hold a weight that had fired.
        recorded: Recordings, stages and chunks of which some rank records weights.
        doubtful: Recordings of which the last update may have spoiled weights that are not recorded.
    """

    recorded: frozenset[StageChunk]
    doubtful: frozenset[int]
    modules: dict[StageChunk, set[str]] = field(default_factory=dict)

    def bad_below(self, member: Member, graph: DataflowGraph, chunk: int, module: str) -> bool:
        """Whether one below the module is; of a module that has none of its own, one of the chunk, which it may share."""
        where = member.recording, member.stage, chunk
        if member.recording in self.doubtful and where not in self.recorded:
            return True
        bad = self.modules.get(where)
        return bad is not None and (module if graph.has_weights(chunk, module) else ROOT) in bad


class StepPropagation:
    """One step of ranks that exchange activations within modules, or of one rank alone."""

    def __init__(self, job: RankedJob, step: int, weights: Weights, pipelines: Mapping[PipelineGroup, PipelineEvents]) -> None:
        self._job = job
        self._step = step
        self._weights = weights
        self._pipelines = pipelines
        self.chunks: dict[int, Chunk] = {}

    def origins(self, seen: Iterable[Sighting]) -> Iterator[int]:
        """Numbers of events that nothing they depend on has fired before.

        Args:
            seen: In the order of their ``call_id``.
        """
        for alike in _at_once(seen):
            for one in alike:
                if one.member.graph is not None and not self._explained(one, one.member.graph):
                    yield one.number
            for one in alike:
                self._add(one)

    def _add(self, one: Sighting) -> None:
        chunk = self.chunks.setdefault(one.subject.series.vpp_stage, Chunk())
        chunk.add(one)
        graph, subject = one.member.graph, one.subject
        if graph is not None and subject.role == Role.BACKWARD and subject.is_entry:
            for inner in graph.entries_like(subject.series):
                _lower(chunk.entries, (Role.BACKWARD, inner), one.micro_step)
                _lower(chunk.modules, (Role.BACKWARD, inner), one.micro_step)

    def _explained(self, one: Sighting, graph: DataflowGraph) -> bool:
        chunk = self.chunks.setdefault(one.subject.series.vpp_stage, Chunk())
        if one.subject.role == Role.FORWARD:
            return self._forward(one, graph, chunk)
        if one.subject.role == Role.BACKWARD:
            return self._backward(one, graph, chunk)
        return self._local_gradient(one, graph, chunk)

    def _forward(self, one: Sighting, graph: DataflowGraph, chunk: Chunk) -> bool:
        """An input that is a tensor seen before is as good as that one was."""
        same = graph.same_as(one.subject.series) if one.subject.is_input else None
        if same is None:
            return self._made_of_bad(one, graph, chunk)
        if any(chunk.fired(series, one.until) for series in same.series):
            return True
        return any(self._made_of_bad(one._replace(subject=maker), graph, chunk) for maker in same.made)

    def _made_of_bad(self, one: Sighting, graph: DataflowGraph, chunk: Chunk) -> bool:
        """Whether what comes into the module around has fired, or something in it, or a weight of it is bad."""
        module = None if one.finite else graph.closure(one.subject)
        if module is None and self._came_in_bad(one):
            return True
        if one.subject.role == Role.FORWARD and one.subject.is_entry and one.subject.module == ROOT:
            return False
        if chunk.has_reached(one.subject.role, ROOT if module is None else module, one):
            return True
        return self._weights.bad_below(one.member, graph, one.subject.series.vpp_stage, ROOT if module is None else module)

    def _came_in_bad(self, one: Sighting) -> bool:
        """Whether what other chunks of the pipeline have handed over has fired."""
        role, place, forward = one.subject.role, one.place, one.subject.role == Role.FORWARD
        pipeline = self._pipelines[one.member.group]
        if not one.finite and stage_boundary(self._job, one.member, one.subject.series.vpp_stage, role, self._step) is not None:
            return (role, not forward, place - 1 if forward else place + 1, one.micro_step) in pipeline.boundaries
        if forward:
            return pipeline.first_forward.get(one.micro_step, place) < place
        return pipeline.last_backward.get(one.micro_step, place) > place

    def _backward(self, one: Sighting, graph: DataflowGraph, chunk: Chunk) -> bool:
        """The loss joins all that was computed forward; a residual adds parts that no edge shows."""
        if one.micro_step in self._pipelines[one.member.group].first_forward:
            return True
        if any(chunk.fired(series, one.until) for series in graph.sources(one.subject.series)):
            return True
        return self._made_of_bad(one, graph, chunk)

    def _local_gradient(self, one: Sighting, graph: DataflowGraph, chunk: Chunk) -> bool:
        if one.micro_step != NO_MICRO_STEP and chunk.fired(one.subject.series, one.micro_step - 1):
            return True
        owner = graph.owner(one.subject)
        module = ROOT if owner is None or one.finite else owner
        if chunk.fired_in(Role.BACKWARD, module, one.until) or chunk.fired_in(Role.FORWARD, module, one.until):
            return True
        if owner is None:
            return chunk.local_gradient <= one.until or self._came_to_gradient(one, graph)
        return one.finite and self._came_to_gradient(one, graph)

    def _came_to_gradient(self, one: Sighting, graph: DataflowGraph) -> bool:
        """Whether bad weights, or what other stages handed over, may have come to a parameter's gradient unseen."""
        pipeline = self._pipelines[one.member.group]
        if one.micro_step in pipeline.first_forward or pipeline.last_backward.get(one.micro_step, one.place) > one.place:
            return True
        return self._weights.bad_below(one.member, graph, one.subject.series.vpp_stage, ROOT)


def stage_boundary(job: RankedJob, member: Member, chunk: int, role: Role, step: int) -> Member | None:
    """The member from whose root comes what goes into the root of this chunk, if what it handed over was measured and judged.

    None also where the chunk is the first in this direction, or where nobody knows how chunks follow one another.
    """
    forward, size = role == Role.FORWARD, len(member.group.mates)
    place = member.place(chunk) + (-1 if forward else 1)
    if size == 1 or not 0 <= place < member.places:
        return None
    other = job.at_place(member.group, place)
    if other is None or other.graph is None or not other.has_judged_all(step):
        return None
    return other if other.graph.shows_exit(role, place // size, ROOT) else None


def _lower(least: dict[K, int], key: K, number: int) -> None:
    if least.get(key, _NEVER) > number:
        least[key] = number


def _at_once(seen: Iterable[Sighting]) -> Iterator[list[Sighting]]:
    """Those of the same ``call_id``: of one row, or of ranks that ran side by side."""
    alike: list[Sighting] = []
    for one in seen:
        if alike and one.call_id != alike[0].call_id:
            yield alike
            alike = []
        alike.append(one)
    if alike:
        yield alike
