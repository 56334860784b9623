"""``AnomalyBounds``: a number that crosses its bound is one event, in the step in which it does."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from rule_parts import NAN, Event, Watched
from sink_rows import Measured

from monitor.anomalies.bounds import GROUPS, LASTING, OF_NEW_WEIGHTS
from monitor.anomalies.rules import BOUNDS
from monitor.series import KINDS
from monitor.stats.features import HEADS, own_columns
from monitor.stats.histograms import COUNTED
from monitor.stats.partials import COUNT, MAX, SUM, SUMSQ


def watched() -> Watched:
    return Watched(("AnomalyBounds", None))


def heads(name: str, largest: float, entropy: float = 2.0, count: int = 4) -> Measured:
    return Measured(name, numbers={COUNT: 10, SUM: 10 * entropy, MAX: largest, HEADS: count})


def update(ratio: float) -> dict[str, list[Measured]]:
    """An update of this size, of a weight with the norm 1."""
    return {"update_ratio": [Measured("w", numbers={COUNT: 4, SUM: ratio**2, SUMSQ: 1.0})]}


def look(watched: Watched, *rows: Measured) -> list[Event]:
    return watched.step({"attention_head_hook": rows})


def test_a_score_from_the_bound_on_fires_with_its_value_and_says_the_column() -> None:
    found = look(watched(), heads("a.heads.0", 99.9), heads("a.heads.1", 100.0))
    assert found == [Event("attention_head_hook", "a.heads.1", -1, "AnomalyBounds", "max_logit", 100.0, None)]


def test_a_number_that_stays_beyond_its_bound_fires_once_and_again_when_it_comes_back() -> None:
    rank = watched()
    fired = [bool(look(rank, heads("a.heads", largest))) for largest in (50, 200, 300, 400, 50, 200)]
    assert fired == [False, True, False, False, False, True]


def test_entropy_is_judged_of_all_heads_together_and_not_of_one() -> None:
    found = look(watched(), heads("a.heads", 1, entropy=0.005), heads("a.heads.0", 1, entropy=0.005))
    assert [(one.name, one.op) for one in found] == [("a.heads", "entropy")]


def test_nan_does_not_fire_and_ends_what_was_in_a_row() -> None:
    rank = watched()
    assert look(rank, heads("a.heads", NAN)) == []
    assert look(rank, heads("a.heads", 100)) != []


def test_a_bound_that_asks_for_rows_in_a_row_fires_at_the_last_of_them_and_never_during_the_first_steps() -> None:
    rank = watched()
    fired = [step for step in range(OF_NEW_WEIGHTS + 3 * LASTING) if rank.step(update(0.5))]
    assert fired == [OF_NEW_WEIGHTS + LASTING - 1]


def test_one_row_within_the_bound_begins_the_count_anew() -> None:
    rank = watched()
    quiet = [update(0.01)] * OF_NEW_WEIGHTS + [update(0.5)] * (LASTING - 1) + [update(0.01)] + [update(0.5)] * (LASTING - 1)
    assert [rank.step(one) for one in quiet] == [[]] * len(quiet)
    assert [one.op for one in rank.step(update(0.5))] == ["update_ratio"]


def test_elements_that_a_narrower_format_loses_fire_where_they_were_counted() -> None:
    values = np.array([1e6, 1.0]).tolist()
    found = watched().step({"actv": [Measured("a", values, magnitudes=True), Measured("b", [1.0, 2.0], magnitudes=True)]})
    assert [(one.name, one.op) for one in found] == [("a", "overflow_fp16")]
    assert watched().step({"actv": [Measured("a", values)]}) == []


def test_the_other_rules_do_not_judge_features() -> None:
    rank = Watched(("AnomalyNan", None), ("AnomalyTurbulence", 0.5))
    assert look(rank, heads("a.heads", 1)) == look(rank, heads("a.heads", NAN)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_bound_of_a_kind_is_of_a_column_that_it_has(kind: str) -> None:
    columns = own_columns(kind) or COUNTED
    assert {bound.column for bound in BOUNDS[kind]} <= set(columns)


def test_every_bound_of_the_report_belongs_to_a_kind() -> None:
    judged: Mapping[str, object] = {bound.column: kind for kind in KINDS for bound in BOUNDS[kind]}
    assert {bound.column for group in GROUPS for bound in group.bounds} == set(judged)
