"""Where an origin lies: between the last series that was clean and this one, in the smallest module that holds both."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from monitor.anomalies.job import Job, Member
from monitor.anomalies.subjects import ROOT, Role, Subject, parent
from monitor.anomalies.sweep import seam
from monitor.anomalies.wiring import Wiring
from monitor.series import Series


class Where(Enum):
    """What an origin points at."""

    INSIDE = "inside a module"
    BETWEEN = "between modules"
    DATA = "what the model was given"
    STAGES = "between stages of the pipeline"
    LOSS = "the loss"
    PARAMETER = "the gradient of a parameter"
    AGGREGATION = "the aggregation of gradients"
    MOMENTS = "the optimizer's state"
    UPDATE = "the optimizer's step"
    WEIGHTS = "weights between two steps"
    UNKNOWN = "unknown"


class Span(NamedTuple):
    """What an origin points at, and that in words."""

    where: Where
    told: str


def span_of(job: Job, member: Member, subject: Subject, step: int) -> Span:
    """The span of an event that is an origin."""
    wiring = member.wiring
    if wiring is None:
        return Span(Where.UNKNOWN, "the first in order; nothing is known of what fed it")
    if subject.role == Role.FORWARD:
        return _forward(job, member, wiring, subject, step)
    if subject.role == Role.BACKWARD:
        return _backward(job, member, wiring, subject, step)
    return _of_parameter(member, wiring, subject, step)


def _forward(job: Job, member: Member, wiring: Wiring, subject: Subject, step: int) -> Span:
    clean = _last_clean(wiring, subject)
    if clean is not None:
        return _within(clean, subject, "")
    other = seam(job, member, subject.series.vpp_stage, subject.role, step)
    if other is not None:
        return _handed_over(member, other, subject, "output", "input")
    if member.place(subject.series.vpp_stage) > 0:
        return _not_shown(member, "before")
    if subject.is_input:
        return Span(Where.DATA, "in what the model was given: the batch")
    return Span(Where.INSIDE, f"between the batch and {name_of(subject)}")


def _backward(job: Job, member: Member, wiring: Wiring, subject: Subject, step: int) -> Span:
    clean = _last_clean(wiring, subject)
    if clean is not None:
        return _within(clean, subject, "the gradients of ")
    other = seam(job, member, subject.series.vpp_stage, subject.role, step)
    if other is not None:
        return _handed_over(member, other, subject, "input gradient", "output gradient")
    if member.place(subject.series.vpp_stage) < member.places - 1:
        return _not_shown(member, "after")
    return Span(Where.LOSS, f"between the loss and the gradient of {name_of(subject)}")


def _handed_over(member: Member, other: Member, subject: Subject, given: str, taken: str) -> Span:
    """One that the root's own series do not show may also lie between the root and it."""
    there = f"stage {other.stage}'s {given} (rank {other.rank})"
    here = f"stage {member.stage}'s {taken}" if subject.module == ROOT else name_of(subject)
    return Span(Where.STAGES, f"between {there} and {here} (rank {member.rank}): the communication between the stages")


def _not_shown(member: Member, side: str) -> Span:
    told = f"the first to show it on stage {member.stage}; what the stage {side} it handed over is not known"
    return Span(Where.UNKNOWN, told)


def _last_clean(wiring: Wiring, subject: Subject) -> Subject | None:
    """The last series before this one, in the module from which it was made. Of an origin all of these are clean."""
    same = wiring.same_as(subject.series) if subject.role == Role.FORWARD and subject.is_input else None
    if same is not None and same.made:
        return same.made[0]
    closure = wiring.closure(subject)
    around = ROOT if closure is None else closure
    own_entry = subject.is_entry and subject.module == ROOT
    return None if own_entry else next((one for one in wiring.before(subject) if around in one.around), None)


def _within(clean: Subject, subject: Subject, of: str) -> Span:
    module = _holding(clean, subject)
    inside = not subject.is_entry and module == subject.module
    place = f"{'inside' if inside else 'in'} {module or 'the model'}"
    told = f"{place}, between {of}{_relative(clean, module)} and {_relative(subject, module)}"
    return Span(Where.INSIDE if inside else Where.BETWEEN, told)


def _holding(clean: Subject, subject: Subject) -> str:
    """The smallest module that holds both."""
    module = parent(subject.module) if subject.is_entry else subject.module
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
    """As people read it: of the root nothing but what it is."""
    if subject.role in (Role.FORWARD, Role.BACKWARD) and subject.module == ROOT:
        return f"the model's {_slot(subject)}"
    return subject.series.name


def _of_parameter(member: Member, wiring: Wiring, subject: Subject, step: int) -> Span:
    if subject.role == Role.LOCAL_GRADIENT:
        module = wiring.owner(subject)
        around = "the backward of the model" if module is None else f"the backward of {module or 'the model'}"
        begins = "" if module is None else ", between the gradient of its output and that of its parameter"
        return Span(Where.PARAMETER, f"in {around}{begins}")
    if subject.role == Role.GRADIENT:
        return _aggregation(member, wiring, subject)
    if subject.role == Role.MOMENT:
        return Span(Where.MOMENTS, f"in the optimizer's state, before step {step}")
    if subject.role == Role.UPDATED_WEIGHT:
        return Span(Where.UPDATE, f"in the optimizer's step {step}")
    if subject.role == Role.ORIGINAL_WEIGHT:
        return Span(Where.WEIGHTS, f"in the weights before step {step}, after the last update that was judged")
    return Span(Where.UNKNOWN, "the first on its rank")


def _aggregation(member: Member, wiring: Wiring, subject: Subject) -> Span:
    local = Series("grad_unreduced", subject.series.vpp_stage, subject.series.name)
    begins = "" if local in wiring.numbers else "in the backward, or "
    ranks = member.ranks("dp")
    if len(ranks) > 1:
        return Span(Where.AGGREGATION, f"{begins}in the aggregation of gradients over ranks {', '.join(map(str, ranks))}")
    return Span(Where.AGGREGATION, f"{begins}between the backward and the optimizer's step")
