"""The printed report: a table of the earliest events, notes on coverage and order, and advice what to look at next."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final, Literal

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from monitor.anomalies.corruption import ADVICE
from monitor.anomalies.ranking.coverage import Coverage, UnjudgedSteps
from monitor.anomalies.ranking.graph import SCALED, Role
from monitor.anomalies.ranking.ranking import SHOWN, Cause, Ranked, Ranking, Surroundings, capitalized, listed, name_of
from monitor.anomalies.ranking.step_propagation import IN_PASSES
from monitor.anomalies.rules import RULES
from monitor.series import NO_MICRO_STEP, REPLICA_KIND
from monitor.terminal import counted, plain

_ANY_WIDTH: Final = 10_000
"""Width of a console on which every line of a table fits."""

_COUNTED: Final = {"nans": "NaN", "infs": "infinite"}


def listing(ranking: Ranking, console: Console) -> RenderableType:
    """The earliest events, in order: as a table or, on a narrow console, a few lines each."""
    wide = _table(ranking)
    whole = Measurement.get(console, console.options.update(max_width=_ANY_WIDTH), wide).maximum
    if whole <= console.width:
        return wide
    return Text("\n".join(plain(line) for one in ranking.ranked for line in _lines(one, ranking)))


def _lines(one: Ranked, ranking: Ranking) -> Iterator[str]:
    yield f"{_origin(one)}: {_rank(one, ranking)}, {_step(one)}"
    yield f"  {tensor(one)}"
    yield f"  {one.op} {_value(one)}, {one.rule}"
    if remark(one):
        yield f"  {remark(one)}"


def _origin(one: Ranked) -> str:
    return "origin" if one.is_origin else "propagated"


def _table(ranking: Ranking) -> Table:
    found = Table(box=None, pad_edge=False)
    places = [_place(one) for one in ranking.ranked]
    left_out = {"micro-step"} if not any(place["micro-step"] for place in places) else set()
    left_out |= set() if ranking.job.has_several_recordings else {"recording"}
    shown = [name for name in ("rank", "host", "recording", "step", "micro-step") if name not in left_out]
    for name in shown:
        found.add_column(name, no_wrap=True)
    for name in ("tensor", "statistic", "value", "rule", "", "remark"):
        found.add_column(name)
    for one, place in zip(ranking.ranked, places, strict=True):
        cells = [*(place[name] for name in shown), tensor(one), one.op, _value(one), one.rule, _origin(one), remark(one)]
        found.add_row(*(Text(plain(cell)) for cell in cells))  # as text: names must not be parsed as markup
    return found


def _place(one: Ranked) -> dict[str, str]:
    return {
        "rank": str(one.member.rank),
        "host": one.member.host,
        "recording": str(one.member.recording + 1),
        "step": str(one.step),
        "micro-step": "" if one.micro_step == NO_MICRO_STEP else str(one.micro_step),
    }


def tensor(one: Ranked) -> str:
    """The tensor's kind, chunk and name, as in a tag."""
    series = one.subject.recorded_as
    return f"{series.kind} {series.vpp_stage}:{series.name}"


def remark(one: Ranked) -> str:
    """The location of an origin, and whether it is on this replica only."""
    if one.location is None or _advice_of_rule(one):
        return "on this replica only" if one.alone else ""
    return f"{one.location.text}; {one.alone}" if one.alone else one.location.text


def counts(ranking: Ranking) -> str:
    """The numbers of events, ranks and origins, in one line."""
    judged = [one.events.judged for one in ranking.job.members]
    not_kept = sum(sum(one.not_kept.values()) for one in judged)
    ranks = f"{ranking.ranks:,} of {counted(len({one.rank for one in judged}), 'rank')}"
    parts = [f"{counted(ranking.events, 'event')} of {ranks}", counted(ranking.origins, "origin")]
    if not_kept:
        parts.append(f"{counted(not_kept, 'more was', 'more were')} not kept")
    return "; ".join(parts)


