"""Ranks the events of a job: reads, orders and judges them, describes the earliest ones, and locates their origins."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from monitor.anomalies.ranking.coverage import Coverage, StepFilter, coverage_of
from monitor.anomalies.ranking.graph import ROOT, DataflowGraph, Role, Subject, parent
from monitor.anomalies.ranking.job import EventTable, Flags, Member, RankedJob, job_of
from monitor.anomalies.ranking.loading import Flaw, NothingReadError, files_in, read_all
from monitor.anomalies.ranking.order import order_of
from monitor.anomalies.ranking.origins import notes_a_change, origins
from monitor.anomalies.ranking.step_propagation import IN_PASSES, stage_boundary
from monitor.series import COLLECTIVE_INPUT, COLLECTIVE_OUTPUT, GRADIENT_KINDS, LEFT_BY_STEP, MOMENT_KINDS, Series

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


def _having(job: RankedJob, table: EventTable, number: int, among: Sequence[Member] | None = None) -> tuple[list[int], int]:
    """The ranks with the event, and the number of ranks that measure the tensor and have judged the step.

    Of a sharded tensor each rank holds another part, so only the rank itself counts.

    Args:
        among: These ranks; None: the data-parallel replicas.
    """
    of = table
    member, subject, step = of.members[of.member[number]], of.subjects[of.subject[number]], int(of.step[number])
    if member.graph is not None and subject.series in member.graph.sharded:
        return [], 0
    looked = job.replicas(member) if among is None else among
    others = [one for one in looked if one is member or (one.has_judged_all(step) and _shows(one, subject.series, step))]
    return sorted({int(of.rank[one]) for one in _same(table, number, others)}), len(others)


SENDING: Final = ("send", "batch_isend_irecv")
"""Operators by which a stage of a pipeline passes tensors to the next."""


class Givers(NamedTuple):
    """Ranks that passed a bad tensor to a collective in the step, where other ranks passed good ones; or the rank that sent one
    to the next stage.

    Attributes:
        operator: The operator's name.
    """

    ranks: tuple[int, ...]
    operator: str


def givers(job: RankedJob, of: EventTable, number: int) -> Givers | None:
    """Who brought the fault of an aggregated gradient into the aggregation, as far as collectives' inputs are recorded.

    A collective after the aggregation, such as that of a norm, has the fault on every rank, and so tells nothing.
    """
    if of.role[number] in IN_PASSES:
        return _sender(job, of, number)
    if of.role[number] != Role.GRADIENT:
        return None
    same = (of.step == of.step[number]) & (of.recording == of.recording[number]) & (of.finite == of.finite[number])
    for other in np.flatnonzero(same & (of.role == Role.OTHER)).tolist():
        operator, _, what = of.subjects[of.subject[other]].series.name.rpartition(".")
        if what != COLLECTIVE_INPUT:
            continue
        having, judged = _having(job, of, other)
        if judged < 2 and _received(of, number, operator):  # between stages, as of an embedding that they share
            everyone = [one for one in of.members if one.recording == of.members[of.member[other]].recording]
            having, judged = _having(job, of, other, everyone)
        ranks = tuple(rank for rank in having if not _passed_on(of, other, rank))
        if ranks and len(having) < judged:
            return Givers(ranks, operator)
    return None


def _passed_on(of: EventTable, number: int, rank: int) -> bool:
    """Whether a rank that gave bad numbers to an operator had got bad ones from another before, to which it gave good ones."""
    calls = _calls(of, number, rank)
    operator, _, _ = of.subjects[of.subject[number]].series.name.rpartition(".")
    given = calls.get(f"{operator}.{COLLECTIVE_INPUT}", 0)
    got = (name.rpartition(".") for name, call_id in calls.items() if call_id < given)
    return any(what == COLLECTIVE_OUTPUT and f"{other}.{COLLECTIVE_INPUT}" not in calls for other, _, what in got)


def _received(of: EventTable, number: int, operator: str) -> bool:
    """Whether the rank of an event got bad numbers from an operator in the step."""
    return f"{operator}.{COLLECTIVE_OUTPUT}" in _calls(of, number, int(of.rank[number]))


def _calls(of: EventTable, number: int, rank: int) -> dict[str, int]:
    """What a rank gave to collectives, or got from them, that is bad in the step of an event: names and call ids."""
    own = (of.rank == rank) & (of.recording == of.recording[number]) & (of.step == of.step[number]) & (of.role == Role.OTHER)
    return {of.subjects[of.subject[one]].series.name: int(of.call_id[one]) for one in np.flatnonzero(own).tolist()}


def _sender(job: RankedJob, of: EventTable, number: int) -> Givers | None:
    """Which rank sent a bad tensor to the stage that shows the event first.

    Rows of ``send`` do not tell the direction. So only the first stage is known to have sent outputs, and only the last stage
    to have sent gradients, and in a virtual pipeline no stage is.
    """
    member, subject, step = of.members[of.member[number]], of.subjects[of.subject[number]], int(of.step[number])
    other = stage_boundary(job, member, subject.series.vpp_stage, subject.role, step)
    end = 0 if subject.role == Role.FORWARD else member.places - 1
    if other is None or other.stage != end or member.places > len(member.group.mates):
        return None
    theirs = (of.rank == other.rank) & (of.recording == other.recording) & (of.role == Role.OTHER)
    for found in np.flatnonzero(theirs & (of.step == step) & (of.finite == of.finite[number])).tolist():
        operator, _, what = of.subjects[of.subject[found]].series.name.rpartition(".")
        if what == COLLECTIVE_INPUT and operator.partition("@")[0] in SENDING:
            return Givers((other.rank,), operator)
    return None


def _shows(member: Member, series: Series, step: int) -> bool:
    """Whether the rank has measured the series in the step."""
    graph = member.graph_in(step)
    return graph is not None and series in graph.numbers


def _same(of: EventTable, number: int, members: list[Member]) -> list[int]:
    """Events of the same tensor, step and micro-step on these members; those of rules and those of checks of bits apart."""
    same = (of.step == of.step[number]) & (of.micro_step == of.micro_step[number]) & (of.meant == of.meant[number])
    same &= of.of_bits == of.of_bits[number]
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
        first_origin: The earliest origin among all chosen events. One of ``overflows`` only if there is no other.
        first_not_finite: The earliest chosen event of a tensor with a NaN or an Inf, likewise.
        overflows: Number of events of gradients in steps in which the loss scale was too high.
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
    overflows: int = 0

    @property
    def has_faults(self) -> bool:
        """Whether there are other events than ``overflows``."""
        return self.events > self.overflows

    @property
    def is_well(self) -> bool:
        """Whether no rule fired, and everything was judged."""
        job = self.job
        ended = all(one.events.judged.closed for one in job.members)
        return not (self.events or job.flaws or job.missing) and ended and self.coverage.is_whole


def ranking_of(folder: Path, most: int, step_filter: StepFilter | None = None, jobs: Collection[str] = ()) -> Ranking:
    """Read, order and judge the events of all ranks.

    Args:
        most: How many events to keep.
        step_filter: Chooses the steps to list. Other steps still count as possible causes.
        jobs: Ids of the jobs whose events count; empty: those of the launch with the most files.

    Raises:
        NothingReadError: no file could be read, or none is of these jobs.
    """
    read = list(read_all(files_in(folder)))
    of_jobs = [one for one in read if isinstance(one, Flaw) or not jobs or one.judged.job_id in jobs]
    if not of_jobs:
        raise NothingReadError(f"the events in {folder.parent} are of another job.")
    job = job_of(folder, of_jobs)
    if not job.members:
        raise NothingReadError("\n".join([f"no rank's events in {folder} can be read:", *map(_said, job.flaws[:10])]))
    table = EventTable.of(job.members)
    order = order_of(table)
    are_origins = origins(job, table, order)
    listed = order.events if step_filter is None else order.events[step_filter(table.step[order.events])]
    overflowed = table.overflowed[listed]
    harmless_last = np.concatenate([listed[~overflowed], listed[overflowed]])
    first = harmless_last[are_origins[harmless_last]][:1].tolist()
    not_finite = harmless_last[table.not_finite[harmless_last]][:1].tolist()
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
        int(overflowed.sum()),
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
        location_of(job, member, subject, step, givers(job, of, number)) if is_origin else None,
        alone(job, of, number),
        None if math.isnan(of.mean[number]) else float(of.mean[number]),
        shared(job, of, number),
    )


def _said(flaw: Flaw) -> str:
    return f"  {flaw.path}: {flaw.reason}"


# --- Locates an origin: between the last clean series and the event's, in the smallest module that contains both.

SHOWN: Final = 10
"""At most so many ranks or files are listed; more are counted."""


def listed(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 3, 4 and 10 more``."""
    shown = ", ".join(map(str, ranks[:SHOWN]))
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def capitalized(said: str) -> str:
    """The text with a capital first letter."""
    return said[:1].upper() + said[1:]


