"""How data ran through a rank in a step: which series fed which, and in what order micro-batches went through its chunks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from monitor.coordinator.manifest_format import ManifestRecord
from monitor.series import (
    ADAM_KINDS,
    FORWARD_FEATURE_KINDS,
    MOMENT_KINDS,
    NO_MICRO_STEP,
    PARAMETER_KINDS,
    UPDATE_KINDS,
    WEIGHT_FEATURE_KINDS,
    Series,
)

MOST_EDGES: Final = 200_000
"""What is kept of the edges that were seen; a module of a thousand inputs and outputs alone has a million."""

MOST_PASSES: Final = 20_000

_FED_BY: Final = {
    "grad_reduced": ("grad_unreduced",),
    "param_updated": ("grad_reduced", "param_origin", *MOMENT_KINDS),
    **dict.fromkeys(ADAM_KINDS, ("grad_reduced", *MOMENT_KINDS)),
}
"""Kinds of a parameter, and the kinds of the same parameter that they are made from within a step. Moments are those from
before the step: this step's gradient shows in the next one's.
"""


class Edge(NamedTuple):
    """Two series by their numbers: what was measured as ``source`` went into what was measured as ``target``."""

    source: int
    target: int


class Pass(NamedTuple):
    """The forward or the backward of one micro-batch through one chunk of the model."""

    forward: bool
    vpp_stage: int
    micro_step: int


@dataclass(frozen=True, slots=True)
class Flow:
    """What one step has shown.

    Attributes:
        edges: Each once. Along them the first rows of a step stand in the order in which they were measured, so there is no
            way from a series back to itself.
        passes: In the order in which the rank began them.
        cut: Whether there was more than is kept.
    """

    edges: tuple[Edge, ...] = ()
    passes: tuple[Pass, ...] = ()
    cut: bool = False


NO_FLOW: Final = Flow()


def edges_of_parameters(series: Sequence[Series]) -> Iterator[Edge]:
    """The edges between the kinds of each parameter: from its local gradient over the aggregated one to the new weight."""
    number = {one: index for index, one in enumerate(series)}
    for target, one in enumerate(series):
        for kind in _FED_BY.get(one.kind, ()):
            source = number.get(Series(kind, one.vpp_stage, one.name))
            if source is not None:
                yield Edge(source, target)


# --- Which of two rows of a pipeline group came first, when they were measured on different ranks, whose clocks say
# nothing.
#
# A rank's own rows stand in the order of their ``call_id``. Between ranks, micro-batches carry the order: the forward
# of one at a stage comes before its forward at the next stage, its backward comes the other way, and the optimizer
# steps after every backward. With the order in which each rank ran its passes (``Flow.passes``, which the schedule
# fixes) that makes a partial order of everything:
#
#     rank 0   F0 ─▶ F1 ─▶ B0 ─▶ B1          F0 of rank 0 comes before B1 of rank 1; nothing is known of
#               ╲     ╲   ╱     ╱            F1 of rank 0 and B0 of rank 1: they may have run at the same time.
#     rank 1     F0 ─▶ B0 ─▶ F1 ─▶ B1

IN_FORWARD: Final = frozenset({"actv", *FORWARD_FEATURE_KINDS})
IN_BACKWARD: Final = frozenset({"actv_grad", "grad_unreduced"})
AT_THE_STEP: Final = frozenset({"grad_reduced", *PARAMETER_KINDS, *MOMENT_KINDS, *WEIGHT_FEATURE_KINDS, *UPDATE_KINDS})
"""Kinds that are read when every backward is done. Rows of other kinds are ordered among those of their own rank."""

_FAR: Final = 2**32
"""Beyond any stage: where the way back begins."""


class Spot(NamedTuple):
    """Where in a step a row was measured, as rows and events have it."""

    rank: int
    vpp_stage: int
    kind: str
    micro_step: int
    call_id: int


class RankPass(NamedTuple):
    """A pass on a rank."""

    rank: int
    of: Pass


@dataclass(frozen=True, slots=True)
class RankPasses:
    """What one rank of the group ran.

    Attributes:
        stages: For each chunk of the model its place in the pipeline of all ranks' chunks.
        passes: In the order in which they ran; empty where nobody knows.
    """

    stages: Sequence[int]
    passes: Sequence[Pass] = ()


class PipelineOrder:
    """The partial order of the rows of one step, over all ranks of one pipeline group.

    Where a rank's passes are not known, all that is taken for granted is that it takes micro-batches in turn.
    """

    def __init__(self, ranks: Mapping[int, RankPasses]) -> None:
        """Raises ``ValueError`` where the ranks' passes contradict each other: they are of different steps or schedules, or
        the stages are not in the order in which data goes through them.
        """
        self._ranks = ranks
        self._passes = _Passes(ranks)

    @classmethod
    def of(cls, members: Iterable[tuple[ManifestRecord, Flow]]) -> PipelineOrder:
        """The order of the ranks that these manifests and flows are of.

        Raises:
            ValueError: They are not of one pipeline group, or contradict each other.
        """
        ranks: dict[int, RankPasses] = {}
        groups = set()
        for manifest, flow in members:
            pipeline = manifest.pipeline
            groups.add((manifest.rank,) if pipeline is None else pipeline.ranks)
            chunks = 1 + max((one.vpp_stage for one in flow.passes), default=0)
            ranks[manifest.rank] = RankPasses(range(chunks) if pipeline is None else pipeline.stages, flow.passes)
        if len(groups) != 1:
            raise ValueError(f"expected manifests of one pipeline group, and not of {len(groups)}")
        return cls(ranks)

    def precedes(self, first: Spot, second: Spot) -> bool:
        """Whether ``first`` is known to have been measured before ``second``. Neither way round: nothing is known."""
        if first.rank == second.rank:
            return first.call_id < second.call_id
        if second.kind in AT_THE_STEP:
            return first.kind in IN_FORWARD | IN_BACKWARD
        if self._is_guessed(first) or self._is_guessed(second):
            return False
        one, other = self._pass_of(first), self._pass_of(second)
        return one is not None and other is not None and self._passes.precedes(one, other)

    def ordered(self, spots: Iterable[Spot]) -> list[Spot]:
        """All of them, each after those that precede it.

        What nothing is known of stands where it would if every pass took as long as every other.

        Args:
            spots: Of the ranks that this order is of.

        Raises:
            ValueError: They cannot all have been measured in the order that their rank says.
        """
        every = list(spots)
        in_turn = zip(self.turns(every), every, strict=True)
        return [spot for *_, spot in sorted((turn, self._ranks[one.rank].stages[0], one.call_id, one) for turn, one in in_turn)]

    def turns(self, spots: Sequence[Spot]) -> list[int]:
        """For each the turn in which it was measured: it is lower for what precedes, and what stands in the same one may have
        been measured at the same time. Turns of two steps, or of two orders, have nothing to do with each other, unless all
        passes are the same. Arguments and errors are those of ``ordered``.
        """
        by_rank: dict[int, list[int]] = {}
        for number in sorted(range(len(spots)), key=lambda number: spots[number].call_id):
            by_rank.setdefault(spots[number].rank, []).append(number)
        passes = self._passes_with({rank: [spots[number] for number in own] for rank, own in by_rank.items()})
        found = [0] * len(spots)
        for own in by_rank.values():
            for number, (turn, _) in zip(own, self._in_turn([spots[number] for number in own], passes), strict=True):
                found[number] = turn
        return found

    def knows(self, spot: Spot) -> bool:
        """Whether the turn of a row is known, and not only what it stands between on its rank."""
        return spot.kind in AT_THE_STEP or self._pass_of(spot) is not None

    def _passes_with(self, by_rank: Mapping[int, Sequence[Spot]]) -> _Passes:
        """With what the rows themselves tell of ranks whose passes are not known."""
        silent = [own for rank, own in by_rank.items() if not self._ranks[rank].passes]
        if not silent:
            return self._passes
        certain = ([self._pass_of(spot) for spot in own if not self._is_guessed(spot)] for own in silent)
        ran = (dict.fromkeys(place for place in own if place is not None) for own in certain)
        return _Passes(self._ranks, [pair for own in ran for pair in itertools.pairwise(own)])

    def _in_turn(self, own: Sequence[Spot], passes: _Passes) -> Iterator[tuple[int, Spot]]:
        """The turn of each of a rank's spots, which never goes back. One that is not certain stays between its neighbours."""
        turns = [None if self._is_guessed(spot) else self._turn(spot, passes) for spot in own]
        last = passes.turns
        ahead = list(itertools.accumulate((last if turn is None else turn for turn in reversed(turns)), min))[::-1]
        now = 0
        for spot, turn, limit in zip(own, turns, ahead, strict=True):
            if turn is None:
                turn = min(limit, self._guess(spot, passes))
            now = max(now, turn)
            yield now, spot

    def _turn(self, spot: Spot, passes: _Passes) -> int | None:
        """None where it is not known."""
        if spot.kind in AT_THE_STEP:
            return passes.turns
        place = self._pass_of(spot)
        return None if place is None else passes.turn(place)

    def _guess(self, spot: Spot, passes: _Passes) -> int:
        place = self._pass_of(spot)
        return 0 if place is None else passes.turn(place)

    def _is_guessed(self, spot: Spot) -> bool:
        """Whether a row belongs to the last backward of a rank of which nobody knows how many there were."""
        last = spot.kind == "grad_unreduced" and spot.micro_step == NO_MICRO_STEP
        return last and not self._ranks[spot.rank].passes

    def _pass_of(self, spot: Spot) -> RankPass | None:
        """The pass that a row belongs to. One that stands for all micro-batches: combined activations stand where the first of
        them stood, and a local gradient is complete when the last backward is.
        """
        if spot.kind not in IN_FORWARD | IN_BACKWARD:
            return None
        forward, micro_step = spot.kind in IN_FORWARD, spot.micro_step
        if micro_step == NO_MICRO_STEP:
            own = self._passes.micro_steps(spot.rank, forward, spot.vpp_stage)
            if not own:
                return None
            micro_step = own[-1] if spot.kind == "grad_unreduced" else own[0]
        place = RankPass(spot.rank, Pass(forward, spot.vpp_stage, micro_step))
        return place if place in self._passes else None


