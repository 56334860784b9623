from hypothesis import given, strategies as st

from monitor.coordinator.manifest_format import (
    LAST_STEP,
    MOST_CAUSES,
    OTHER_CAUSES,
    Rest,
    StepRange,
    StepRanges,
    StepsByCause,
    without_pairs,
)

STEPS = st.lists(st.integers(0, 60) | st.integers(0, 10**12), max_size=80)


def listed(ranges):
    return [step for one in ranges.ranges for step in one.steps()]


@given(STEPS)
def test_the_ranges_hold_each_step_added_once_in_ascending_order(steps):
    assert listed(StepRanges(steps)) == sorted(set(steps))


@given(STEPS)
def test_the_count_is_that_of_different_steps(steps):
    assert StepRanges(steps).count == len(set(steps))


@given(st.integers(0, 10**9), st.integers(1, 10**6), st.integers(2, 300))
def test_every_nth_step_is_one_range(first, interval, length):
    steps = range(first, first + interval * length, interval)
    assert StepRanges(steps).ranges == (StepRange(first, steps[-1], interval),)


@given(st.integers(0, 10**6), st.integers(2, 100), st.integers(4, 100), st.data())
def test_a_step_missing_from_a_cadence_costs_one_more_range_and_none_once_it_comes(first, interval, length, data):
    steps = list(range(first, first + interval * length, interval))
    missing = steps.pop(data.draw(st.integers(2, length - 3)) if length > 5 else 2)
    ranges = StepRanges(steps)
    assert len(ranges.ranges) == 2
    ranges.add(missing)
    assert ranges.ranges == (StepRange(first, steps[-1], interval),)


def test_a_step_between_those_of_a_range_splits_it():
    ranges = StepRanges(range(0, 101, 10))
    ranges.add(55)
    assert ranges.ranges == (StepRange(0, 50, 10), StepRange(55, 55), StepRange(60, 100, 10))


def test_a_change_of_interval_begins_a_range():
    assert StepRanges([0, 10, 20, 30, 31, 32, 33]).ranges == (StepRange(0, 30, 10), StepRange(31, 33, 1))


@given(st.lists(st.integers(0, 10**6), min_size=1, unique=True), st.integers(1, 10))
def test_past_the_bound_steps_are_counted_and_framed(steps, most):
    ranges = StepRanges(steps, most=most)
    kept = listed(ranges)
    assert len(ranges.ranges) <= most
    assert ranges.count == len(steps)
    unlisted = sorted(set(steps) - set(kept))
    assert set(kept) <= set(steps)
    assert ranges.rest == (Rest(len(unlisted), unlisted[0], unlisted[-1]) if unlisted else None)


def test_a_cadence_continues_past_the_bound():
    ranges = StepRanges([0, 1, 5, 6, 100, 107], most=2)
    assert ranges.ranges == (StepRange(0, 1), StepRange(5, 6))
    ranges.add(7)
    assert ranges.ranges == (StepRange(0, 1), StepRange(5, 7))
    assert ranges.rest == Rest(2, 100, 107)


def test_steps_stand_under_their_cause():
    steps = StepsByCause()
    for step, cause in [(3, "queue full"), (4, "queue full"), (9, "closing")]:
        steps.add(step, cause)
    assert {cause: ranges.ranges for cause, ranges in steps.items()} == {
        "queue full": (StepRange(3, 4),),
        "closing": (StepRange(9, 9),),
    }


def test_causes_without_number_are_gathered_under_one():
    steps = StepsByCause()
    for step in range(1000):
        steps.add(step, f"error {step}" * 1000)
    causes = dict(steps.items())
    assert len(causes) == MOST_CAUSES + 1
    assert causes[OTHER_CAUSES].count == 1000 - MOST_CAUSES
    assert max(len(cause) for cause in causes) == 300


@given(STEPS, st.integers(0, 70), st.integers(0, 70) | st.just(LAST_STEP))
def test_steps_taken_out_are_those_between_and_no_others(steps, first, last):
    ranges = StepRanges(steps)
    taken = [step for one in ranges.take(first, last) for step in one.steps()]
    assert taken == sorted(step for step in set(steps) if first <= step <= last)
    assert listed(ranges) == sorted(set(steps) - set(taken))
    assert ranges.count == len(set(steps)) - len(taken)


@given(STEPS, STEPS)
def test_ranges_added_are_their_steps_added(steps, others):
    ranges = StepRanges(steps)
    ranges.add_all(StepRanges(others).ranges)
    assert listed(ranges) == sorted({*steps, *others})
    assert ranges.count == len({*steps, *others})


def test_a_range_that_stands_clear_of_the_others_is_not_taken_apart():
    ranges = StepRanges([0, 1])
    ranges.add_all([StepRange(10, 10**15)])
    assert ranges.ranges == (StepRange(0, 1), StepRange(10, 10**15))


@given(STEPS, st.integers(1, 5))
def test_what_was_read_back_continues_as_it_was(steps, most):
    ranges = StepRanges(steps, most=most)
    again = StepRanges.restored(ranges.ranges, ranges.rest, most=most)
    for step in (7, 10**13):
        ranges.add(step)
        again.add(step)
    assert (again.ranges, again.rest, again.count) == (ranges.ranges, ranges.rest, ranges.count)


@given(STEPS)
def test_for_people_no_two_steps_that_lie_apart_make_a_range_and_no_step_is_lost(steps):
    found = without_pairs(StepRanges(steps).ranges)
    assert [step for one in found for step in one.steps()] == sorted(set(steps))
    assert all(one.size != 2 or one.interval == 1 for one in found)


def test_for_people_a_step_before_an_unbroken_run_stands_alone():
    assert without_pairs(StepRanges([0, *range(10, 16)]).ranges) == [StepRange(0, 0), StepRange(10, 15)]
