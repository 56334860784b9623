"""Locates an origin: between the last clean series and the event's, in the smallest module that contains both."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Final, NamedTuple

from monitor.anomalies.ranking.graph import ROOT, DataflowGraph, Role, Subject, parent
from monitor.anomalies.ranking.job import Member, RankedJob
from monitor.anomalies.ranking.origins import notes_a_change
from monitor.anomalies.ranking.step_propagation import stage_boundary
from monitor.series import GRADIENT_KINDS, MOMENT_KINDS, Series

# --- Formatting helpers for messages.

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
    LOSS = "the loss"
    BEHIND = "behind what is watched"
    PARAMETER = "the gradient of a parameter"
    PASSES = "a pass of which nothing is watched"
    AGGREGATION = "the aggregation of gradients"
    UNSEEN_RANKS = "a gradient of ranks that do not record theirs"
    CHANGED_GRADIENTS = "what changed all gradients together"
    MOMENTS = "the optimizer's state"
    UPDATE = "the optimizer's step"
    WEIGHTS = "weights between two steps"
    UNKNOWN = "unknown"


class FaultLocation(NamedTuple):
    """The part of training that an origin points at, and its description for people."""

    cause: Cause
    text: str


def location_of(job: RankedJob, member: Member, subject: Subject, step: int) -> FaultLocation:
    """The location of an event that is an origin."""
    graph = member.graph
    if graph is None:
        return FaultLocation(Cause.UNKNOWN, "the first event; its inputs are not known")
    if subject.role == Role.FORWARD:
        return _forward(job, member, graph, subject, step)
    if subject.role == Role.BACKWARD:
        return _backward(job, member, graph, subject, step)
    return _of_parameter(job, member, graph, subject, step)


def _forward(job: RankedJob, member: Member, graph: DataflowGraph, subject: Subject, step: int) -> FaultLocation:
    clean = _last_clean(graph, subject)
    if clean is not None:
        return _within(clean, subject, _own_module(subject), "")
    other = stage_boundary(job, member, subject.series.vpp_stage, subject.role, step)
    if other is not None:
        return _handed_over(member, other, subject, "output", "input")
    if member.place(subject.series.vpp_stage) > 0:
        return _not_shown(member, "before")
    if subject.is_input and subject.module == ROOT:
        return FaultLocation(Cause.DATA, "in what the model was given: the batch")
    return FaultLocation(Cause.BEFORE, f"between the batch and {name_of(subject)}")


def _backward(job: RankedJob, member: Member, graph: DataflowGraph, subject: Subject, step: int) -> FaultLocation:
    clean = _last_clean(graph, subject)
    if clean is not None:
        around = subject.module if graph.uses_itself(subject) else _own_module(subject)
        return _within(graph.innermost(clean), subject, around, "the gradients of ")
    other = stage_boundary(job, member, subject.series.vpp_stage, subject.role, step)
    if other is not None:
        return _handed_over(member, other, subject, "input gradient", "output gradient")
    if member.place(subject.series.vpp_stage) < member.places - 1:
        return _not_shown(member, "after")
    if graph.shows_exit(Role.FORWARD, subject.series.vpp_stage, ROOT):
        return FaultLocation(Cause.LOSS, f"between the loss and the gradient of {name_of(subject)}")
    return FaultLocation(
        Cause.BEHIND, f"after the watched part of the forward, in the loss, or before the gradient of {name_of(subject)}"
    )


def _handed_over(member: Member, other: Member, subject: Subject, given: str, taken: str) -> FaultLocation:
    """A fault between stages. If the root's own series are not measured, it may also lie between the root and ``subject``."""
    there = f"stage {other.stage}'s {given} (rank {other.rank})"
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


def _of_parameter(job: RankedJob, member: Member, graph: DataflowGraph, subject: Subject, step: int) -> FaultLocation:
    if subject.role == Role.LOCAL_GRADIENT:
        return _local_gradient(graph, subject)
    if subject.role == Role.GRADIENT:
        return _aggregation(job, member, subject, step)
    if subject.role == Role.MOMENT:
        return FaultLocation(Cause.MOMENTS, f"in the optimizer's state, before step {step}")
    if subject.role == Role.UPDATED_WEIGHT:
        return FaultLocation(Cause.UPDATE, f"in the optimizer's step {step}{_not_recorded(graph, subject)}")
    if subject.role == Role.ORIGINAL_WEIGHT:
        return FaultLocation(Cause.WEIGHTS, f"in the weights before step {step}, after the last update that was judged")
    return FaultLocation(Cause.UNKNOWN, "the first on its rank")


def _local_gradient(graph: DataflowGraph, subject: Subject) -> FaultLocation:
    module = graph.owner(subject)
    if module is not None:
        around = f"in the backward of {module or 'the model'}"
        return FaultLocation(Cause.PARAMETER, f"{around}, between the gradient of its output and that of its parameter")
    forward = ("actv", subject.series.vpp_stage) in graph.kinds
    if forward:
        text = "in the backward of the model. Gradients of activations around it were not recorded"
    else:
        text = "in the forward or backward of the model. Activations were not recorded"
    return FaultLocation(Cause.PASSES, f"{text}, so the place is not known more precisely")


def _aggregation(job: RankedJob, member: Member, subject: Subject, step: int) -> FaultLocation:
    ranks = member.ranks("dp")
    among = f"in the aggregation of gradients over {listed(ranks)}" if len(ranks) > 1 else ""
    after = among or "between the backward and the optimizer's step"
    if notes_a_change(member.manifest):
        text = f"{after}, where all were changed together, as by clipping: any of them may be the cause"
        return FaultLocation(Cause.CHANGED_GRADIENTS, text)
    unseen = [
        rank for rank in ranks or (member.rank,) if not _shows_its_own(job.member_of(member.recording, rank), subject, step)
    ]
    if not unseen:
        return FaultLocation(Cause.AGGREGATION, after)
    return FaultLocation(
        Cause.UNSEEN_RANKS, f"in the backward of {listed(unseen)}, whose own gradient is not known, or {after}"
    )


def _shows_its_own(member: Member | None, subject: Subject, step: int) -> bool:
    """Whether the rank's local gradient of the parameter was measured and judged."""
    local = Series("grad_unreduced", subject.series.vpp_stage, subject.series.name)
    return member is not None and member.has_judged_all(step) and member.graph is not None and local in member.graph.numbers


def _not_recorded(graph: DataflowGraph, subject: Subject) -> str:
    """The optimizer's inputs that were not recorded, as a text."""
    chunk, name = subject.series.vpp_stage, subject.series.name
    missing = [
        text for text, kinds in _MADE_OF.items() if not any(Series(kind, chunk, name) in graph.numbers for kind in kinds)
    ]
    return f" (not recorded: {', '.join(missing)})" if missing else ""