_MADE_OF: Final = {"gradients": GRADIENT_KINDS, "moments": MOMENT_KINDS, "the weight before": ("param_origin",)}
"""The optimizer's inputs for a weight, and the kinds that record them."""


class Cause(Enum):
    """The part of training that an origin points at."""

    INSIDE = "inside a module"
    BETWEEN = "between modules"
    DATA = "what the model was given"
    BEFORE = "before what is watched"
    STAGES = "between stages of the pipeline"
    SENT = "what a stage of the pipeline sent"
    LOSS = "the loss"
    BEHIND = "behind what is watched"
    PARAMETER = "the gradient of a parameter"
    PASSES = "a pass of which nothing is watched"
    AGGREGATION = "the aggregation of gradients"
    UNSEEN_RANKS = "a gradient of ranks that do not record theirs"
    UNREAD_GRADIENTS = "gradients that no rank reads before they are aggregated"
    GIVEN = "what a rank gave to a collective"
    CHANGED_GRADIENTS = "what changed all gradients together"
    MOMENTS = "the optimizer's state"
    UNSEEN_UPDATES = "the optimizer's state, and gradients of earlier steps, which were not recorded"
    UPDATE = "the optimizer's step"
    UNSEEN_GRADIENTS = "the optimizer's step, whose gradients were not recorded"
    WEIGHTS = "weights between two steps"
    UNKNOWN = "unknown"