class _Passes:
    """All passes of the group, and what comes before what.

    They form chains, in each of which every pass precedes the next: those of a rank, where its schedule is known. For each
    pass and each chain it is kept how many of the chain's passes precede it, and it comes in the turn after the latest of
    those.

    Attributes:
        turns: How many turns there are.
    """

    def __init__(self, ranks: Mapping[int, RankPasses], also: Iterable[tuple[RankPass, RankPass]] = ()) -> None:
        """``also``: pairs of which the first is known to precede the second."""
        count = 1 + max((one.micro_step for member in ranks.values() for one in member.passes), default=0)
        self._chains = [chain for rank, member in ranks.items() for chain in _chains(rank, member, count)]
        self._at = {place: (c, position) for c, chain in enumerate(self._chains) for position, place in enumerate(chain)}
        self._number = {place: number for number, place in enumerate(self._at)}
        self._before: NDArray[np.int32] = np.zeros((len(self._at), len(self._chains)), np.int32)
        self._turn = [0] * len(self._at)
        self._own: dict[tuple[int, bool, int], list[int]] = {}
        for rank, (forward, chunk, micro_step) in self._at:
            self._own.setdefault((rank, forward, chunk), []).append(micro_step)
        leads_to = _leads_to(ranks, self._at)
        for place, following in also:
            leads_to.setdefault(place, []).append(following)
        self._settle(leads_to)
        self.turns = 1 + max(self._turn, default=-1)

    def __contains__(self, place: RankPass) -> bool:
        return place in self._at

    def micro_steps(self, rank: int, forward: bool, chunk: int) -> Sequence[int]:
        """In the order in which the rank took them through the chunk."""
        return self._own.get((rank, forward, chunk), ())

    def turn(self, place: RankPass) -> int:
        return self._turn[self._number[place]]

    def precedes(self, first: RankPass, second: RankPass) -> bool:
        chain, position = self._at[first]
        return bool(position < self._before[self._number[second], chain])

    def _settle(self, leads_to: Mapping[RankPass, Sequence[RankPass]]) -> None:
        """Go through all passes, each after those that precede it."""
        missing = dict.fromkeys(self._at, 0)
        for place in itertools.chain.from_iterable((*leads_to.values(), *(chain[1:] for chain in self._chains))):
            missing[place] += 1
        ready = [place for place, number in missing.items() if not number]
        for place in ready:
            for following in self._following(place, leads_to):
                self._come_after(following, place)
                missing[following] -= 1
                if not missing[following]:
                    ready.append(following)
        if len(ready) < len(self._at):
            stuck = next(place for place, number in missing.items() if number)
            raise ValueError(f"the passes of the ranks contradict each other, about {stuck.of} of rank {stuck.rank}")

    def _following(self, place: RankPass, leads_to: Mapping[RankPass, Sequence[RankPass]]) -> Iterator[RankPass]:
        yield from leads_to.get(place, ())
        chain, position = self._at[place]
        yield from self._chains[chain][position + 1 : position + 2]

    def _come_after(self, following: RankPass, place: RankPass) -> None:
        (chain, position), before, after = self._at[place], self._number[place], self._number[following]
        np.maximum(self._before[after], self._before[before], out=self._before[after])
        self._before[after, chain] = max(self._before[after, chain], position + 1)
        self._turn[after] = max(self._turn[after], self._turn[before] + 1)


def _chains(rank: int, member: RankPasses, micro_steps: int) -> list[list[RankPass]]:
    """The passes of a rank in one chain; where they are not known, in one for each direction and chunk."""
    if member.passes:
        return [[RankPass(rank, one) for one in member.passes]]
    return [
        [RankPass(rank, Pass(forward, chunk, micro_step)) for micro_step in range(micro_steps)]
        for forward in (True, False)
        for chunk in range(len(member.stages))
    ]


def _leads_to(ranks: Mapping[int, RankPasses], known: Iterable[RankPass]) -> dict[RankPass, list[RankPass]]:
    """How a micro-batch goes: forward from stage to stage, and back. A stage that nobody knows of is stepped over."""
    ways: dict[int, list[tuple[int, RankPass]]] = {}
    for place in known:
        stage = ranks[place.rank].stages[place.of.vpp_stage]
        along = stage if place.of.forward else _FAR - stage
        ways.setdefault(place.of.micro_step, []).append((along, place))
    found: dict[RankPass, list[RankPass]] = {}
    for way in ways.values():
        places = [place for _, place in sorted(way)]
        for place, following in itertools.pairwise(places):
            found[place] = [following]
    return found
