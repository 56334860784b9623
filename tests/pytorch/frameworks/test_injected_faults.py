"""A fault is planted in a real pipeline, at a random place: the ranking puts that place first, and calls it an origin."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from evidence import PROVES
from jobs import Job

from monitor.anomalies.events import EVENTS_FOLDER
from monitor.anomalies.ranking.ranking import Ranked, ranking_of

WATCHED = {
    "xy_distribution": True,
    "all_xy": True,
    "alert": {
        "rules": [{"rule_name": "AnomalyNan"}, {"rule_name": "AnomalyTurbulence", "args": {"threshold": 0.9}}],
        "dump": True,
    },
}
JOBS = (
    {"1f1b": (2, range(14)), "interleaved": (2, range(14, 27)), "dp2pp2": (4, range(27, 40))}
    if PROVES
    else {"1f1b": (2, range(8, 11)), "interleaved": (2, range(24, 27)), "dp2pp2": (4, range(35, 39))}
)
"""How many ranks, and which cases: as few as have every kind of fault, unless all are to be proved."""

CASES = [pytest.param(how, case, id=f"{how}-{case}") for how, (_, cases) in JOBS.items() for case in cases]


@pytest.fixture(scope="module")
def planted(run_job: Callable[..., Job]) -> Callable[[str, int], dict[str, Any]]:
    """What was planted in a case; the job that trains all cases of its schedule runs when the first of them is asked for."""
    known: dict[str, Job] = {}

    def of(how: str, case: int) -> dict[str, Any]:
        ranks, cases = JOBS[how]
        if how not in known:
            known[how] = run_job("injected_faults.py", ranks, how, cases.start, cases.stop, **WATCHED)
        fault: dict[str, Any] = known[how].monitored[0][case - cases.start]
        return fault

    return of


def found_first(fault: dict[str, Any], most: int = 8) -> list[Ranked]:
    ranking = ranking_of(Path(fault["base"]) / EVENTS_FOLDER, most)
    assert not ranking.unordered
    assert ranking.job.flaws == []
    return list(ranking.ranked)


def place(one: Ranked) -> tuple[int, int, int, int, str, str]:
    series = one.subject.recorded_as
    return one.member.rank, series.vpp_stage, one.step, one.micro_step, series.kind, series.name


@pytest.mark.parametrize(("how", "case"), CASES)
def test_the_planted_place_is_the_first_line_and_an_origin(
    how: str, case: int, planted: Callable[[str, int], dict[str, Any]]
) -> None:
    """Fault 21 of those found in other tools: of 6 NaN planted in a two-stage pipeline, none was put first."""
    fault = planted(how, case)
    first, *others = found_first(fault)
    kind = "actv" if fault["forward"] else "actv_grad"
    assert place(first) == (*(fault[key] for key in ("rank", "chunk", "step", "micro_step")), kind, f"{fault['module']}.output")
    assert first.is_origin
    assert [place(one) for one in others if one.is_origin] in ([], [place(first)])  # its second statistic, if there is one


@pytest.mark.parametrize(("how", "case"), CASES)
def test_the_rule_that_fired_is_that_of_the_fault(how: str, case: int, planted: Callable[[str, int], dict[str, Any]]) -> None:
    fault = planted(how, case)
    first = found_first(fault)[0]
    fired = {"nan": ("AnomalyNan", "nans"), "inf": ("AnomalyNan", "infs")}
    assert (first.rule, first.op) == fired.get(fault["what"], ("AnomalyTurbulence", "norm"))


def test_a_fault_of_one_data_parallel_rank_is_distinguished_from_one_of_all(
    planted: Callable[[str, int], dict[str, Any]],
) -> None:
    for case in JOBS["dp2pp2"][1]:
        first = found_first(planted("dp2pp2", case))[0]
        assert first.alone is not None


def test_every_kind_of_fault_and_every_rank_is_among_the_cases(planted: Callable[[str, int], dict[str, Any]]) -> None:
    faults = [planted(how, case) for how, (_, cases) in JOBS.items() for case in cases]
    assert {(one["forward"], one["what"]) for one in faults} == {
        *((way, what) for way in (True, False) for what in ("nan", "inf", "spike")),
        (False, "zeroed"),
    }
    assert {one["rank"] for one in faults} == {0, 1, 2, 3}
    assert {one["micro_step"] for one in faults} == {0, 1, 2, 3}
    assert len({json.dumps(one, sort_keys=True) for one in faults}) == len(faults)
