"""The order of rows across the ranks of a pipeline, from the order of passes on each rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from monitor.coordinator.manifest_format import ManifestRecord
from monitor.coordinator.series_file import Flow, Pass
from monitor.series import KIND_TABLE, NO_MICRO_STEP

# --- The order of two rows of a pipeline group that were measured on different ranks. Their clocks cannot be compared.
#
# On one rank, ``call_id`` orders the rows. Between ranks, micro-batches give the order: the forward of a micro-batch at a
# stage precedes its forward at the next stage, its backward runs the other way, and the optimizer steps after every
# backward. Together with the order in which each rank ran its passes (``Flow.passes``, which the schedule fixes), that
# is a partial order of all rows:
#
#     rank 0   F0 ─▶ F1 ─▶ B0 ─▶ B1          F0 of rank 0 comes before B1 of rank 1; nothing is known of
#               ╲     ╲   ╱     ╱            F1 of rank 0 and B0 of rank 1: they may have run at the same time.
#     rank 1     F0 ─▶ B0 ─▶ F1 ─▶ B1

IN_FORWARD, IN_BACKWARD, AT_THE_STEP = (
    frozenset(kind.name for kind in KIND_TABLE if kind.phase == phase) for phase in ("forward", "backward", "step")
)
"""Kinds by the phase in which they are measured. Rows of other kinds are ordered on their own rank only."""

_FAR: Final = 2**32
"""Beyond any stage: the turn of the forward into the backward."""


class Spot(NamedTuple):
    """The point of a step at which a row was measured."""

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
    """The passes of one rank of the group.

    Attributes:
        stages: For each model chunk, its index in the pipeline of all ranks' chunks.
        passes: In the order in which they ran; empty if unknown.
    """

    stages: Sequence[int]
    passes: Sequence[Pass] = ()


class PipelineOrder:
    """The partial order of the rows of one step, over all ranks of one pipeline group.

    If a rank's passes are not known, the order only assumes that the rank takes micro-batches in turn.
    """

    def __init__(self, ranks: Mapping[int, RankPasses]) -> None:
        """Raises ``ValueError`` if the ranks' passes contradict each other: they are of different steps or schedules, or the
        stages are not in the order of the forward pass.
        """
        self._ranks = ranks
        self._passes = _Passes(ranks)

    @classmethod
    def of(cls, members: Iterable[tuple[ManifestRecord, Flow]]) -> PipelineOrder:
        """The order of the ranks with these manifests and flows.

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
            raise ValueError(f"expected manifests of one pipeline group, received manifests of {len(groups)}")
        return cls(ranks)

    def precedes(self, first: Spot, second: Spot) -> bool:
        """Whether ``first`` is known to precede ``second``. If False both ways, their order is unknown."""
        if first.rank == second.rank:
            return first.call_id < second.call_id
        if second.kind in AT_THE_STEP:
            return first.kind in IN_FORWARD | IN_BACKWARD
        if self._is_guessed(first) or self._is_guessed(second):
            return False
        one, other = self._pass_of(first), self._pass_of(second)
        return one is not None and other is not None and self._passes.precedes(one, other)

    def ordered(self, spots: Iterable[Spot]) -> list[Spot]:
        """Sort ``spots``: each comes after those that precede it.

        Spots of unknown order are placed as if all passes took equally long.

        Args:
            spots: Of the ranks in this order.

        Raises:
            ValueError: The spots contradict the order of passes on their rank.
        """
        every = list(spots)
        in_turn = zip(self.turns(every), every, strict=True)
        return [spot for *_, spot in sorted((turn, self._ranks[one.rank].stages[0], one.call_id, one) for turn, one in in_turn)]

    def turns(self, spots: Sequence[Spot]) -> list[int]:
        """The turn of each spot. A preceding spot has a lower turn; spots of one turn may have been measured simultaneously.

        Turns of two steps, or of two orders, cannot be compared, unless all passes are the same. Arguments and errors are
        those of ``ordered``.
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
        """Whether the turn of a row is known. Otherwise only its neighbours on its rank are."""
        return spot.kind in AT_THE_STEP or self._pass_of(spot) is not None

    def _passes_with(self, by_rank: Mapping[int, Sequence[Spot]]) -> _Passes:
        """The passes, where rows give the order of ranks whose passes are not known."""
        silent = [own for rank, own in by_rank.items() if not self._ranks[rank].passes]
        if not silent:
            return self._passes
        certain = ([self._pass_of(spot) for spot in own if not self._is_guessed(spot)] for own in silent)
        ran = (dict.fromkeys(place for place in own if place is not None) for own in certain)
        return _Passes(self._ranks, [pair for own in ran for pair in itertools.pairwise(own)])

    def _in_turn(self, own: Sequence[Spot], passes: _Passes) -> Iterator[tuple[int, Spot]]:
        """The turns of a rank's spots; they never decrease. An uncertain spot stays between its neighbours."""
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
        """The turn of a spot; None if unknown."""
        if spot.kind in AT_THE_STEP:
            return passes.turns
        place = self._pass_of(spot)
        return None if place is None else passes.turn(place)

    def _guess(self, spot: Spot, passes: _Passes) -> int:
        place = self._pass_of(spot)
        return 0 if place is None else passes.turn(place)

    def _is_guessed(self, spot: Spot) -> bool:
        """Whether a row belongs to the last backward of a rank whose number of backwards is unknown."""
        last = spot.kind == "grad_unreduced" and spot.micro_step == NO_MICRO_STEP
        return last and not self._ranks[spot.rank].passes

    def _pass_of(self, spot: Spot) -> RankPass | None:
        """The pass that a row belongs to.

        A row over all micro-batches: combined activations belong to the first micro-batch, and a local gradient to the last
        backward, which completes it.
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
    """All passes of the group, and their partial order.

    Passes form chains, in which each pass precedes the next: a rank with a known schedule is one chain. For each pass and
    each chain, the object stores how many passes of the chain precede it. A pass comes in the turn after the latest of these.

    Attributes:
        turns: The number of turns.
    """

    def __init__(self, ranks: Mapping[int, RankPasses], also: Iterable[tuple[RankPass, RankPass]] = ()) -> None:
        """``also``: pairs whose first pass is known to precede the second."""
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
        """In the order in which the rank ran them through the chunk."""
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
    """The passes of a rank in one chain; if they are not known, one chain for each direction and chunk."""
    if member.passes:
        return [[RankPass(rank, one) for one in member.passes]]
    return [
        [RankPass(rank, Pass(forward, chunk, micro_step)) for micro_step in range(micro_steps)]
        for forward in (True, False)
        for chunk in range(len(member.stages))
    ]


def _leads_to(ranks: Mapping[int, RankPasses], known: Iterable[RankPass]) -> dict[RankPass, list[RankPass]]:
    """The way of a micro-batch: forward from stage to stage, and back. An unknown stage is skipped."""
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
