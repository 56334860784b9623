"""The report names activations that are dead or collapsed, and says nothing of healthy ones, which may be massive."""

from __future__ import annotations

from pathlib import Path

import pytest
from recorded_job import RecordedRank
from reported_job import reported
from sink_rows import Measured

from monitor.report.findings import BAD, GOOD
from monitor.stats import partials

HEALTHY = {
    partials.COUNT: 64.0,
    partials.SUM: 640.0,
    partials.SMALLS: 1.0,
    partials.SUMSQ: 12.0,
    partials.MAX: 40.0,
    partials.POSINFS: 1500.0,
    partials.NEGINFS: 1500.0**2,
    partials.NANS: 1.0,
    partials.MIN: 0.9,
}

FAULTS = {
    "dead": ({partials.MIN: 0.25}, "its dead_units is 0.75: most of its units are dead"),
    "collapsed": ({partials.SUMSQ: 1.0005}, "its effective_rank is 1: all tokens point in the same direction"),
}


def record(base: Path, change: dict[int, float]) -> Path:
    one = RecordedRank(base, micro_step_kinds=["activation_hook"])
    for step in range(3):
        numbers = {**HEALTHY, **(change if step == 2 else {})}
        one.write(step, {"activation_hook": [Measured("h.0.activation", micro_step=0, numbers=numbers)]})
    one.close()
    return base


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_activations_is_named_with_its_place(fault: str, tmp_path: Path) -> None:
    change, said = FAULTS[fault]
    with reported(record(tmp_path, change)) as (_, checks, verdict):
        assert next(one for one in checks if one.name == "Activations").state == BAD
        assert (verdict.place.step, verdict.place.kind, verdict.place.name) == (2, "activation_hook", "h.0.activation")
        assert said in verdict.says
        assert verdict.then


def test_healthy_activations_are_good_however_massive_they_are(tmp_path: Path) -> None:
    with reported(record(tmp_path, {partials.MAX: 1500.0})) as (_, checks, _verdict):
        found = next(one for one in checks if one.name == "Activations")
        assert found.state == GOOD
        assert found.finding.says == "dead_units, effective_rank are within bounds."
