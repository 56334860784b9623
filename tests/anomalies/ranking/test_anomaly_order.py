"""The order of events, held against the flow of data in pipelines that are played."""

from __future__ import annotations

import itertools
import random
from typing import NamedTuple

import pytest
from played_job import AT_THE_STEP, PARAMETERS, ROWS, PlayedRank, ranked, told
from schedules import gpipe, interleaved, one_forward_one_backward

from monitor.anomalies.ranking.ranking import Ranked
from monitor.series import NO_MICRO_STEP

FIRED = 150
CASES = [
    *((gpipe, size, micro_steps, 1) for size, micro_steps in ((1, 4), (2, 3), (5, 8), (16, 64))),
    *((one_forward_one_backward, size, micro_steps, 1) for size, micro_steps in ((1, 4), (2, 4), (7, 9), (16, 64))),
    *((interleaved, size, micro_steps, chunks) for size, micro_steps, chunks in ((2, 4, 2), (3, 6, 3), (16, 64, 2))),
]


class Happened(NamedTuple):
    """An event, as far as the flow of data is concerned; ``place`` among the chunks of the whole pipeline."""

    step: int
    kind: str
    name: str
    place: int
    micro_step: int

    @property
    def row(self) -> int:
        return ROWS[self.kind].index(self.name) if self.kind in ROWS else 0

    def feeds(self, other: Happened) -> bool:
        """Whether it may be what the other one came from."""
        if self.step != other.step:
            return self.step < other.step
        if other.kind == "param_origin" or self.kind == "param_updated":
            return False
        if self.kind == "param_origin" or other.kind == "param_updated":
            return True
        return self._feeds_in_passes(other)

    def _feeds_in_passes(self, other: Happened) -> bool:
        pair = self.kind, other.kind
        if other.kind == "grad_reduced" and self.kind not in AT_THE_STEP:
            return True
        if pair == ("actv_grad", "grad_unreduced"):
            return self.place > other.place
        if pair == ("actv", "grad_unreduced"):
            return True
        if self.micro_step != other.micro_step or other.kind not in ROWS:
            return False
        if pair == ("actv", "actv_grad"):
            return True
        forward = self.kind == "actv"
        along = (self.place, self.row) < (other.place, other.row)
        back = (-self.place, self.row) < (-other.place, other.row)
        return self.kind == other.kind and (along if forward else back)


def pipelines(schedule, size, micro_steps, chunks, copies=2, **options):
    """Pipelines side by side, whose stages are replicas of each other."""
    for rank in range(size * copies):
        copy, stage = divmod(rank, size)
        groups = {"pp": range(copy * size, (copy + 1) * size), "dp": range(stage, size * copies, size)}
        yield PlayedRank(rank, groups, schedule(stage, size, micro_steps, chunks), chunks=chunks, **options)


def fire_at_random(ranks, draw):
    for _ in range(FIRED):
        rank = draw.choice(ranks)
        one = draw.choice(rank.passes)
        kind = draw.choice(["actv", "actv", "actv_grad", "actv_grad", "grad_unreduced", *AT_THE_STEP])
        if kind in ROWS:
            one = one._replace(forward=kind == "actv")
            rank.fire(kind, draw.choice(ROWS[kind]), draw.randrange(2), one.micro_step, one.vpp_stage)
        else:
            rank.fire(kind, draw.choice(PARAMETERS), draw.randrange(2), NO_MICRO_STEP, one.vpp_stage)


def happened(one: Ranked) -> Happened:
    series = one.subject.series
    place = one.member.place(series.vpp_stage)
    return Happened(one.step, series.kind, series.name, place, one.micro_step)


@pytest.mark.parametrize("with_manifest", [True, False], ids=["schedule known", "schedule unknown"])
@pytest.mark.parametrize(("schedule", "size", "micro_steps", "chunks"), CASES)
def test_no_event_stands_before_one_that_it_may_come_from(schedule, size, micro_steps, chunks, with_manifest, tmp_path):
    ranks = list(pipelines(schedule, size, micro_steps, chunks, copies=2 if size < 16 else 1, with_manifest=with_manifest))
    fire_at_random(ranks, random.Random(f"{schedule.__name__} {size}"))
    ranking = ranked(tmp_path, *ranks, most=10**6)
    order = [happened(one) for one in ranking.ranked]
    assert len(order) > FIRED / 2
    assert [pair for pair in itertools.combinations(order, 2) if pair[1].feeds(pair[0])] == []
    assert bool(ranking.unordered) == (not with_manifest and size > 1)


TAKING_TURNS = [(one_forward_one_backward, 3, 6, 1), (interleaved, 2, 4, 2)]


@pytest.mark.parametrize("case", TAKING_TURNS)
def test_events_of_a_rank_stand_in_the_order_of_its_calls_but_for_the_weights_it_began_with(case, tmp_path):
    schedule, size, micro_steps, chunks = case
    ranks = list(pipelines(schedule, size, micro_steps, chunks, copies=1))
    fire_at_random(ranks, random.Random(0))
    found = ranked(tmp_path, *ranks, most=10**6).ranked
    for rank in ranks:
        own = [one for one in found if one.member.rank == rank.rank and one.subject.series.kind != "param_origin"]
        own = [(one.step, one.call_id) for one in own]
        assert own == sorted(own)
        assert len(own) > 10


def test_a_rank_without_a_manifest_runs_the_schedule_of_the_same_stage_of_another_pipeline(tmp_path):
    ranks = list(pipelines(one_forward_one_backward, 2, 4, 1))
    ranks[2].with_manifest = False
    for rank in ranks:
        rank.fire("actv", "b.output", micro_step=2).fire("actv_grad", "b.output", micro_step=0)
    ranking = ranked(tmp_path, *ranks)
    assert ranking.unordered == {}
    assert [one[0] for one in told(ranking) if one[1] == "actv/b.output"] == [0, 2, 1, 3]


def test_a_pass_that_the_recorded_step_did_not_have_leaves_the_order_to_micro_steps(tmp_path):
    """As where a later step has more micro-batches."""
    first, second = pipelines(gpipe, 2, 3, 1, copies=1)
    first.recorded_passes = gpipe(0, 2, 2, 1)
    found = ranked(tmp_path, first.fire("actv", "b.output", micro_step=2), second.fire("actv", "b.output", micro_step=1))
    assert [one[0] for one in told(found)] == [1, 0]
    assert "it is not known when stage 0 ran the pass" in found.unordered[0]


def test_weights_stand_before_the_forwards_of_their_step(tmp_path):
    rank = PlayedRank().fire("actv", ".input").fire("param_origin", "b.weight").fire("param_updated", "b.weight", step=0)
    assert [one[1] for one in told(ranked(tmp_path, rank))] == [
        "param_updated/b.weight",
        "param_origin/b.weight",
        "actv/.input",
    ]
