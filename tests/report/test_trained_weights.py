"""What a report says of weights without gradients: frozen ones, those of an expert that is chosen now and then."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import pytest
from recorded_job import RecordedRank
from reported_job import modelled
from sink_rows import Measured

from monitor.coordinator.manifest_format import MANIFEST_FILE, ConfigurationRecord, read_manifest
from monitor.report.checks import CheckResult
from monitor.report.findings import BAD, GOOD, NOT_LOOKED_AT, CheckFinding, Verdict
from monitor.report.trained_weights import SILENT_STEPS
from monitor.stats.partials import COUNT, SUM, SUMSQ

STEPS = 64
WEIGHTS = [f"h.{layer}.weight" for layer in range(4)]
Trains = Callable[[int, str], bool]
"""Whether a weight has a gradient in a step."""


def recorded(
    base: Path, trains: Trains, kinds: Collection[str] = ("param_origin", "grad_reduced"), steps: int = STEPS
) -> tuple[list[CheckResult], Verdict]:
    one = RecordedRank(base)
    for step in range(steps):
        trained = [Measured(name) for name in WEIGHTS if trains(step, name)]
        one.write(step, {kind: [*map(Measured, WEIGHTS)] if kind == "param_origin" else trained for kind in kinds})
    one.close()
    _, checks, verdict = modelled(base)
    return checks, verdict


def finding(checks: list[CheckResult]) -> CheckFinding:
    return next(one.finding for one in checks if one.name == "Weights are trained")


@pytest.mark.parametrize("kind", ["grad_reduced", "grad_unreduced"])
def test_a_layer_frozen_in_the_middle_is_named_and_no_fault(kind: str, tmp_path: Path) -> None:
    checks, verdict = recorded(tmp_path, lambda step, name: name != WEIGHTS[1] or step < 30, ("param_origin", kind))
    assert finding(checks).state == GOOD
    assert finding(checks).says == "Since step 30, no gradient was recorded of 1 of 4 weights (h.1.weight)."
    assert verdict.state == GOOD, verdict.says
    assert "Since step 30, no gradient was recorded of 1 of 4 weights (h.1.weight)" in verdict.says


def test_layers_frozen_one_after_the_other_are_named_with_the_first_and_the_last_step(tmp_path: Path) -> None:
    checks, verdict = recorded(tmp_path, lambda step, name: step < 30 + 4 * WEIGHTS.index(name) or name == WEIGHTS[-1])
    says = "Since steps 30 to 38, no gradient was recorded of 3 of 4 weights (h.0.weight, h.1.weight, h.2.weight)."
    assert finding(checks).says == says
    assert verdict.state == GOOD, verdict.says


def test_weights_that_never_had_a_gradient_are_counted(tmp_path: Path) -> None:
    checks, verdict = recorded(tmp_path, lambda _, name: name != WEIGHTS[2])
    assert finding(checks).says == "No gradient at all was recorded of 1 of 4 weights (h.2.weight)."
    assert verdict.state == GOOD, verdict.says
    assert "h.2.weight" not in verdict.says  # it is usual: most weights of a fine-tuning are frozen


@pytest.mark.parametrize(
    "trains",
    [lambda _step, _name: True, lambda step, name: name != WEIGHTS[1] or step % (SILENT_STEPS - 1) == 0],
    ids=["all", "an expert"],
)
def test_weights_that_are_trained_now_and_then_are_trained(trains: Trains, tmp_path: Path) -> None:
    checks, verdict = recorded(tmp_path, trains)
    assert finding(checks) == CheckFinding(GOOD, f"All 4 weights had a gradient in the last {SILENT_STEPS} steps.")
    assert "gradient" not in verdict.says


@pytest.mark.parametrize("steps", [range(30, STEPS), range(30, 33)], ids=["frozen", "an expert without tokens"])
@pytest.mark.parametrize(("has_gradients", "state"), [(False, GOOD), (True, BAD)])
def test_a_weight_without_a_gradient_may_stop_changing_and_one_with_a_gradient_may_not(
    has_gradients: bool, state: str, steps: range, tmp_path: Path
) -> None:
    one, weights = RecordedRank(tmp_path), [*WEIGHTS, "head.weight", "embedding.weight"]
    for step in range(STEPS):
        stopped = WEIGHTS[1] if step in steps else ""
        ratios = {name: 0.0 if name == stopped else 1e-3 for name in weights}
        gradients = [Measured(name) for name in weights if has_gradients or name != stopped]
        updates = [Measured(name, numbers={COUNT: 8, SUM: ratio**2, SUMSQ: 1.0}) for name, ratio in ratios.items()]
        one.write(step, {"grad_reduced": gradients, "update_ratio": updates})
    one.close()
    _, checks, _ = modelled(tmp_path)
    found = {check.name: check.state for check in checks}
    assert (found["Sudden changes"], found["Updates of layers"]) == (state, state)


def test_weights_that_another_configuration_may_have_left_out_are_not_judged(tmp_path: Path) -> None:
    recorded(tmp_path, lambda step, name: name != WEIGHTS[1] or step < 30)
    (manifest,) = tmp_path.rglob(MANIFEST_FILE)
    start = ConfigurationRecord(number=0, origin="start", from_step=0, since=0, on=True, digest="0" * 16, changed="")
    changed = start.model_copy(update={"number": 1, "origin": "file", "from_step": 30, "since": 30})
    manifest.write_bytes(read_manifest(manifest).model_copy(update={"configurations": (start, changed)}).to_json())
    _, checks, verdict = modelled(tmp_path)
    assert finding(checks).state == NOT_LOOKED_AT
    assert "gradient" not in verdict.says


@pytest.mark.parametrize(("kinds", "steps"), [(("param_origin",), STEPS), (("grad_reduced",), SILENT_STEPS - 1)])
def test_without_gradients_or_steps_no_one_has_looked(kinds: Collection[str], steps: int, tmp_path: Path) -> None:
    checks, _ = recorded(tmp_path, lambda _step, _name: True, kinds, steps)
    assert finding(checks).state == NOT_LOOKED_AT


@pytest.mark.parametrize("left", [0, 1, SILENT_STEPS - 1, SILENT_STEPS, 40])
@pytest.mark.parametrize("of_other", [0.0, 1e-3])
def test_a_learning_rate_that_is_zero_for_many_steps_is_said_with_the_first_of_them(
    left: int, of_other: float, tmp_path: Path
) -> None:
    one = RecordedRank(tmp_path)
    for step in range(STEPS):
        moves = step < STEPS - left
        rates = {"learning_rate.0": 1e-3 * moves, "learning_rate.1": 1e-3 if moves else of_other}
        run = [Measured(name, numbers={SUM: rate, COUNT: 1.0}) for name, rate in rates.items()]
        one.write(step, {"run": run, "grad_reduced": [*map(Measured, WEIGHTS)]})
    one.close()
    _, checks, verdict = modelled(tmp_path)
    says = f"The learning rate has been 0 since step {STEPS - left}, so weights do not change."
    assert verdict.state == GOOD, verdict.says
    assert (says in finding(checks).says) == (says in verdict.says) == (left >= SILENT_STEPS and not of_other)
    assert ("learning rate has been 0" in verdict.says) == (says in verdict.says)