class FaultLocation(NamedTuple):
    """The part of training that an origin points at, and its description for people."""

    cause: Cause
    text: str


def location_of(job: RankedJob, member: Member, subject: Subject, step: int, given: Givers | None) -> FaultLocation:
    """The location of an event that is an origin."""
    graph = member.graph_in(step)
    if graph is None:
        return FaultLocation(Cause.UNKNOWN, "the first event; its inputs are not known")
    if subject.role == Role.FORWARD:
        return _forward(job, member, graph, subject, step, given)
    if subject.role == Role.BACKWARD:
        return _backward(job, member, graph, subject, step, given)
    if subject.role == Role.GRADIENT:
        return _aggregation(job, member, subject, step, given)
    return _of_parameter(member, graph, subject, step)


def _forward(
    job: RankedJob, member: Member, graph: DataflowGraph, subject: Subject, step: int, given: Givers | None
) -> FaultLocation:
    clean = _last_clean(graph, subject)
    if clean is not None:
        return _within(clean, subject, _own_module(subject), "")
    other = stage_boundary(job, member, subject.series.vpp_stage, subject.role, step)
    if other is not None:
        return _handed_over(member, other, subject, "output", "input", given)
    if member.place(subject.series.vpp_stage) > 0:
        return _not_shown(member, "before")
    if subject.is_input and subject.module == ROOT:
        return FaultLocation(Cause.DATA, "in what the model was given: the batch")
    return FaultLocation(Cause.BEFORE, f"between the batch and {name_of(subject)}")


def _backward(
    job: RankedJob, member: Member, graph: DataflowGraph, subject: Subject, step: int, given: Givers | None
) -> FaultLocation:
    clean = _last_clean(graph, subject)
    if clean is not None:
        around = subject.module if graph.uses_itself(subject) else _own_module(subject)
        return _within(graph.innermost(clean), subject, around, "the gradients of ")
    other = stage_boundary(job, member, subject.series.vpp_stage, subject.role, step)
    if other is not None:
        return _handed_over(member, other, subject, "input gradient", "output gradient", given)
    if member.place(subject.series.vpp_stage) < member.places - 1:
        return _not_shown(member, "after")
    if graph.shows_exit(Role.FORWARD, subject.series.vpp_stage, ROOT):
        return FaultLocation(Cause.LOSS, f"between the loss and the gradient of {name_of(subject)}")
    return FaultLocation(
        Cause.BEHIND, f"after the watched part of the forward, in the loss, or before the gradient of {name_of(subject)}"
    )


