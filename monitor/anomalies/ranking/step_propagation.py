"""Propagates faults through the forwards and backwards of one step, to find events without an upstream cause.

A tensor is made from the entries of the smallest module around it whose entries were measured, and by the computation inside
that module. So events are processed in the order of their calls, and each module records whether anything in it has fired.

A NaN does not pass through a tensor without NaN. A deviation can pass through a tensor that deviates too little to fire. So
if anything upstream has fired, the first event of a deviation is not its origin. The same holds if nothing between the loss
and a parameter's gradient was measured: then only the gradients of other parameters show the fault.
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
"""The micro-step of a row over all micro-steps of the step: every other micro-step came before."""

StageChunk = tuple[int, int, int]
"""Recording, stage and chunk."""

PASSES: Final = (Role.FORWARD, Role.BACKWARD)
IN_PASSES: Final = (*PASSES, Role.LOCAL_GRADIENT)


K = TypeVar("K", bound=Hashable)


class Sighting(NamedTuple):
    """One event, reduced to what the propagation needs.

    Attributes:
        finite: Whether it is a deviation, which may have passed through tensors that did not fire.
    """

    call_id: int
    number: int
    member: Member
    subject: Subject
    micro_step: int
    finite: bool

    @property
    def place(self) -> int:
        """The index of the chunk in the pipeline."""
        return self.member.place(self.subject.series.vpp_stage)

    @property
    def until(self) -> int:
        """The last micro-step that may have come before."""
        return _ALL if self.micro_step == NO_MICRO_STEP else self.micro_step


@dataclass
class Chunk:
    """What has fired in a chunk so far.

    Attributes:
        passes: Modules with an event, by direction and micro-step.
        modules: The first micro-step with an event in each module; ``entries``: the first with an event at its entries.
        series: The first micro-step with an event of each series.
        local_gradient: The first micro-step with an event of a parameter's gradient.
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
                break  # then all modules around it are included, too
            self.passes.add((role, module, micro_step))
            _lower(self.modules, (role, module), micro_step)

    def has_reached(self, role: Role, module: str, seen: Sighting) -> bool:
        """Whether anything has fired in the module in the same pass, or earlier at its entries."""
        return (role, module, seen.micro_step) in self.passes or self.entries.get((role, module), _NEVER) <= seen.until

    def fired_in(self, role: Role, module: str, until: int) -> bool:
        return self.modules.get((role, module), _NEVER) <= until

    def fired(self, series: Series, until: int) -> bool:
        return self.series.get(series, _NEVER) <= until


