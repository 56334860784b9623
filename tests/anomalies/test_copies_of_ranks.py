"""Copies are compared through the job's store: the rank, step and tensor that differ first are said, and nothing else is."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from typing import Any

import pytest
from evidence import examples
from simulated_ranks import KINDS, SimulatedJob, flipped

from monitor.anomalies.copies import CHUNKS, KEPT_STEPS, MOST_CHARACTERS
from monitor.anomalies.copy_exchange import LONG_APART, MOST_ALERTS, MOST_WAITING
from monitor.anomalies.odd_copies import PATIENCE
from monitor.coordinator.store_memory import LocalStore


def test_healthy_ranks_say_nothing_and_ask_nothing() -> None:
    job = SimulatedJob(4)
    for step in range(20):
        job.step(step)
        job.turns()
    assert job.notes == []
    assert not job.store.check(["copies//board"])


def test_the_odd_rank_of_three_is_named_with_step_tensor_host_and_the_last_good_checkpoint() -> None:
    job = SimulatedJob(4)
    for step in range(8):
        job.step(step, {2: flipped(("grad_reduced", "b"))} if step == 5 else {})
        job.turns()
    job.turns(4)
    (said,) = job.notes
    assert said == (
        "Copies of grad_reduced differ in step 5: b: rank 2 (node-2): other bits than the 3 ranks that agree; take "
        "node-2 out of the job; so far the last step in which all compared copies agree is 4; the checkpoint of step 4 is the "
        "last that is known to be good."
    )
    assert [rank.alarms for rank in job.ranks] == [1, 0, 0, 0]
    assert [rank.events() for rank in job.ranks] == [[], [], [(5, "grad_reduced/b")], []]


def test_of_two_copies_both_ranks_are_named() -> None:
    job = SimulatedJob(2)
    for step in range(5):
        job.step(step, {1: flipped(("exp_avg", "a"))} if step == 3 else {})
        job.turns()
    job.turns(4)
    said, over = job.notes
    assert over.startswith("Copies of exp_avg and what follows from them are not compared any more between ranks 0, 1")
    assert (
        "step 3: a: ranks 0 (node-0), 1 (node-1) differ from each other, and the copies do not say which is wrong; so" in said
    )
    assert [rank.events() for rank in job.ranks] == [[(3, "exp_avg/a")]] * 2


def test_what_follows_from_a_difference_is_no_other_and_another_rank_is_named_too() -> None:
    job = SimulatedJob(5)
    for step in range(12):
        changed = {}
        if step >= 3:
            changed[1] = flipped(*((kind, name) for kind in KINDS for name in "abc"), bits=step)
        if step >= 7:
            changed[4] = flipped(("param_origin", "c"), bits=step)
        job.step(step, changed)
        job.turns(3)
    assert [said.partition("; ")[0] for said in job.notes] == [
        "Copies of param_origin differ in step 3: a, b, c: rank 1 (node-1): other bits than the 4 ranks that agree",
        "Copies of param_origin differ in step 7: c: rank 4 (node-4): other bits than the 3 ranks that agree",
    ]
    assert "checkpoint of step 1 is the last" in job.notes[0]


def test_copies_that_differ_by_design_are_said_once_and_no_rank_is_accused() -> None:
    job = SimulatedJob(3)
    for step in range(9):
        drift = [(kind, name) for kind in KINDS for name in "abc" if kind != "param_origin" or step]
        job.step(step, {rank: flipped(*drift, bits=10 * step + rank + 1) for rank in range(3)})
        job.turns(4)
    assert sorted(job.notes) == sorted(
        f"Copies of {kind} differ in most tensors at once, so by design. A merge compares them by value." for kind in KINDS
    )
    assert sum(rank.alarms for rank in job.ranks) == 0


def test_the_copies_of_each_group_are_compared_among_its_ranks() -> None:
    job = SimulatedJob(8, groups=[range(8), (0, 2, 4, 6), (1, 3, 5, 7)])
    for step in range(6):
        job.step(step, {5: flipped(("param_updated", "b1"))} if step == 4 else {})
        job.turns(3)
    assert [said.partition("; ")[0] for said in job.notes] == [
        "Copies of param_updated differ in step 4: b1: rank 5 (node-5): other bits than the 3 ranks that agree"
    ]
    assert job.ranks[1].notes


@pytest.mark.parametrize("tensors", [CHUNKS, CHUNKS + 1, 5_000])
def test_one_tensor_of_thousands_is_found_with_messages_of_bounded_size(tensors: int) -> None:
    names = [f"layers.{number}.weight" for number in range(tensors)]
    job = SimulatedJob(3, names=names)
    sizes = Counter[str]()
    kept = job.store.set

    def measured(key: str, value: str) -> None:
        sizes[key] = max(sizes[key], len(value))
        kept(key, value)

    job.store.set = measured
    job.step(0)
    job.step(1, {2: flipped(("grad_reduced", names[tensors - 3]))})
    job.turns(12)
    (said,) = job.notes
    assert f"differ in step 1: {names[tensors - 3]}: rank 2 (node-2)" in said
    assert max(sizes.values()) < MOST_CHARACTERS / 4


def test_a_rank_that_is_silent_holds_up_the_others_for_a_few_looks_only() -> None:
    job = SimulatedJob(4)
    *others, _silent = job.ranks
    for step in range(3):
        for rank in others:
            rank.hold(step, flipped(("grad_reduced", "a")) if rank.number == 1 and step == 2 else None)
    for _ in range(PATIENCE + 8):
        for rank in others:
            rank.turn()
    assert "grad_reduced differ in step 2: a: rank 1 (node-1): other bits than the 2 ranks" in job.notes[0]


def test_steps_of_one_rank_alone_wait_for_another_however_long_it_is_silent() -> None:
    job = SimulatedJob(2)
    first, second = job.ranks
    for step in range(4):
        first.hold(step)
        job.turns(3 * PATIENCE if step else 3)
        if not step:
            second.hold(step)
    for step in range(1, 4):
        second.hold(step, flipped(("param_origin", "a")) if step == 2 else None)
    job.turns(8)
    (said,) = (one for one in job.notes if "differ" in one)
    assert said.startswith("Copies of param_origin differ in step 2: a: ranks 0 (node-0), 1 (node-1) differ from each other")
    assert "agree is 1;" in said


def test_a_step_that_one_rank_has_dropped_is_compared_among_the_others() -> None:
    job = SimulatedJob(4)
    for step in range(6):
        for rank in job.ranks:
            if (rank.number, step) != (2, 3):
                rank.hold(step, flipped(("grad_reduced", "a")) if rank.number == 1 and step == 3 else None)
        job.turns(2)
    job.turns(6)
    assert "grad_reduced differ in step 3: a: rank 1 (node-1): other bits than the 2 ranks" in job.notes[0]


def test_ranks_that_do_not_have_the_same_tensors_are_not_compared_which_is_said() -> None:
    job = SimulatedJob(3)
    for step in range(6):
        for rank in job.ranks:
            rank.hold(step, without="b" if rank.number == 2 else "")
        job.turns(10)
    assert sorted(set(job.notes)) == sorted(
        f"Copies of {kind} are not compared any more: ranks do not measure the same tensors." for kind in KINDS
    )


def test_where_the_step_is_gone_when_it_is_asked_for_a_later_one_tells_which_tensor_it_is() -> None:
    job = SimulatedJob(3)
    job.step(0)
    wrong = {2: flipped(("exp_avg", "c"))}
    job.step(1, wrong)
    job.turns(1)
    for _ in range(2):
        job.ranks[0].turn()  # it finds the keys, and asks
    for step in range(2, 2 + KEPT_STEPS):
        job.step(step, wrong)
    job.turns(2 * MOST_WAITING)
    (said,) = job.notes
    assert re.match(r"Copies of exp_avg differ in step [2-9]: c: rank 2 \(node-2\): other bits than the 2 ranks", said)
    assert "agree is 0;" in said


def test_ranks_that_cannot_answer_any_more_are_not_accused() -> None:
    job = SimulatedJob(3)
    for step in range(5):
        for rank in job.ranks:
            rank.hold(step, without="b" if (rank.number, step) == (2, 4) else "")
        job.turns(2)
    for _ in range(3 * MOST_WAITING):  # one has ended
        for rank in job.ranks[:2]:
            rank.turn()
    assert job.notes == []


def test_a_leader_that_has_lost_the_step_finds_the_odd_rank() -> None:
    job = SimulatedJob(4)
    for step in range(9):
        for rank in job.ranks:
            if rank.number or step < 4:  # the leader loses all later steps
                rank.hold(step, flipped(("param_origin", "b")) if rank.number == 2 and step >= 4 else None)
        job.turns(2)
    job.turns(2 * PATIENCE)
    assert any("param_origin differ in step 4" in said and "rank 2 (node-2)" in said for said in job.notes), job.notes


def test_a_rank_whose_tensor_was_not_measured_is_not_accused_with_another() -> None:
    job = SimulatedJob(5)
    for step in range(6):
        changed = {1: flipped(("grad_reduced", "a")), 3: {("grad_reduced", "c"): 0}} if step == 3 else {}
        job.step(step, changed)
        job.turns(4)
    job.turns(4)
    (said,) = job.notes
    assert said.startswith("Copies of grad_reduced differ in step 3: a: rank 1 (node-1): other bits than the 3 ranks")


def test_where_half_of_the_copies_differ_a_rank_that_does_not_answer_is_not_accused() -> None:
    job = SimulatedJob(4)
    job.step(0)
    job.turns(3)
    job.step(1, {rank: flipped(("exp_avg", "c")) for rank in (2, 3)})
    job.turns(1)
    for _ in range(4 * MOST_WAITING):  # the last rank has ended
        for rank in job.ranks[:3]:
            rank.turn()
    assert not any("3 (node-3)" in said for said in job.notes), job.notes


def test_a_kind_that_is_recorded_later_may_differ_by_design_from_its_own_first_step_on() -> None:
    job = SimulatedJob(2)
    for step in range(16):
        drift = flipped(*(("grad_reduced", name) for name in "abc"), bits=step + 1)
        for rank in job.ranks:
            rank.hold(step, drift if rank.number else None, kinds=KINDS if step >= 8 else KINDS[:1])
        job.turns(4)
    assert job.notes == [
        ("Copies of grad_reduced differ in most tensors at once, so by design. A merge compares them by value.")
    ]


def test_groups_that_are_the_same_among_the_monitored_ranks_are_compared_together() -> None:
    job = SimulatedJob(8, groups=[range(8), (0, 2, 4, 6), (1, 3, 5, 7)])
    for rank in job.ranks:
        rank.history.use((0, 2, 4))
    for step in range(5):
        job.step(step, {4: flipped(("param_origin", "a"), ("param_origin", "b1"))} if step == 3 else {})
        job.turns(4)
    (said,) = job.notes
    assert said.startswith("Copies of param_origin differ in step 3: a, b1: rank 4 (node-4)")


def test_a_step_in_which_a_rank_lacks_a_tensor_hides_no_later_fault_and_is_not_called_agreed() -> None:
    job = SimulatedJob(3)
    for step in range(12):
        for rank in job.ranks:
            changed = flipped(("grad_reduced", "a")) if rank.number == 2 and step == 8 else None
            rank.hold(step, changed, without="b" if (rank.number, step) == (1, 3) else "")
        job.turns(10 if step == 3 else 3)
    job.turns(6)
    (said,) = job.notes
    assert said.startswith("Copies of grad_reduced differ in step 8: a: rank 2 (node-2)")
    assert "agree is 7;" in said


def test_a_kind_that_only_some_ranks_have_in_a_step_is_not_called_agreed() -> None:
    job = SimulatedJob(3)
    for step in range(7):
        for rank in job.ranks:
            wrong = flipped(("param_origin", "a")) if rank.number == 0 and step == 6 else None
            rank.hold(step, wrong, kinds=KINDS[:3] if rank.number and step == 5 else KINDS)
        job.turns(3)
    job.turns(6)
    assert "agree is 4;" in job.notes[0]


def test_what_one_group_calls_good_is_not_later_than_what_another_group_calls_wrong() -> None:
    job = SimulatedJob(4, groups=[range(4), (0, 2), (1, 3)])
    for step in range(8):
        wrong: dict[int, dict[tuple[str, str], int]] = {}
        if step >= 2:
            wrong[3] = flipped(("param_origin", "a1"), bits=step)
        if step >= 6:
            wrong[2] = flipped(("param_origin", "b"), bits=step)
        job.step(step, wrong)
        job.turns(6)
    job.turns(6)
    (last,) = (said for said in job.notes if "differ in step 6: b: rank 2" in said)
    assert "agree is 1; the checkpoint of step 0 is the last" in last


def test_where_two_of_four_copies_differ_the_others_say_which_is_odd_in_a_later_step() -> None:
    job = SimulatedJob(4)
    for step in range(1, 9):
        wrong = flipped(("grad_reduced", "a"), bits=step) if step >= 3 else None
        for rank in job.ranks:
            if rank.number < 2 or step % 2 == 0:
                rank.hold(step, wrong if rank.number == 1 else None)
        job.turns(4)
    job.turns(4)
    assert job.notes[0].startswith("Copies of grad_reduced differ in step 4: a: rank 1 (node-1): other bits than the 3 ranks")


def test_copies_that_part_later_all_at_once_are_called_design_if_no_two_are_alike() -> None:
    job = SimulatedJob(3)
    for step in range(12):
        drift = [(kind, name) for kind in KINDS for name in "abc"] if step >= 6 else []
        job.step(step, {rank: flipped(*drift, bits=10 * step + rank + 1) for rank in range(3)})
        job.turns(4)
    job.turns(8)
    assert all("so by design" in said for said in job.notes)
    assert job.notes


@pytest.mark.parametrize("back_to", [3, 7])
def test_training_that_goes_back_again_and_again_compares_no_step_with_one_of_another_time(back_to: int) -> None:
    job, drawn = SimulatedJob(3), random.Random(back_to)
    for pass_ in range(6):
        for step in range(back_to if pass_ else 0, 10):
            for rank in drawn.sample(job.ranks, 3):
                rank.hold(step, flipped(*((kind, name) for kind in KINDS for name in "abc"), bits=pass_ + 1))
                if drawn.random() < 0.5:
                    drawn.choice(job.ranks).turn()
        job.turns(1)
    job.turns(6)
    assert job.notes == []


def test_training_that_goes_back_is_compared_again() -> None:
    job = SimulatedJob(3)
    for step in [*range(8), *range(3, 6)]:
        job.step(step)
        job.turns(2)
    job.step(6, {0: flipped(("param_origin", "a"))})
    job.turns(6)
    assert "param_origin differ in step 6: a: rank 0 (node-0)" in job.notes[0]


def test_the_event_of_a_wrong_copy_is_of_its_model_chunk() -> None:
    job = SimulatedJob(3, chunks=2)
    for step in range(4):
        job.step(step, {2: flipped(("grad_reduced", "1:b"))} if step == 2 else {})
        job.turns(3)
    job.turns(4)
    assert "differ in step 2: 1:b: rank 2" in job.notes[0]
    ((series, _),) = job.ranks[2].history.find(job.ranks[2].exchange.verdicts[0])
    assert (job.ranks[2].series[series].vpp_stage, job.ranks[2].series[series].name) == (1, "b")


def test_a_rank_that_has_not_seen_training_go_back_is_said_not_to_be_compared() -> None:
    job = SimulatedJob(3)
    for step in range(12):
        for rank in job.ranks:
            if rank.number < 2 or step < 6:
                rank.hold(step)
        job.turns()
    for step in range(7, 7 + LONG_APART + 3):
        job.step(step)
        job.turns()
    assert job.notes == ["Copies of rank 2 are not compared: ranks disagree how often training went back to an earlier step."]


def test_a_run_has_a_bounded_number_of_alerts() -> None:
    job = SimulatedJob(2 * MOST_ALERTS + 5)
    for step in range(2 * MOST_ALERTS):
        job.step(step, {step: flipped(("grad_reduced", "a"))})
        job.turns(4)
    *alerts, end = job.notes
    assert len(alerts) == MOST_ALERTS
    assert end == f"Copies of grad_reduced were the last of {MOST_ALERTS} alerts: this rank compares no more."


def test_steps_that_are_faster_than_the_looks_are_thinned_so_that_ranks_have_some_in_common() -> None:
    job = SimulatedJob(3)
    for rank in job.ranks:
        rank.history.look_s = 100.0
    seen: dict[int, set[int]] = {}
    for rank in job.ranks:
        for step in range(1_000 + 37 * rank.number):
            rank.hold(step, now=step * 0.2)
        seen[rank.number] = set(rank.history.published().steps)
    assert all(len(steps) <= KEPT_STEPS for steps in seen.values())
    assert len(set.intersection(*seen.values())) > KEPT_STEPS / 4


@pytest.mark.parametrize("case", range(examples(40, 400)))
def test_the_first_difference_is_named_in_whatever_order_the_ranks_take_their_turns(case: int) -> None:
    drawn = random.Random(case)
    world, odd = drawn.choice([3, 4, 7]), 0
    job, first = SimulatedJob(world), drawn.randrange(1, 9)
    odd, kind, name = drawn.randrange(world), drawn.choice(KINDS), drawn.choice("abc")
    held = [0] * world
    while min(held) < 12:
        number = drawn.randrange(world)
        if held[number] <= min(held) + 1:  # training is synchronous: no rank is ahead by more than a step
            at = KINDS.index(kind)
            later = [(kind, name), *((of, one) for of in KINDS[at + 1 :] for one in "abc" if drawn.random() < 0.3)]
            wrong = later if held[number] == first else [(of, one) for of in KINDS for one in "abc" if drawn.random() < 0.5]
            is_wrong = number == odd and held[number] >= first
            job.ranks[number].hold(held[number], flipped(*wrong, bits=held[number]) if is_wrong else None)
            held[number] += 1
        if drawn.random() < 0.3:
            for rank in drawn.sample(job.ranks, world):
                rank.turn()
    job.turns(12)
    (said,) = job.notes
    assert said.startswith(f"Copies of {kind} differ in step {first}: {name}: rank {odd} (node-{odd}): other bits"), said


# --- What others wrote into the store.

GARBAGE: tuple[Any, ...] = (
    "",
    "{",
    "null",
    "[]",
    '{"host": 3}',
    "\x00\xff",
    json.dumps({"host": "h", "steps": [1], "groups": {"g": {"exp_avg": "AAAA"}}}),
    json.dumps({"host": "h", "steps": [-1], "groups": {}}),
    json.dumps({"host": "h" * 200, "steps": [], "groups": {}}),
    json.dumps({"number": 10**30, "question": {"leader": -1}, "verdicts": []}),
    json.dumps({"number": 1, "question": None, "verdicts": [{}] * 1000}),
    json.dumps({"number": 1, "total": 5, "order": "x", "chunk": 0, "digests": "!"}),
    "9" * (MOST_CHARACTERS + 1),
    "[" * 50_000,
)


@pytest.mark.parametrize("key", ["rank/1", "board", "answer/1"])
def test_wrong_values_in_the_store_are_said_once_and_the_other_ranks_are_compared(key: str) -> None:
    for value in GARBAGE:
        job = SimulatedJob(4)
        for step in range(12):
            if step < 3 or key != "board":
                job.store.set(f"copies//{key}", value)
            job.step(step, {2: flipped(("grad_reduced", "a"))} if step == 3 else {})
            job.turns(3)
        job.turns(2 * MOST_WAITING)
        assert [said.partition(": ")[0] for said in job.notes] == ["Copies of grad_reduced differ in step 3"], value
        assert "rank 2 (node-2)" in job.notes[0]
        if value in ("{", "null") and key != "answer/1":
            assert max(rank.failures.counts.total() for rank in job.ranks) > 0


def test_a_board_that_is_no_text_is_replaced() -> None:
    job = SimulatedJob(4)
    job.store._held["copies//board"] = b"\xff\xfe"
    for step in range(8):
        job.step(step, {2: flipped(("grad_reduced", "a"))} if step == 3 else {})
        job.turns(3)
    assert [said.partition(": ")[0] for said in job.notes] == ["Copies of grad_reduced differ in step 3"]


# --- What it costs the store.


class Counting(LocalStore):
    """Counts what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def __getattribute__(self, name: str) -> Any:
        if name in ("check", "get", "set", "add", "compare_set"):
            self.asked += 1
        return super().__getattribute__(name)


@pytest.mark.parametrize("world", [2, 16, 128])
def test_a_turn_of_all_ranks_asks_the_store_a_bounded_number_of_times(world: int) -> None:
    store = Counting()
    job = SimulatedJob(world, store)
    for step in range(12):
        asked = store.asked
        job.step(step, {1: flipped(("grad_reduced", "a"))} if step == 6 else {})
        job.turns()
        assert store.asked - asked <= 3 * world + 40
    assert job.notes


@pytest.mark.parametrize(("world", "budget"), [(2, 2_000), (1_024, 2_000), (10_000, 2_000), (10_000, 200)])
def test_the_pause_between_turns_keeps_all_ranks_together_within_the_budget(world: int, budget: int) -> None:
    rank = SimulatedJob(2).ranks[0]
    rank.hold(0)
    rank.exchange._job, rank.exchange._pause_s = rank.exchange._job.__class__(0, world, None, asked_per_second=budget), None
    assert 3 * world / rank.exchange.turn_s <= budget
    assert rank.exchange.turn_s >= 1.0