def _handed_over(
    member: Member, other: Member, subject: Subject, gives: str, taken: str, given: Givers | None
) -> FaultLocation:
    """A fault between stages. If the root's own series are not measured, it may also lie between the root and ``subject``."""
    there = f"stage {other.stage}'s {gives} (rank {other.rank})"
    if given is not None:
        return FaultLocation(Cause.SENT, f"between {there} and {given.operator}, to which this rank gave bad numbers")
    here = f"stage {member.stage}'s {taken}" if subject.module == ROOT else name_of(subject)
    return FaultLocation(Cause.STAGES, f"between {there} and {here} (rank {member.rank}): the communication between the stages")


def _not_shown(member: Member, side: str) -> FaultLocation:
    text = f"the first to show it on stage {member.stage}; what the stage {side} it sent is not known"
    return FaultLocation(Cause.UNKNOWN, text)


def _last_clean(graph: DataflowGraph, subject: Subject) -> Subject | None:
    """The last series before this one in the module that produced it. For an origin, all of these are clean."""
    same = graph.same_as(subject.series) if subject.role == Role.FORWARD and subject.is_input else None
    if same is not None and same.made:
        return same.made[0]
    closure = graph.closure(subject)
    around = ROOT if closure is None else closure
    own_entry = subject.is_entry and subject.module == ROOT
    return None if own_entry else next((one for one in graph.before(subject) if around in one.around), None)


def _within(clean: Subject, subject: Subject, own: str, of: str) -> FaultLocation:
    """A location inside or between modules. ``own`` is the smallest module that may have produced the tensor."""
    module = _holding(clean, own)
    inside = module == subject.module == own
    place = f"{'inside' if inside else 'in'} {module or 'the model'}"
    text = f"{place}, between {of}{_relative(clean, module)} and {_relative(subject, module)}"
    return FaultLocation(Cause.INSIDE if inside else Cause.BETWEEN, text)


def _own_module(subject: Subject) -> str:
    """The module that produced the tensor: an entry of a module was made in the module around it."""
    return parent(subject.module) if subject.is_entry else subject.module


def _holding(clean: Subject, module: str) -> str:
    """The smallest module around ``module`` that also contains the clean tensor."""
    while module not in clean.around:
        module = parent(module)
    return module


def _relative(subject: Subject, module: str) -> str:
    if subject.module != module:
        return name_of(subject)
    return f"its {_slot(subject)}"


def _slot(subject: Subject) -> str:
    return subject.series.name.removeprefix(f"{subject.module}.")


def name_of(subject: Subject) -> str:
    """The subject's name for people; for the root only its slot."""
    if subject.role in (Role.FORWARD, Role.BACKWARD) and subject.module == ROOT:
        return f"the model's {_slot(subject)}"
    return subject.series.name


def _of_parameter(member: Member, graph: DataflowGraph, subject: Subject, step: int) -> FaultLocation:
    if subject.role == Role.LOCAL_GRADIENT:
        return _local_gradient(member, graph, subject)
    left = subject.series.kind.endswith(LEFT_BY_STEP)
    if subject.role == Role.MOMENT and not left:
        before = f"in the optimizer's state, before step {step}"
        if not _saw_gradients(member, step - 1):
            return FaultLocation(Cause.UNSEEN_UPDATES, f"in gradients of earlier steps, which were not recorded, or {before}")
        return FaultLocation(Cause.MOMENTS, before)
    if left:  # weights or moments after the step
        cause = Cause.UPDATE if _saw_gradients(member, step) else Cause.UNSEEN_GRADIENTS
        return FaultLocation(cause, f"in the optimizer's step {step}{_not_recorded(graph, subject)}")
    if subject.role == Role.ORIGINAL_WEIGHT:
        return FaultLocation(Cause.WEIGHTS, f"in the weights before step {step}, after the last update that was judged")
    return FaultLocation(Cause.UNKNOWN, "the first on its rank")


