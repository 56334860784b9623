"""Finds the origins: events for which nothing that they depend on had fired before.

Steps are processed in order, since weights and moments carry faults over to the next step. If it is not known what a tensor
was made from, everything that may have contributed counts: a false origin sends people to the wrong place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from monitor.anomalies.events import ScanSummary
from monitor.anomalies.ranking import step_propagation
from monitor.anomalies.ranking.graph import DataflowGraph, Role, Subject, modules_around, parent
from monitor.anomalies.ranking.job import Columns, EventTable, Flags, Member, PipelineGroup, RankedJob
from monitor.anomalies.ranking.order import Order
from monitor.anomalies.ranking.step_propagation import StepPropagation
from monitor.coordinator.manifest_format import ManifestRecord, StepsRecord
from monitor.series import ACTIVATION_KINDS, GRADIENT_KINDS, KIND_TABLE, LEFT_BY_STEP

# --- The effect of earlier steps on weights and moments.

CHANGED_NOTE: Final = "grad_reduced"
CHANGED: Final = "changed in place"
"""Key and words of the manifest's note that gradients were clipped, or changed in another way, before they were read."""

_WEIGHTS: Final = ("param_origin", "param_updated")

_OF_WEIGHTS: Final = tuple(kind.name for kind in KIND_TABLE if kind.role)
"""Kinds that depend on weights, or are weights."""

_OF_PASSES: Final = (*ACTIVATION_KINDS, "grad_unreduced")
"""Kinds that show a forward or a backward."""

MOST_BACK: Final = 10_000
"""Steps that are looked through for one with such a kind."""

Parameter = tuple[int, int, int, str]
"""Recording, stage, chunk and name."""


def notes_a_change(manifest: ManifestRecord | None) -> bool:
    """Whether gradients were read after they had been changed together. The same note may hold other remarks."""
    return manifest is not None and CHANGED in str(manifest.notes.get(CHANGED_NOTE, ""))


def _sets() -> defaultdict[Role, set[Parameter]]:
    return defaultdict(set)


@dataclass
class StepEvents:
    """The events of a step.

    Attributes:
        roles: By recording, the roles of series that fired on any rank.
        parameters: By role, the parameters with a series that fired.
        incomplete: Recordings that lack some events of the step.
    """

    step: int
    roles: dict[int, set[Role]] = field(default_factory=lambda: defaultdict(set))
    parameters: defaultdict[Role, set[Parameter]] = field(default_factory=_sets)
    incomplete: frozenset[int] = frozenset()

    def of(self, recording: int) -> StepEvents:
        """The events of one recording."""
        own = {role: {one for one in names if one[0] == recording} for role, names in self.parameters.items()}
        return StepEvents(self.step, {recording: self.roles.get(recording, set())}, defaultdict(set, own), self.incomplete)

    def carried_over(self, later: StepEvents) -> StepEvents:
        """The combined events after a later step whose update was skipped."""
        both = {role: self.parameters[role] | later.parameters[role] for role in {*self.parameters, *later.parameters}}
        return StepEvents(later.step, self.roles, defaultdict(set, both), self.incomplete)