def notes(ranking: Ranking) -> Iterator[str]:
    """Notes on the order and on missing files, ranks and steps."""
    job = ranking.job
    if ranking.events:
        yield from _of_the_order(ranking)
    if ranking.overflows and ranking.has_faults:
        yield (
            f"{counted(ranking.overflows, 'event')} of gradients came from a loss scale that was too high. The optimizer "
            "skipped their steps. So the first event is looked for among the others."
        )
    if job.missing:
        origins = ": a fault that is called an origin may have started there" if ranking.events else ""
        yield f"{listed(job.missing)} wrote no events and judged no step{origins}."
    open_ranks = sorted({one.rank for one in job.members if not one.events.judged.closed})
    if open_ranks:
        runs = "runs" if len(open_ranks) == 1 else "run"
        yield f"{listed(open_ranks)} did not end cleanly, or still {runs}: later events may be missing."
    yield from _not_looked_at(ranking)
    for flaw in job.flaws[:SHOWN]:
        yield f"{flaw.path}: {flaw.reason}"
    if len(job.flaws) > SHOWN:
        yield f"and {len(job.flaws) - SHOWN} more files"


def _of_the_order(ranking: Ranking) -> Iterator[str]:
    job = ranking.job
    yield from (
        f"Forwards and backwards are ordered by micro-steps and stages only: {reason}."
        for reason in dict.fromkeys(ranking.unordered.values())
    )
    if job.without_manifest:
        yield (
            f"{_without_manifest(job.without_manifest)} first event of each step is called an origin, unless another rank or "
            "the update before may have caused it."
        )
    if job.has_several_recordings:
        yield (
            "The ranks have several recordings each, counted in the order in which they began. What one passes to another is "
            "not known: each has origins of its own."
        )


def _without_manifest(ranks: Sequence[int]) -> str:
    has, their = ("has", "its") if len(ranks) == 1 else ("have", "their")
    return f"{capitalized(listed(ranks))} {has} no manifest. Only {their} order of calls is known, so {their}"


def _not_looked_at(ranking: Ranking) -> Iterator[str]:
    """Steps, ranks and replicas that no rule has judged."""
    coverage, job = ranking.coverage, ranking.job
    everybody = {one.rank for one in job.members}
    if coverage.is_empty and coverage.steps:
        yield (
            'Not judged: no rank recorded a row that alert rules judge. Switch a kind on, such as "wg_distribution": true '
            'for gradients or "xy_distribution" for activations.'
        )
    elif coverage.is_empty:
        yield "Not judged: no rank has judged any of these steps."
    for gap in coverage.gaps[:SHOWN]:
        on = "" if set(gap.ranks) == everybody else f" of {listed(gap.ranks)}"
        yield f"Not judged: {_steps_text(gap)}{on}: {gap.reason}."
    if len(coverage.gaps) > SHOWN:
        yield f"Not judged: more steps, for {len(coverage.gaps) - SHOWN} other reasons."
    for ranks, kinds in _in_few_steps(ranking).items():
        yield f"Recorded in some of the steps only{ranks}: {', '.join(kinds)}. In the others these kinds were not judged."
    if coverage.idle:
        yield f"Not judged: {listed(coverage.idle)} recorded no row that alert rules judge."
    if job.not_monitored:
        yield f"Not monitored, as module_ranks says: {listed(job.not_monitored)}."
    if any(one.manifest is not None and one.manifest.config.get("replica_check") is False for one in job.members):
        yield "replica_check is false: a tensor that one rank writes for several was judged on that rank only."


def _in_few_steps(ranking: Ranking) -> dict[str, list[str]]:
    """Kinds that were judged in fewer steps than others, with the number of these steps: by the ranks, as a text.

    A kind that lacks one step is not told: moments begin with the second.
    """
    every = ranking.job.members
    of: dict[str, list[int]] = {}
    for one in every:
        for kind, steps in one.events.judged.kinds.items():
            if one.events.judged.steps.count - steps.count > 1:
                said = f"{kind} ({steps.count:,} of {one.events.judged.steps.count:,})"
                of.setdefault(said, []).append(one.rank)
    found: dict[str, list[str]] = {}
    for kind, ranks in of.items():
        found.setdefault("" if len(ranks) == len(every) else f" by {listed(sorted(set(ranks)))}", []).append(kind)
    return found


def _steps_text(gap: UnjudgedSteps) -> str:
    if gap.count == 1:
        return f"step {gap.first}"
    between = f"{gap.first} to {gap.last}"
    return f"steps {between}" if gap.count == gap.last - gap.first + 1 else f"{gap.count:,} of the steps {between}"


def described_value(one: Ranked) -> str:
    """The statistic's value, in words."""
    if one.rule in ADVICE:
        return "its bits are not what they should be"
    if one.op in _COUNTED:
        return f"{one.value:g} elements are {_COUNTED[one.op]}" if one.value > 1 else f"an element is {_COUNTED[one.op]}"
    return f"{one.op} is {_value(one)}"


