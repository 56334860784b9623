"""Where an origin lies: between the last series that was clean and this one, in the smallest module that holds both."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Final, NamedTuple

from monitor.anomalies.ranking.graph import ROOT, Role, Subject, Wiring, parent
from monitor.anomalies.ranking.job import Job, Member
from monitor.anomalies.ranking.origins import notes_a_change
from monitor.anomalies.ranking.step_propagation import seam
from monitor.series import GRADIENT_KINDS, MOMENT_KINDS, Series

# --- How what people read is spelled.

SHOWN: Final = 10
"""Of one cause; more are counted."""


def listed(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 3, 4 and 10 more``."""
    shown = ", ".join(map(str, ranks[:SHOWN]))
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def capitalized(said: str) -> str:
    """With a capital first letter, the others as they are."""
    return said[:1].upper() + said[1:]


_MADE_OF: Final = {"gradients": GRADIENT_KINDS, "moments": MOMENT_KINDS, "the weight before": ("param_origin",)}
"""A weight by the optimizer, and the kinds that show it."""


class Where(Enum):
    """What an origin points at."""

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


class Span(NamedTuple):
    """What an origin points at, and that in words."""

    where: Where
    told: str


def span_of(job: Job, member: Member, subject: Subject, step: int) -> Span:
    """The span of an event that is an origin."""
    wiring = member.wiring
    if wiring is None:
        return Span(Where.UNKNOWN, "the first event; its inputs are not known")
    if subject.role == Role.FORWARD:
        return _forward(job, member, wiring, subject, step)
    if subject.role == Role.BACKWARD:
        return _backward(job, member, wiring, subject, step)
    return _of_parameter(job, member, wiring, subject, step)


def _forward(job: Job, member: Member, wiring: Wiring, subject: Subject, step: int) -> Span:
    clean = _last_clean(wiring, subject)
    if clean is not None:
        return _within(clean, subject, _own_module(subject), "")
    other = seam(job, member, subject.series.vpp_stage, subject.role, step)
    if other is not None:
        return _handed_over(member, other, subject, "output", "input")
    if member.place(subject.series.vpp_stage) > 0:
        return _not_shown(member, "before")
    if subject.is_input and subject.module == ROOT:
        return Span(Where.DATA, "in what the model was given: the batch")
    return Span(Where.BEFORE, f"between the batch and {name_of(subject)}")


def _backward(job: Job, member: Member, wiring: Wiring, subject: Subject, step: int) -> Span:
    clean = _last_clean(wiring, subject)
    if clean is not None:
        around = subject.module if wiring.uses_itself(subject) else _own_module(subject)
        return _within(wiring.innermost(clean), subject, around, "the gradients of ")
    other = seam(job, member, subject.series.vpp_stage, subject.role, step)
    if other is not None:
        return _handed_over(member, other, subject, "input gradient", "output gradient")
    if member.place(subject.series.vpp_stage) < member.places - 1:
        return _not_shown(member, "after")
    if wiring.shows_exit(Role.FORWARD, subject.series.vpp_stage, ROOT):
        return Span(Where.LOSS, f"between the loss and the gradient of {name_of(subject)}")
    return Span(
        Where.BEHIND, f"behind what is watched of the forward, in the loss, or before the gradient of {name_of(subject)}"
    )


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


def _within(clean: Subject, subject: Subject, own: str, of: str) -> Span:
    """``own``: the smallest module that the tensor may have been made in."""
    module = _holding(clean, own)
    inside = module == subject.module == own
    place = f"{'inside' if inside else 'in'} {module or 'the model'}"
    told = f"{place}, between {of}{_relative(clean, module)} and {_relative(subject, module)}"
    return Span(Where.INSIDE if inside else Where.BETWEEN, told)


def _own_module(subject: Subject) -> str:
    """What comes into a module was made in the one around it."""
    return parent(subject.module) if subject.is_entry else subject.module


def _holding(clean: Subject, module: str) -> str:
    """The smallest module around this one that holds the clean tensor, too."""
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


def _of_parameter(job: Job, member: Member, wiring: Wiring, subject: Subject, step: int) -> Span:
    if subject.role == Role.LOCAL_GRADIENT:
        return _local_gradient(wiring, subject)
    if subject.role == Role.GRADIENT:
        return _aggregation(job, member, subject, step)
    if subject.role == Role.MOMENT:
        return Span(Where.MOMENTS, f"in the optimizer's state, before step {step}")
    if subject.role == Role.UPDATED_WEIGHT:
        return Span(Where.UPDATE, f"in the optimizer's step {step}{_not_recorded(wiring, subject)}")
    if subject.role == Role.ORIGINAL_WEIGHT:
        return Span(Where.WEIGHTS, f"in the weights before step {step}, after the last update that was judged")
    return Span(Where.UNKNOWN, "the first on its rank")


def _local_gradient(wiring: Wiring, subject: Subject) -> Span:
    module = wiring.owner(subject)
    if module is not None:
        around = f"in the backward of {module or 'the model'}"
        return Span(Where.PARAMETER, f"{around}, between the gradient of its output and that of its parameter")
    forward = ("actv", subject.series.vpp_stage) in wiring.kinds
    if forward:
        told = "in the backward of the model. Gradients of activations around it were not recorded"
    else:
        told = "in the forward or backward of the model. Activations were not recorded"
    return Span(Where.PASSES, f"{told}, so the place is not known more closely")


def _aggregation(job: Job, member: Member, subject: Subject, step: int) -> Span:
    ranks = member.ranks("dp")
    among = f"in the aggregation of gradients over {listed(ranks)}" if len(ranks) > 1 else ""
    after = among or "between the backward and the optimizer's step"
    if notes_a_change(member.manifest):
        told = f"{after}, where all were changed together, as by clipping: any of them may have brought it in"
        return Span(Where.CHANGED_GRADIENTS, told)
    unseen = [
        rank for rank in ranks or (member.rank,) if not _shows_its_own(job.member_of(member.recording, rank), subject, step)
    ]
    if not unseen:
        return Span(Where.AGGREGATION, after)
    return Span(Where.UNSEEN_RANKS, f"in the backward of {listed(unseen)}, whose own gradient is not known, or {after}")


def _shows_its_own(member: Member | None, subject: Subject, step: int) -> bool:
    """Whether the rank's local gradient of the parameter was measured and judged."""
    local = Series("grad_unreduced", subject.series.vpp_stage, subject.series.name)
    return member is not None and member.has_judged_all(step) and member.wiring is not None and local in member.wiring.numbers


def _not_recorded(wiring: Wiring, subject: Subject) -> str:
    """Of what the optimizer makes a weight from."""
    chunk, name = subject.series.vpp_stage, subject.series.name
    missing = [
        told for told, kinds in _MADE_OF.items() if not any(Series(kind, chunk, name) in wiring.numbers for kind in kinds)
    ]
    return f" (not recorded: {', '.join(missing)})" if missing else ""
