"""What else fired in the step of an event: a deviation of many tensors on all ranks is another matter than that of one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from monitor.anomalies.ranking.evidence import Evidence, Flags
from monitor.anomalies.ranking.job import Job
from monitor.anomalies.ranking.sweep import IN_PASSES


class Surroundings(NamedTuple):
    """The deviations in the step of an event. What came after the aggregation of gradients does not count: all ranks share it.

    Attributes:
        tensors: How many tensors deviate.
        ranks: On how many ranks.
        all_ranks: Whether that is every rank that can tell.
        steps: In how many steps the tensor of the event deviates.
    """

    tensors: int
    ranks: int
    all_ranks: bool
    steps: int


def surroundings(job: Job, evidence: Evidence, number: int) -> Surroundings:
    """Those of an event."""
    of = evidence
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
