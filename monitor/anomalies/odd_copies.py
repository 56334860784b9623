"""Which rank holds other bits than the others, from the digests that ranks publish while training runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from monitor.series import CHECKED_KINDS, MOMENT_KINDS, Ranks
from monitor.stats.partials import Words

PATIENCE: Final = 10
"""Looks for which a rank may be behind the others. Then these are compared without it, until it publishes again."""

EARLY: Final = 2
"""Steps in which copies that differ by design do so at the latest: weights begin equal, and differ after the first update."""

ENOUGH: Final = 3
"""Fewest tensors, or copies, that may differ by design. Fewer may all differ by a fault."""

WEIGHTS: Final = CHECKED_KINDS[0]
STATE_KINDS: Final = frozenset({WEIGHTS, *MOMENT_KINDS})
"""What a step begins with, and a checkpoint holds."""

MOST_RANKS: Final = 16
"""Odd ranks that are listed."""

DigestsOfRank = Mapping[int, Mapping[str, int]]
"""What a rank has published of a group: digests by step and kind."""


MOST_UNLIKE: Final = 3
"""Steps in a row in which ranks do not have the same tensors. Then their kind is compared no more."""


@dataclass(frozen=True, slots=True)
class CopyDifference:
    """Copies of a kind that differ in a step.

    Attributes:
        odd: The ranks whose copies are not what most are. All ranks, if no more than half of the copies agree.
        agreeing: Ranks whose copies agree; empty if no more than half do.
        all_unlike: Whether there are three or more copies, and no two agree.
    """

    step: int
    kind: str
    odd: Ranks
    agreeing: Ranks
    all_unlike: bool = False


class GroupComparison:
    """Compares what the ranks of a group have published, step by step, and within a step in the order of the kinds.

    It stops at the first difference until one of ``accuse``, ``take_for_design``, ``miss`` and ``find_unlike`` says what it is.

    Attributes:
        agreed_until: The last step in which all copies agreed, before any difference; None if there is none.
        good: The last step whose checkpoint is known good: the next step began with weights and moments that agree, as far as
            they are compared. None if there is none.
        by_design: Kinds whose copies differ by design.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.agreed_until: int | None = None
        self.good: int | None = None
        self.by_design: set[str] = set()
        self._done = -1
        self._compared: Counter[str] = Counter()  # steps, by kind
        self._settled: set[str] = set()  # kinds of the step that is being compared
        self._agreed = False
        self._unlike: Counter[str] = Counter()
        self._odd: set[int] = set()
        self._missed = False
        self._newest: dict[int, int] = {}
        self._behind: Counter[int] = Counter()

    def next(self, published: Mapping[int, DigestsOfRank]) -> CopyDifference | None:
        """The next difference, from what each rank has published; None if there is none so far."""
        there = self._complete_until(published)
        for step in sorted({step for digests in published.values() for step in digests if self._done < step <= there}):
            if (found := self._first_of(step, published)) is not None:
                return found
            self._finish(step)
        return None

    def _complete_until(self, published: Mapping[int, DigestsOfRank]) -> int:
        """The last step of which no rank may still publish something, unless it has been behind for long.

        Of the step, two ranks at least have published something: one alone is compared with nothing.
        """
        newest = {rank: max(published.get(rank, {}), default=-1) for rank in self.ranks}
        furthest = max(newest.values())
        for rank, step in newest.items():
            is_behind = step < furthest and step == self._newest.get(rank, -1)
            self._behind[rank] = self._behind[rank] + 1 if is_behind else 0
        self._newest = newest
        on_time = min(step for rank, step in newest.items() if self._behind[rank] <= PATIENCE)
        compared = sorted(step for rank, step in newest.items() if rank not in self._odd)
        return min([on_time, *compared[-2:-1]])

    def _first_of(self, step: int, published: Mapping[int, DigestsOfRank]) -> CopyDifference | None:
        at_step = {rank: published.get(rank, {}).get(step, {}) for rank in self.ranks if rank not in self._odd}
        there = {kind for digests in at_step.values() for kind in digests}
        if self._began_well(step, at_step):
            self.good = step - 1
        for kind in CHECKED_KINDS:
            if kind not in there - self._settled - self.by_design:
                continue
            if self._unlike[kind] >= MOST_UNLIKE:
                self._missed = True
                continue
            values = {rank: digests[kind] for rank, digests in at_step.items() if kind in digests}
            self._missed |= len(values) < len(self.ranks)
            odd, agreeing = split(values)
            if len(values) < 2:
                self._settled.add(kind)
            elif not odd:
                self._settle(kind)
                self._agreed = True
            elif agreeing or not self._wait_for_more(values):
                all_unlike = len(values) >= ENOUGH and len(set(values.values())) == len(values)
                return CopyDifference(step, kind, odd, agreeing, all_unlike)
            else:
                self._settled.add(kind)  # a later step, which more ranks have, says which copy is odd
        return None

    def _wait_for_more(self, values: Mapping[int, int]) -> bool:
        """Whether more ranks, which are alive, may say which copy is odd."""
        absent = (rank for rank in self.ranks if rank not in values and rank not in self._odd)
        return any(self._behind[rank] <= PATIENCE for rank in absent)

    def _began_well(self, step: int, at_step: Mapping[int, Mapping[str, int]]) -> bool:
        """Whether all copies of the state that the step began with agree, weights at least."""
        kinds = {kind for digests in at_step.values() for kind in digests} & STATE_KINDS - self.by_design
        values = ([digests.get(kind) for digests in at_step.values()] for kind in kinds)
        alike = all(len(set(each)) == 1 and None not in each for each in values)
        return step > 0 and WEIGHTS in kinds and len(at_step) == len(self.ranks) and alike

    def _settle(self, kind: str) -> None:
        """The kind was compared in the step."""
        self._settled.add(kind)
        self._unlike[kind] = 0
        self._compared[kind] += 1

    def _finish(self, step: int) -> None:
        if self._agreed and not self._missed:
            self.agreed_until = step
        self._done = step
        self._agreed, self._missed = False, bool(self._odd)
        self._settled.clear()

    def is_by_design(self, found: CopyDifference, differing: int, total: int) -> bool:
        """Whether most tensors differ, in one of the first compared steps or with no two copies alike, and no copy is odd.

        Args:
            differing: How many of ``total`` tensors, or equal parts of them, differ.
        """
        most = total >= ENOUGH and 2 * differing > total and not found.agreeing
        early = self._compared[found.kind] < EARLY
        return most and (early or found.all_unlike or bool(self.by_design))

    def take_for_design(self, found: CopyDifference) -> None:
        """Compare the kind no more."""
        self._settle(found.kind)
        self.by_design.add(found.kind)

    def accuse(self, found: CopyDifference) -> None:
        """Leave out the odd ranks from now on: what differs later follows from this."""
        self._settle(found.kind)
        self._odd.update(found.odd)
        self._missed = True

    def miss(self, found: CopyDifference) -> None:
        """Too few ranks still know the step. A later one shows it again, if it is a fault."""
        self._settled.add(found.kind)
        self._missed = True

    def find_unlike(self, found: CopyDifference) -> bool:
        """The ranks do not have the same tensors in the step. Returns whether the kind is compared no more."""
        self.miss(found)
        self._unlike[found.kind] += 1
        return self._unlike[found.kind] == MOST_UNLIKE

    @property
    def is_over(self) -> bool:
        """Whether no two ranks are left to compare."""
        return len(self.ranks) - len(self._odd) < 2


