"""Whether an event was seen by one data-parallel rank alone: their data differ, and so does their hardware."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from monitor.anomalies.ranking.evidence import Evidence
from monitor.anomalies.ranking.job import Job, Member


class Alone(NamedTuple):
    """The only one of several ranks."""

    rank: int
    of: int

    def __str__(self) -> str:
        return f"only on rank {self.rank} of its {self.of} data-parallel replicas"


def alone(job: Job, evidence: Evidence, number: int) -> Alone | None:
    """None if others have the event too, or nobody can say: those count that measure the tensor and have judged the step. Of a
    tensor in parts each rank holds another.
    """
    of = evidence
    member, subject, step = of.members[of.member[number]], of.subjects[of.subject[number]], int(of.step[number])
    if member.wiring is not None and subject.series in member.wiring.sharded:
        return None
    others = [
        one
        for one in job.replicas(member)
        if one is member or (one.has_judged_all(step) and one.wiring is not None and subject.series in one.wiring.numbers)
    ]
    if len(others) < 2 or len({of.rank[one] for one in _same(evidence, number, others)}) > 1:
        return None
    return Alone(member.rank, len(others))


def _same(of: Evidence, number: int, members: list[Member]) -> list[int]:
    """Events of the same tensor, step and micro-step on these members."""
    same = (of.step == of.step[number]) & (of.micro_step == of.micro_step[number]) & (of.meant == of.meant[number])
    among = [index for index, one in enumerate(of.members) if any(one is other for other in members)]
    found: list[int] = np.flatnonzero(same & np.isin(of.member, among)).tolist()
    return found
