import pytest
from hypothesis import given, strategies as st

from monitor.pipeline.delivery import DroppedSteps

Reports = list[tuple[int, str]]


def reported_by(gaps: DroppedSteps) -> Reports:
    told: Reports = []
    gaps.report(lambda step, reason: told.append((step, reason)))
    return told


@given(st.lists(st.tuples(st.integers(0, 50), st.sampled_from(["full", "broken"]), st.booleans())))
def test_every_dropped_step_is_reported_exactly_once_with_its_reason_and_in_order(drops):
    gaps = DroppedSteps()
    told: Reports = []
    for step, reason, tell_now in drops:
        gaps.add(step, reason)
        if tell_now:
            told += reported_by(gaps)
    told += reported_by(gaps)
    assert told == [(step, reason) for step, reason, _ in drops]
    assert not gaps.unreported


def test_a_hundred_thousand_evenly_spaced_steps_are_one_gap():
    gaps = DroppedSteps()
    for step in range(0, 1_000_000, 10):
        gaps.add(step, "full")
    assert [gap.steps for gap in gaps._ranges] == [range(0, 999_991, 10)]


def test_drops_are_counted_by_reason():
    gaps = DroppedSteps()
    for step, reason in enumerate(["full", "broken", "full"]):
        gaps.add(step, reason)
    assert gaps.counts == {"full": 2, "broken": 1}


def test_a_step_that_the_journal_refused_is_reported_again():
    gaps = DroppedSteps()
    gaps.add(7, "full")

    class RefusedError(Exception): ...

    def refuse(*_: object) -> None:
        raise RefusedError

    with pytest.raises(RefusedError):
        gaps.report(refuse)
    assert reported_by(gaps) == [(7, "full")]