def split(values: Mapping[int, int]) -> tuple[Ranks, Ranks]:
    """The ranks whose values are not what most have, and those that have it.

    If no more than half have it, all are odd. If all have it, none is.
    """
    if not values:
        return (), ()
    most, count = Counter(values.values()).most_common(1)[0]
    agreeing = tuple(rank for rank, value in values.items() if value == most and 2 * count > len(values))
    return tuple(rank for rank in values if rank not in agreeing), agreeing


def differing_places(numbers: Sequence[Words]) -> list[int]:
    """Where the numbers of several ranks are not all the same. A 0 was not measured."""
    each = np.stack(numbers)
    measured = each.astype(bool).all(axis=0)
    places: list[int] = np.flatnonzero(measured & (each != each[0]).any(axis=0)).tolist()
    return places


# --- Sentences about copies that differ, while training runs and in a merge (``monitor.merge.bits``).


_FROM_THE_START: Final = (
    "; begin with the same weights on all ranks, and set `tensor_model_parallel = True` on those that tensor parallelism splits"
)
"""What to do if copies may never have been equal."""


def who(one: Mapping[str, Any]) -> str:
    """Which ranks differ, of an entry of ``first`` in the ``bits`` of a report."""
    named = [f"{rank} ({host})" if host else f"{rank}" for rank, host in zip(one["odd_ranks"], one["hosts"], strict=True)]
    unnamed = one["copies"] - one["agreeing"] - len(named[:8])
    more = f" and {unnamed} more" if unnamed else ""
    ranks = f"rank{'' if len(named) == 1 else 's'} {', '.join(named[:8])}{more}"
    if changed := one.get("changed_on"):
        found = f"rank{'' if len(changed) == 1 else 's'} {', '.join(map(str, changed))}"
        own = f"; {found} found that its own copy changed between two steps"
    else:
        own = "" if one["agreeing"] else ", and the copies do not say which is wrong"
    if not one["agreeing"]:
        return f"{ranks} differ from each other{own}"
    return f"{ranks}: other bits than the {one['agreeing']} ranks that agree{own}"


def suspect(about: Mapping[str, Any], *, of_device: bool = True) -> str:
    """What to do, of the ``bits`` of a report: which host, if it may be the device, and which checkpoints."""
    first, good, until = about["first"][0], about["checkpoint"], about["agreed_until"]
    wrong = first["odd_ranks"] if first["agreeing"] else first.get("changed_on", ())
    named = zip(first["odd_ranks"], first["hosts"], strict=True)
    hosts = dict.fromkeys(host for rank, host in named if host and rank in wrong)
    leave = f"take {', '.join(list(hosts)[:8])} out of the job; " if hosts and of_device else ""
    so_far = "so far " if about.get("so_far") else ""
    last = f"{so_far}the last step in which all compared copies agree is {until}"
    agreed = "no earlier step was compared" if until is None else last
    known = "no checkpoint is" if good is None else f"the checkpoint of step {good} is the last that is"
    return f"{leave}{agreed}; {known} known to be good{'' if until is not None else _FROM_THE_START}"