class EventHistory:
    """The events of earlier steps, updated step by step.

    Attributes:
        recordings: The recordings of the job.
        spoiled: Recordings whose moments include a gradient that had fired.
        moments: Parameters with moments that fired.
    """

    def __init__(self, job: RankedJob) -> None:
        self.recordings = sorted({one.recording for one in job.members})
        self.recorded = _RecordedKinds(job)
        self.spoiled: set[int] = set()
        self.moments: set[Parameter] = set()
        self._judged: dict[int, set[StepsRecord]] = defaultdict(set)
        self._skipped: dict[int, set[StepsRecord]] = defaultdict(set)
        for one in job.members:
            self._judged[one.recording].add(one.events.judged.steps)
            if one.manifest is not None:
                self._skipped[one.recording].add(one.manifest.steps.skipped)
        self._last: dict[int, StepEvents] = {}

    def recordings_behind(self, step: int) -> frozenset[int]:
        """Recordings with a rank that has not judged the step, or not yet: it may have had events."""
        return frozenset(one for one, every in self._judged.items() if not all(steps.holds(step) for steps in every))

    def begin(self, step: int) -> None:
        """Forget events that are older than the last update before ``step``."""
        self._last = {recording: one for recording, one in self._last.items() if not self._updated(recording, one.step, step)}

    def add(self, fired: StepEvents) -> None:
        """The step is over."""
        self.moments |= fired.parameters[Role.MOMENT]
        for recording in fired.roles:
            own = fired.of(recording)
            if any(steps.holds(fired.step) for steps in self._skipped[recording]):
                last = self._last.get(recording, StepEvents(fired.step))
                self._last[recording] = last.carried_over(StepEvents(own.step, {}, own.parameters))
            else:
                self._last[recording] = own
                if self.is_dirty(recording, own):
                    self.spoiled.add(recording)

    def last_update(self, recording: int) -> StepEvents | None:
        """The events of the step whose update the current step began with; None if there were none."""
        return self._last.get(recording)

    def doubtful(self, recording: int) -> bool:
        """Whether the last update may have spoiled weights."""
        last = self._last.get(recording)
        return last is not None and self.is_dirty(recording, last)

    def is_dirty(self, recording: int, fired: StepEvents) -> bool:
        """Whether gradients that the optimizer received had fired, as far as they are recorded."""
        roles = fired.roles.get(recording, set())
        for kind, role in (("grad_reduced", Role.GRADIENT), ("grad_unreduced", Role.LOCAL_GRADIENT)):
            if self.recorded.anywhere(recording, kind, fired.step) and recording not in fired.incomplete:
                return role in roles
        return bool(roles & {Role.GRADIENT, Role.MOMENT, Role.ORIGINAL_WEIGHT, *step_propagation.IN_PASSES})

    def saw_gradients_before(self, recording: int, step: int) -> bool:
        """Whether the gradients of the step before were looked at: otherwise they may have spoiled moments and weights."""
        return self.recorded.shows_gradients(recording, step - 1)

    def weights(self, fired: StepEvents) -> step_propagation.Weights:
        """The known state of the weights that the step of ``fired`` began with."""
        doubtful = frozenset(one for one in self.recordings if self.doubtful(one) or self._moments_tell(one, fired))
        last = {one: self._last.get(one, StepEvents(fired.step - 1)) for one in doubtful}
        unknown = {one for one in doubtful if one in fired.incomplete or one in last[one].incomplete}
        unknown |= {one for one in doubtful if not self.recorded.shows_weights(one, last[one].step, fired.step)}
        weights = step_propagation.Weights(
            frozenset(where for where in self.recorded.weights if where[0] not in unknown), doubtful
        )
        bad = set(fired.parameters[Role.ORIGINAL_WEIGHT])
        bad.update(*(last.parameters[Role.UPDATED_WEIGHT] for last in self._last.values()))
        for recording, stage, chunk, name in bad:
            weights.modules.setdefault((recording, stage, chunk), set()).update(modules_around(parent(name)))
        return weights

    def _moments_tell(self, recording: int, fired: StepEvents) -> bool:
        """Whether moments show an update by bad gradients, which were not looked at. They are read before the step."""
        return Role.MOMENT in fired.roles.get(recording, ()) and not self.saw_gradients_before(recording, fired.step)

    def _updated(self, recording: int, first: int, last: int) -> bool:
        """Whether the optimizer made a judged step strictly between the two, which would have shown an earlier bad update."""
        skipped = max((one.between(first + 1, last - 1).count for one in self._skipped[recording]), default=0)
        if not any(one.between(first + 1, last - 1).count > skipped for one in self._judged[recording]):
            return False
        if not self.recorded.is_sparse(recording):
            return True
        between = range(last - 1, max(first, last - 1 - MOST_BACK), -1)
        made = (step for step in between if not any(one.holds(step) for one in self._skipped[recording]))
        judged = (step for step in made if any(one.holds(step) for one in self._judged[recording]))
        return last - first > MOST_BACK or any(self.recorded.shows_update(recording, step) for step in judged)


