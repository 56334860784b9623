"""Rules side by side: what counts where several fire, and which callbacks are called."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from rule_parts import INF, NAN, Watched, said
from sink_rows import Measured

from monitor.anomalies.rules import RULES
from monitor.anomalies.scanner import StepFindings
from monitor.config import AlertRule, RuleArgs
from monitor.config.model import RULE_ARGUMENTS
from monitor.series import DIRECTION_KIND, FEATURE_KINDS, SIGNED_KINDS
from monitor.stats.partials import COUNT, MAX, SUM, SUMSQ, Partials

RULE, NAN_RULE = "AnomalyTurbulence", "AnomalyNan"


def test_every_rule_that_the_configuration_knows_can_be_made_of_its_arguments_and_no_other_exists() -> None:
    assert set(RULES) == set(get_args(AlertRule.model_fields["rule_name"].annotation)) == set(RULE_ARGUMENTS)
    every = RuleArgs(threshold=0.5).model_dump()
    for name, rule in RULES.items():
        needed, optional = RULE_ARGUMENTS[name]
        assert rule(**{one: every[one] for one in needed}).name == name
        assert rule(**{one: every[one] for one in (*needed, *optional)}).name == name


@pytest.mark.parametrize(("rules", "expected"), [((NAN_RULE, RULE), "nans"), ((RULE, NAN_RULE), "norm")])
def test_of_a_nan_the_first_rule_counts_and_there_is_one_event(rules: tuple[str, str], expected: str) -> None:
    watched = Watched(*((rule, 0.5) for rule in rules))
    for _ in range(3):
        assert said(watched.step(a=[NAN, INF])) == [("a", rules[0], expected)]


def test_of_a_tensor_that_two_rules_fire_on_only_the_events_of_the_first_in_the_list_count() -> None:
    named = {NAN_RULE: [("a", NAN_RULE, "absmax")], RULE: [("a", RULE, "norm"), ("a", RULE, "mean")]}
    for first, second in ((NAN_RULE, RULE), (RULE, NAN_RULE)):
        watched = Watched((first, 5.0), (second, 5.0))
        watched.step(a=[1.0, 1.0])
        assert said(watched.step(a=[100.0, 100.0])) == named[first]


def test_another_tensor_of_the_step_is_left_to_the_second_rule() -> None:
    watched = Watched((NAN_RULE, 50.0), (RULE, 0.5))
    watched.step(a=[1.0], b=[1.0])
    assert said(watched.step(a=[100.0], b=[9.0])) == [("a", NAN_RULE, "absmax"), ("b", RULE, "norm"), ("b", RULE, "mean")]


def test_of_two_rules_of_one_kind_the_first_counts() -> None:
    watched = Watched((RULE, 9.0), (RULE, 0.5))
    watched.step(a=[1.0, 1.0], b=[1.0, 1.0])
    found = watched.step(a=[100.0, 100.0], b=[3.0, 3.0])
    assert said(found) == [("a", RULE, "norm"), ("a", RULE, "mean"), ("b", RULE, "norm"), ("b", RULE, "mean")]


def test_a_rule_that_was_not_the_first_remembers_all_the_same() -> None:
    watched = Watched((NAN_RULE, 5.0), (RULE, 0.5))
    for value in (9.0, 9.0, 1.0):
        found = watched.step(a=[value])
    assert said(found) == [("a", RULE, "norm"), ("a", RULE, "mean")]


def test_events_of_a_step_stand_in_call_order_whatever_their_kind_and_rule() -> None:
    watched = Watched((NAN_RULE, None), (RULE, 0.5))
    rows = [watched.rank.step(step, kinds(values)) for step, values in enumerate(([1.0], [9.0], [NAN]))]
    for step in rows:
        step.kinds["actv"].call_id[:] = (0, 3)
        step.kinds["grad_reduced"].call_id[:] = (1, 2)
    _, spiked, spoiled = (watched.look(step) for step in rows)
    assert [(one.name, one.op) for one in spiked] == [(name, op) for name in "acdb" for op in ("norm", "mean")]
    assert [one.name for one in spoiled] == ["a", "c", "d", "b"]


@pytest.mark.parametrize("kind", [*FEATURE_KINDS, DIRECTION_KIND])
def test_features_are_not_judged_as_if_they_were_statistics_of_a_tensor(kind: str) -> None:
    watched = Watched((NAN_RULE, 5.0), (RULE, 0.5))
    for number in (1.0, 1e9, NAN):
        feature = Measured("w", numbers={COUNT: 1, SUM: number, SUMSQ: number, MAX: number})
        assert watched.step({kind: [feature]}) == []


@pytest.mark.parametrize("kind", SIGNED_KINDS)
def test_what_adam_makes_of_its_moments_is_judged_as_the_tensor_that_it_is(kind: str) -> None:
    watched = Watched((NAN_RULE, None))
    assert said(watched.step({kind: [Measured("w", [NAN, 1.0])]})) == [("w", NAN_RULE, "nans")]


def kinds(values: list[float]) -> dict[str, list[Measured]]:
    return {
        "actv": [Measured("a", values), Measured("b", values)],
        "grad_reduced": [Measured("c", values), Measured("d", values)],
    }


@pytest.mark.parametrize("status", ["skipped", "incomplete"])
def test_a_step_that_was_skipped_or_cut_short_is_judged_like_any_other(status: str) -> None:
    watched = Watched((NAN_RULE, None))
    rows = watched.rank.step(1, {"actv": [Measured("a", [NAN])]})
    assert len(watched.look(replace(rows, status=status))) == 1


@pytest.mark.parametrize("ops", [(), ("zeros",), ("shape",)])
def test_rules_see_what_they_need_whatever_statistics_are_written(ops: tuple[str, ...]) -> None:
    watched = Watched((NAN_RULE, None), (RULE, 0.5))
    for values in ([1.0], [9.0], [NAN]):
        found = watched.look(watched.rank.step(1, {"actv": [Measured("a", values)]}, ops=ops))
    assert said(found) == [("a", NAN_RULE, "nans")]
    assert [len(one) for one in watched.findings] == [0, 2, 1]


class Listening:
    """Keeps what it was given."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def judged(self, findings: StepFindings) -> None:
        self.told.append((findings.step, len(findings)))

    def not_judged(self, step: int, reason: str) -> None:
        self.told.append((step, reason))

    def save(self) -> None:
        self.told.append("save")

    def close(self) -> None:
        self.told.append("close")


