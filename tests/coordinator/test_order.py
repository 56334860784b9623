"""The order of a pipeline group's rows, held against schedules that are played with whatever durations."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest
from hypothesis import given, settings, strategies as st
from schedules import gpipe, interleaved, one_forward_one_backward

from monitor.coordinator.manifest_format import ManifestRecord, PipelineRecord
from monitor.coordinator.pipeline_order import PipelineOrder, RankPasses, Spot
from monitor.coordinator.series_file import Flow, Pass
from monitor.series import NO_MICRO_STEP

FEW = settings(max_examples=40)
AT_THE_STEP = ("param_origin", "grad_reduced", "param_updated", "linear_hook", "adam_update")


class Row(NamedTuple):
    """A row and when it was measured."""

    spot: Spot
    time: int


class Job(NamedTuple):
    """Ranks of a pipeline that ran a step; ``begun`` says when each pass began."""

    ranks: dict[int, RankPasses]
    begun: dict[tuple[int, Pass], int]
    rows: list[Row]

    def __repr__(self) -> str:
        return f"Job({self.ranks})"

    @property
    def order(self) -> PipelineOrder:
        return PipelineOrder(self.ranks)


def dependencies(ranks):
    """Of each pass of each rank, the passes that must have ended before it begins."""
    on = {stage: (rank, chunk) for rank, member in ranks.items() for chunk, stage in enumerate(member.stages)}
    needs = {}
    for rank, member in ranks.items():
        for before, one in zip([None, *member.passes], member.passes, strict=False):
            needs[rank, one] = [(rank, before)] if before else []
            stage = member.stages[one.vpp_stage]
            earlier = stage - 1 if one.forward else stage + 1
            if earlier in on:
                needs[rank, one].append((on[earlier][0], one._replace(vpp_stage=on[earlier][1])))
            elif not one.forward:
                needs[rank, one].append((rank, one._replace(forward=True)))
    return needs


def played(ranks, duration):
    """When each pass begins and ends, if each begins as soon as it can."""
    needs, ends, begun = dependencies(ranks), {}, {}
    while len(ends) < len(needs):
        can = [one for one, before in needs.items() if one not in ends and all(b in ends for b in before)]
        assert can, "the schedule hangs"
        for one in can:
            begun[one] = max((ends[b] for b in needs[one]), default=0)
            ends[one] = begun[one] + duration(one)
    return begun, ends


def run(schedule, size, micro_steps, chunks, duration=lambda _: 1):
    """Play a step; the rows of each pass stand close together, in units of a thousandth."""
    ranks = {
        10 + rank: RankPasses(range(rank, size * chunks, size), schedule(rank, size, micro_steps, chunks))
        for rank in range(size)
    }
    begun, ends = played(ranks, duration)
    done, rows = max(ends.values()), []
    for rank, member in ranks.items():
        call_ids = itertools.count()
        last = {one.vpp_stage: one for one in member.passes if not one.forward}
        for one in member.passes:
            kinds = ["actv", "actv"] if one.forward else ["actv_grad", "actv_grad"]
            kinds += ["grad_unreduced"] if last[one.vpp_stage] == one else []
            for place, kind in enumerate(kinds):
                micro_step = NO_MICRO_STEP if kind == "grad_unreduced" else one.micro_step
                spot = Spot(rank, one.vpp_stage, kind, micro_step, next(call_ids))
                rows.append(Row(spot, 1000 * begun[rank, one] + place))
        for kind in AT_THE_STEP:
            call_id = next(call_ids)
            rows.append(Row(Spot(rank, 0, kind, NO_MICRO_STEP, call_id), 1000 * done + call_id))
    return Job(ranks, begun, rows)


@st.composite
def jobs(draw, even=False):
    schedule = draw(st.sampled_from([gpipe, one_forward_one_backward, interleaved]))
    size, chunks = draw(st.integers(1, 3)), draw(st.integers(1, 3)) if schedule is interleaved else 1
    micro_steps = size * draw(st.integers(1, 2)) if schedule is interleaved else draw(st.integers(1, 5))
    durations = draw(st.just([1]) if even else st.lists(st.integers(1, 9), min_size=1, max_size=12))
    return run(schedule, size, micro_steps, chunks, lambda one: durations[hash(one) % len(durations)])


def must_precede(job):
    """Pairs of passes that no durations can turn round."""
    needs = dependencies(job.ranks)
    before = {}
    for one in sorted(needs, key=job.begun.__getitem__):
        before[one] = set(needs[one]).union(*(before[b] for b in needs[one]))
    return before


def pass_of(job, spot):
    last = [one.micro_step for one in job.ranks[spot.rank].passes if not one.forward and one.vpp_stage == spot.vpp_stage][-1]
    micro_step = last if spot.micro_step == NO_MICRO_STEP else spot.micro_step
    return spot.rank, Pass(spot.kind == "actv", spot.vpp_stage, micro_step)


@FEW
@given(jobs())
def test_what_is_said_to_precede_did(job):
    order = job.order
    for first, second in itertools.permutations(job.rows, 2):
        assert first.time < second.time or not order.precedes(first.spot, second.spot)


@FEW
@given(jobs())
def test_all_that_can_be_known_is(job):
    order, before = job.order, must_precede(job)
    for first, second in itertools.permutations((row.spot for row in job.rows), 2):
        if first.rank == second.rank:
            known = first.call_id < second.call_id
        elif first.kind in AT_THE_STEP or second.kind in AT_THE_STEP:
            known = first.kind not in AT_THE_STEP
        else:
            known = pass_of(job, first) in before[pass_of(job, second)]
        assert order.precedes(first, second) == known


@FEW
@given(jobs(), st.data())
def test_whatever_rows_are_ordered_each_stands_after_those_that_precede_it(job, data):
    spots = data.draw(st.lists(st.sampled_from([row.spot for row in job.rows]), unique=True))
    order = job.order
    found = order.ordered(spots)
    assert sorted(found) == sorted(spots)
    assert not any(order.precedes(later, earlier) for earlier, later in itertools.combinations(found, 2))


@FEW
@given(jobs(even=True))
def test_where_passes_take_equally_long_the_order_is_that_of_time(job):
    found = job.order.ordered(row.spot for row in job.rows)
    begun = [job.begun[pass_of(job, spot)] for spot in found if spot.kind not in AT_THE_STEP]
    assert begun == sorted(begun)
    assert {spot.kind for spot in found[len(begun) :]} == set(AT_THE_STEP)


@FEW
@given(jobs(), st.data())
def test_of_ranks_whose_passes_are_not_known_nothing_wrong_is_said(job, data):
    silent = data.draw(st.sets(st.sampled_from(sorted(job.ranks))))
    order = PipelineOrder(
        {rank: RankPasses(one.stages, () if rank in silent else one.passes) for rank, one in job.ranks.items()}
    )
    for first, second in itertools.permutations(job.rows, 2):
        assert first.time < second.time or not order.precedes(first.spot, second.spot)
    found = order.ordered(row.spot for row in job.rows)
    assert not any(order.precedes(later, earlier) for earlier, later in itertools.combinations(found, 2))


@pytest.mark.parametrize("known", [True, False])
def test_a_micro_batch_goes_forward_through_the_stages_and_back(known):
    ranks = {0: RankPasses([0, 2]), 1: RankPasses([1, 3])}
    if known:
        ranks = {rank: RankPasses(one.stages, interleaved(rank, 2, 2, 2)) for rank, one in ranks.items()}
    way = [(0, 0), (1, 0), (0, 1), (1, 1)]
    spots = [Spot(rank, chunk, "actv", 0, chunk) for rank, chunk in way]
    spots += [Spot(rank, chunk, "actv_grad", 0, 3 - chunk) for rank, chunk in reversed(way)]
    order = PipelineOrder(ranks)
    assert all(order.precedes(a, b) for a, b in itertools.combinations(spots, 2))
    assert order.ordered(reversed(spots)) == spots


def test_combined_micro_batches_stand_where_the_first_of_them_stood():
    order = run(gpipe, 2, 3, 1).order
    first, second = Spot(10, 0, "actv", NO_MICRO_STEP, 0), Spot(11, 0, "actv", NO_MICRO_STEP, 0)
    assert order.precedes(first, second)
    assert order.precedes(second, Spot(10, 0, "actv_grad", 0, 1))


def test_rows_of_no_direction_are_ordered_among_those_of_their_rank():
    order = run(gpipe, 2, 1, 1).order
    spots = [Spot(10, 0, "actv", 0, 0), Spot(10, 0, "other", NO_MICRO_STEP, 1), Spot(11, 0, "actv", 0, 0)]
    assert order.ordered(reversed(spots)) == spots
    assert not order.precedes(spots[1], spots[2])
    assert not order.precedes(spots[2], spots[1])


def test_a_pass_that_the_flow_does_not_have_is_known_from_its_rank_alone():
    order = run(gpipe, 2, 1, 1).order
    one, other = Spot(10, 0, "actv", 5, 9), Spot(11, 0, "actv", 5, 9)
    assert not order.precedes(one, other)
    assert order.precedes(Spot(10, 0, "actv", 0, 0), one)
    assert order.precedes(other, Spot(10, 0, "grad_reduced", NO_MICRO_STEP, 20))
    assert sorted(order.ordered([other, one])) == [one, other]


def test_passes_that_contradict_each_other_are_refused():
    there, back = [Pass(True, 0, 0), Pass(True, 0, 1)], [Pass(True, 0, 1), Pass(True, 0, 0)]
    with pytest.raises(ValueError, match="the passes of the ranks contradict each other, about Pass"):
        PipelineOrder({0: RankPasses([0], [*there, Pass(False, 0, 1)]), 1: RankPasses([1], [Pass(False, 0, 1), *back])})


def manifest_of(rank, ranks, chunks=1):
    """The fields of a manifest that ordering needs."""
    return ManifestRecord.model_construct(rank=rank, pipeline=PipelineRecord.of(rank, ranks, chunks))


def test_manifests_and_flows_of_a_group_make_its_order():
    members = [(manifest_of(rank, (3, 1), 2), Flow(passes=tuple(interleaved(at, 2, 2, 2)))) for at, rank in enumerate((3, 1))]
    order = PipelineOrder.of(members)
    assert order.precedes(Spot(1, 0, "actv", 0, 0), Spot(3, 1, "actv", 0, 0))
    assert order.precedes(Spot(3, 1, "actv_grad", 0, 0), Spot(1, 0, "actv_grad", 0, 0))


def test_a_rank_on_its_own_is_a_group():
    order = PipelineOrder.of([(manifest_of(0, ()), Flow(passes=(Pass(True, 0, 0), Pass(True, 1, 0))))])
    assert order.precedes(Spot(0, 1, "actv", 0, 3), Spot(0, 0, "actv", 0, 7))


def test_manifests_of_different_groups_are_refused():
    with pytest.raises(ValueError, match="one pipeline group, received manifests of 2"):
        PipelineOrder.of([(manifest_of(0, (0, 1)), Flow()), (manifest_of(2, (2, 3)), Flow())])
