"""Every order in which two ranks can take their steps, and many of those of three that fail: they never disagree."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from evidence import examples
from hypothesis import given, settings, strategies as st
from modelled import Ahead, ModelRank, World

from monitor.dynamic.consensus import Add
from monitor.dynamic.step_boundary import StepBoundary

Ends = set[frozenset[tuple[int, int]]]


def explore(make: Callable[[], World], most: int) -> tuple[int, Ends]:
    """Go through all states that ``make()`` can get into; how many there are, and with what agreements they end.

    A state is reached by the way that led to it first: conversations cannot be copied, so the way is gone again.
    """
    seen, ends = set(), set()
    ways: list[tuple[tuple[int, str], ...]] = [()]
    while ways:
        way = ways.pop()
        world = make()
        for rank, action in way:
            getattr(world.ranks[rank], action)()
        while True:
            state = world.state()
            if state in seen:
                break
            seen.add(state)
            assert len(seen) <= most
            choices = [(rank.rank, action) for rank in world.ranks for action in rank.actions()]
            if all(not rank.training_actions() for rank in world.ranks):
                ends.add(frozenset(world.commits.items()))
            first, *others = choices
            ways.extend((*way, other) for other in others)
            way = (*way, first)
            getattr(world.ranks[first[0]], first[1])()
    return len(seen), ends


def joined(world: World) -> World:
    """What every agreement begins with: all are there, and none is in a conversation."""
    for rank in world.ranks:
        while not rank.agreement.joined:
            rank.talk()
        while rank._conversation is not None:
            rank.talk()
    return world


def one_wish() -> World:
    world = joined(World(2, last_step=0))
    world.wish(0, "new")
    return world


def two_wishes() -> World:
    world = joined(World(2, last_step=-1))
    world.wish(0, "new")
    world.wish(1, "deep", steps=2)
    return world


def refused_by_one() -> World:
    world = joined(World(2, last_step=0, refuses="new"))
    world.wish(0, "new")
    return world


def steps_agreed_on(ends: Ends) -> set[tuple[int, ...]]:
    """Of the first agreement, the second and so on, in any end."""
    return {tuple(step for _, step in sorted(end)) for end in ends}


def test_two_ranks_agree_or_do_not_in_every_order_of_their_steps():
    states, ends = explore(one_wish, most=100_000)
    assert states > 5_000
    assert steps_agreed_on(ends) == {(), (0,), (1,)}


def test_two_wishes_at_once_are_agreed_on_one_after_the_other_in_every_order():
    _, ends = explore(two_wishes, most=100_000)
    assert steps_agreed_on(ends) == {(), (0,), (0, 0)}


def test_what_one_rank_cannot_use_no_rank_uses_in_any_order():
    _, ends = explore(refused_by_one, most=100_000)
    assert steps_agreed_on(ends) == {()}


def test_a_promise_that_is_not_looked_at_again_is_found_out(monkeypatch):
    """The exploration would notice: training may begin a step while the gate is being moved there."""
    monkeypatch.setattr(StepBoundary, "kept", lambda *_: True)
    with pytest.raises(AssertionError, match=r"had begun step 0|began step"):
        explore(one_wish, most=100_000)


def test_a_gate_that_is_looked_at_before_the_step_is_announced_is_found_out(monkeypatch):
    monkeypatch.setattr(ModelRank, "announce", lambda rank: setattr(rank, "about_to_begin", rank.begun + 1))
    with pytest.raises(AssertionError, match=r"had begun step|began step"):
        explore(one_wish, most=100_000)


FAILING = ("talk", "talk", "talk", "step", "step", "lose_answer", "lose_question", "crash")

moves = st.lists(st.tuples(st.integers(0, 2), st.sampled_from(FAILING)), max_size=150)
wishes = st.lists(st.tuples(st.integers(0, 2), st.sampled_from("abc"), st.sampled_from([None, None, 1, 3])), max_size=4)


def move(world: World, rank: int, action: str) -> None:
    one = world.ranks[rank]
    if one.crashed:
        return
    if action == "step":
        action = next(iter(one.training_actions()), "talk")
    getattr(one, action)()


@settings(max_examples=examples(75, 300))
@given(st.integers(1, 3), wishes, moves, moves)
def test_ranks_that_fail_in_any_way_keep_those_alike_that_reach_the_store(ahead, wished, before, after):
    world = World(3, ahead, last_step=8, retry_s=0.0)
    for rank, name, steps in wished[:2]:
        world.wish(rank, name, steps)
    for rank, action in before:
        move(world, rank, action)
    for rank, name, steps in wished[2:]:
        world.wish(rank, name, steps)
    for rank, action in after:
        move(world, rank, action)
    assert_the_rest_ends(world)


def assert_the_rest_ends(world: World) -> None:
    """Every rank that is still there finishes training, and knows where it was not like the others."""
    for _ in range(400):
        for rank in world.ranks:
            move(world, rank.rank, "step")
            move(world, rank.rank, "talk")
    for rank in world.ranks:
        assert rank.crashed or rank.begun == 8
        wrong = {step for step, config in rank.ran.items() if config != world.configs.get(step, config)}
        assert rank.crashed or wrong <= rank.missed


@given(st.integers(2, 5), st.integers(1, 3), st.data())
@settings(max_examples=examples(25, 100))
def test_a_wish_is_granted_where_all_answer_before_any_has_waited_long_enough(size, ahead, data):
    world = World(size, ahead, last_step=20)
    world.wish(data.draw(st.integers(0, size - 1)), "new")
    for _ in range(40 * size):
        rank = world.ranks[data.draw(st.integers(0, size - 1))]
        steps = [action for action in rank.training_actions() if action in ("announce", "begin")]
        getattr(rank, data.draw(st.sampled_from([*steps, "talk", "talk"])))()
    world.talk_all()
    assert list(world.commits) == [1]


def test_an_acknowledgement_of_which_no_answer_came_is_not_made_again():
    """It was counted, and twice would count for the rank that has not acknowledged."""
    world = joined(World(2, last_step=3))
    first = world.ranks[0]
    world.wish(0, "new")
    while not isinstance(first._operation, Add):
        first.talk()
    first.lose_answer()
    for _ in range(20):
        first.talk()
    assert world.store.get("1/acknowledged") == b"1"
    world.talk_all()
    assert list(world.commits) == [1]


def test_a_later_change_does_not_come_before_an_earlier_one():
    """Training has become faster, or slower, and the second promise reaches less far."""
    world = joined(World(2, ahead=4, last_step=6))
    world.wish(0, "new")
    world.talk_all()
    for rank in world.ranks:
        rank.boundary.lookahead = Ahead(1)
    world.wish(1, "newer")
    world.talk_all()
    assert world.commits == {1: 3, 2: 3}
    run_to_the_end(world)
    assert world.configs == {**dict.fromkeys(range(3), "start"), **dict.fromkeys(range(3, 7), "newer")}


def test_an_excursion_ends_by_itself_on_all_ranks():
    world = joined(World(2, last_step=6))
    world.wish(1, "deep", steps=2)
    world.talk_all()
    run_to_the_end(world)
    assert world.configs == {0: "start+deep", 1: "start+deep", **dict.fromkeys(range(2, 7), "start")}


def test_what_is_agreed_on_during_an_excursion_ends_it():
    world = joined(World(2, last_step=6))
    world.wish(1, "deep", steps=4)
    world.talk_all()
    for rank in world.ranks:
        rank.announce()
        rank.begin()
    world.wish(0, "new")
    world.talk_all()
    run_to_the_end(world)
    assert world.configs == {0: "start+deep", **dict.fromkeys(range(1, 7), "new")}


def test_an_excursion_asked_for_by_two_ranks_happens_once():
    world = joined(World(2, last_step=6))
    for rank in range(2):
        world.wish(rank, "deep", steps=2)
    world.talk_all()
    assert world.commits == {1: 0}


def test_a_rank_that_starts_late_holds_no_one_up_and_nothing_is_proposed_before_it_is_there():
    world = World(2, last_step=3)
    early, late = world.ranks
    world.wish(0, "new")
    for _ in range(20):
        early.talk()
    assert early.training_actions() == ["announce"]
    assert not early.agreement.open
    late.talk()
    world.talk_all()
    run_to_the_end(world)
    assert set(world.configs.values()) == {"new"}


def test_an_aborted_proposal_is_made_again_and_after_five_times_given_up():
    """The other rank is there and says nothing any more."""
    world = joined(World(2, last_step=40, retry_s=0.0))
    world.wish(0, "new")
    world.ranks[1].crash()
    for _ in range(300):
        move(world, 0, "talk")
        move(world, 0, "step")
    assert world.ranks[0].begun == 40
    assert world.denied == [(0, {"name": "new"}, "abort")]
    assert world.store.check(["5/decision"])
    assert not world.store.check(["6/proposal"])


def test_a_refusal_reaches_who_wished_with_its_reason_and_is_not_tried_again():
    world = joined(World(2, last_step=3, refuses="new", retry_s=0.0))
    world.wish(0, "new")
    world.talk_all()
    assert world.denied == [(0, {"name": "new"}, "rank 1: cannot be used here")]
    assert not world.store.check(["2/proposal"])


def run_to_the_end(world: World) -> None:
    for rank in world.ranks:
        while actions := rank.training_actions():
            getattr(rank, actions[0])()