_AFTER_FORWARD: Final = "between the last recorded activation and the end of the"


def _local_gradient(member: Member, graph: DataflowGraph, subject: Subject) -> FaultLocation:
    module = graph.owner(subject)
    if module is not None:
        around = f"in the backward of {module or 'the model'}"
        return FaultLocation(Cause.PARAMETER, f"{around}, between the gradient of its output and that of its parameter")
    forward = ("actv", subject.series.vpp_stage)
    if forward in graph.kinds:
        text = f"{_AFTER_FORWARD} backward of the model. Gradients of activations around it were not recorded"
    else:
        rarely = member.graph is not None and forward in member.graph.kinds
        text = f"in the forward or backward of the model. Activations were not recorded{' in this step' if rarely else ''}"
    return FaultLocation(Cause.PASSES, f"{text}, so the place is not known more precisely")


def _aggregation(job: RankedJob, member: Member, subject: Subject, step: int, given: Givers | None) -> FaultLocation:
    ranks = member.ranks("dp")
    among = f"in the aggregation of gradients over {listed(ranks)}" if len(ranks) > 1 else ""
    after = among or "between the backward and the optimizer's step"
    suspects = given.ranks if given is not None else ranks or (member.rank,)
    unseen = [rank for rank in suspects if not _shows_its_own(job.member_of(member.recording, rank), subject, step)]
    if given is not None and not unseen:
        text = f"between the backward of {listed(given.ranks)} and {given.operator}, to which no other rank gave bad numbers"
        return FaultLocation(Cause.GIVEN, text)
    changed = notes_a_change(member.manifest)
    together = ", where all were changed together, as by clipping: any of them may be the cause" if changed else ""
    if unseen and given is None and not _records_its_own(member, subject):
        shown = _shows_forward(member, subject, step)
        passes = f"{_AFTER_FORWARD if shown else 'in the forward or'} backward of {listed(unseen)}"
        text = (
            f"{passes}, or {after}{together}. Gradients before that were not recorded, so the place is not known more precisely"
        )
        return FaultLocation(Cause.UNREAD_GRADIENTS, text)
    if changed:
        return FaultLocation(Cause.CHANGED_GRADIENTS, f"{after}{together}")
    if not unseen:
        return FaultLocation(Cause.AGGREGATION, after)
    return FaultLocation(
        Cause.UNSEEN_RANKS, f"in the backward of {listed(unseen)}, whose own gradient is not known, or {after}"
    )


def _shows_its_own(member: Member | None, subject: Subject, step: int) -> bool:
    """Whether the rank's local gradient of the parameter was measured and judged."""
    local = Series("grad_unreduced", subject.series.vpp_stage, subject.series.name)
    return member is not None and member.has_judged_all(step) and _shows(member, local, step)


def _records_its_own(member: Member, subject: Subject) -> bool:
    """Whether the configuration asks for local gradients."""
    return member.graph is None or ("grad_unreduced", subject.series.vpp_stage) in member.graph.kinds


def _shows_forward(member: Member, subject: Subject, step: int) -> bool:
    """Whether activations were measured and judged in the step."""
    graph = member.graph_in(step)
    return graph is not None and ("actv", subject.series.vpp_stage) in graph.kinds


def _saw_gradients(member: Member, step: int) -> bool:
    """Whether gradients were recorded in a step."""
    graph = member.graph_in(step)
    return graph is None or bool(_kinds_of_gradients(graph))


def _kinds_of_gradients(graph: DataflowGraph) -> set[str]:
    return {kind for kind, _ in graph.kinds} & set(GRADIENT_KINDS)


def _not_recorded(graph: DataflowGraph, subject: Subject) -> str:
    """The optimizer's inputs that were not recorded, as a text."""
    chunk, name = subject.series.vpp_stage, subject.series.name
    missing = [
        text for text, kinds in _MADE_OF.items() if not any(Series(kind, chunk, name) in graph.numbers for kind in kinds)
    ]
    return f" (not recorded: {', '.join(missing)})" if missing else ""