def _value(one: Ranked) -> str:
    """The value and what it was compared with; that of a check of bits is not told."""
    mean = "" if one.mean is None else f", running mean {one.mean:.6g}"
    return "other bits" if one.rule in ADVICE else f"{one.value:.6g}{mean}"


# --- The last line: what was found first, and what to look at next.

_NEXT: Final = {
    Cause.INSIDE: "Dump what goes into {module} there, and run it again on another device{because}.",
    Cause.BETWEEN: "Look at the code between these two, {which}, and dump what goes into it.",
    Cause.DATA: "Look at the batch that rank {rank} loaded for step {step}.",
    Cause.BEFORE: "Nothing before it is watched: look at the batch that rank {rank} loaded for step {step}, and watch more.",
    Cause.STAGES: "Both ends were measured: look at the link and at the communication library between these ranks.",
    Cause.SENT: "That rank computed good numbers: look at its code between there and the sending, and at its device.",
    Cause.LOSS: "Look at the loss function, its labels and the loss scale.",
    Cause.BEHIND: "Watch the forward up to the model's output, or look at the loss function, its labels and the loss scale.",
    Cause.PASSES: "Record activations and their gradients as well (xy_distribution), and go through step {step} again.",
    Cause.PARAMETER: "Dump the module's inputs there and the gradient of its output, and run its backward on another device.",
    Cause.AGGREGATION: "No rank's own gradient was bad: look at the communication library, and what scales or clips gradients.",
    Cause.UNSEEN_RANKS: "See whether their events are missing or not recorded (module_ranks), then look at the communication.",
    Cause.UNREAD_GRADIENTS: "Record gradients before aggregation (wg_distribution, and wg_reduced_only false) and activations "
    "(xy_distribution) in every step, and go through step {step} again.",
    Cause.GIVEN: "No rank's own gradient was bad after backward: look at what changes gradients there before they are reduced.",
    Cause.CHANGED_GRADIENTS: "Look at what changes gradients before the optimizer's step, and at the communication library.",
    Cause.MOMENTS: "Look at what changed it since the last step that was judged: a loaded checkpoint, the device's memory.",
    Cause.UNSEEN_UPDATES: "Record gradients in every step (wg_distribution, intervals), and go through step {before} again.",
    Cause.UPDATE: "Its recorded inputs were clean: look at the learning rate, eps and the optimizer.",
    Cause.UNSEEN_GRADIENTS: "Its gradients were not recorded: record them in every step (wg_distribution, intervals), and "
    "repeat step {step}.",
    Cause.WEIGHTS: "Look at what changed the weights of rank {rank} {since}: a loaded checkpoint, a broadcast{unjudged}, or "
    "the device's memory.",
    Cause.UNKNOWN: "Look at what comes before it.",
}


_ALONE: Final = "Look at what scales, clips or changes gradients before the optimizer's step."

_GROWN: Final = (
    "Look at the gradients of step {before}: a second moment grows with their squares. If they are as usual, look at what "
    "changed it since: a loaded checkpoint, the device's memory."
)
"""Replaces the advice for a moment that is finite."""

_SHARED: Final = {
    Cause.INSIDE: "Dump what goes into {module} there, and compute it again on the CPU{because}.",
    Cause.PARAMETER: "Dump the module's inputs there and the gradient of its output, and run its backward again on the CPU.",
}
"""Replaces the advice if all replicas have the event: then it is not the fault of one device."""

_GIVEN: Final = ", or what one rank sends to the others there, as context parallelism and SyncBatchNorm do"
"""What replicas also share in a forward or a backward."""

_KEPT: Final = (Role.ORIGINAL_WEIGHT, Role.MOMENT, Role.UPDATED_WEIGHT)
"""Roles whose replicas are updated with the same gradients: one rank's data cannot spoil one replica."""

_NOUNS: Final = {
    Role.FORWARD: "",
    Role.BACKWARD: "the gradient of ",
    Role.ORIGINAL_WEIGHT: "the weight ",
    Role.UPDATED_WEIGHT: "the updated weight ",
}


def advice(ranking: Ranking) -> str:
    """One paragraph."""
    if not ranking.events:
        return _no_event(ranking.coverage, whole=ranking.is_well)
    return " ".join(filter(None, found_first(ranking)))


