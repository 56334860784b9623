"""The last line: what was found first, and what to look at next."""

from __future__ import annotations

import math
from typing import Final

from monitor.anomalies.ranking import Ranked, Ranking
from monitor.anomalies.report import told_value
from monitor.anomalies.span import Where, name_of
from monitor.anomalies.subjects import Role
from monitor.series import NO_MICRO_STEP

_NEXT: Final = {
    Where.INSIDE: "Dump what goes into {module} there, and run it again on another device: its inputs were clean.",
    Where.BETWEEN: "Look at the code between these two, which is in no module that is watched, and dump what goes into it.",
    Where.DATA: "Look at the batch that rank {rank} loaded for step {step}.",
    Where.STAGES: "Both ends were measured: look at the link and at the communication library between these ranks.",
    Where.LOSS: "Look at the loss function, its labels and the loss scale.",
    Where.PARAMETER: "Dump the module's inputs there and the gradient of its output, and run its backward on another device.",
    Where.AGGREGATION: "No rank had brought it in: look at the communication library, and at what scales or clips gradients.",
    Where.MOMENTS: "Look at the checkpoint that the optimizer's state came from, and at steps before that were not judged.",
    Where.UPDATE: "Gradients, moments and weights before were clean: look at the learning rate, eps and the optimizer itself.",
    Where.WEIGHTS: "Look at what changed weights since: a loaded checkpoint, a broadcast, or a step that was not judged.",
    Where.UNKNOWN: "Look at what comes before it.",
}


def advice(ranking: Ranking) -> str:
    """One paragraph."""
    if not ranking.events:
        return "No event: no rule has fired in these steps."
    first = ranking.first_origin
    if first is None:
        return (
            f"First came {_found(ranking.ranked[0])}, but it follows from something before, none of these is an origin: "
            "rank the steps before, too."
        )
    return " ".join([f"First came {_found(first)}, {first.span.told if first.span else ''}.", *_next(first)])


def _found(one: Ranked) -> str:
    gradient = "the gradient of " if one.subject.role == Role.BACKWARD else ""
    kind = "" if one.subject.role in (Role.FORWARD, Role.BACKWARD) else f"{one.subject.spelled.kind} "
    micro_step = "" if one.micro_step == NO_MICRO_STEP else f", micro-step {one.micro_step}"
    where = f"on rank {one.member.rank} ({one.member.host}) in step {one.step}{micro_step}"
    return f"{kind}{gradient}{name_of(one.subject)} {where}: {told_value(one)}"


def _next(one: Ranked) -> list[str]:
    where = one.span.where if one.span else Where.UNKNOWN
    told = []
    if one.member.skipped(one.step):
        told.append(
            f"The optimizer skipped step {one.step}, as it does where the loss scale is too high: harmless unless it repeats."
        )
    elif where == Where.AGGREGATION and (one.op == "infs" or math.isinf(one.value)):
        told.append("An infinity there is most often a loss scale that is too high.")
    if one.alone is not None:
        told.append(f"No other replica has it: suspect the device of rank {one.member.rank} on {one.member.host}, or its data.")
    told.append(_NEXT[where].format(module=one.subject.module or "the model", rank=one.member.rank, step=one.step))
    return told
