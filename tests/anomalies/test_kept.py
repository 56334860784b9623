"""Which events stay when there are too many."""

from __future__ import annotations

from collections import Counter

from monitor.anomalies.listeners import EventBuffer, EventEntry


def entries(step: int, count: int) -> list[EventEntry]:
    return [EventEntry((step, place), "rule", b"") for place in range(count)]


def kept(*counts: int, most: int = 100, most_of_a_step: int = 20) -> EventBuffer:
    """After steps with so many events."""
    found = EventBuffer(most, most_of_a_step)
    for step, count in enumerate(counts):
        found.add(step, entries(step, count))
    assert len(found) == len(list(found))
    return found


def by_step(found: EventBuffer) -> list[int]:
    """How many are kept of each step; they are its first ones."""
    places: dict[int, list[int]] = {}
    for entry in found:
        places.setdefault(entry.place[0], []).append(entry.place[1])
    assert all(of_step == list(range(len(of_step))) for of_step in places.values())
    return [len(of_step) for _, of_step in sorted(places.items())]


def test_all_are_kept_up_to_the_bound() -> None:
    assert by_step(kept(20, 3, 20, 17, 20, 20)) == [20, 3, 20, 17, 20, 20]


def test_of_a_step_with_more_than_its_bound_the_first_are_kept() -> None:
    assert by_step(kept(5000, 1)) == [20, 1]


def test_beyond_the_bound_every_step_gives_up_its_later_events_and_none_its_first() -> None:
    assert by_step(kept(20, 3, 20, 20, 20, 20)) == [10, 3, 10, 10, 10, 10]


def test_a_long_stream_leaves_room_for_what_comes_after_it() -> None:
    found = kept(*[20] * 60)
    assert by_step(found) == [1] * 60
    assert by_step(kept(*[3] * 30, 20)) == [3] * 30 + [10]


def test_with_an_event_of_each_of_very_many_steps_the_first_steps_are_kept() -> None:
    found = kept(*[20] * 500)
    assert by_step(found) == [1] * 100
    assert {entry.place[0] for entry in found} == set(range(100))


def test_a_step_that_comes_again_takes_the_place_of_what_it_was() -> None:
    found = kept(4, 4)
    found.add(0, entries(0, 2))
    found.add(1, [])
    assert Counter(entry.place[0] for entry in found) == {0: 2}
    assert len(found) == 2
