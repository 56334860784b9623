"""What a report says of clipping, of the health of the optimizer, and of updates that leave the band of their layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from recorded_job import RecordedRank
from reported_job import modelled
from sink_rows import Measured

from monitor.anomalies.bounds import LASTING, OF_NEW_WEIGHTS
from monitor.report.checks import CheckResult, checks_of
from monitor.report.facts import facts_of
from monitor.report.findings import BAD, GOOD, NOT_LOOKED_AT, Verdict
from monitor.report.model import unusual_of, verdict_for_programs
from monitor.report.optimizer import FEWEST
from monitor.stats.partials import COUNT, NEGINFS, SMALLS, SUM, SUMSQ

STEPS, WHEN, LAYERS = 120, 80, 6
Ratio = Callable[[int, int], float]
"""Of a step and a layer."""


def recorded(base: Path, kind: str, numbers: Callable[[int, int], dict[int, float]], steps: int = STEPS) -> list[CheckResult]:
    one = RecordedRank(base)
    for step in range(steps):
        one.write(step, {kind: [Measured(f"h.{layer}.weight", numbers=numbers(step, layer)) for layer in range(LAYERS)]})
    one.close()
    _, checks, _ = modelled(base)
    return checks


def state(checks: list[CheckResult], name: str) -> str:
    return next(one.state for one in checks if one.name == name)


def says(checks: list[CheckResult], name: str) -> str:
    return next(one.finding.says for one in checks if one.name == name)


# --- Updates beside the usual band.


def ratios(ratio: Ratio, seed: int = 0) -> Callable[[int, int], dict[int, float]]:
    noise = np.random.default_rng(seed).lognormal(0, 0.2, (STEPS, LAYERS))
    return lambda step, layer: {COUNT: 8, SUM: (ratio(step, layer) * noise[step, layer]) ** 2, SUMSQ: 1.0}


def schedule(step: int) -> float:
    """Warm-up, a decay to nothing, and a restart."""
    return 1e-3 * min(1.0, (step + 1) / 20) * max(0.0, 1 - (step % 60) / 59)


HEALTHY: dict[str, Ratio] = {
    "a schedule that restarts": lambda step, layer: schedule(step) * 2**layer,
    "a layer that began at zero": lambda step, layer: 1 / (1 + step) if not layer else schedule(step),
    "a frozen layer": lambda step, layer: schedule(step) if layer else 0.0,
    "a schedule that ends at zero": lambda step, _: 1e-3 if step < STEPS - 1 else 0.0,
    "a restart from a hundredth": lambda step, _: 1e-5 if step < WHEN else 1e-3,
}
FAULTY: dict[str, Ratio] = {
    "a layer that moves too fast": lambda step, layer: schedule(step) * (30 if layer == 2 and step >= WHEN else 1),
    "a layer that stops": lambda step, layer: schedule(step) * (layer != 2 or step < WHEN),
}


@pytest.mark.parametrize("what", HEALTHY)
def test_updates_of_healthy_layers_are_in_their_band(what: str, tmp_path: Path) -> None:
    checks = recorded(tmp_path, "update_ratio", ratios(HEALTHY[what]))
    assert state(checks, "Updates of layers") == GOOD
    assert state(checks, "Size of updates") == GOOD
    assert state(checks, "Sudden changes") == GOOD


def test_weights_that_no_step_changes_any_more_are_a_sudden_change(tmp_path: Path) -> None:
    checks = recorded(tmp_path, "update_ratio", ratios(lambda step, _: 1e-3 if step < WHEN else 0.0))
    assert says(checks, "Sudden changes").startswith(f"First came update_ratio h.0.weight on rank 0 in step {WHEN}: ")
    (then,) = [one.finding.then for one in checks if one.name == "Sudden changes"]
    assert then.startswith("No optimizer changes this weight any more: look at the learning rate, and at what was frozen or ")


def test_programs_get_ratios_that_a_schedule_moved_among_the_unusual_tensors(tmp_path: Path) -> None:
    recorded(tmp_path, "update_ratio", ratios(HEALTHY["a restart from a hundredth"]))
    with facts_of(str(tmp_path)) as facts:
        assert unusual_of(facts)[0]["kind"] == "update_ratio"


@pytest.mark.parametrize("what", FAULTY)
def test_a_layer_that_leaves_its_band_is_named(what: str, tmp_path: Path) -> None:
    checks = recorded(tmp_path, "update_ratio", ratios(FAULTY[what]))
    assert state(checks, "Updates of layers") == BAD
    assert says(checks, "Updates of layers").startswith(f"update_ratio h.2.weight on rank 0 in step {WHEN}: it is ")


@pytest.mark.parametrize("elements", [1, 2])
def test_the_ratio_of_a_weight_of_few_elements_that_comes_near_zero_is_in_its_band(tmp_path: Path, elements: int) -> None:
    """Its update stays as large, while the weight passes zero in a few steps."""

    def numbers(step: int, layer: int) -> dict[int, float]:
        weight = 1.0 if layer else min(1.0, max(abs(step - WHEN) / 4, 1e-3))
        return {COUNT: 8 if layer else elements, SUM: 1e-6, SUMSQ: weight**2}

    checks = recorded(tmp_path, "update_ratio", numbers)
    assert (state(checks, "Sudden changes"), state(checks, "Updates of layers")) == (GOOD, GOOD)


def test_few_layers_are_not_judged(tmp_path: Path) -> None:
    one = RecordedRank(tmp_path)
    for step in range(STEPS):
        rows = [Measured(f"{layer}", numbers={COUNT: 8, SUM: 1e-6, SUMSQ: 1.0}) for layer in range(FEWEST - 1)]
        one.write(step, {"update_ratio": rows})
    one.close()
    assert state(modelled(tmp_path)[1], "Updates of layers") == NOT_LOOKED_AT


def test_updates_as_large_as_a_tenth_of_their_weight_are_bad_if_they_last(tmp_path: Path) -> None:
    """Those of a weight that began at 0 are as large at first."""
    for name, until in (("begins", OF_NEW_WEIGHTS), ("short", OF_NEW_WEIGHTS + LASTING - 1), ("lasting", STEPS)):
        checks = recorded(tmp_path / name, "update_ratio", ratios(lambda step, _, until=until: 0.3 if step < until else 1e-3))
        assert state(checks, "Size of updates") == (BAD if name == "lasting" else GOOD), name
    last = OF_NEW_WEIGHTS + LASTING - 1
    assert says(checks, "Size of updates").startswith(
        f"update_ratio h.0.weight on rank 0 in step {last}: its update_ratio is 0."
    )
    assert f"a step changes this weight too much, {LASTING} recorded steps in a row." in says(checks, "Size of updates")


def test_updates_that_cannot_be_computed_are_bad_at_once(tmp_path: Path) -> None:
    def numbers(step: int, layer: int) -> dict[int, float]:
        return {COUNT: 8, SUM: np.nan if (step, layer) == (STEPS - 1, 2) else 1e-6, SUMSQ: 1.0}

    assert says(recorded(tmp_path, "update_ratio", numbers), "Size of updates") == (
        f"update_ratio h.2.weight on rank 0 in step {STEPS - 1}: its update_ratio is nan: it cannot be computed from NaN."
    )


# --- The health of the optimizer.


def health(staleness: Ratio, swallowed: Ratio) -> Callable[[int, int], dict[int, float]]:
    def numbers(step: int, layer: int) -> dict[int, float]:
        stale, gone = staleness(step, layer), swallowed(step, layer)
        return {COUNT: 100, SUM: 100 * stale**2, SUMSQ: 100, NEGINFS: 50, SMALLS: 50 * gone}

    return numbers


def test_a_moment_is_stale_if_the_gradient_stays_ahead_of_it(tmp_path: Path) -> None:
    for name, steps in (("single", 1), ("some", LASTING - 1), ("lasting", LASTING)):
        there = range(WHEN, WHEN + steps)
        numbers = health(lambda step, layer, there=there: 6.0 if layer == 3 and step in there else 1.0, lambda *_: 0.0)
        checks = recorded(tmp_path / name, "optimizer_health", numbers)
        assert state(checks, "Optimizer") == (BAD if steps == LASTING else GOOD)
        assert state(checks, "Sudden changes") == GOOD
    expected = (
        f"optimizer_health h.3.weight on rank 0 in step {WHEN + LASTING - 1}: its staleness is 6: the gradient has outgrown"
    )
    assert says(checks, "Optimizer").startswith(expected)
    assert "beta2" in next(one.finding.then for one in checks if one.name == "Optimizer")


def test_updates_that_rounding_swallows_are_bad_if_they_last(tmp_path: Path) -> None:
    checks = recorded(tmp_path, "optimizer_health", health(lambda *_: 1.0, lambda _, layer: 0.96 if layer == 1 else 0.2))
    assert says(checks, "Optimizer").startswith(
        f"optimizer_health h.1.weight on rank 0 in step {LASTING - 1}: its swallowed is 0.96: rounding swallows its updates"
    )


# --- Gradients that are rounding alone.


def with_gradients(base: Path, kind: str, numbers: Callable[[int, int], dict[int, float]], share: float) -> list[CheckResult]:
    """The gradient of layer 2 has a share of that of the others."""
    one = RecordedRank(base)
    for step in range(STEPS):
        gradients = [{COUNT: 8, SUMSQ: (share if layer == 2 else 1.0) ** 2} for layer in range(LAYERS)]
        of_kinds = {"grad_reduced": gradients, kind: [numbers(step, layer) for layer in range(LAYERS)]}
        one.write(step, {k: [Measured(f"h.{n}.weight", numbers=x) for n, x in enumerate(rows)] for k, rows in of_kinds.items()})
    one.close()
    _, checks, _ = modelled(base)
    return checks


def growing_moment(norm: float) -> Callable[[int, int], dict[int, float]]:
    """That of layer 2 grows a hundredfold in a step. The others have norms of 1."""
    return lambda step, layer: {COUNT: 8, SUMSQ: 1.0 if layer != 2 else (norm * (100 if step >= WHEN else 1)) ** 2}


OF_ROUNDING = {
    "swallowed updates": ("optimizer_health", health(lambda *_: 1.0, lambda _, layer: float(layer == 2)), "Optimizer"),
    "an update that stops": ("update_ratio", ratios(FAULTY["a layer that stops"]), "Updates of layers"),
}


@pytest.mark.parametrize("what", OF_ROUNDING)
def test_updates_of_a_gradient_that_is_rounding_alone_are_not_judged(what: str, tmp_path: Path) -> None:
    """The bias in front of a BatchNorm has such a gradient: SGD hardly changes it."""
    kind, numbers, check = OF_ROUNDING[what]
    checks = with_gradients(tmp_path / "rounding", kind, numbers, 1e-7)
    assert (state(checks, check), state(checks, "Sudden changes")) == (GOOD, GOOD)
    assert state(with_gradients(tmp_path / "gradient", kind, numbers, 1e-2), check) == BAD


def test_moments_of_a_gradient_that_is_rounding_alone_have_no_sudden_change(tmp_path: Path) -> None:
    """Those of other gradients have one, however small they are."""
    for norm, expected in ((1e-15, GOOD), (1e-7, BAD)):
        checks = recorded(tmp_path / str(norm), "exp_avg_sq", growing_moment(norm))
        assert state(checks, "Sudden changes") == expected


# --- Clipping.


def with_norms(base: Path, steps: int, clipped: Callable[[int], bool]) -> tuple[list[CheckResult], dict[str, object]]:
    one = RecordedRank(base)
    for step in range(steps):
        norm = 2.0 + step % 3
        rows = [("grad_norm", norm), ("grad_norm_clipped", norm / 2 if clipped(step) else norm)]
        one.write(step, {"run": [Measured(name, numbers={COUNT: 1, SUM: value}) for name, value in rows]})
    one.close()
    with facts_of(str(base)) as facts:
        checks = checks_of(facts)
        return checks, verdict_for_programs(facts, checks, Verdict(GOOD, "", "", checks[0].finding.place))


def test_the_share_of_clipped_steps_is_in_the_facts(tmp_path: Path) -> None:
    checks, told = with_norms(tmp_path, 200, lambda step: step < 100 or step % 4 == 0)
    assert told["clipping"] == {"steps": 200, "share": 0.625, "last": 0.25}
    assert says(checks, "Clipping") == "Gradients were clipped in 62% of 200 steps, and in 25% of the last 100."
    assert state(checks, "Clipping") == GOOD


def test_clipping_of_most_steps_is_said_and_no_fault(tmp_path: Path) -> None:
    checks, told = with_norms(tmp_path, 30, lambda step: step % 10 > 0)
    assert told["clipping"] == {"steps": 30, "share": 0.9, "last": 0.9}
    expected = "Gradients were clipped in 90% of 30 steps. So most gradients have the norm of the limit. "
    expected += "For SGD that is a lower learning rate; Adam's steps hardly depend on it."
    assert (state(checks, "Clipping"), says(checks, "Clipping")) == (GOOD, expected)


def test_clipping_that_was_not_recorded_is_not_looked_at(tmp_path: Path) -> None:
    checks = recorded(tmp_path, "update_ratio", ratios(HEALTHY["a schedule that restarts"]))
    assert state(checks, "Clipping") == NOT_LOOKED_AT
    assert state(checks, "Optimizer") == NOT_LOOKED_AT


# --- A learning rate that rises for a few steps.

RATES: dict[str, tuple[Callable[[int], float], str]] = {
    "one step a hundred times too high": (lambda step: 1e-1 if step == WHEN else 1e-3, BAD),
    "four steps": (lambda step: 1e-1 if WHEN <= step < WHEN + 4 else 1e-3, BAD),
    "five steps, which may be a plan": (lambda step: 1e-1 if WHEN <= step < WHEN + 5 else 1e-3, GOOD),
    "each twentieth step": (lambda step: 1e-1 if step % 20 == 10 else 1e-3, GOOD),
    "a step that is nine times as high": (lambda step: 9e-3 if step == WHEN else 1e-3, GOOD),
    "a schedule that restarts": (schedule, GOOD),
    "a new stage": (lambda step: 1e-3 if step < WHEN else 1e-1, GOOD),
    "a warm-up that begins late": (lambda step: 1e-6 if step < WHEN else schedule(step - WHEN), GOOD),
    "a rate of zero between": (lambda step: 1e-3 if step % 2 else 0.0, GOOD),
}


@pytest.mark.parametrize("what", RATES)
def test_a_learning_rate_that_rises_once_for_a_few_steps_is_a_sudden_change(what: str, tmp_path: Path) -> None:
    rate, expected = RATES[what]
    one = RecordedRank(tmp_path)
    for step in range(STEPS):
        run = Measured("learning_rate.0", numbers={COUNT: 1.0, SUM: rate(step)})
        one.write(step, {"run": [run], "grad_unreduced": [Measured("w")]})
    one.close()
    _, checks, verdict = modelled(tmp_path)
    assert state(checks, "Sudden changes") == verdict.state == expected
    if expected == BAD:
        assert verdict.says == f"The learning rate rose from 0.001 to 0.1 in step {WHEN}, and fell to 0.001 soon after."
        assert (verdict.place.step, verdict.place.name) == (WHEN, "learning_rate.0")
