"""How many data-parallel ranks have an event: one alone has other data and another device, all share weights and software."""

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
    """None if other replicas have the event too, or too few of them can tell."""
    having, of = _having(job, evidence, number)
    return Alone(having[0], of) if of > 1 and len(having) == 1 else None


def shared(job: Job, evidence: Evidence, number: int) -> int | None:
    """How many replicas have the event, if all have it; None if some do not, or too few of them can tell."""
    having, of = _having(job, evidence, number)
    return of if of > 1 and len(having) == of else None


def _having(job: Job, evidence: Evidence, number: int) -> tuple[list[int], int]:
    """The ranks that have the event, and of how many. Those count that measure the tensor and have judged the step. Of a tensor
    in parts each rank holds another.
    """
    of = evidence
    member, subject, step = of.members[of.member[number]], of.subjects[of.subject[number]], int(of.step[number])
    if member.wiring is not None and subject.series in member.wiring.sharded:
        return [], 0
    others = [
        one
        for one in job.replicas(member)
        if one is member or (one.has_judged_all(step) and one.wiring is not None and subject.series in one.wiring.numbers)
    ]
    return sorted({int(of.rank[one]) for one in _same(evidence, number, others)}), len(others)


def _same(of: Evidence, number: int, members: list[Member]) -> list[int]:
    """Events of the same tensor, step and micro-step on these members."""
    same = (of.step == of.step[number]) & (of.micro_step == of.micro_step[number]) & (of.meant == of.meant[number])
    among = [index for index, one in enumerate(of.members) if any(one is other for other in members)]
    found: list[int] = np.flatnonzero(same & np.isin(of.member, among)).tolist()
    return found