@dataclass
class PipelineEvents:
    """All events of one pipeline in the step, regardless of the order of calls.

    Attributes:
        first_forward: The first chunk with an event in the micro-step's forward; ``last_backward``: the last in its backward.
        boundaries: Events of inputs and outputs of roots, as (direction, is input, place, micro-step).
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
    """The known state of the weights that a step began with.

    Attributes:
        modules: By recording, stage and chunk, the modules with a weight that had fired.
        recorded: Recordings, stages and chunks for which some rank records weights.
        doubtful: Recordings whose last update may have spoiled weights that are not recorded.
    """

    recorded: frozenset[StageChunk]
    doubtful: frozenset[int]
    modules: dict[StageChunk, set[str]] = field(default_factory=dict)

    def bad_below(self, member: Member, graph: DataflowGraph, chunk: int, module: str) -> bool:
        """Whether a weight below the module is bad. A module without weights may share any weight of the chunk."""
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
        """Numbers of events without an earlier event that they depend on.

        Args:
            seen: In the order of their ``call_id``.
        """
        for alike in _at_once(seen):
            for one in alike:
                graph = one.member.graph_in(self._step)
                if graph is not None and not self._explained(one, graph):
                    yield one.number
            for one in alike:
                self._add(one)

    def _add(self, one: Sighting) -> None:
        chunk = self.chunks.setdefault(one.subject.series.vpp_stage, Chunk())
        chunk.add(one)
        graph, subject = one.member.graph_in(self._step), one.subject
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
        """Whether a forward event is explained. An input that was measured earlier is as good as that tensor was."""
        same = graph.same_as(one.subject.series) if one.subject.is_input else None
        if same is None:
            return self._made_of_bad(one, graph, chunk)
        if any(chunk.fired(series, one.until) for series in same.series):
            return True
        return any(self._made_of_bad(one._replace(subject=maker), graph, chunk) for maker in same.made)

    def _made_of_bad(self, one: Sighting, graph: DataflowGraph, chunk: Chunk) -> bool:
        """Whether the surrounding module has a bad entry, an event inside it, or a bad weight."""
        module = None if one.finite else graph.closure(one.subject)
        if module is None and self._came_in_bad(one):
            return True
        if one.subject.role == Role.FORWARD and one.subject.is_entry and one.subject.module == ROOT:
            return False
        if chunk.has_reached(one.subject.role, ROOT if module is None else module, one):
            return True
        return self._weights.bad_below(one.member, graph, one.subject.series.vpp_stage, ROOT if module is None else module)

    def _came_in_bad(self, one: Sighting) -> bool:
        """Whether a tensor from other chunks of the pipeline has fired."""
        role, place, forward = one.subject.role, one.place, one.subject.role == Role.FORWARD
        pipeline = self._pipelines[one.member.group]
        if len(one.member.group.mates) == 1 and self._fired_elsewhere(one.subject.series.vpp_stage):
            return True
        if not one.finite and stage_boundary(self._job, one.member, one.subject.series.vpp_stage, role, self._step) is not None:
            return (role, not forward, place - 1 if forward else place + 1, one.micro_step) in pipeline.boundaries
        if forward:
            return pipeline.first_forward.get(one.micro_step, place) < place
        return pipeline.last_backward.get(one.micro_step, place) > place

    def _fired_elsewhere(self, chunk: int) -> bool:
        """Whether anything has fired in another model that the rank watches. In what order models without a pipeline call one
        another is not known: a critic has several micro-steps for each of its generator's.
        """
        return any(fired.modules for other, fired in self.chunks.items() if other != chunk)

    def _backward(self, one: Sighting, graph: DataflowGraph, chunk: Chunk) -> bool:
        """Whether a backward event is explained. The loss joins all forwards; a residual adds parts without an edge."""
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
        """Whether bad weights or tensors of other stages may have reached a parameter's gradient unmeasured."""
        pipeline = self._pipelines[one.member.group]
        if one.micro_step in pipeline.first_forward or pipeline.last_backward.get(one.micro_step, one.place) > one.place:
            return True
        return self._weights.bad_below(one.member, graph, one.subject.series.vpp_stage, ROOT)


def stage_boundary(job: RankedJob, member: Member, chunk: int, role: Role, step: int) -> Member | None:
    """The member whose root feeds the root of this chunk, if the tensor between them was measured and judged; else None.

    Also None if the chunk is the first in this direction, or the order of chunks is unknown.
    """
    forward, size = role == Role.FORWARD, len(member.group.mates)
    place = member.place(chunk) + (-1 if forward else 1)
    if size == 1 or not 0 <= place < member.places:
        return None
    other = job.at_place(member.group, place)
    graph = None if other is None else other.graph_in(step)
    if other is None or graph is None or not other.has_judged_all(step):
        return None
    return other if graph.shows_exit(role, place // size, ROOT) else None


def _lower(least: dict[K, int], key: K, number: int) -> None:
    if least.get(key, _NEVER) > number:
        least[key] = number


def _at_once(seen: Iterable[Sighting]) -> Iterator[list[Sighting]]:
    """Groups of the same ``call_id``: of one row, or of ranks that ran in parallel."""
    alike: list[Sighting] = []
    for one in seen:
        if alike and one.call_id != alike[0].call_id:
            yield alike
            alike = []
        alike.append(one)
    if alike:
        yield alike