class _RecordedKinds:
    """Which kinds ranks record at all, and in a step."""

    def __init__(self, job: RankedJob) -> None:
        with_graph = [(one, one.graph) for one in job.members if one.graph is not None]
        kinds = {(one.recording, one.stage, id(graph)): graph.kinds for one, graph in with_graph}
        self._kinds = {(recording, stage, chunk, kind) for (recording, stage, _), own in kinds.items() for kind, chunk in own}
        self._anywhere = {(recording, kind) for recording, _, _, kind in self._kinds}
        self._changed = {one.recording for one in job.members if notes_a_change(one.manifest)}
        rare: dict[int, dict[object, ScanSummary]] = defaultdict(dict)
        for one in job.members:
            judged = one.events.judged
            if judged.has_few:  # most ranks have judged the same kinds in the same steps
                rare[one.recording][judged.steps, *judged.kinds.items()] = judged
        self._rare = {recording: list(judged.values()) for recording, judged in rare.items()}

    @property
    def weights(self) -> frozenset[step_propagation.StageChunk]:
        """Where weights are recorded."""
        return frozenset((recording, stage, chunk) for recording, stage, chunk, kind in self._kinds if kind in _WEIGHTS)

    def by(self, where: step_propagation.StageChunk, kind: str, step: int) -> bool:
        """Whether any rank of the stage records the kind, and none left it out in this step."""
        return (*where, kind) in self._kinds and not self._lacks(where[0], kind, step)

    def anywhere(self, recording: int, kind: str, step: int) -> bool:
        """Whether any rank records the kind, and none left it out in this step."""
        return (recording, kind) in self._anywhere and not self._lacks(recording, kind, step)

    def shows_weights(self, recording: int, last: int, step: int) -> bool:
        """Whether weights of ``step`` are known, as far as they are recorded: from it, or from the update in ``last``."""
        return not (self._lacks(recording, "param_origin", step) and self._lacks(recording, "param_updated", last))

    def shows_gradients(self, recording: int, step: int) -> bool:
        """Whether gradients that the optimizer received in a step were looked at, as far as they are recorded at all."""
        asked = [kind for kind in GRADIENT_KINDS if (recording, kind) in self._anywhere]
        return not asked or any(not self._lacks(recording, kind, step) for kind in asked)

    def shows_update(self, recording: int, step: int) -> bool:
        """Whether a step has a kind that depends on weights, so that it shows whether an earlier update has spoiled them."""
        asked = [kind for kind in _OF_WEIGHTS if (recording, kind) in self._anywhere]
        return not asked or any(not self._lacks(recording, kind, step) for kind in asked)

    def is_sparse(self, recording: int) -> bool:
        """Whether some kinds were judged in some of the steps only."""
        return recording in self._rare

    def _lacks(self, recording: int, kind: str, step: int) -> bool:
        return any(not one.has(kind, step) and one.steps.holds(step) for one in self._rare.get(recording, ()))

    def changed_gradients(self, recording: int) -> bool:
        """Whether gradients were read after something had joined them all, as clipping by their norm does."""
        return recording in self._changed


def origins(job: RankedJob, table: EventTable, order: Order) -> Flags:
    """Flags: which events are origins."""
    found = np.zeros(len(table), np.bool_)
    history = EventHistory(job)
    if not len(table):
        return found
    steps, begins = np.unique(table.step[order.events], return_index=True)
    for step, events in zip(steps.tolist(), np.split(order.events, begins[1:]), strict=True):
        history.begin(step)
        found[list(_Step(job, table, history, step, events).origins())] = True
    return found


