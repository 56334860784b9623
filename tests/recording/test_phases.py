"""The phases of a step reach the collectors that take part in them."""

from __future__ import annotations

from typing import Any

from monitor.recording.phases import Collector, Collectors, OptimizerTurn
from monitor.recording.recorder import Due


class Noting(Collector):
    """Notes the calls of two phases."""

    def __init__(self, name: str, calls: list[tuple[Any, ...]]) -> None:
        self.name, self.calls = name, calls

    def begin_step(self, *, before_a_turn: bool) -> None:
        self.calls.append((self.name, before_a_turn))

    def before_step(self, turn: OptimizerTurn) -> None:
        self.calls.append((self.name, turn))


def test_a_phase_calls_the_collectors_in_the_order_in_which_they_were_added() -> None:
    calls: list[tuple[Any, ...]] = []
    collectors, turn = Collectors(), OptimizerTurn("optimizer")
    for name in ("first", "second"):
        collectors.add(Noting(name, calls), Due(True))
    collectors.each(Collector.begin_step, before_a_turn=True)
    collectors.each(Collector.before_step, turn)
    assert calls == [("first", True), ("second", True), ("first", turn), ("second", turn)]


def test_a_phase_that_no_collector_overrides_calls_nothing() -> None:
    called: list[str] = []

    class Inheriting(Noting):
        def remove(self) -> None:
            called.append("remove")

    collectors = Collectors()
    collectors.add(Inheriting("only", []), Due())
    assert {phase: len(calls) for phase, calls in collectors._calls.items()} == {
        "begin_step": 1,
        "forward_begins": 0,
        "before_step": 1,
        "gradients_ready": 0,
        "clipped": 0,
        "after_step": 0,
        "end_turn": 0,
        "before_seal": 0,
        "end_step": 0,
        "remove": 1,
    }
    collectors.all(Collector.remove)
    assert called == ["remove"]


def test_a_collector_takes_part_in_the_steps_that_are_due_and_hears_of_the_end_of_each() -> None:
    calls: list[tuple[Any, ...]] = []

    class Ending(Noting):
        def end_step(self, *, collected: bool) -> None:
            self.calls.append((self.name, "ends", collected))

    due, turn = Due(), OptimizerTurn("optimizer")
    collectors = Collectors()
    collectors.add(Ending("rare", calls), due)
    collectors.add(Ending("always", calls), Due(True))
    for due.in_step in (False, True):
        collectors.each(Collector.before_step, turn)
        collectors.end_step(collected=True)
    assert calls == [
        ("always", turn),
        ("rare", "ends", False),
        ("always", "ends", True),
        ("rare", turn),
        ("always", turn),
        ("rare", "ends", True),
        ("always", "ends", True),
    ]