def found_first(ranking: Ranking) -> tuple[str, str]:
    """What came first, and what to look at next. There are events."""
    first = ranking.first_origin
    if first is None:
        return (
            f"First came {_found(ranking.ranked[0], ranking)}. An earlier event caused it, and no event of these steps is an "
            "origin: rank earlier steps, too."
        ), ""
    return f"First came {_located(first, ranking)}.", " ".join([*_next(first), *_not_finite(ranking, first)])


def _advice_of_rule(one: Ranked) -> str:
    """The advice of the rule that fired; empty if the place of the fault decides."""
    advised: str = getattr(RULES.get(one.rule), "advice", "")
    return ADVICE.get(one.rule, advised)


def _located(one: Ranked, ranking: Ranking) -> str:
    found = _found(one, ranking)
    if _advice_of_rule(one):
        return found
    return f"{found}, {one.location.text}" if one.location else f"{found}, which may follow from something before"


def _not_finite(ranking: Ranking, first: Ranked) -> list[str]:
    """The first NaN or Inf, if a deviation came first: a deviation may be a false alarm, a NaN is not."""
    other = ranking.first_not_finite
    if other is None or other is first or not first.is_finite:
        return []
    return [f"The first NaN or Inf: {_located(other, ranking)}."]


def _rank(one: Ranked, ranking: Ranking) -> str:
    """The rank, its host and, if ranks have several, the recording, counted from 1 in the order in which they began."""
    recording = f" of recording {one.member.recording + 1}" if ranking.job.has_several_recordings else ""
    return f"rank {one.member.rank} ({one.member.host}){recording}"


def _step(one: Ranked) -> str:
    return f"step {one.step}" if one.micro_step == NO_MICRO_STEP else f"step {one.step}, micro-step {one.micro_step}"


def _found(one: Ranked, ranking: Ranking) -> str:
    subject = one.subject
    kind = _NOUNS.get(subject.role, f"{subject.series.kind} ")
    replica = f" (rank {one.member.rank}'s replica)" if subject.recorded_as.kind == REPLICA_KIND else ""
    chunk = f" of chunk {subject.series.vpp_stage}" if subject.series.vpp_stage else ""
    where = f"on {_rank(one, ranking)} in {_step(one)}"
    return f"{kind}{name_of(subject)}{chunk}{replica} {where}: {described_value(one)}"


_LOG_SCALE: Final = (
    "If the loop scales its loss, call `log(loss_scale=scale)` before the optimizer: overflows are no fault then."
)


def _next(one: Ranked) -> list[str]:
    if said := _advice_of_rule(one):
        return [said]
    where = one.location.cause if one.location else Cause.UNKNOWN
    parts = []
    if one.member.skipped(one.step):
        scaled = one.subject.role in SCALED
        because = (
            ", as it does where the loss scale is too high: harmless unless it repeats"
            if scaled
            else ": the weights are unaffected"
        )
        parts.append(f"The optimizer skipped step {one.step}{because}.")
        if scaled and not one.member.has_loss_scale:
            parts.append(_LOG_SCALE)
    elif where == Cause.AGGREGATION and (one.op == "infs" or math.isinf(one.value)):
        parts.append("An infinity there is most often a loss scale that is too high.")
    if one.shared is not None and one.subject.role != Role.GRADIENT:  # an aggregated gradient is on every rank
        given = _GIVEN if one.subject.role in IN_PASSES else ""
        parts.append(
            f"All {one.shared} replicas have it: suspect what they share: the software, the learning rate, the weights{given}."
        )
    deviates = one.around is not None and one.is_finite and one.subject.role in IN_PASSES
    data = "" if one.subject.role in _KEPT else ", or its data"
    if where in (Cause.STAGES, Cause.SENT) and not deviates:
        return [*parts, _NEXT[where]]  # the rank that received it is no suspect
    if one.alone is not None and not (deviates and one.around is not None and one.around.all_ranks):
        parts.append(f"No other replica has it: suspect the device of rank {one.member.rank} on {one.member.host}{data}.")
    elif deviates and one.around is not None:
        return [*parts, _deviation(one, one.around)]
    module = one.subject.module or "the model"
    which = "which is in no module that is watched" if one.subject.is_entry else f"{module} among it"
    if where == Cause.WEIGHTS and one.mean is not None and _follows_the_first_update(one):
        parts.append(
            f"The update of step {one.step - 1} was the first to be judged, so there was no running mean for its weights yet: "
            "look at the learning rate of that step."
        )
        return parts
    since, unjudged = _since(one)
    more = {"because": _because(one), "since": since, "unjudged": unjudged, "before": one.step - 1}
    parts.append(_next_step(one, where).format(module=module, which=which, rank=one.member.rank, step=one.step, **more))
    return parts