class _Step:
    """One step of the whole job.

    Args:
        events: Numbers of the step's events, in order.
    """

    def __init__(self, job: RankedJob, table: EventTable, history: EventHistory, step: int, events: Columns) -> None:
        self._job, self._of, self._history = job, table, history
        self._step, self._events = step, events
        writers = [table.members[number] for number in np.unique(table.member[events])]
        lacking = (one.recording for one in writers if not one.has_judged_all(step))
        self._fired = StepEvents(step, incomplete=history.recordings_behind(step).union(lacking))
        self._modules: dict[step_propagation.StageChunk, set[str]] = defaultdict(set)
        self._parameters: dict[tuple[int, int], Parameter] = {}
        self._spread: dict[tuple[int, int, int], bool] = {}
        self._weights = step_propagation.Weights(frozenset(), frozenset())

    def origins(self) -> Iterator[int]:
        """Numbers of the events that are origins."""
        self._note_what_fired()
        self._weights = self._history.weights(self._fired)
        yield from self._without_graph()
        yield from self._of_passes()
        for number in self._numbers(*set(Role) - {*step_propagation.IN_PASSES}):
            member, subject = self._of.members[self._of.member[number]], self._of.subjects[self._of.subject[number]]
            graph = member.graph_in(self._step)
            if graph is not None and not self._explained(number, graph, subject):
                yield number
        self._history.add(self._fired)

    def _note_what_fired(self) -> None:
        of, events = self._of, self._events
        each = np.unique(np.stack([of.recording[events], of.role[events]]), axis=1)
        for recording, role in each.T.tolist():
            self._fired.roles[recording].add(Role(role))
        for number in self._numbers(*set(Role) - {*step_propagation.PASSES, Role.OTHER}):
            self._fired.parameters[Role(of.role[number])].add(self._parameter(number))

    def _numbers(self, *roles: Role) -> list[int]:
        selected = np.isin(self._of.role[self._events], roles)
        found: list[int] = self._events[selected].tolist()
        return found

    def _parameter(self, number: int) -> Parameter:
        key = int(self._of.member[number]), int(self._of.subject[number])
        known = self._parameters.get(key)
        if known is None:
            member, series = self._of.members[key[0]], self._of.subjects[key[1]].series
            known = self._parameters[key] = (member.recording, member.stage, series.vpp_stage, series.name)
        return known

    def _without_graph(self) -> Iterator[int]:
        """The origins on ranks without a manifest: the first event of the pipeline, in all its statistics."""
        of, events = self._of, self._events
        _, first = np.unique(of.group[events], return_index=True)
        for number in events[first].tolist():
            if of.members[of.member[number]].graph is None and not self._may_follow(number):
                same = (of.member[events] == of.member[number]) & (of.call_id[events] == of.call_id[number])
                yield from events[same].tolist()

    def _may_follow(self, number: int) -> bool:
        """Whether the first event of a pipeline without a manifest may come from another pipeline or from the last update."""
        recording, role = int(self._of.recording[number]), Role(self._of.role[number])
        if role == Role.ORIGINAL_WEIGHT and self._original_weight(self._parameter(number)):
            return True
        if role not in (Role.ORIGINAL_WEIGHT, *step_propagation.IN_PASSES) and any(
            one < role for one in self._fired.roles[recording]
        ):
            return True
        return self._history.doubtful(recording) or (role == Role.MOMENT and recording in self._history.spoiled)

    def _of_passes(self) -> Iterator[int]:
        of = self._of
        numbers = np.array(self._numbers(*step_propagation.IN_PASSES), dtype=np.int64)
        joined = np.array(self._job.joined, dtype=np.int64)[of.member[numbers]]
        by_call = np.lexsort((of.call_id[numbers], joined))
        seen = list(self._sightings(numbers[by_call]))
        pipelines: defaultdict[PipelineGroup, step_propagation.PipelineEvents] = defaultdict(step_propagation.PipelineEvents)
        for one in seen:
            pipelines[one.member.group].add(one)
        begins = np.flatnonzero(np.diff(joined[by_call], prepend=-1)).tolist()
        for begin, end in zip(begins, [*begins[1:], len(seen)], strict=False):
            propagation = StepPropagation(self._job, self._step, self._weights, pipelines)
            yield from propagation.origins(seen[begin:end])
            self._note_modules(seen[begin].member, propagation)

    def _note_modules(self, member: Member, propagation: StepPropagation) -> None:
        for chunk, fired in propagation.chunks.items():
            self._modules[member.recording, member.stage, chunk].update(module for _, module in fired.modules)

    def _sightings(self, numbers: Columns) -> Iterator[step_propagation.Sighting]:
        of = self._of
        columns = (column[numbers].tolist() for column in (of.call_id, of.member, of.subject, of.micro_step, of.finite))
        for number, call_id, member, subject, micro_step, finite in zip(numbers.tolist(), *columns, strict=True):
            yield step_propagation.Sighting(call_id, number, of.members[member], of.subjects[subject], micro_step, finite)

    def _explained(self, number: int, graph: DataflowGraph, subject: Subject) -> bool:
        parameter = self._parameter(number)
        recording = parameter[0]
        if subject.role == Role.GRADIENT:
            deviates_upstream = bool(self._of.finite[number]) and bool(
                self._fired.roles[recording] & {*step_propagation.PASSES}
            )
            return deviates_upstream or self._after_unseen_passes(number) or self._gradient(graph, subject, parameter)
        if subject.role == Role.MOMENT and subject.series.kind.endswith(LEFT_BY_STEP):
            return self._history.is_dirty(recording, self._fired) or self._follows_another(number, Role.MOMENT)
        if subject.role == Role.MOMENT:
            last = self._history.last_update(recording)
            follows = bool(self._of.finite[number]) and last is not None
            if follows or recording in self._history.spoiled or parameter in self._history.moments:
                return True
            if self._history.saw_gradients_before(recording, self._step):
                return False
            return self._follows_another(number, Role.MOMENT) or (
                last is not None and bool(last.parameters[Role.UPDATED_WEIGHT])
            )
        if subject.role == Role.UPDATED_WEIGHT:
            same = (self._fired.parameters[role] for role in (Role.ORIGINAL_WEIGHT, Role.MOMENT))
            if self._history.is_dirty(recording, self._fired) or any(parameter in one for one in same):
                return True
            seen = self._history.recorded.shows_gradients(recording, self._step)
            return not seen and self._follows_another(number, Role.UPDATED_WEIGHT)
        if subject.role == Role.ORIGINAL_WEIGHT:
            return self._original_weight(parameter)
        return self._follows_another(number)

    def _after_unseen_passes(self, number: int) -> bool:
        """Whether an aggregated gradient may come from bad weights, or from what spoiled another one, through a forward and a
        backward of which this step shows nothing.
        """
        recording, stage, chunk, _ = self._parameter(number)
        place = recording, stage, chunk
        if any(self._history.recorded.by(place, kind, self._step) for kind in _OF_PASSES):
            return False
        weights = self._weights
        if any(one[0] == recording for one in weights.modules) or (
            recording in weights.doubtful and place not in weights.recorded
        ):
            return True
        return self._follows_another(number, Role.GRADIENT)

    def _gradient(self, graph: DataflowGraph, subject: Subject, parameter: Parameter) -> bool:
        """Whether an aggregated gradient is explained: each rank of the aggregation may have contributed the fault."""
        recording, stage, chunk, _ = parameter
        roles, local = self._fired.roles[recording], self._fired.parameters[Role.LOCAL_GRADIENT]
        if self._history.recorded.changed_gradients(recording) or recording in self._fired.incomplete:
            return bool(roles & {*step_propagation.IN_PASSES})
        if self._has_spread(graph, recording, stage):
            return True
        if parameter in local or self._history.recorded.by((recording, stage, chunk), "grad_unreduced", self._step):
            return parameter in local
        module = graph.owner(subject)
        return bool(roles & {*step_propagation.PASSES}) if module is None else module in self._modules[recording, stage, chunk]

    def _has_spread(self, graph: DataflowGraph, recording: int, stage: int) -> bool:
        """Whether a bad local gradient may be in all aggregated gradients of a rank: all of them fired, as after a clipping
        that is not noted. MindSpore does not show it.
        """
        key = id(graph), recording, stage
        if key not in self._spread:
            every = {(recording, stage, one.vpp_stage, one.name) for one in graph.numbers if one.kind == "grad_reduced"}
            of, events = self._of, self._events
            local = (of.role[events] == Role.LOCAL_GRADIENT) & (of.recording[events] == recording) & ~of.finite[events]
            self._spread[key] = bool(local.any()) and len(every) > 1 and every <= self._fired.parameters[Role.GRADIENT]
        return self._spread[key]

    def _original_weight(self, parameter: Parameter) -> bool:
        """Whether a weight at the beginning of the step is explained by the last update."""
        recording, stage, chunk, _ = parameter
        last = self._history.last_update(recording)
        if last is None:
            return False
        if parameter in last.parameters[Role.UPDATED_WEIGHT] or parameter in last.parameters[Role.ORIGINAL_WEIGHT]:
            return True
        recorded = self._history.recorded.by((recording, stage, chunk), "param_updated", last.step)
        known = recorded and recording not in last.incomplete
        return not known and self._history.doubtful(recording)

    def _follows_another(self, number: int, role: Role | None = None) -> bool:
        """Whether anything fired earlier on the rank, or anything of a role."""
        of, events = self._of, self._events
        own = events[of.member[events] == of.member[number]]
        if role is not None:
            own = own[of.role[own] == role]
        return bool((of.call_id[own] < of.call_id[number]).any())
