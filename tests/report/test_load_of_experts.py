"""A report judges experts by their tokens of many steps and of all ranks together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from recorded_job import RecordedRank
from reported_job import reported
from sink_rows import Measured

from monitor.report.checks import CheckResult
from monitor.report.findings import BAD, GOOD, NOT_LOOKED_AT
from monitor.stats.features import ASSIGNED, DROPPED, ROUTERS
from monitor.stats.loads import LOAD_KIND
from monitor.stats.partials import COUNT, MAX, SUM

STEPS = 12
EVEN = (1.0, 1.0, 1.0, 1.0)


def judged(base: Path, shares: dict[int, tuple[float, ...]], tokens: int = 40, **router: float) -> dict[str, CheckResult]:
    """The checks of a job whose ranks send their tokens to experts in these shares, drawn at random in each step."""
    random = np.random.default_rng(0)
    columns = {"logit_max": MAX, "dropped": DROPPED}
    for rank, of_rank in shares.items():
        one = RecordedRank(base, rank, len(shares), micro_step_kinds=[LOAD_KIND])
        for step in range(STEPS):
            counts = random.multinomial(tokens, np.array(of_rank) / sum(of_rank)).tolist()
            own = {COUNT: tokens, SUM: 1.0, ASSIGNED: sum(counts), ROUTERS: 1.0, MAX: 3.0}
            own |= {columns[name]: value for name, value in router.items()}
            rows = [Measured("h.0.gate.experts", micro_step=0, numbers=own)]
            for expert, count in enumerate(counts):
                numbers = {COUNT: sum(counts), ASSIGNED: count}
                rows.append(Measured(f"h.0.gate.experts.{expert}", micro_step=0, numbers=numbers))
            one.write(step, {LOAD_KIND: rows})
        one.close()
    with reported(base) as (_, checks, _verdict):
        return {one.name: one for one in checks}


def test_even_experts_are_good_also_where_a_step_leaves_one_out(tmp_path: Path) -> None:
    found = judged(tmp_path, {0: (1.0, 1.0, 1.0, 0.3)}, tokens=60)["Load of experts"]
    assert found.state == GOOD
    assert "Every expert got tokens, from 0." in found.finding.says


def test_a_dead_expert_is_named_with_what_to_do(tmp_path: Path) -> None:
    found = judged(tmp_path, {0: (1.0, 0.0, 1.0, 1.0)})["Load of experts"]
    assert found.state == BAD
    assert "h.0.gate.experts, in steps 0 to 11: 1 of its 4 experts got no token, where an even share is 120: 1." in (
        found.finding.says
    )
    assert "load-balancing loss" in found.finding.then


def routed(base: Path, counts: list[tuple[int, ...]]) -> dict[str, CheckResult]:
    """The checks of a job of one rank, with the assignments of each step."""
    one = RecordedRank(base, micro_step_kinds=[LOAD_KIND])
    for step, of_step in enumerate(counts):
        numbers = [{COUNT: sum(of_step), ASSIGNED: count} for count in of_step]
        experts = [Measured(f"gate.experts.{expert}", micro_step=0, numbers=each) for expert, each in enumerate(numbers)]
        own = {COUNT: sum(of_step), ASSIGNED: sum(of_step), ROUTERS: 1.0}
        one.write(step, {LOAD_KIND: [Measured("gate.experts", micro_step=0, numbers=own), *experts]})
    one.close()
    with reported(base) as (_, checks, _verdict):
        return {each.name: each for each in checks}


def test_an_expert_that_dies_late_is_named_with_its_last_step(tmp_path: Path) -> None:
    found = routed(tmp_path, [(20, 20, 20)] * 30 + [(30, 0, 30)] * 20)["Load of experts"]
    assert found.state == BAD
    assert found.finding.says.startswith(f"{LOAD_KIND} gate.experts, in steps 0 to 49: expert 1 got no token after step 29, ")
    assert found.finding.says.endswith("where 400 are expected at its earlier rate.")


@pytest.mark.parametrize("counts", [[(20, 20, 20)] * 40 + [(30, 0, 30)] * 10, [(60, 4, 60), (60, 0, 60)] * 20])
def test_an_expert_without_tokens_for_a_few_steps_is_no_fault(counts: list[tuple[int, ...]], tmp_path: Path) -> None:
    found = routed(tmp_path, counts)
    assert (found["Load of experts"].state, found["Sudden changes"].state) == (GOOD, GOOD)


def test_an_expert_that_another_rank_uses_is_not_dead(tmp_path: Path) -> None:
    shares = {0: (1.0, 0.0, 1.0, 1.0), 1: (0.5, 2.0, 0.5, 0.5)}
    assert judged(tmp_path, shares)["Load of experts"].state == GOOD


def test_an_expert_that_gets_most_tokens_of_many_experts_is_named(tmp_path: Path) -> None:
    found = judged(tmp_path, {0: (30.0, *[1.0] * 15)}, tokens=200)["Load of experts"]
    assert found.state == BAD
    assert "expert 0 got " in found.finding.says


def test_a_starved_expert_is_said_and_is_no_fault(tmp_path: Path) -> None:
    found = judged(tmp_path, {0: (1.0, 0.02, 1.0, 1.0)}, tokens=200)["Load of experts"]
    assert found.state == GOOD
    assert "; 1 have less than 0.1 of it" in found.finding.says


def test_few_tokens_are_not_judged(tmp_path: Path) -> None:
    assert judged(tmp_path, {0: (1.0, 0.0, 1.0, 1.0)}, tokens=8)["Load of experts"].state == NOT_LOOKED_AT


@pytest.mark.parametrize(("column", "value", "says"), [("logit_max", 130.0, "bfloat16 rounds"), ("dropped", 50.0, "capacity")])
def test_large_logits_and_dropped_tokens_are_named(tmp_path: Path, column: str, value: float, says: str) -> None:
    found = judged(tmp_path, {0: EVEN}, **{column: value})["Experts"]
    assert found.state == BAD
    assert says in found.finding.says


def test_a_router_within_bounds_is_good(tmp_path: Path) -> None:
    checks = judged(tmp_path, {0: EVEN})
    assert [checks[name].state for name in ("Experts", "Load of experts", "NaN and infinity")] == [GOOD, GOOD, GOOD]