def _next_step(one: Ranked, where: Cause) -> str:
    if where in (Cause.AGGREGATION, Cause.CHANGED_GRADIENTS) and len(one.member.ranks("dp")) < 2:
        return _ALONE
    if where == Cause.MOMENTS and one.is_finite:
        return _GROWN
    return _SHARED.get(where, _NEXT[where]) if one.shared is not None else _NEXT[where]


def _since(one: Ranked) -> tuple[str, str]:
    """When the step's initial weights changed, and whether steps in between were not judged."""
    judged = one.member.events.judged
    seen, which = judged.kinds.get("param_updated"), "whose weights were"
    if seen is None:
        seen, which = judged.steps, "that was"
    before = seen.between(0, one.step - 1)
    if not before.ranges:
        return f"before step {one.step}", ""
    last = before.ranges[-1][1]
    update = "" if one.member.skipped(last) else "the update of "
    unjudged = "" if last == one.step - 1 else f", a step {which} not judged"
    return f"between {update}step {last} and step {one.step}", unjudged


def _follows_the_first_update(one: Ranked) -> bool:
    """Whether the update right before was the first to be judged: no rule that compares with a running mean fires on it."""
    updated = one.member.events.judged.kinds.get("param_updated", one.member.events.judged.steps)
    before = updated.between(0, one.step - 1)
    return before.count == 1 and before.ranges[0][1] == one.step - 1


def _deviation(one: Ranked, around: Surroundings) -> str:
    """Advice for a deviation that is not known to be of one device."""
    if around.tensors == 1:
        again = f" It deviates in {around.steps:,} steps." if around.steps > 1 else ""
        return (
            f"No other tensor of forward and backward deviates in step {one.step}.{again} Look at its norm in the steps "
            "before: growth over many steps is an instability, a single jump is often the data of the step."
        )
    on = f" on {'all ' if around.all_ranks else ''}{around.ranks:,} ranks" if around.ranks > 1 else ""
    return (
        f"{around.tensors:,} tensors of forward and backward deviate in step {one.step}{on}: look at the loss, at the learning "
        f"rate and at the data of this step. If they are as usual, the threshold of the rule is too low.{_weights_unseen(one)}"
    )


def _weights_unseen(one: Ranked) -> str:
    """A remark if weights are not recorded: an optimizer step that is too large shows in weights first."""
    how = {"never": "are not recorded (param_distribution)", "rarely": f"were not recorded{_in_this_step(one)}"}
    missing = _weights_missing(one)
    return f" Weights {how[missing]}: the update before this step may have been too large." if missing else ""


def _in_this_step(one: Ranked) -> str:
    if one.member.skipped(one.step):
        return " in this step, which the optimizer skipped"
    return " in this step (intervals, or the step did not reach its optimizer)"


def _weights_missing(one: Ranked) -> Literal["never", "rarely", ""]:
    """How weights of the event's module are missing in its step; empty if they are there."""
    every, graph = one.member.graph, one.member.graph_in(one.step)
    chunk, module = one.subject.series.vpp_stage, one.subject.module
    if every is None or graph is None or not every.has_weights(chunk, module) or graph.records_weights(chunk, module):
        return ""
    return "rarely" if every.records_weights(chunk, module) else "never"


def _no_event(coverage: Coverage, *, whole: bool) -> str:
    """A summary of what was judged, if no rule fired."""
    if coverage.is_empty:
        return "Nothing was judged. No events does not mean healthy."
    on = f"of {counted(len(coverage.ranks), 'rank')}"
    steps = counted(coverage.steps, "step")
    looked = f"{steps} {on}" if coverage.rows is None else f"{counted(coverage.rows, 'row')} {on} in {steps}"
    return f"No event in {looked}." + ("" if whole else " Not everything was judged.")


def _because(one: Ranked) -> str:
    """What is known of the module's inputs and weights."""
    graph, subject, chunk = one.member.graph_in(one.step), one.subject, one.subject.series.vpp_stage
    if graph is None or not graph.shows_entry(subject.role, chunk, subject.module):
        return ""
    how = {"never": " (set param_distribution and replica_check)", "rarely": _in_this_step(one)}
    missing = _weights_missing(one)
    if not missing:
        return ": its inputs were clean"
    return (
        f": its inputs were clean. Rank {one.member.rank}'s weights were not recorded{how[missing]}. If the weights are bad, "
        "the other device gives the same result"
    )
