"""Whether the experts of each router share its tokens, over the last recorded steps."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from monitor.query.sources import RowChoice
from monitor.report.facts import Facts
from monitor.report.findings import BAD, GOOD, NOT_LOOKED_AT, CheckFinding, Place
from monitor.report.history import Ints
from monitor.report.kind_reader import GLOBAL_NAME
from monitor.stats.loads import LOAD_KIND, NO_EXPERT, router_and_expert
from monitor.stats.partials import Floats

STEPS: Final = 100
"""Most steps of the window."""

LEAST_TOKENS: Final = 100
"""Assignments of an even share, from which on a router is judged. If routing were even, an expert would have none of them with
a probability of about e^-100.
"""

IMBALANCE: Final = 8.0
"""The greatest load over the mean that is a fault: MaxVio + 1 of Wang et al. 2024 (arXiv 2408.15664). The limit is our choice.
In pytorch/torchtitan issue 1246, a collapsed router sends most tokens to one expert.
"""

STARVED: Final = 0.1
"""Experts with less than this part of an even share are counted, and said. They are no fault by themselves: in large trained
models the least loaded expert can have a millionth of the greatest load (arXiv 2506.21328, abstract).
"""

SILENT_STEPS: Final = 16
"""Steps without a token after which an expert that had some is dead, if ``LEAST_TOKENS`` were to be expected. Our choice: the
data of a few steps may have nothing for an expert.
"""

MOST_NAMED: Final = 5
_THEN: Final = "Raise the coefficient of the load-balancing loss, or the update rate of the balancing bias."


class RouterLoad(NamedTuple):
    """The assignments of a router in the window.

    Attributes:
        even: An even share.
        shares: By expert, as shares of an even load.
        steps: Those with assignments, ascending.
        counts: By step and expert.
    """

    name: str
    even: float
    shares: Floats
    steps: Ints
    counts: Floats


def load_of_experts(facts: Facts) -> CheckFinding:
    """Judge the sums over all ranks, micro-steps and steps of the window, so that a small batch is no fault."""
    spans = facts.kinds[LOAD_KIND].spans if LOAD_KIND in facts.kinds else []
    if not spans:
        return CheckFinding(NOT_LOOKED_AT, "It was not recorded.")
    span = spans[-1]
    wanted = range(max(span.first, span.last - STEPS + 1), span.last + 1)
    columns = ("step", "name", GLOBAL_NAME, "assigned")
    rows = facts.source.rows(RowChoice(LOAD_KIND, steps=wanted, columns=columns))
    judged = [one for one in _routers(rows) if one.even >= LEAST_TOKENS]
    if not judged:
        return CheckFinding(NOT_LOOKED_AT, f"There are fewer than {LEAST_TOKENS} assignments an expert in the last file.")
    step = rows["step"].to_numpy()
    for one in judged:
        if said := _fault(one):
            says = f"{LOAD_KIND} {one.name}, in steps {step.min()} to {step.max()}: {said}."
            return CheckFinding(BAD, says, Place(int(step.max()), None, LOAD_KIND, one.name), _THEN)
    return CheckFinding(GOOD, _summary(judged))


def _routers(rows: pa.Table) -> list[RouterLoad]:
    of_router: dict[str, list[tuple[int, int, float]]] = {}
    for one in rows.group_by(["step", "name", GLOBAL_NAME]).aggregate([("assigned", "sum")]).to_pylist():
        router, expert = router_and_expert(one[GLOBAL_NAME] or one["name"])
        if expert != NO_EXPERT:
            of_router.setdefault(router, []).append((one["step"], expert, one["assigned_sum"] or 0.0))
    return [_of(name, of_router[name]) for name in sorted(of_router)]


def _of(name: str, found: list[tuple[int, int, float]]) -> RouterLoad:
    every, expert, assigned = (np.array(one) for one in zip(*found, strict=True))
    steps, place = np.unique(every, return_inverse=True)
    counts = np.zeros((len(steps), int(expert.max()) + 1))
    np.add.at(counts, (place, expert), assigned)
    of_expert = counts.sum(axis=0)
    even = float(of_expert.mean())
    return RouterLoad(name, even, of_expert / even if even else of_expert, steps, counts)


def _fault(one: RouterLoad) -> str:
    dead = np.flatnonzero(one.shares == 0).tolist()
    if dead:
        named = ", ".join(map(str, dead[:MOST_NAMED])) + (" ..." if len(dead) > MOST_NAMED else "")
        return f"{len(dead)} of its {len(one.shares)} experts got no token, where an even share is {one.even:.0f}: {named}"
    if one.shares.max() >= IMBALANCE:
        return f"expert {int(one.shares.argmax())} got {one.shares.max():.3g} times an even share"
    return _late(one)


def _late(one: RouterLoad) -> str:
    """Which expert got tokens first and none since, where it would have got many at its earlier rate; or nothing."""
    last = len(one.steps) - 1 - (one.counts[::-1] > 0).argmax(axis=0)  # every expert has a token
    routed = one.counts.sum(axis=1).cumsum()
    expected = one.counts.sum(axis=0) / routed[last] * (routed[-1] - routed[last])
    dead = np.flatnonzero((len(one.steps) - 1 - last >= SILENT_STEPS) & (expected >= LEAST_TOKENS)).tolist()
    if not dead:
        return ""
    first = min(dead, key=lambda expert: (last[expert], expert))
    more = f", and so for {len(dead) - 1} more" if len(dead) > 1 else ""
    return (
        f"expert {first} got no token after step {one.steps[last[first]]}, "
        f"where {expected[first]:.0f} are expected at its earlier rate{more}"
    )


def _summary(judged: list[RouterLoad]) -> str:
    least, most = (min(one.shares.min() for one in judged), max(one.shares.max() for one in judged))
    starved = sum(int((one.shares < STARVED).sum()) for one in judged)
    few = f"; {starved} have less than {STARVED} of it" if starved else ""
    return f"Every expert got tokens, from {least:.2g} to {most:.2g} times an even share{few}."
