"""The verdict of a report: one sentence that the checks give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from monitor.anomalies.corruption import ADVICE
from monitor.anomalies.ranking.report import found_first
from monitor.report.checks import CheckResult, row_events, said
from monitor.report.facts import Facts
from monitor.report.findings import BAD, GOOD, NOT_LOOKED_AT, Place, Verdict
from monitor.report.spike_links import RATE
from monitor.report.spikes import SPIKES
from monitor.series import GRADIENT_KINDS, LEFT_BY_STEP, MOMENT_KINDS
from monitor.terminal import counted

OF_BITS: Final = ("Replicas agree", "Unchanged between steps")


def verdict_of(facts: Facts, checks: Sequence[CheckResult]) -> Verdict:
    """The verdict that the checks give."""
    bad = [one for one in checks if one.state == BAD]
    first_event = None if facts.ranking is None else facts.ranking.first_origin
    of_bits = [one for one in bad if one.name in OF_BITS]
    is_of_bits = bool(
        of_bits and first_event is not None and (first_event.rule in ADVICE or _before(first_event.step, of_bits))
    )
    earlier = of_bits if is_of_bits else _before_deviation(facts, bad)
    if facts.ranking is not None and facts.ranking.has_faults and not earlier:
        says, then = found_first(facts.ranking)
        return Verdict(BAD, says, f"{_loss_before(facts)}{_jump_before(facts)}{then}", bad[0].finding.place)
    if bad:
        first = _explained(min(earlier or bad, key=_earliest), bad)
        more = [one.name for one in bad if one is not first]
        next_steps = [first.finding.then, f"Also bad: {', '.join(more)}." if more else ""]
        return Verdict(BAD, first.finding.says, " ".join(filter(None, next_steps)), first.finding.place)
    unseen = [one.name for one in checks if one.state == NOT_LOOKED_AT]
    without = f"Not looked at: {', '.join(unseen)}." if unseen else "Every check has looked."
    lacking = [one.name for one in checks if one.is_needed and one.state == NOT_LOOKED_AT]
    rows = f"{counted(sum(facts.told['rows'].values()), 'row')} of {counted(len(facts.ranks), 'rank')}"
    if lacking:
        says = f"Nothing wrong was found in {rows}, but needed checks did not look: {', '.join(lacking)}."
        return Verdict(NOT_LOOKED_AT, says, without, Place())
    healthy = f"Healthy: nothing wrong was found in {rows} and {counted(len(facts.axis.steps), 'step')}."
    noted = [one.finding.then for one in checks]
    return Verdict(GOOD, " ".join(filter(None, [healthy, *noted])), without, Place())


def _loss_before(facts: Facts) -> str:
    """What is said of a loss that was not finite before the gradient that an alert rule found first."""
    first = None if facts.ranking is None else facts.ranking.first_origin
    losses = [one for one in row_events(facts, only_infinite=True) if one.is_loss]
    if not losses or first is None or first.subject.series.kind not in _OF_BACKWARD or losses[0].sudden.step > first.step:
        return ""
    return f"The {losses[0].name} was not finite in step {losses[0].sudden.step}, before any gradient of that step. "


def _jump_before(facts: Facts) -> str:
    """What is said of a value that changed suddenly before the NaN that an alert rule found first: its rule judges no jumps."""
    first = None if facts.ranking is None else facts.ranking.first_origin
    event = next(iter(row_events(facts)), None)
    if first is None or first.is_finite or event is None or not event.is_finite or event.sudden.step > first.step:
        return ""
    return f"Before it came {said(event, facts)}. "


_OF_BACKWARD: Final = ("actv_grad", *GRADIENT_KINDS)
_ONLY_SEEN: Final = ("Sudden changes", "Loss", "Total gradient norm")
"""Checks that say what happened, and not why."""


def _before_deviation(facts: Facts, bad: Sequence[CheckResult]) -> list[CheckResult]:
    """The checks that saw what came before a deviation that an alert rule found first. A NaN comes before all else."""
    event = None if facts.ranking is None else facts.ranking.first_origin
    if event is None or not event.is_finite:
        return []
    step, is_left = event.step, event.subject.series.kind.endswith(LEFT_BY_STEP)
    seen = (one for one in bad if one.name in (*_ONLY_SEEN, SPIKES))
    return [one for one in seen if _before(step, [one]) or (is_left and _is_of_moments(one.finding.place, step))]


def _is_of_moments(place: Place, step: int) -> bool:
    """Whether a check found something in the moments that a step began with: the optimizer makes new weights of them."""
    return place.step == step and place.kind in MOMENT_KINDS


def _before(step: int, bad: Sequence[CheckResult]) -> bool:
    """Whether one of these checks found something before ``step``: alerts of that step may follow from it."""
    return any(one.finding.place.step is not None and one.finding.place.step < step for one in bad)


def _explained(first: CheckResult, bad: Sequence[CheckResult]) -> CheckResult:
    """The check of spikes in place of one that only saw something, if it knows the cause. A learning rate of some ranks
    alone explains why copies of weights have differed since that step, too.
    """
    cause = next((one for one in bad if one.name == SPIKES and one.finding.listed[0]["cause"]), first)
    if first.name in OF_BITS and cause is not first:
        said = cause.finding.listed[0]
        of_ranks = said["cause"] == RATE and said["place"].get("rank") is not None
        return cause if of_ranks and said["place"]["step"] <= (first.finding.place.step or 0) else first
    is_before = (cause.finding.place.step or 0) <= (first.finding.place.step or 0)  # later steps explain nothing
    return cause if first.name in _ONLY_SEEN and is_before else first


def _earliest(one: CheckResult) -> tuple[bool, bool, int]:
    step = one.finding.place.step
    return not one.of_training, step is None, step or 0