def test_every_listener_gets_steps_with_and_without_events_and_of_those_that_were_lost() -> None:
    listening = Listening()
    watched = Watched((NAN_RULE, None), listeners=[listening])
    watched.step(a=[1.0])
    watched.step(a=[NAN])
    watched.scanner.dropped(7, "queue full")
    watched.scanner.save()
    watched.scanner.close()
    assert listening.told == [(1, 0), (2, 1), (7, "queue full"), "save", "close"]


def test_a_step_in_which_the_rules_fail_counts_as_not_judged() -> None:
    listening = Listening()
    watched = Watched((RULE, 0.5), listeners=[listening])
    rows = watched.rank.step(4, {"actv": [Measured("a")]})
    torn = replace(rows.kinds["actv"], partials=Partials(np.zeros((3, 1))))
    with pytest.raises(IndexError):
        watched.scanner.look(replace(rows, kinds={"actv": torn}))
    [(step, reason)] = listening.told
    assert (step, reason.startswith("the rules failed: IndexError")) == (4, True)


def test_a_listener_that_fails_keeps_no_other_from_being_told() -> None:
    class Failing(Listening):
        def judged(self, findings: StepFindings) -> None:
            raise OSError(f"no line about step {findings.step}")

    listening = Listening()
    watched = Watched((NAN_RULE, None), listeners=[Failing(), listening])
    with pytest.raises(OSError, match="no line about step 1"):
        watched.step(a=[NAN])
    assert listening.told == [(1, 1)]
